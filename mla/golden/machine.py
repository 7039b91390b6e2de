"""What a bundle says of the machine that it was recorded on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import mla
from mla.compute.kernels import KernelSet
from mla.golden.bundle import Provenance

__all__ = ["provenance_of"]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    # Virtual machines give many processors one name.
    return f"{said['model name']}, family {said.get('cpu family', '?')}, model {said.get('model', '?')}"


def _cpu_capability() -> str:
    """What torch and the libraries below it choose their code by."""
    found = [torch.backends.cpu.get_cpu_capability()]
    for name in ("avx512_bf16", "amx_tile", "amx_fp16"):
        has: Any = getattr(torch.cpu, f"_is_{name}_supported", None)
        if has is not None and has():
            found.append(name)
    if "intel_extension_for_pytorch" in sys.modules:  # replaces operators of torch in the whole process
        found.append("ipex")
    return " ".join(found)


def provenance_of(kernels: KernelSet, device: torch.device) -> Provenance:
    """What a bundle says of who recorded it, here and now.

    Parameters
    ----------
    kernels : KernelSet
        Its name counts.
    device : torch.device
        Where it runs.
    """
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return Provenance(
        mla=mla.__version__,
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        cpu=_cpu_name(),
        cpu_capability=_cpu_capability(),
        kernels=kernels.name,
        threads=torch.get_num_threads(),
        triton=triton,
    )
