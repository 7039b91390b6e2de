"""The kernel sets of NVIDIA GPUs, in Triton: which kernels it takes, and what it cannot run.

Nothing here imports Triton: the kernels do, at their first launch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Any

import torch

from mla.compute import triton_cache, triton_decode, triton_hopper, triton_prefill
from mla.compute.kernels import KernelSet
from mla.compute.operators import as_operators
from mla.errors import KernelError
from mla.metadata.dims import MLADims

__all__ = ["OLDEST_TRITON", "check_triton", "make_balanced_kernel_set", "make_kernel_set", "make_portable_kernel_set"]

OLDEST_TRITON = (3, 6)
"""The first release that these kernels were compiled with."""

ROUTES = "kernels for Hopper where widths are DeepSeek's, portable ones elsewhere"


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


def _route(dims: MLADims, dtype: torch.dtype, *, portable: bool = False) -> str:
    """Which kernels a model takes on the current GPU, and why."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    decode = triton_decode.decode_route(dtype, dtype, dims.kv_lora_rank, dims.latent_dim, device)
    prefill = triton_prefill.prefill_route(dtype, dims.qk_head_dim, dims.v_head_dim, device)
    if portable:
        kernel = "the portable kernel, as asked for"
    elif decode.name == "portable":
        kernel = f"the portable kernel, because {decode.reason}"
    else:
        few = triton_hopper.FEW_ROWS
        most = few // dims.num_heads
        name = (
            f"the kernel for up to {few} rows with up to {most} new tokens a sequence, by the one for 64 rows beyond"
            if most
            else f"the kernel for 64 rows, for a token has more than {few}"
        )
        kernel = f"{name} ({decode.reason})"
    return f"here decode by {kernel}; prefill by the {prefill.name} kernel, because {prefill.reason}"


def _make(name: str, remark: str, **kernels: Any) -> KernelSet:
    version = check_triton(_installed_triton())
    kernel_set = KernelSet(
        name=name,
        device_types=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        varlen_attention=triton_prefill.varlen_attention,
        write_latent_cache_=triton_cache.write_latent_cache_,
        gather_latent_cache=triton_cache.gather_latent_cache,
        plan_type=triton_hopper.HopperPlan,
        plans_in_capture=True,
        remark=f"Triton {version}, any head count, block size and width; {remark}",
        route=functools.partial(_route, portable=name == "TRITON_MLA_PORTABLE"),
        **kernels,
    )
    return as_operators(kernel_set)


def make_kernel_set() -> KernelSet:
    """The kernel set "TRITON_MLA".

    Its cuts depend on a sequence's own length only, so a sequence's bits depend neither on its batch nor on padding, placement
    or block size; nothing is read on the host, so every call can be captured in a CUDA graph.

    Returns
    -------
    KernelSet
        For bfloat16 and float16.

    Raises
    ------
    KernelError
        No Triton, or one that is too old; found in the package's metadata, nothing is imported.
    """
    return _make(
        "TRITON_MLA",
        f"{ROUTES}; bits do not depend on the batch",
        paged_decode=triton_decode.paged_decode,
        make_plan=triton_decode.make_plan,
    )


def make_balanced_kernel_set() -> KernelSet:
    """The kernel set "TRITON_MLA_BALANCED": as "TRITON_MLA", with the work of a decode batch shared out in equal parts.

    The fastest for ragged and for small batches; repeatable, but a sequence's bits depend on its batch.

    Raises
    ------
    KernelError
        As for "TRITON_MLA".
    """
    return _make(
        "TRITON_MLA_BALANCED",
        f"{ROUTES}; decode in equal shares: bits depend on the batch",
        paged_decode=triton_decode.paged_decode_balanced,
        make_plan=triton_decode.make_balanced_plan,
    )


def make_portable_kernel_set() -> KernelSet:
    """The kernel set "TRITON_MLA_PORTABLE": decode by the kernel for any GPU, to compare the others with.

    Raises
    ------
    KernelError
        As for "TRITON_MLA".
    """
    return _make(
        "TRITON_MLA_PORTABLE",
        "decode by the kernel for any GPU; bits do not depend on the batch",
        paged_decode=triton_decode.paged_decode_portable,
        make_plan=triton_decode.make_plan,
    )
