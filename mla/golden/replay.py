"""Running golden cases: recording bundles, and checking kernel sets against them."""

from __future__ import annotations

import fnmatch
import importlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import attrs
import torch

from mla._checks import check_choice, check_instance, dtype_name, usable_device
from mla.compute.kernels import KernelSet, explain
from mla.compute.select import KERNEL_SETS, kernel_set
from mla.errors import GoldenError
from mla.golden.bundle import DEFAULT_TOLERANCES, Bundle, find_bundles, load_bundle, lse_dtype
from mla.golden.case import GoldenCase
from mla.golden.compare import compare_bits, compare_close, errors_of, wrong_form
from mla.golden.diagnose import diagnose
from mla.golden.inputs import CaseInputs, make_inputs
from mla.golden.machine import provenance_of
from mla.golden.report import Report, Result
from mla.golden.run import reference_of, run_case

__all__ = ["EXACT", "SHORT_NAMES", "check", "check_bundle", "find_kernels", "record", "with_bar"]

SHORT_NAMES = {"cpu": "CPU_MLA", "ipex": "CPU_MLA_IPEX", "aiter": "ROCM_AITER_MLA", "cuda": "TRITON_MLA"}
"""What ``--kernels`` may say in place of a set's name."""

T = TypeVar("T")
EXACT = ("auto", "always", "never")
THREADS = (1, 2)
MAX_NAMES = 16
"""How many bundles a message lists."""


def find_kernels(kernels: KernelSet | str) -> KernelSet:
    """A kernel set by its name, its short name, or as ``module:name`` of your own.

    Parameters
    ----------
    kernels : KernelSet or str
        A set passes as it is; a module is imported.

    Raises
    ------
    GoldenError, KernelError
        No such set, or one whose package is missing here.
    """
    if isinstance(kernels, str) and ":" not in kernels:
        if kernels not in SHORT_NAMES and kernels not in KERNEL_SETS:
            names = ", ".join([*SHORT_NAMES, *KERNEL_SETS])
            raise GoldenError(f"kernels: expected one of {names}, or module:name of your own, got {kernels!r}")
        return kernel_set(SHORT_NAMES.get(kernels, kernels))
    found: Any = _imported(kernels) if isinstance(kernels, str) else kernels
    check_instance("kernels", found, KernelSet, GoldenError)
    chosen: KernelSet = found
    return chosen


def _imported(text: str) -> Any:
    """What ``module:name`` stands for; whatever an import raises becomes one line."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise GoldenError(f"kernels: expected module:name of a KernelSet (a dotted module, no path), got {text!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as reason:
        got = f"{type(reason).__name__} in the import of {module!r}: {' '.join(str(reason).split())}"
        if isinstance(reason, ModuleNotFoundError) and reason.name is not None:
            got = f"no module {reason.name!r}"
            if not f"{module}.".startswith(f"{reason.name}."):
                got += f" in the import of {module!r}"
        elif isinstance(reason, AttributeError) and reason.name == name and isinstance(reason.obj, ModuleType):
            got = f"module {module!r} without {name!r}"
        raise GoldenError(f"kernels: expected module:name of a KernelSet (a dotted module, no path), got {got}") from reason


def _device_of(kernels: KernelSet, device: torch.device | str | None) -> torch.device:
    """The device asked for, or the first that the set runs on."""
    types = kernels.device_types
    own = "cpu" if not types or "cpu" in types else types[0]
    return usable_device("device", own if device is None else device, GoldenError)


def record(
    case: GoldenCase, kernels: KernelSet | str = "cpu", *, device: torch.device | str | None = None, bits: bool = True
) -> Bundle:
    """Make a bundle of a case: the float64 reference and, with `bits`, what the kernel set gives here.

    Parameters
    ----------
    case : GoldenCase
        What to run.
    kernels : KernelSet or str
        Whose results are kept; they must be within tolerance.
    device : torch.device or str or None
        Where it runs; None takes the set's own.
    bits : bool
        False keeps the reference alone.

    Raises
    ------
    GoldenError, MLAError
        A case that the kernel set cannot run, or results out of tolerance: a wrong kernel makes no golden.

    Examples
    --------
    >>> case = load_bundle(find_bundles()[0]).case
    >>> bundle = record(attrs.evolve(case, name="mine"), "cpu")
    >>> bundle.name, bundle.provenance.kernels, bundle.recorded_out.dtype == case.dtype
    ('mine', 'CPU_MLA', True)
    >>> record(case, bits=False).recorded_out is None
    True
    """
    kernels, case = find_kernels(kernels), case.placed()
    where = _device_of(kernels, device)
    tolerances = DEFAULT_TOLERANCES["decode" if case.kind == "decode" else "prefill"]
    inputs = make_inputs(case, page_size=kernels.page_size)
    out, lse = reference_of(case, inputs)
    bundle = Bundle(case=case, provenance=provenance_of(kernels, where), tolerances=tolerances, out=out, lse=lse)
    if not bits:
        return bundle
    reason = explain(kernels, dims=case.dims, dtype=case.dtype)
    if not reason.startswith(f"{kernels.name} runs"):
        raise GoldenError(f"case {case.name}: expected one that {kernels.name} runs, got {reason}")
    got = run_case(case, inputs.to(device=where), kernels)
    bundle = attrs.evolve(bundle, recorded_out=got.out, recorded_lse=got.lse)
    result = check_bundle(bundle, kernels, device=where, exact="never")
    if result.status != "passed":
        raise GoldenError(f"case {case.name}: expected results of {kernels.name} to keep, got {'; '.join(result.messages)}")
    return attrs.evolve(bundle, recorded_out=got.out.cpu(), recorded_lse=got.lse.cpu())


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """So many threads for a while; None leaves them."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


