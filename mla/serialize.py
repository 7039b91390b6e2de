"""Records as JSON and back, losslessly: sequence groups, dimensions, cache layouts and metadata.

A record is an object of its fields, with its class under ``"type"`` at the top. A tensor is ``{"dtype", "shape", "data"}`` with
flat, row-major integers, and so is a numpy array of block ids; other sequences are lists and come back as tuples. The device is
not part of it. Reading makes records through their own checks and runs no code.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import numpy as np
import numpy.typing as npt
import torch

from mla._checks import FLOATS, describe, dtype_name
from mla.cache.spec import LatentCacheSpec
from mla.errors import GoldenError, MLAError
from mla.metadata.dims import MLADims, RopeSpec, YarnSpec
from mla.metadata.groups import BlockIds, SequenceGroup
from mla.metadata.records import ContextChunk, DecodeMetadata, MLAMetadata, PagedKV, PrefillMetadata

__all__ = ["MAX_JSON_BYTES", "dumps", "fields_from_json", "fields_to_json", "from_json", "loads", "parse_json", "to_json"]

T = TypeVar("T")
IntArray = npt.NDArray[np.integer[Any]]
MAX_JSON_BYTES = 1 << 26
"""Longest text that is read: 64 MiB."""

_VALUES = (SequenceGroup, MLADims, RopeSpec, YarnSpec, LatentCacheSpec)
_METADATA = (MLAMetadata, PrefillMetadata, DecodeMetadata, ContextChunk, PagedKV)
RECORDS: dict[str, type] = {record.__name__: record for record in (*_VALUES, *_METADATA)}
"""What `to_json` takes and `from_json` returns, by the name under ``"type"``."""

ARRAY_FIELDS = {"dtype", "shape", "data"}
INT_DTYPES = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
MAX_SIZE = 1 << 31
DTYPES = {dtype_name(dtype): dtype for dtype in FLOATS}


def to_json(record: object) -> dict[str, Any]:
    """A record as plain JSON data.

    Parameters
    ----------
    record : attrs instance
        A `SequenceGroup`, `MLADims`, `RopeSpec`, `YarnSpec`, `LatentCacheSpec`, `MLAMetadata`, or a part of the latter.

    Returns
    -------
    dict
        With the name of the class under ``"type"`` and every field.

    Raises
    ------
    GoldenError
        Another object, or a field that JSON cannot hold, such as a tuple in a multi-modal map.

    Examples
    --------
    >>> to_json(RopeSpec(dim=64, interleaved=True))
    {'type': 'RopeSpec', 'dim': 64, 'interleaved': True, 'theta': 10000.0, 'yarn': None}
    """
    name = type(record).__name__
    if RECORDS.get(name) is not type(record):
        raise GoldenError(f"record: expected one of {', '.join(RECORDS)}, got {describe(record)}")
    return {"type": name, **fields_to_json(record, name)}


def from_json(data: object) -> Any:
    """The record that `to_json` wrote.

    Parameters
    ----------
    data : object
        JSON data, with ``"type"``. Fields that have a default may be missing.

    Returns
    -------
    attrs instance
        Checked as if it were made by hand; tensors are on the CPU.

    Raises
    ------
    GoldenError
        An unknown type or field, a value of the wrong type, sizes that do not fit, or anything that the record refuses.

    Examples
    --------
    >>> from_json({"type": "RopeSpec", "dim": 64, "interleaved": True}).theta
    10000.0
    """
    if not isinstance(data, dict) or not isinstance(data.get("type"), str) or data["type"] not in RECORDS:
        got = data.get("type") if isinstance(data, dict) else describe(data)
        raise GoldenError(f"type: expected one of {', '.join(RECORDS)}, got {_short(got)}")
    name = data["type"]
    return fields_from_json(RECORDS[name], {key: value for key, value in data.items() if key != "type"}, name)


def dumps(record: object, *, indent: int | None = None) -> str:
    """`to_json` as text.

    Raises
    ------
    GoldenError
        As `to_json`.

    Examples
    --------
    >>> dumps(RopeSpec(dim=64, interleaved=True))
    '{"type": "RopeSpec", "dim": 64, "interleaved": true, "theta": 10000.0, "yarn": null}'
    """
    return json.dumps(to_json(record), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """The record in a text that `dumps` wrote.

    Raises
    ------
    GoldenError
        As `parse_json` and `from_json`.

    Examples
    --------
    >>> loads(dumps(YarnSpec(factor=40.0, original_max_position_embeddings=4096))).factor
    40.0
    """
    return from_json(parse_json(text))


def parse_json(text: str | bytes, field: str = "json") -> Any:
    """Plain data of a JSON text, strictly: no NaN or infinity, no key twice, no number beyond a float, no endless nesting.

    Parameters
    ----------
    text : str or bytes
        At most `MAX_JSON_BYTES` long.
    field : str
        Name that opens the message.

    Raises
    ------
    GoldenError
        Anything else.

    Examples
    --------
    >>> parse_json('{"lengths": [5, 17]}')
    {'lengths': [5, 17]}
    """
    if not isinstance(text, (str, bytes)) or len(text) > MAX_JSON_BYTES:
        got = f"{len(text)} bytes" if isinstance(text, (str, bytes)) else describe(text)
        raise GoldenError(f"{field}: expected JSON text of at most {MAX_JSON_BYTES} bytes, got {got}")

    def refuse(constant: str) -> Any:
        raise GoldenError(f"{field}: expected finite numbers, got {constant}")

    def finite(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise GoldenError(f"{field}: expected every key once, got {max(keys, key=keys.count)!r} twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=unique)
    except GoldenError:
        raise
    except RecursionError:
        raise GoldenError(f"{field}: expected JSON of a few levels, got brackets nested too deeply") from None
    except ValueError as reason:
        raise GoldenError(f"{field}: expected JSON, got {_short(reason)}") from None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Types of the fields that its constructor takes."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in attrs.fields(cls) if field.init}


def fields_to_json(record: Any, path: str) -> dict[str, Any]:
    """Fields of an attrs record as plain JSON data.

    Parameters
    ----------
    record : attrs instance
        Whose fields have types that this module knows.
    path : str
        What messages call it.

    Raises
    ------
    GoldenError
        A field that JSON cannot hold.

    Examples
    --------
    >>> fields_to_json(RopeSpec(dim=64, interleaved=True), "rope")
    {'dim': 64, 'interleaved': True, 'theta': 10000.0, 'yarn': None}
    """
    cls: Any = type(record)
    return {name: _encode(getattr(record, name), hint, f"{path}.{name}") for name, hint in _hints(cls).items()}


def fields_from_json(cls: type[T], data: object, path: str) -> T:
    """An attrs record of its fields.

    Parameters
    ----------
    cls : type
        An attrs class whose fields have types that this module knows.
    data : object
        An object with its fields; those with a default may be missing.
    path : str
        What messages call it.

    Raises
    ------
    GoldenError
        Unknown or missing fields, values of the wrong type, or anything that `cls` refuses.

    Examples
    --------
    >>> fields_from_json(RopeSpec, {"dim": 64, "interleaved": True}, "rope").theta
    10000.0
    """
    if not isinstance(data, dict):
        raise GoldenError(f"{path}: expected an object with the fields of {cls.__name__}, got {_short(data)}")
    record: Any = cls  # neither attrs nor the cache knows T
    hints = _hints(record)
    unknown = [key for key in data if key not in hints]
    if unknown:
        raise GoldenError(f"{path}: expected fields of {', '.join(hints)}, got {', '.join(map(_short, unknown[:8]))}")
    needed = [field.name for field in attrs.fields(record) if field.init and field.default is attrs.NOTHING]
    missing = [name for name in needed if name not in data]
    if missing:
        raise GoldenError(f"{path}.{missing[0]}: expected a value, got none")
    values = {key: _decode(value, hints[key], f"{path}.{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except MLAError as reason:
        message = f"{path}.{reason}"
        raise GoldenError(message) from reason


def _short(value: object) -> str:
    text = value if isinstance(value, str) else str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse(path: str, expected: str, value: object) -> NoReturn:
    # `repr` of a long list or of a tensor is longer than a message should be.
    got = describe(value) if isinstance(value, (torch.Tensor, np.ndarray, tuple)) else _short(value)
    raise GoldenError(f"{path}: expected {expected}, got {got}")


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without None, and whether None was in it."""
    if hint != BlockIds and get_origin(hint) in (Union, types.UnionType):
        rest = [kind for kind in get_args(hint) if kind is not types.NoneType]
        if len(rest) == 1:
            return rest[0], True
        if set(rest) == set(get_args(BlockIds)):
            return BlockIds, True
    return hint, False


