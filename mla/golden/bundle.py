"""A golden bundle: a folder with the case, what was expected, how close is close enough, and who recorded it.

``case.json`` holds the `GoldenCase`, ``bundle.json`` tolerances and provenance, ``expected.safetensors`` the float64 reference
(``reference.out``, ``reference.lse``) and, if they were kept, the recorded kernel set's own bits (``recorded.out``,
``recorded.lse``). Nothing in a bundle is code or names another file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import torch

from mla._checks import check_positive_float, dtype_name, named_fields
from mla.errors import GoldenError, MLAError
from mla.golden.case import GoldenCase, case_from_json, case_to_json
from mla.golden.files import read_file, read_tensors, write_tensors
from mla.golden.inputs import make_metadata
from mla.serialize import fields_from_json, fields_to_json, parse_json

__all__ = [
    "DEFAULT_TOLERANCES",
    "FORMAT",
    "SHIPPED",
    "Bundle",
    "Provenance",
    "Tolerance",
    "Tolerances",
    "find_bundles",
    "load_bundle",
    "save_bundle",
]

FORMAT = 1
SHIPPED = Path(__file__).parent / "bundles"
"""The folder of bundles that comes with the package."""

CASE, BUNDLE, EXPECTED = "case.json", "bundle.json", "expected.safetensors"
RECORDED = ("recorded.out", "recorded.lse")


def _check_limit(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    check_positive_float(attribute.name, value, GoldenError)


@named_fields(GoldenError)
@attrs.frozen(kw_only=True)
class Tolerance:
    """How far from float64 a result may be.

    Parameters
    ----------
    out_rel : float
        Largest relative error of the output in the Frobenius norm; a single row may have four times as much, and a single
        element sixteen times as much of the root mean square of its row.
    lse_abs : float
        Largest absolute error of the LSE.

    Raises
    ------
    GoldenError
        A number that is not finite and above 0.

    Examples
    --------
    >>> Tolerance(out_rel=2e-6, lse_abs=0.0)
    Traceback (most recent call last):
        ...
    mla.errors.GoldenError: lse_abs: expected a finite number > 0, got 0.0
    """

    out_rel: float = attrs.field(validator=_check_limit)
    lse_abs: float = attrs.field(validator=_check_limit)


@named_fields(GoldenError)
@attrs.frozen(kw_only=True)
class Tolerances:
    """A `Tolerance` for every dtype that a case may be run in.

    Parameters
    ----------
    float64, float32, bfloat16, float16 : Tolerance
        By the dtype of q.

    Examples
    --------
    >>> tolerance = Tolerance(out_rel=1e-3, lse_abs=5e-3)
    >>> Tolerances(float64=tolerance, float32=tolerance, bfloat16=tolerance, float16=tolerance).float16.lse_abs
    0.005
    """

    float64: Tolerance
    float32: Tolerance
    bfloat16: Tolerance
    float16: Tolerance

    def of(self, dtype: torch.dtype) -> Tolerance:
        """That of a dtype.

        Raises
        ------
        GoldenError
            Another dtype.

        Examples
        --------
        >>> load_bundle(SHIPPED / "decode_f32_few_heads").tolerances.of(torch.bfloat16)
        Tolerance(out_rel=0.004, lse_abs=0.005)
        """
        found = getattr(self, dtype_name(dtype), None)
        if not isinstance(found, Tolerance):
            raise GoldenError(f"dtype: expected float64, float32, bfloat16 or float16, got {dtype}")
        return found


DEFAULT_TOLERANCES = {
    "decode": Tolerances(
        float64=Tolerance(out_rel=1e-12, lse_abs=1e-12),
        float32=Tolerance(out_rel=2e-6, lse_abs=2e-5),
        bfloat16=Tolerance(out_rel=4e-3, lse_abs=5e-3),
        float16=Tolerance(out_rel=1e-3, lse_abs=5e-3),
    ),
    # Keys and values are rounded once more after their up-projection.
    "prefill": Tolerances(
        float64=Tolerance(out_rel=1e-12, lse_abs=1e-12),
        float32=Tolerance(out_rel=4e-6, lse_abs=2e-5),
        bfloat16=Tolerance(out_rel=8e-3, lse_abs=2e-2),
        float16=Tolerance(out_rel=2e-3, lse_abs=5e-3),
    ),
}
"""By kind of case; those of prompts hold with context too."""


@named_fields(GoldenError)
@attrs.frozen(kw_only=True)
class Provenance:
    """Who recorded a bundle, on what.

    Parameters
    ----------
    mla, torch : str
        Versions.
    device : str
        ``cpu`` or the name of the GPU.
    cpu : str
        The processor's name.
    cpu_capability : str
        Instructions that torch and the libraries below it choose by.
    kernels : str
        Name of the kernel set.
    threads : int
        Of torch.
    triton : str or None
        Version, where it is installed.

    Examples
    --------
    >>> load_bundle(SHIPPED / "decode_f32_few_heads").provenance.kernels
    'CPU_MLA'
    """

    mla: str
    torch: str
    device: str
    cpu: str
    cpu_capability: str
    kernels: str
    threads: int
    triton: str | None = None

    def differences(self, other: Provenance) -> list[str]:
        """What keeps bits of the one from being those of the other, as ``name``s of fields; empty where they must be equal.

        The number of threads is none of them, and neither is this package's version: a release that changes bits is found.

        Examples
        --------
        >>> here = load_bundle(SHIPPED / "decode_f32_few_heads").provenance
        >>> here.differences(attrs.evolve(here, torch="2.8.0", threads=64))
        ['torch']
        """
        names = ["torch", "device", "cpu", "cpu_capability", "kernels"]
        if self.device != "cpu" or self.kernels.startswith("TRITON"):
            names.append("triton")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


@named_fields(GoldenError)
@attrs.frozen(kw_only=True)
class _Info:
    format: int
    provenance: Provenance
    tolerances: Tolerances


@attrs.frozen(kw_only=True, eq=False)
class Bundle:
    """One golden case with what is expected of it.

    Parameters
    ----------
    case : GoldenCase
        With blocks for every sequence.
    provenance : Provenance
        Who recorded it.
    tolerances : Tolerances
        How close is close enough.
    out : torch.Tensor of shape (num_tokens, num_heads, width), float64
        The reference; `width` is `kv_lora_rank` to decode and `v_head_dim` for prompts.
    lse : torch.Tensor of shape (num_tokens, num_heads), float64
        The reference; natural logarithm.
    recorded_out, recorded_lse : torch.Tensor or None
        What the recorded kernel set gave, bit for bit, in its own dtypes.

    Examples
    --------
    >>> bundle = load_bundle(SHIPPED / "decode_f32_few_heads")
    >>> bundle.name, bundle.case.dtype, bundle.out.dtype, bundle.out.shape == bundle.case.out_shape
    ('decode_f32_few_heads', torch.float32, torch.float64, True)
    """

    case: GoldenCase
    provenance: Provenance
    tolerances: Tolerances
    out: torch.Tensor
    lse: torch.Tensor
    recorded_out: torch.Tensor | None = None
    recorded_lse: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The case's."""
        return self.case.name


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def load_bundle(folder: Path | str) -> Bundle:
    """Read one bundle; nothing in it is run.

    Parameters
    ----------
    folder : Path or str
        With ``case.json``, ``bundle.json`` and ``expected.safetensors``.

    Returns
    -------
    Bundle
        Checked: shapes and dtypes are the case's, and all sizes are limited before anything of that size is made.

    Raises
    ------
    GoldenError
        A missing, damaged or hostile file.

    Examples
    --------
    >>> bundle = load_bundle(SHIPPED / "decode_f32_few_heads")
    >>> bundle.case.kind, bundle.lse.dtype, bundle.recorded_lse.dtype
    ('decode', torch.float64, torch.float32)
    """
    root = Path(folder)
    try:
        return _load(root)
    except GoldenError as reason:
        message = f"bundle {root.name[:80]}: {reason}"
        raise GoldenError(message) from reason