def _run_dtype(case: GoldenCase, kernels: KernelSet) -> torch.dtype:
    """The case's dtype, or float64 (with inputs rounded to the case's) where the set takes no other."""
    return torch.float64 if kernels.dtypes == (torch.float64,) else case.dtype


def check_bundle(
    bundle: Bundle, kernels: KernelSet | str, *, device: torch.device | str | None = None, exact: str = "auto"
) -> Result:
    """Replay one bundle.

    Parameters
    ----------
    bundle : Bundle
        What is expected.
    kernels : KernelSet or str
        What runs.
    device : torch.device or str or None
        Where; None takes the set's own.
    exact : str
        ``"auto"`` compares bits, under 1 and 2 threads on a CPU, where the provenance is equal, and within tolerance
        elsewhere; ``"always"`` and ``"never"`` decide it.

    Returns
    -------
    Result
        Failures are in it and not raised, an exception of the kernels included.

    Raises
    ------
    GoldenError
        Arguments that make no sense.

    Examples
    --------
    >>> result = check_bundle(load_bundle(find_bundles()[0]), "cpu", exact="never")
    >>> result.status, result.compared
    ('passed', 'tolerance (as asked)')
    """
    check_instance("bundle", bundle, Bundle, GoldenError)
    check_choice("exact", exact, EXACT, GoldenError)
    kernels = find_kernels(kernels)
    case, where = bundle.case, _device_of(kernels, device)
    dtype = _run_dtype(case, kernels)
    start = time.monotonic()
    base = Result(bundle=bundle.name, kind=case.kind, dtype=dtype_name(dtype), status="skipped")
    reason = explain(kernels, dims=case.dims, dtype=dtype)
    if not reason.startswith(f"{kernels.name} runs"):
        return attrs.evolve(base, messages=(reason,))
    differences = bundle.provenance.differences(provenance_of(kernels, where))
    has_bits = bundle.recorded_out is not None and dtype == case.dtype
    if exact == "always" and not has_bits:
        raise GoldenError(f"exact: expected a bundle with recorded bits in {dtype_name(dtype)}, got {bundle.name} without")
    by_bits = has_bits and exact != "never" and (exact == "always" or not differences)
    inputs = make_inputs(case, page_size=kernels.page_size)
    messages: list[str] = []
    errors = None
    counts: tuple[int | None, ...] = THREADS if by_bits and where.type == "cpu" else (None,)
    for count in counts:
        with _threads(count):
            errors, found = _check_once(bundle, kernels, inputs, where, dtype, by_bits=by_bits)
        prefix = f"with {count} thread{'s' if count != 1 else ''}, " if count is not None else ""
        messages += [prefix + message for message in found]
        if found:
            break
    if by_bits:
        compared = f"bits, {' and '.join(map(str, counts))} threads" if counts[0] is not None else "bits"
    else:
        why = ", ".join(differences) if has_bits else "no bits in this dtype"
        compared = f"tolerance ({'as asked' if exact == 'never' else f'other {why}' if has_bits else why})"
    status = "failed" if messages else "passed"
    seconds = time.monotonic() - start
    return attrs.evolve(base, status=status, compared=compared, errors=errors, messages=tuple(messages), seconds=seconds)