def _item_type(hint: Any) -> Any | None:
    """The X of ``tuple[X, ...]``."""
    arguments = get_args(hint)
    return arguments[0] if get_origin(hint) is tuple and arguments[1:] == (Ellipsis,) else None


def _kind(hint: Any) -> str:
    """Which of the codecs below a type has."""
    if hint == BlockIds:
        return "blocks"
    if hint in (int, torch.Tensor, torch.dtype):
        return str(hint.__name__)
    if get_origin(hint) is Mapping:
        return "mapping"
    return "record" if isinstance(hint, type) and attrs.has(hint) else "scalar"


def _encode(value: Any, hint: Any, path: str) -> Any:
    kind, optional = _without_none(hint)
    if value is None and optional:
        return None
    item = _item_type(kind)
    if item is None:
        return ENCODE[_kind(kind)](value, kind, path)
    return [_encode(each, item, f"{path}[{i}]") for i, each in enumerate(_instance(value, tuple, path))]


def _decode(data: Any, hint: Any, path: str) -> Any:
    kind, optional = _without_none(hint)
    if data is None and optional:
        return None
    item = _item_type(kind)
    if item is None:
        return DECODE[_kind(kind)](data, kind, path)
    return tuple(_decode(each, item, f"{path}[{i}]") for i, each in enumerate(_instance(data, list, path)))


