"""Finding intel-extension-for-pytorch (IPEX) and importing it; nothing of it is imported before `load_ipex` is called.

A wrong environment makes IPEX's own import end the process (another torch, a CPU without AVX2) or fail with a misleading error,
so versions and instruction sets are checked first. IPEX 2.8 is the last release and was archived in March 2026.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import attrs
import torch

from mla.errors import KernelError

__all__ = [
    "Environment",
    "Installed",
    "check_environment",
    "diagnostic",
    "has_avx512_bf16",
    "inspect_ipex",
    "load_ipex",
    "read_environment",
    "varlen_parameters",
]

MODULE: Final = "intel_extension_for_pytorch"
DISTRIBUTION: Final = "intel-extension-for-pytorch"
RELEASE: Final = "2.8"
INSTALL: Final = "pip install 'mla[ipex]' (torch 2.8, intel-extension-for-pytorch 2.8.0, setuptools)"

FLASH_PARAMETERS: Final = ("query", "key", "value", "dropout_p", "is_causal", "attention_mask", "scale")
DECODE_PARAMETERS: Final = (
    "query", "output", "kv_cache", "beam_idx", "attn_logits", "scaling", "logit_cap", "offset",
)  # fmt: skip
VARLEN_FIRST: Final = ("query", "key", "value", "out", "seqlen_q", "seqlen_k")
VARLEN_REST: Final = (
    "max_seqlen_q", "max_seqlen_k", "pdropout", "softmax_scale", "zero_tensors", "is_causal", "return_softmax", "gen_",
)  # fmt: skip
VARLEN_OPTIONAL: Final = ("alibi_slopes", "window_size_left", "window_size_right", "softcap")
"""Parameters that came with 2.8: `alibi_slopes` is required there and stands before the lengths."""


@attrs.frozen(kw_only=True)
class Environment:
    """What decides whether IPEX can be imported, read without importing it.

    Parameters
    ----------
    torch, ipex, setuptools : str or None
        Versions; None for a package that is not installed.
    has_avx2 : bool
        Whether the CPU has AVX2.
    """

    torch: str
    ipex: str | None
    setuptools: str | None
    has_avx2: bool


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_avx2() -> bool:
    return bool(torch.cpu._is_avx2_supported())


def has_avx512_bf16() -> bool:
    """Whether decoding runs on the CPU's bfloat16 instructions; without them IPEX has scalar code only."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def read_environment() -> Environment:
    """The installed versions, from their metadata, and the CPU."""
    return Environment(
        torch=str(torch.__version__),
        ipex=_version(DISTRIBUTION),
        setuptools=_version("setuptools"),
        has_avx2=_has_avx2(),
    )


def check_environment(environment: Environment) -> None:
    """Refuse an environment in which importing IPEX would end the process or fail.

    Parameters
    ----------
    environment : Environment
        From `read_environment`.

    Raises
    ------
    KernelError
        Naming what is missing or of the wrong version.

    Examples
    --------
    >>> check_environment(Environment(torch="2.13.0", ipex="2.8.0", setuptools="80.9.0", has_avx2=True))
    Traceback (most recent call last):
    mla.errors.KernelError: torch: expected 2.8.* for intel-extension-for-pytorch 2.8.0, got 2.13.0
    """
    ipex = environment.ipex
    if ipex is None:
        raise KernelError(f"{DISTRIBUTION}: expected {RELEASE}.*, got no package of that name; {INSTALL}")
    if _minor(ipex) != RELEASE or ipex.partition("+")[2].startswith("xpu"):
        raise KernelError(f"{DISTRIBUTION}: expected {RELEASE}.* for CPUs, got {ipex}; {INSTALL}")
    if _minor(environment.torch) != RELEASE:
        raise KernelError(f"torch: expected {RELEASE}.* for {DISTRIBUTION} {ipex}, got {environment.torch}")
    if environment.setuptools is None:
        raise KernelError(f"setuptools: expected it for {DISTRIBUTION} {ipex}, which imports it, got no package of that name")
    if not environment.has_avx2:
        raise KernelError(f"CPU: expected AVX2 or newer for {DISTRIBUTION} {ipex}, got a CPU without it")


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+(?![\d])", version)
    return found[0] if found else version


@contextlib.contextmanager
def _same_environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and put every variable back as it was, those that others changed too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _no_transformers() -> Iterator[None]:
    """Let imports find no `transformers`; modules of it that were there come back as they were."""
    names = [name for name in sys.modules if name.partition(".")[0] == "transformers"]
    before = {name: sys.modules.pop(name) for name in names}
    sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["transformers"]
        sys.modules.update(before)


