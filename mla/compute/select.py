"""The visible table of kernel sets, and choosing from it. Nothing is probed, tried or decided by the environment."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from mla._checks import as_device, describe
from mla.cache.spec import CACHE_DTYPES
from mla.compute import cpu, cuda, ipex, reference, rocm
from mla.compute.contracts import Plan
from mla.compute.kernels import KernelSet, explain, refuse_features
from mla.compute.operators import as_operators
from mla.errors import KernelError
from mla.metadata.dims import MLADims
from mla.metadata.records import DecodeMetadata

__all__ = ["KERNEL_SETS", "kernel_set", "kernels_for"]


def _plan_cpu(metadata: DecodeMetadata) -> Plan:
    return cpu.plan_decode(metadata, metadata.block_size)


CPU_MLA = as_operators(
    KernelSet(
        name="CPU_MLA",
        device_types=("cpu",),
        dtypes=CACHE_DTYPES,
        paged_decode=cpu.paged_decode,
        varlen_attention=cpu.varlen_attention,
        make_plan=_plan_cpu,
        plan_type=cpu.DecodePlan,
        varlen_bytes=cpu.varlen_bytes,
        remark=(
            "plain torch on the CPU, any head count, block size and width; bfloat16 by the fused attention operator where the "
            "processor has AMX and by separate products elsewhere; float16 is computed in float32"
        ),
    )
)
"""Plain torch, tuned for the CPU."""

TORCH = attrs.evolve(CPU_MLA, name="TORCH", device_types=(), remark="plain torch on any device, reading lengths on the host")
"""The same code wherever torch runs."""

REFERENCE = as_operators(
    KernelSet(
        name="REFERENCE",
        device_types=(),
        dtypes=(torch.float64,),
        paged_decode=reference.paged_decode,
        varlen_attention=reference.varlen_attention,
        differentiable=True,
        remark="the float64 specification, one loop per sequence, slow",
    )
)
"""`mla.compute.reference` as a set, to run a model on the specification."""

KERNEL_SETS: dict[str, Callable[[], KernelSet]] = {
    "CPU_MLA": lambda: CPU_MLA,
    "CPU_MLA_IPEX": ipex.make_kernel_set,
    "TORCH": lambda: TORCH,
    "REFERENCE": lambda: REFERENCE,
    "ROCM_AITER_MLA": rocm.make_kernel_set,
    "TRITON_MLA": cuda.make_kernel_set,
    "TRITON_MLA_BALANCED": cuda.make_balanced_kernel_set,
    "TRITON_MLA_PORTABLE": cuda.make_portable_kernel_set,
}
"""Every kernel set by its name; a set over a vendor's package imports that package when it is asked for."""


def kernel_set(name: str) -> KernelSet:
    """The kernel set of this name.

    Raises
    ------
    KernelError
        An unknown name, in which case the text lists those that exist, or a set whose package is missing or does not fit.

    Examples
    --------
    >>> kernel_set("REFERENCE").dtypes
    (torch.float64,)
    >>> kernel_set("TORCH").device_types  # any device
    ()
    """
    if not isinstance(name, str) or name not in KERNEL_SETS:
        raise KernelError(f"name: expected one of {', '.join(KERNEL_SETS)}, got {name!r}")
    return KERNEL_SETS[name]()


def _default_name(device: torch.device, *, use_ipex: bool) -> str:
    """The set for a device: a fixed table, nothing is tried."""
    if use_ipex:
        if device.type != "cpu":
            raise KernelError(f"ipex: expected False on a device other than the CPU, got True for {device}")
        return "CPU_MLA_IPEX"
    if device.type == "cpu":
        return "CPU_MLA"
    if device.type == "cuda":
        return "TRITON_MLA" if torch.version.hip is None else "ROCM_AITER_MLA"
    raise KernelError(
        f"device: expected cpu or cuda, got {device.type!r}; kernel_set('TORCH') runs in plain torch on any device"
    )


def kernels_for(
    device: torch.device | str,
    *,
    dims: MLADims | None = None,
    dtype: torch.dtype | None = None,
    ipex: bool = False,
    alibi_slopes: object = None,
    sliding_window: object = None,
    blocksparse_params: object = None,
    logits_soft_cap: object = None,
    attn_type: str = "decoder",
) -> KernelSet:
    """The kernel set for a device, checked against what the model needs.

    Parameters
    ----------
    device : torch.device or str
        Such as ``"cpu"``.
    dims : MLADims or None
        Given, head counts and widths are checked now and not at the first call.
    dtype : torch.dtype or None
        Given, the dtype of the queries is checked.
    ipex : bool
        Take "CPU_MLA_IPEX" on the CPU. That imports intel-extension-for-pytorch, which replaces kernels of aten in the whole
        process: see `mla.compute.ipex`.
    alibi_slopes, sliding_window, blocksparse_params, logits_soft_cap, attn_type
        What other attention libraries offer; anything but the defaults is refused by name.

    Returns
    -------
    KernelSet
        A value; pass it on.

    Raises
    ------
    KernelError
        A device without kernels of its own, dimensions or a dtype that they cannot run, or an unsupported feature.

    Examples
    --------
    >>> kernels_for("cpu").name
    'CPU_MLA'
    """
    refuse_features(
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        blocksparse_params=blocksparse_params,
        logits_soft_cap=logits_soft_cap,
        attn_type=attn_type,
    )
    if not isinstance(ipex, bool):
        raise KernelError(f"ipex: expected True or False, got {describe(ipex)}")
    name = _default_name(as_device("device", device, KernelError), use_ipex=ipex)
    try:
        kernels = kernel_set(name)
    except KernelError as error:
        if ipex:
            raise KernelError(f"ipex: expected a machine that runs {name}, or False for plain torch, got {error}") from error
        raise KernelError(
            f"device: expected {name} for {device}, or kernel_set('TORCH') for plain torch, got {error}"
        ) from error
    sentence = explain(kernels, dims=dims, dtype=dtype)
    if not sentence.startswith(f"{kernels.name} runs"):
        raise KernelError(sentence.removeprefix(f"{kernels.name} does not run: "))
    return kernels