def _blocks_to_json(value: Any, _: Any, path: str) -> Any:
    if isinstance(value, np.ndarray):
        return _array_to_json(value, path)
    return [_int(each, f"{path}[{i}]") for i, each in enumerate(_instance(value, Iterable, path))]


def _blocks_from_json(data: Any, _: Any, path: str) -> Any:
    if isinstance(data, dict):
        return _array_from_json(data, path)
    return tuple(_int(each, f"{path}[{i}]") for i, each in enumerate(_instance(data, list, path)))


def _dtype_from_json(data: Any, _: Any, path: str) -> torch.dtype:
    if not isinstance(data, str) or data not in DTYPES:
        _refuse(path, f"one of {', '.join(DTYPES)}", data)
    return DTYPES[data]


def _instance(value: Any, kind: type, path: str) -> Any:
    if not isinstance(value, kind):
        _refuse(path, {"dict": "an object", "list": "a list", "tuple": "a tuple"}.get(kind.__name__, kind.__name__), value)
    return value


def _scalar(value: Any, kind: Any, path: str) -> Any:
    """A bool, a string, or a number where a float is wanted."""
    if kind is float:
        if isinstance(value, float) and math.isfinite(value):
            return value
        return _int(value, path, "a finite number")
    if kind in (bool, str) and isinstance(value, kind):
        return value
    _refuse(path, getattr(kind, "__name__", str(kind)), value)


def _int(value: Any, path: str, expected: str = "an integer of 64 bits") -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -(2**63) <= int(value) < 2**63:
        _refuse(path, expected, value)
    return int(value)


def _plain(value: Any, path: str) -> Any:
    """JSON data as it is; what would not come back as it went is refused."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                _refuse(path, "keys that are strings", key)
        return {key: _plain(each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, f"{path}[{i}]") for i, each in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _int(value, path)
    if isinstance(value, float) and math.isfinite(value):
        return value
    _refuse(path, "JSON values (object, list, string, finite number, true, false or null)", value)


def _array_to_json(array: IntArray, path: str) -> dict[str, Any]:
    if array.dtype.name not in INT_DTYPES:
        raise GoldenError(f"{path}: expected one of {', '.join(INT_DTYPES)}, got {array.dtype.name}")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.reshape(-1).tolist()}


def _array_from_json(data: Any, path: str) -> IntArray:
    if not isinstance(data, dict) or set(data) != ARRAY_FIELDS:
        _refuse(path, "an object of dtype, shape and data", data)
    dtype, shape, values = data["dtype"], data["shape"], data["data"]
    if not isinstance(dtype, str) or dtype not in INT_DTYPES:
        _refuse(f"{path}.dtype", f"one of {', '.join(INT_DTYPES)}", dtype)
    # An empty array may have any other size: it is limited too.
    sizes = shape if isinstance(shape, list) and all(type(size) is int and 0 <= size < MAX_SIZE for size in shape) else None
    if sizes is None or len(sizes) not in (1, 2):
        _refuse(f"{path}.shape", f"one or two integers in 0..{MAX_SIZE - 1}", shape)
    if not isinstance(values, list) or len(values) != math.prod(sizes):
        got = f"{len(values)} of them" if isinstance(values, list) else _short(values)
        raise GoldenError(f"{path}.data: expected {math.prod(sizes)} integers for shape {tuple(sizes)}, got {got}")
    limits = np.iinfo(dtype)
    for i, value in enumerate(values):
        if type(value) is not int or not limits.min <= value <= limits.max:
            _refuse(f"{path}.data[{i}]", f"an integer of {dtype}", value)
    return np.array(values, dtype=dtype).reshape(sizes)


ENCODE: dict[str, Callable[[Any, Any, str], Any]] = {
    "blocks": _blocks_to_json,
    "int": lambda value, _, path: _int(value, path),
    "Tensor": lambda value, kind, path: _array_to_json(_instance(value, kind, path).detach().cpu().numpy(), path),
    "dtype": lambda value, kind, path: dtype_name(_instance(value, kind, path)),
    "mapping": lambda value, _, path: _plain(dict(_instance(value, Mapping, path)), path),
    "record": lambda value, kind, path: fields_to_json(_instance(value, kind, path), path),
    "scalar": _scalar,
}
DECODE: dict[str, Callable[[Any, Any, str], Any]] = {
    "blocks": _blocks_from_json,
    "int": lambda data, _, path: _int(data, path),
    "Tensor": lambda data, _, path: torch.from_numpy(_array_from_json(data, path)),
    "dtype": _dtype_from_json,
    "mapping": lambda data, _, path: _plain(_instance(data, dict, path), path),
    "record": lambda data, kind, path: fields_from_json(kind, data, path),
    "scalar": _scalar,
}
"""How a value of each kind goes to JSON and comes back: ``(value, type, path)``."""