def load_ipex() -> ModuleType:
    """Import IPEX, here and nowhere else.

    What importing it does to the process cannot be undone: 27 operators of aten (`matmul`, `cat`, `index_select`, `sum`,
    `mean`, `layer_norm` ...) get IPEX's kernels, for everybody in the process, whose results differ in their last bits; torch's
    compiler is imported; and two warnings are written to standard error. What it would do besides is held back:

    - Importing torch's compiler starts worker processes where Triton is installed. The variable ``TORCH_WARM_POOL`` stops that
      and is set for the time of the import only: workers start when something is compiled. (``TORCHINDUCTOR_COMPILE_THREADS``
      would stop it too, but torch keeps its value for good.) Variables that change meanwhile are put back as they were.
    - It imports transformers where that is installed, and fails with releases from 5 on. Its kernels do not need transformers,
      so it is made to find none; `ipex.optimize_transformers` then does not work. Whoever needs that imports IPEX first: an
      IPEX that is there is used as it is.

    While it runs, other threads should neither read the environment nor import transformers.

    Returns
    -------
    module
        ``intel_extension_for_pytorch``.

    Raises
    ------
    KernelError
        As `check_environment`, or an error inside IPEX, which is reported as itself.
    """
    loaded = sys.modules.get(MODULE)
    if loaded is not None:
        return loaded
    environment = read_environment()
    check_environment(environment)
    try:
        with _same_environment(TORCH_WARM_POOL="0"), _no_transformers():
            return importlib.import_module(MODULE)
    # IPEX ends the process where it does not like the machine, and its module bodies fail in many ways.
    except (Exception, SystemExit) as error:
        got = f"{type(error).__name__}: {error}"
        raise KernelError(f"{DISTRIBUTION}: expected {environment.ipex} to import, got {got}") from error


@attrs.frozen(kw_only=True)
class Installed:
    """An IPEX whose signatures have been read.

    Parameters
    ----------
    flash_attention, decode_attention : callable
        ``torch.ops.torch_ipex.flash_attention`` and ``decode_attention``.
    varlen_attention : callable
        ``ipex.llm.functional.varlen_attention``.
    varlen_parameters : tuple of str
        Names of its parameters in the installed order.
    release : str or None
        Version of IPEX, None where unknown.
    """

    flash_attention: Callable[..., Any]
    decode_attention: Callable[..., Any]
    varlen_attention: Callable[..., Any]
    varlen_parameters: tuple[str, ...]
    release: str | None


def inspect_ipex(ipex: ModuleType | None = None) -> Installed:
    """Read the signatures of an IPEX and refuse one whose calls would not bind.

    Parameters
    ----------
    ipex : module or None
        None imports it with `load_ipex`.

    Raises
    ------
    KernelError
        As `load_ipex`, or parameters other than the known ones, with the installed version.
    """
    module: Any = load_ipex() if ipex is None else ipex
    release = getattr(module, "__version__", None)
    where = f"of {DISTRIBUTION} {release or 'of unknown version'}"
    operators = {}
    for name, parameters in (("flash_attention", FLASH_PARAMETERS), ("decode_attention", DECODE_PARAMETERS)):
        operator = getattr(torch.ops.torch_ipex, name, None)
        if operator is None:
            raise KernelError(f"torch_ipex.{name}: expected it in {DISTRIBUTION} {release}, got no such operator")
        found = tuple(argument.name for argument in operator.default._schema.arguments)
        if found != parameters:
            raise KernelError(f"torch_ipex.{name} {where}: expected parameters {', '.join(parameters)}, got {', '.join(found)}")
        operators[name] = operator.default
    function = module.llm.functional.varlen_attention
    return Installed(
        **operators,
        varlen_attention=function,
        varlen_parameters=varlen_parameters(function, where),
        release=release,
    )


def varlen_parameters(function: Callable[..., Any], where: str) -> tuple[str, ...]:
    """The parameters of an `ipex.llm.functional.varlen_attention` in their order; releases before 2.8 have fewer.

    Parameters
    ----------
    function : callable
        Of any release.
    where : str
        Said in errors: which IPEX it is of.

    Raises
    ------
    KernelError
        Parameters that no known release has, or lacks.
    """
    found = inspect.signature(function).parameters
    label = f"varlen_attention {where}"
    first = tuple(found)[: len(VARLEN_FIRST)]
    if first != VARLEN_FIRST:
        raise KernelError(f"{label}: expected parameters {', '.join(VARLEN_FIRST)} first, got {', '.join(first)}")
    for name in VARLEN_REST:
        if name not in found:
            raise KernelError(f"{label}: expected a parameter {name}, got {', '.join(found)}")
    for name, parameter in found.items():
        if name not in (*VARLEN_FIRST, *VARLEN_REST, *VARLEN_OPTIONAL) and parameter.default is parameter.empty:
            raise KernelError(f"{label}: expected no other parameter to be required, got {name}")
    return tuple(found)


def diagnostic(installed: Installed) -> str:
    """One line with the versions, the file of IPEX and what the CPU has, for bug reports."""
    where = getattr(sys.modules.get(MODULE), "__file__", None)
    code = "AVX512_BF16" if has_avx512_bf16() else "scalar code for bfloat16"
    return f"{DISTRIBUTION} {installed.release} from {where}, torch {torch.__version__}, {code}"
