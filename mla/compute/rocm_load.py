"""Finding AMD's AITER and reading its signatures; nothing of it is imported before `load_aiter` is called."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs
import torch

from mla.compute.rocm_table import head_kernels, lse_source
from mla.errors import KernelError

__all__ = ["Installed", "diagnostic", "inspect_aiter", "is_aiter_mla_enabled", "load_aiter"]

INSTALL: Final = "pip install amd-aiter (AMD's package, for ROCm)"

DECODE_POSITIONS: Final = (
    "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q",
)  # fmt: skip
DECODE_KEYWORDS: Final = ("sm_scale", "logit_cap", "num_kv_splits")
VARLEN_POSITIONS: Final = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
VARLEN_KEYWORDS: Final = ("softmax_scale", "causal", "return_lse")
STAGE_1_POSITIONS: Final = ("Q", "KV", "qo_indptr", "kv_indptr", "kv_page_indices", "kv_last_page_lens")
STAGE_1_VALUES: Final = ("num_kv_splits_indptr", "max_seqlen_q", "softmax_scale", "splitData", "splitLse", "output")
STAGE_1_OPTIONAL: Final = ("page_size", "nhead_kv")
STAGE_1_NONE: Final = ("work_metadata", "work_meta_data", "work_indptr", "work_info_set", "lse", "q_scale", "kv_scale")
"""Parameters of the first stage that get None: persistent scheduling, a final LSE and fp8 scales are not used."""


def is_aiter_mla_enabled(environ: Mapping[str, str]) -> bool:
    """Whether vLLM's two switches for AITER's MLA are both on in this environment; a pure function of the mapping.

    Parameters
    ----------
    environ : mapping of str to str
        Such as ``os.environ``. ``VLLM_ROCM_USE_AITER`` is off unless set, ``VLLM_ROCM_USE_AITER_MLA`` is on unless set; "true"
        (in any case) and "1" are on.

    References
    ----------
    vLLM 0.9, ``vllm/envs.py`` and ``is_aiter_mla_enabled`` of its ``rocm_aiter_mla`` backend.

    Examples
    --------
    >>> is_aiter_mla_enabled({"VLLM_ROCM_USE_AITER": "1"}), is_aiter_mla_enabled({})
    (True, False)
    """
    switches = {"VLLM_ROCM_USE_AITER": "false", "VLLM_ROCM_USE_AITER_MLA": "true"}
    return all(environ.get(name, default).lower() in ("true", "1") for name, default in switches.items())


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_aiter() -> ModuleType:
    """Import AMD's AITER, here and nowhere else.

    Returns
    -------
    module
        ``aiter``, with ``aiter.mla.mla_decode_fwd`` and ``aiter.flash_attn_varlen_func``.

    Raises
    ------
    KernelError
        No package `aiter`, another package of that name, or an error inside AITER, which is reported as itself.
    """
    loaded = sys.modules.get("aiter")
    if loaded is None:
        spec = importlib.util.find_spec("aiter")
        if spec is None:
            raise KernelError(f"aiter: expected AMD's AITER, got no package of that name; {INSTALL}")
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        if not any((folder / "mla.py").is_file() for folder in folders):
            raise KernelError(f"aiter: expected AMD's AITER, got {_another(spec.origin)}")
    try:
        found: Any = importlib.import_module("aiter")
    # Importing AITER builds and loads code for the accelerator, so more than imports fail.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        version = _distribution("amd-aiter") or "of unknown version"
        raise KernelError(f"aiter: expected amd-aiter {version} to import, got {type(error).__name__}: {error}") from error
    if not hasattr(getattr(found, "mla", None), "mla_decode_fwd") or not hasattr(found, "flash_attn_varlen_func"):
        raise KernelError(f"aiter: expected AMD's AITER, got {_another(getattr(found, '__file__', None))}")
    module: ModuleType = found
    return module


def _another(origin: str | None) -> str:
    """What was found in AITER's place, and what to do about it."""
    other = _distribution("aiter")
    if other is not None:
        found = f"PyPI's aiter {other}, an unrelated package for asynchronous iterators,"
    else:
        found = "another package (PyPI's aiter is an unrelated one for asynchronous iterators)"
    return f"{found} at {origin}; pip uninstall aiter, then {INSTALL}"


@attrs.frozen(kw_only=True)
class Installed:
    """An AITER whose signatures have been read.

    Parameters
    ----------
    mla_decode_fwd, flash_attn_varlen_func, stage_1 : callable
        ``aiter.mla.mla_decode_fwd``, ``aiter.flash_attn_varlen_func`` and ``aiter.mla_decode_stage1_asm_fwd``.
    decode_parameters, stage_1_parameters : tuple of str
        Names in the installed order; those of the first stage only where it is called.
    release, arch : str or None
        Version of amd-aiter and accelerator, None where unknown.
    lse : str
        As `mla.compute.rocm_table.Capability.lse`.
    """

    mla_decode_fwd: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]
    stage_1: Callable[..., Any]
    decode_parameters: tuple[str, ...]
    stage_1_parameters: tuple[str, ...]
    release: str | None
    arch: str | None
    lse: str