def _load(root: Path) -> Bundle:
    info: Any = parse_json(read_file(root / BUNDLE, BUNDLE, inside=root), BUNDLE)
    version = info.get("format") if isinstance(info, dict) else None
    if type(version) is not int or version != FORMAT:
        raise GoldenError(f"{BUNDLE}.format: expected {FORMAT}, got {version!r:.40}")
    about = fields_from_json(_Info, info, BUNDLE)
    case = case_from_json(parse_json(read_file(root / CASE, CASE, inside=root), CASE), CASE)
    try:
        case = case.placed()
        make_metadata(case)
    except MLAError as reason:
        message = f"{CASE}.{reason}"
        raise GoldenError(message) from reason
    if root.resolve().name != case.name:
        raise GoldenError(f"{CASE}.name: expected {root.resolve().name!r}, the name of its folder, got {case.name!r}")
    shape, dtype = case.out_shape, case.dtype
    wanted = {
        "reference.out": (shape, torch.float64),
        "reference.lse": (shape[:2], torch.float64),
        "recorded.out": (shape, dtype),
        "recorded.lse": (shape[:2], lse_dtype(dtype)),
    }
    tensors = read_tensors(root / EXPECTED, wanted, optional=RECORDED, inside=root)
    if bool(tensors["reference.out"].isnan().any()) or bool(tensors["reference.lse"].isnan().any()):
        raise GoldenError(f"{EXPECTED}: expected numbers in reference.out and reference.lse, got NaN")
    return Bundle(
        case=case,
        provenance=about.provenance,
        tolerances=about.tolerances,
        out=tensors["reference.out"],
        lse=tensors["reference.lse"],
        recorded_out=tensors.get("recorded.out"),
        recorded_lse=tensors.get("recorded.lse"),
    )


