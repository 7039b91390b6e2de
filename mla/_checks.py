"""Checks of shape, dtype and device that never read a tensor's values.

Record fields declare their tensors with `tensor`, in the same words as their docstrings: ``(num_seqs + 1,)``, ``int32``.
`check_record` binds the names of the dimensions across all fields of a record, so that two fields that disagree are refused.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from mla.errors import MLAError

__all__ = [
    "TensorSpec",
    "check_choice",
    "check_int",
    "check_positive_float",
    "check_record",
    "check_tensor",
    "dtype_name",
    "tensor",
]

_NEW_NAME = re.compile(r"(?P<name>[a-z_0-9]*[a-z_][a-z_0-9]*)(?:\s*\+\s*(?P<plus>\d+))?\Z")


def _evaluate(node: ast.expr, bound: Mapping[str, int]) -> int | None:
    """Value of an expression of names, numbers, ``+`` and ``*``; None while a name is unknown."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return bound.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, bound), _evaluate(right, bound)
            if a is not None and b is not None:
                return a * b if isinstance(op, ast.Mult) else a + b
    return None


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

    @property
    def dims(self) -> tuple[str, ...]:
        """The entries of `shape`."""
        return tuple(d.strip() for d in self.shape.removeprefix("(").removesuffix(")").split(",") if d.strip())


def tensor(shape: str, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """Metadata of an attrs field that holds a tensor: ``attrs.field(metadata=tensor("(n,)", torch.int32))``."""
    return {"tensor": TensorSpec(shape, dtype)}


def dtype_name(dtype: torch.dtype | None) -> str:
    """``int32`` for ``torch.int32``."""
    return str(dtype).removeprefix("torch.")


def _check_dims(field: str, shape: torch.Size, spec: TensorSpec, bound: dict[str, int], error: type[MLAError]) -> None:
    got = tuple(shape)
    if len(got) != len(spec.dims):
        raise error(f"{field}: expected shape {spec.shape}, got {got}")
    for size, dim in zip(got, spec.dims, strict=True):
        want = _evaluate(ast.parse(dim, mode="eval").body, bound)
        if want is None and (new := _NEW_NAME.match(dim)):
            plus = int(new["plus"] or 0)
            if size >= plus:
                bound[new["name"]] = size - plus
                continue
        if size != want:
            names = ", ".join(f"{name}={bound[name]}" for name in re.findall(r"[a-z_]\w*", spec.shape) if name in bound)
            raise error(f"{field}: expected shape {spec.shape}{' with ' + names if names else ''}, got {got}")


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
        raise error(f"{field}: expected a torch.Tensor of shape {shape}, got {type(value).__name__}")
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if allowed is not None and value.dtype not in allowed:
        raise error(f"{field}: expected {' or '.join(map(dtype_name, allowed))}, got {value.dtype}")
    _check_dims(field, value.shape, TensorSpec(shape, None), bound, error)
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


def check_int(field: str, value: object, *, low: int, error: type[MLAError], high: int | None = None) -> int:
    """Refuse anything that is not an integer in ``low..high``; booleans are refused too.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    # numpy integers register as int-like through __index__; bool does too, but a flag in a length field is a mistake.
    index = getattr(value, "__index__", None)
    limits = f">= {low}" if high is None else f"in {low}..{high}"
    if isinstance(value, bool) or index is None or isinstance(value, torch.Tensor):
        raise error(f"{field}: expected an int {limits}, got {value!r}")
    number = int(index())
    if number < low or (high is not None and number > high):
        raise error(f"{field}: expected an int {limits}, got {number}")
    return number


def check_positive_float(field: str, value: object, error: type[MLAError]) -> float:
    """Refuse anything that is not a finite number above 0.

    Raises
    ------
    MLAError
        Of class `error`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
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