def _check_once(
    bundle: Bundle, kernels: KernelSet, inputs: CaseInputs, where: torch.device, dtype: torch.dtype, *, by_bits: bool
) -> tuple[Any, list[str]]:
    """Errors and messages of one run."""
    case = bundle.case
    tolerance = bundle.tolerances.of(dtype)
    moved = inputs.to(device=where, dtype=dtype)
    try:
        run = run_case(case, moved, kernels)
    except GoldenError as error:
        return None, [str(error)]
    except Exception as error:  # noqa: BLE001  a kernel of somebody's own may raise anything
        return None, [f"raised {type(error).__name__}: {error}"]
    out, lse, changed = run.out, run.lse, list(run.changed)
    wrong = wrong_form("out", out, case.out_shape, dtype), wrong_form("lse", lse, case.out_shape[:2], lse_dtype(dtype))
    if any(wrong):
        return None, [message for message in wrong if message] + changed
    found = _wrong_rows(inputs.to(dtype=dtype).written_cache(), run.latent_cache.cpu()) + changed
    host_out, host_lse = out.detach().cpu(), lse.detach().cpu()
    wide = host_out.double(), host_lse.double()
    errors = errors_of(*wide, bundle.out, bundle.lse)
    off = compare_close(*wide, bundle.out, bundle.lse, tolerance)
    if by_bits and bundle.recorded_out is not None and bundle.recorded_lse is not None:
        bits = compare_bits("out", host_out, bundle.recorded_out), compare_bits("lse", host_lse, bundle.recorded_lse)
        near = "" if off else "; all within tolerance"
        found += [message + near for message in bits if message]
    found += off
    if off:
        found += diagnose(case, inputs, *wide, bundle.out, bundle.lse, tolerance)
    return errors, found


def _wrong_rows(expected: torch.Tensor, actual: torch.Tensor) -> list[str]:
    """Cache rows that hold something else than they should once the new tokens are stored."""
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    rows = (~same.all(dim=2)).nonzero().tolist()
    if not rows:
        return []
    block, offset = rows[0]
    what = "was written and should not" if bool(expected[block, offset].isnan().all()) else "is not what was to be stored"
    where = f"first row {offset} of block {block}, which {what}"
    return [f"latent_cache: {len(rows)} rows differ after write_latent_cache_, {where}"]


def check(
    kernels: KernelSet | str,
    bundles: Path | str | Iterable[Bundle] | None = None,
    *,
    only: str = "*",
    device: torch.device | str | None = None,
    exact: str = "auto",
    progress: bool = False,
) -> Report:
    """Check a kernel set against golden bundles.

    Parameters
    ----------
    kernels : KernelSet or str
        Yours, or the name of one of this package: ``"cpu"``, ``"ipex"``, ``"aiter"``, ``"cuda"`` or such as ``"CPU_MLA"``.
    bundles : Path or str or iterable of Bundle or None
        A folder of bundles, or one; None takes those that come with the package.
    only : str
        Names that are checked, with ``*`` and ``?``.
    device : torch.device or str or None
        Where it runs; None takes the set's own.
    exact : str
        See `check_bundle`.
    progress : bool
        Show a bar (tqdm) after two seconds.

    Returns
    -------
    Report
        Print it; `Report.passed` says whether all is well.

    Raises
    ------
    GoldenError
        No such folder, a damaged bundle, or no bundle of such a name.

    Examples
    --------
    >>> check("cpu", only="decode_f32*").passed
    True
    """
    kernels = find_kernels(kernels)
    if bundles is None or isinstance(bundles, (str, Path)):
        folders = find_bundles(bundles)
        names = [folder.resolve().name for folder in folders]
        chosen = [load_bundle(folder) for folder, name in zip(folders, names, strict=True) if fnmatch.fnmatchcase(name, only)]
    else:
        given = list(bundles)
        names = [bundle.name for bundle in given]
        chosen = [bundle for bundle in given if fnmatch.fnmatchcase(bundle.name, only)]
    if not chosen:
        there = ", ".join(names[:MAX_NAMES]) + (f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
        raise GoldenError(f"only: expected the name of a bundle ({there or 'there is none'}), got {only!r}, which none has")
    results = [check_bundle(bundle, kernels, device=device, exact=exact) for bundle in with_bar(chosen, show=progress)]
    return Report(kernels=kernels.name, results=tuple(results))


def with_bar(items: Iterable[T], *, show: bool) -> Iterable[T]:
    """The items behind a progress bar that shows after two seconds, if it is wanted and tqdm is here."""
    if not show:
        return items
    try:
        from tqdm import tqdm  # noqa: PLC0415  an extra
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc="golden bundles", delay=2, leave=False)
    return bar