def save_bundle(bundle: Bundle, parent: Path | str, *, overwrite: bool = False) -> Path:
    """Write a bundle into a folder of its name below `parent`.

    Parameters
    ----------
    bundle : Bundle
        What to write.
    parent : Path or str
        Made if it is missing.
    overwrite : bool
        Whether a bundle of that name may be replaced.

    Returns
    -------
    Path
        The bundle's folder.

    Raises
    ------
    GoldenError
        There is one already, or the package safetensors is missing.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = save_bundle(load_bundle(SHIPPED / "decode_f32_few_heads"), parent)
    ...     folder.name, sorted(file.name for file in folder.iterdir())
    ('decode_f32_few_heads', ['bundle.json', 'case.json', 'expected.safetensors'])
    """
    folder = Path(parent) / bundle.name
    if folder.exists() and not overwrite:
        raise GoldenError(f"bundle {bundle.name}: expected no such folder in {parent}, got one (overwrite replaces it)")
    folder.mkdir(parents=True, exist_ok=True)
    info = _Info(format=FORMAT, provenance=bundle.provenance, tolerances=bundle.tolerances)
    tensors = {"reference.out": bundle.out, "reference.lse": bundle.lse}
    if bundle.recorded_out is not None and bundle.recorded_lse is not None:
        tensors |= {"recorded.out": bundle.recorded_out.cpu(), "recorded.lse": bundle.recorded_lse.cpu()}
    (folder / CASE).write_text(_text(case_to_json(bundle.case)))
    (folder / BUNDLE).write_text(_text(fields_to_json(info, BUNDLE)))
    write_tensors(folder / EXPECTED, tensors)
    return folder


def _text(data: object) -> str:
    """JSON with a list of integers in one line."""
    text = json.dumps(data, allow_nan=False, indent=1)
    return re.sub(r"\[[\s\d,]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"


def find_bundles(folder: Path | str | None = None) -> list[Path]:
    """Folders of the bundles in `folder`, by name; a bundle itself is the only one.

    Parameters
    ----------
    folder : Path or str or None
        None takes the bundles that come with the package.

    Raises
    ------
    GoldenError
        No such folder, no bundle in it, or a link that leads out of it.

    Examples
    --------
    >>> folder = SHIPPED / "decode_f32_few_heads"
    >>> folder in find_bundles(), find_bundles(folder) == [folder]
    (True, True)
    """
    root = SHIPPED if folder is None else Path(folder)
    if not root.is_dir():
        raise GoldenError(f"folder: expected a folder of bundles, got {root}")
    if (root / BUNDLE).exists():
        return [root]
    found = sorted(path for path in root.iterdir() if path.is_dir() and (path / BUNDLE).exists())
    if not found:
        raise GoldenError(f"folder: expected at least one bundle in {root}, got none")
    for path in found:
        if not path.resolve().is_relative_to(root.resolve()):
            raise GoldenError(f"bundle {path.name}: expected a folder inside of {root}, got a link that leads out of it")
    return found
