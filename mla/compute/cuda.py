"""The kernel set of NVIDIA GPUs, in Triton: which kernels it takes, and what it cannot run.

Nothing here imports Triton: the kernels do, at their first launch.
"""

from __future__ import annotations

import importlib.metadata
import re

import torch

from mla.compute import triton_cache, triton_decode, triton_prefill
from mla.compute.kernels import KernelSet
from mla.errors import KernelError

__all__ = ["OLDEST_TRITON", "check_triton", "make_kernel_set"]

OLDEST_TRITON = (3, 6)
"""The first release that these kernels were compiled with."""


def _installed_triton() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_triton(installed: str | None) -> str:
    """The version of Triton, refused if it is missing or too old.

    Parameters
    ----------
    installed : str or None
        As the package's metadata have it.

    Returns
    -------
    str
        The same.

    Raises
    ------
    KernelError
        No Triton, or one older than `OLDEST_TRITON`.

    Examples
    --------
    >>> check_triton("3.6.0")
    '3.6.0'
    """
    wanted = ".".join(map(str, OLDEST_TRITON))
    if installed is None:
        raise KernelError(f"triton: expected {wanted} or newer, got no package of that name; torch's CUDA wheels bring it")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < OLDEST_TRITON:
        raise KernelError(f"triton: expected {wanted} or newer, got {installed}")
    return installed


def make_kernel_set() -> KernelSet:
    """The kernel set "TRITON_MLA".

    Its cuts depend on a sequence's own length only, so a sequence's bits depend neither on its batch nor on padding, placement
    or block size; nothing is read on the host, so every call can be captured in a CUDA graph. It needs no plan.

    Returns
    -------
    KernelSet
        For bfloat16 and float16.

    Raises
    ------
    KernelError
        No Triton, or one that is too old; found in the package's metadata, nothing is imported.
    """
    version = check_triton(_installed_triton())
    return KernelSet(
        name="TRITON_MLA",
        device_types=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        paged_decode=triton_decode.paged_decode,
        varlen_attention=triton_prefill.varlen_attention,
        write_latent_cache_=triton_cache.write_latent_cache_,
        gather_latent_cache=triton_cache.gather_latent_cache,
        remark=(
            f"Triton {version}, any head count, block size and width; decode by one portable kernel, prefill by a kernel for "
            "Hopper at widths 192 and 128 and by a portable one elsewhere (mla.compute.triton_prefill.prefill_route says which)"
        ),
    )
