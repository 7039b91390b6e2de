"""Checks of shape, dtype and device that never read a tensor's values.

Record fields declare their tensors with `tensor`, in the same words as their docstrings: ``(num_seqs + 1,)``, ``int32``.
`check_record` binds the names of the dimensions across all fields of a record, so that two fields that disagree are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from mla.errors import MLAError

__all__ = [
    "FLOATS",
    "TensorSpec",
    "as_device",
    "as_items",
    "check_choice",
    "check_floating",
    "check_instance",
    "check_int",
    "check_positive_float",
    "check_record",
    "check_tensor",
    "describe",
    "dtype_name",
    "named_fields",
    "tensor",
    "usable_device",
]

T = TypeVar("T")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Size = int | str | tuple[str, "Size", "Size"]
"""Of a dimension: a number, a name, or the sum or product of two sizes with its sign first."""


def _parse_size(text: str) -> Size:
    """The size that a text says: names, numbers, sums of products, or a product of sums in brackets."""
    text = text.strip()
    if text[:1] == "(" and text[-1:] == ")":
        return _parse_size(text[1:-1])
    for sign in ("*",) if "(" in text else ("+", "*"):
        left, found, right = text.partition(sign)
        if found:
            return sign, _parse_size(left), _parse_size(right)
    return int(text) if text.isdigit() else text


def _parse(shape: str) -> tuple[Size, ...]:
    """The sizes of a shape. Plain enough for torch to trace, as all that follows."""
    return tuple([_parse_size(text) for text in shape[1:-1].split(",") if text.strip()])


_parsed = functools.lru_cache(maxsize=256)(_parse)


def _evaluate(size: Size, bound: Mapping[str, int]) -> int | None:
    """Value of a size; None while a name is unknown."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return bound.get(size)
    sign, left, right = size
    a, b = _evaluate(left, bound), _evaluate(right, bound)
    if a is None or b is None:
        return None
    return a * b if sign == "*" else a + b


def _names(size: Size) -> list[str]:
    """The names in a size."""
    if isinstance(size, tuple):
        return _names(size[1]) + _names(size[2])
    return [size] if isinstance(size, str) else []


@attrs.frozen
class TensorSpec:
    """Declared shape and dtype of one tensor.

    Parameters
    ----------
    shape : str
        Such as ``(num_seqs + 1,)``: numbers, names, and sums and products of them.
    dtype : torch.dtype or None
        Required dtype; None leaves it open.
    """

    shape: str
    dtype: torch.dtype | None


def tensor(shape: str, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """Metadata of an attrs field that holds a tensor: ``attrs.field(metadata=tensor("(n,)", torch.int32))``."""
    return {"tensor": TensorSpec(shape, dtype)}


def dtype_name(dtype: torch.dtype | None) -> str:
    """``int32`` for ``torch.int32``."""
    return str(dtype).removeprefix("torch.")


def _check_dims(field: str, got: torch.Size, shape: str, bound: dict[str, int], error: type[MLAError]) -> None:
    dims = _parse(shape) if torch.compiler.is_compiling() else _parsed(shape)
    if len(got) != len(dims):
        raise error(f"{field}: expected shape {shape}, got {tuple(got)}")
    for i, size in enumerate(dims):
        want = _evaluate(size, bound)
        if want is None:  # a new name, or a new name and a number
            name, plus = (size[1], size[2]) if isinstance(size, tuple) and size[0] == "+" else (size, 0)
            if isinstance(name, str) and isinstance(plus, int) and got[i] >= plus:
                bound[name] = got[i] - plus
                continue
        if got[i] != want:
            known = [name for size in dims for name in _names(size) if name in bound]
            names = ", ".join([f"{name}={bound[name]}" for name in known])
            raise error(f"{field}: expected shape {shape}{' with ' + names if names else ''}, got {tuple(got)}")


def check_tensor(
    field: str,
    value: object,
    shape: str,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    *,
    device: torch.device | None = None,
    bound: dict[str, int] | None = None,
    error: type[MLAError] = MLAError,
) -> dict[str, int]:
    """Refuse anything that is not a tensor of this shape, dtype and device.

    Parameters
    ----------
    field : str
        Name that opens the message.
    value : object
        What the caller passed.
    shape : str
        Such as ``(num_tokens, num_heads, 192)``.
    dtype : torch.dtype or tuple of torch.dtype or None
        Allowed dtypes; None allows all.
    device : torch.device or None
        Required device; None allows all.
    bound : dict of str to int or None
        Sizes of dimensions that are already known by name; new names are added.
    error : type of MLAError
        Class to raise.

    Returns
    -------
    dict of str to int
        `bound` with the names of this tensor.

    Raises
    ------
    MLAError
        Of class `error`, naming the field.
    """
    bound = {} if bound is None else bound
    if not isinstance(value, torch.Tensor):
        raise error(f"{field}: expected a torch.Tensor of shape {shape}, got {describe(value)}")
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if allowed is not None and value.dtype not in allowed:
        raise error(f"{field}: expected {' or '.join(map(dtype_name, allowed))}, got {value.dtype}")
    _check_dims(field, value.shape, shape, bound, error)
    if device is not None and value.device != device:
        raise error(f"{field}: expected device {device}, got {value.device}")
    return bound


def check_record(record: Any, error: type[MLAError], **known: int) -> dict[str, int]:
    """Check every declared tensor field of an attrs record: shapes agree, dtypes are right, one device holds all.

    Parameters
    ----------
    record : attrs instance
        Fields declared with `tensor` are checked; those that are None are skipped.
    error : type of MLAError
        Class to raise.
    **known : int
        Sizes of named dimensions that are known beforehand.

    Returns
    -------
    dict of str to int
        Sizes by name.

    Raises
    ------
    MLAError
        Of class `error`, naming the field.
    """
    bound = dict(known)
    device: torch.device | None = None
    for field in attrs.fields(type(record)):
        spec = field.metadata.get("tensor")
        value = getattr(record, field.name)
        if spec is None or (value is None and field.metadata.get("optional", False)):
            continue
        check_tensor(field.name, value, spec.shape, spec.dtype, device=device, bound=bound, error=error)
        device = value.device
    return bound


def describe(value: object) -> str:
    """What an error says it got: numbers and words with their type, everything else by its type."""
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, str)):
        return f"{type(value).__name__} {value!r:.60}"
    return type(value).__name__


