"""Two metadata records, or two bundles, field by field."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs

from mla._checks import dtype_name
from mla.errors import GoldenError
from mla.golden.bundle import BUNDLE, Bundle, load_bundle
from mla.golden.case import case_to_json
from mla.golden.compare import compare_bits
from mla.golden.files import read_file
from mla.serialize import ARRAY_FIELDS, parse_json, to_json

__all__ = ["diff"]

MISSING = object()


def diff(first: object, second: object) -> list[str]:
    """What differs, one line for each field; empty if nothing does.

    Parameters
    ----------
    first, second : record, Bundle, or Path or str
        Two records that `mla.serialize.to_json` takes, two bundles, or two paths: of JSON files or of bundles' folders.

    Raises
    ------
    GoldenError
        Two things of different kinds, or files that are damaged.

    Examples
    --------
    >>> from mla.metadata import build_metadata, decode_group
    >>> diff(*(build_metadata([decode_group(n, [7, 2])], block_size=16).decode for n in (20, 21)))[0]
    'seq_start_loc: 1 of 2 values differ, first at [1]: 20 in the first, 21 in the second'
    """
    a, b = _read("first", first), _read("second", second)
    if isinstance(a, Bundle) != isinstance(b, Bundle):
        raise GoldenError("first, second: expected two bundles or two records, got one of each")
    if isinstance(a, Bundle) and isinstance(b, Bundle):
        return _bundles(a, b)
    return list(_values("", a, b))


def _read(field: str, value: object) -> Any:
    """A bundle, or plain JSON data."""
    if isinstance(value, Bundle):
        return value
    if not isinstance(value, (str, Path)):
        return to_json(value)
    path = Path(value)
    if path.is_dir():
        if not (path / BUNDLE).exists():
            raise GoldenError(f"{field}: expected a bundle or a JSON file, got folder {path} without {BUNDLE}")
        return load_bundle(path)
    return parse_json(read_file(path, field), path.name)


def _bundles(a: Bundle, b: Bundle) -> list[str]:
    found = list(_values("case", case_to_json(a.case), case_to_json(b.case)))
    for name in ("provenance", "tolerances"):
        found += _values(name, attrs.asdict(getattr(a, name)), attrs.asdict(getattr(b, name)))
    for name in ("out", "lse", "recorded_out", "recorded_lse"):
        x, y = getattr(a, name), getattr(b, name)
        if x is None or y is None:
            if x is not y:
                found.append(f"{name}: {'missing' if x is None else 'there'} in the first, not in the second")
        elif x.shape != y.shape or x.dtype != y.dtype:
            here, there = (f"{tuple(t.shape)} {dtype_name(t.dtype)}" for t in (x, y))
            found.append(f"{name}: {here} in the first, {there} in the second")
        else:
            message = compare_bits(name, y, x)
            if message:
                found.append(message.replace("expected", "first has").replace("got", "second has"))
    return found


def _short(value: object) -> str:
    if value is MISSING:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _values(path: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        if set(a) == set(b) == ARRAY_FIELDS and a["dtype"] == b["dtype"] and len(a["shape"]) == len(b["shape"]) == 1:
            return _lists(path, a["data"], b["data"])
        if set(a) == set(b) == ARRAY_FIELDS and a["shape"] != b["shape"]:
            return [f"{path}: shape {a['shape']} in the first, {b['shape']} in the second"]
        below = f"{path}." if path else ""
        return [line for key in {**a, **b} for line in _values(f"{below}{key}", a.get(key, MISSING), b.get(key, MISSING))]
    if isinstance(a, list) and isinstance(b, list):
        return _lists(path, a, b)
    if type(a) is type(b) and a == b:
        return []
    return [f"{path or 'value'}: {_short(a)} in the first, {_short(b)} in the second"]


def _lists(path: str, a: list[Any], b: list[Any]) -> list[str]:
    """Lists of records item by item; of numbers in one line, with the first that differs."""
    if any(isinstance(item, (dict, list)) for item in (*a, *b)):
        pairs = enumerate(zip_longest(a, b, fillvalue=MISSING))
        return [line for i, (x, y) in pairs for line in _values(f"{path}[{i}]", x, y)]
    wrong = [i for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=MISSING)) if type(x) is not type(y) or x != y]
    if not wrong:
        return []
    i = wrong[0]
    lengths = "" if len(a) == len(b) else f", of {len(a)} values in the first and {len(b)} in the second"
    x, y = (_short(values[i] if i < len(values) else MISSING) for values in (a, b))
    count = f"{len(wrong)} of {max(len(a), len(b))} values differ{lengths}"
    return [f"{path}: {count}, first at [{i}]: {x} in the first, {y} in the second"]