def inspect_aiter(aiter: ModuleType | None, *, arch: str | None) -> Installed:  # noqa: A002
    """Read the signatures of an AITER and refuse one whose calls would not bind.

    Parameters
    ----------
    aiter : module or None
        None imports it with `load_aiter`.
    arch : str or None
        Such as ``"gfx942"``; None asks torch, where it is built for ROCm and sees a device.

    Raises
    ------
    KernelError
        As `load_aiter`, or parameters other than the known ones, with the installed version.
    """
    module: Any = load_aiter() if aiter is None else aiter
    release = _release(module)
    name = f"aiter.mla.mla_decode_fwd of amd-aiter {release or 'of unknown version'}"
    decode = _parameters(module.mla.mla_decode_fwd, "mla_decode_fwd", name)
    _check(name, decode, DECODE_POSITIONS, DECODE_KEYWORDS)
    name = name.replace("aiter.mla.mla_decode_fwd", "aiter.flash_attn_varlen_func")
    _check(name, _parameters(module.flash_attn_varlen_func, "flash_attn_varlen_func", name), VARLEN_POSITIONS, VARLEN_KEYWORDS)
    lse = lse_source(release)
    if lse is None:
        # Without a version: the first releases have no `work_meta_data`; of the others only the first stage is sure.
        lse = "stage 1" if "work_meta_data" in decode else "returned splits"
    stage_1: tuple[str, ...] = ()
    function = getattr(module, "mla_decode_stage1_asm_fwd", None)
    if lse == "stage 1":
        name = name.replace("flash_attn_varlen_func", "mla_decode_stage1_asm_fwd")
        found = _parameters(function, "mla_decode_stage1_asm_fwd", name)
        _check(name, found, STAGE_1_POSITIONS, STAGE_1_VALUES, (*STAGE_1_OPTIONAL, *STAGE_1_NONE))
        stage_1 = tuple(found)
    where = _arch() if arch is None else arch
    head_kernels(release, where)
    return Installed(
        mla_decode_fwd=module.mla.mla_decode_fwd,
        flash_attn_varlen_func=module.flash_attn_varlen_func,
        stage_1=_missing if function is None else function,
        decode_parameters=tuple(decode),
        stage_1_parameters=stage_1,
        release=release,
        arch=where,
        lse=lse,
    )


def _missing(*_: object) -> None:
    raise KernelError("aiter.mla_decode_stage1_asm_fwd: expected it in the installed amd-aiter, got none")


def _release(module: Any) -> str | None:
    version = getattr(module, "__version__", None) or _distribution("amd-aiter")
    return version if isinstance(version, str) else None


def _arch() -> str | None:
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    name = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "gcnArchName", None)
    return name.partition(":")[0] if isinstance(name, str) else None


def _parameters(function: Any, operator_name: str, label: str) -> dict[str, bool]:
    """Names of the parameters in their order, each with whether it may be left out."""
    try:
        found = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        found = ()
    if found and not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return {p.name: p.default is not p.empty for p in found}
    # AITER registers its compiled functions as operators of torch, behind wrappers that take anything.
    operator = getattr(torch.ops.aiter, operator_name, None)
    if operator is None:
        raise KernelError(f"{label}: expected a signature that can be read, got none")
    return {a.name: bool(a.has_default_value()) for a in operator.default._schema.arguments}


def _check(
    label: str,
    found: Mapping[str, bool],
    positions: tuple[str, ...],
    keywords: tuple[str, ...],
    optional: tuple[str, ...] = (),
) -> None:
    names = tuple(found)
    first = names[: len(positions)]
    if first != positions:
        raise KernelError(f"{label}: expected parameters {', '.join(positions)} first, got {', '.join(first)}")
    for keyword in keywords:
        if keyword not in names:
            raise KernelError(f"{label}: expected a parameter {keyword}, got {', '.join(names)}")
    for name, may_be_left_out in found.items():
        if not may_be_left_out and name not in (*positions, *keywords, *optional):
            raise KernelError(f"{label}: expected no other parameter to be required, got {name}")


def diagnostic(installed: Installed) -> str:
    """One line with the versions, the accelerator and the file that `installed` came from, for bug reports."""
    where = getattr(sys.modules.get(installed.flash_attn_varlen_func.__module__), "__file__", None)
    return (
        f"amd-aiter {installed.release} from {where} on {installed.arch}, torch {torch.__version__} for ROCm "
        f"{torch.version.hip}, LSE from {installed.lse}"
    )