def check_instance(field: str, value: object, kind: type, error: type[MLAError]) -> None:
    """Refuse anything that is not a `kind`.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    if not isinstance(value, kind):
        raise error(f"{field}: expected {kind.__name__}, got {describe(value)}")


def as_items(field: str, values: Iterable[T], error: type[MLAError]) -> list[T]:
    """The items of an iterable; a single thing in its place is refused.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    if isinstance(values, (str, bytes, torch.Tensor)) or not isinstance(values, Iterable):
        raise error(f"{field}: expected a sequence, got {describe(values)}")
    return list(values)


def as_device(field: str, device: object, error: type[MLAError]) -> torch.device:
    """A torch.device from a device or its name.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError):
        raise error(f"{field}: expected a device of torch, got {describe(device)}") from None


def usable_device(field: str, device: object, error: type[MLAError]) -> torch.device:
    """`as_device`, for a device that this torch can put tensors on.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    where = as_device(field, device, error)
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as reason:
        raise error(f"{field}: expected a device that this torch can use, got {where}: {reason}") from reason
    return where


def check_int(field: str, value: object, *, low: int, error: type[MLAError], high: int | None = None) -> int:
    """Refuse anything that is not an integer in ``low..high``; booleans are refused too.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    limits = f">= {low}" if high is None else f"in {low}..{high}"
    # bool is an int to Python, but a flag in a length field is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise error(f"{field}: expected an int {limits}, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise error(f"{field}: expected an int {limits}, got {number}")
    return number


def check_floating(field: str, value: torch.Tensor, error: type[MLAError]) -> None:
    """Refuse a tensor that does not hold floating numbers wide enough to compute with.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    if value.dtype not in FLOATS:
        raise error(f"{field}: expected {' or '.join(map(dtype_name, FLOATS))}, got {value.dtype}")


def check_positive_float(field: str, value: object, error: type[MLAError]) -> float:
    """Refuse anything that is not a finite number above 0.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise error(f"{field}: expected a finite number > 0, got {value!r}")
    return float(value)


def check_choice(field: str, value: object, choices: tuple[str, ...] | Mapping[str, object], error: type[MLAError]) -> None:
    """Refuse a word that is not one of `choices`.

    Raises
    ------
    MLAError
        Of class `error`, listing the choices.
    """
    if value not in choices:
        raise error(f"{field}: expected one of {', '.join(choices)}, got {value!r}")


def named_fields(error: type[MLAError]) -> Callable[[type[T]], type[T]]:
    """Class decorator: an unknown keyword is refused with the list of the fields that exist.

    Raises
    ------
    MLAError
        Of class `error`, when an instance is made.
    """

    def decorate(cls: type[T]) -> type[T]:
        plain_init = cls.__init__
        known = [field.alias for field in attrs.fields(cls) if field.init]  # type: ignore[arg-type]

        @functools.wraps(plain_init)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            unknown = sorted(kwargs.keys() - set(known))
            if unknown:
                raise error(f"{cls.__name__}: expected fields of {', '.join(map(str, known))}, got {', '.join(unknown)}")
            plain_init(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[assignment]
        return cls

    return decorate
