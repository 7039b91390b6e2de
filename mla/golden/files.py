"""Reading files that somebody else made: regular files of a sane size, inside the folder that was named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mla._checks import dtype_name
from mla.errors import GoldenError

__all__ = ["MAX_FILE_BYTES", "checked_file", "read_file", "read_tensors", "write_tensors"]

MAX_FILE_BYTES = 1 << 28
"""Largest file that is read: 256 MiB."""

EXTRA = "pip install 'mla[golden]'"
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def checked_file(path: Path, field: str, *, inside: Path | None = None) -> Path:
    """The path, resolved, of a regular file of at most `MAX_FILE_BYTES`.

    Parameters
    ----------
    path : Path
        Of the file.
    field : str
        Name that opens the message.
    inside : Path or None
        A folder that the file must lie in, once links are followed.

    Raises
    ------
    GoldenError
        No such file, something else, a link that leads out of the folder, or one that is too large.
    """
    try:
        real = path.resolve(strict=True)
        if inside is not None and not real.is_relative_to(inside.resolve(strict=True)):
            raise GoldenError(f"{field}: expected a file inside of its folder, got a link that leads out of it")
        if not real.is_file():
            raise GoldenError(f"{field}: expected a regular file, got another kind of file at {path}")
        size = real.stat().st_size
    except (OSError, RuntimeError, ValueError) as reason:
        if isinstance(reason, GoldenError):
            raise
        raise GoldenError(f"{field}: expected a file that can be read, got {reason}") from reason
    if size > MAX_FILE_BYTES:
        raise GoldenError(f"{field}: expected at most {MAX_FILE_BYTES} bytes, got {size}")
    return real


def read_file(path: Path, field: str, *, inside: Path | None = None) -> bytes:
    """Bytes of a file that `checked_file` lets pass.

    Raises
    ------
    GoldenError
        As `checked_file`.
    """
    real = checked_file(path, field, inside=inside)
    try:
        return real.read_bytes()
    except OSError as reason:
        raise GoldenError(f"{field}: expected a file that can be read, got {reason}") from reason


def read_tensors(
    path: Path, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, optional: tuple[str, ...], inside: Path
) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, none of which is read before all names, shapes and dtypes are known to be right.

    Parameters
    ----------
    path : Path
        Of the file.
    wanted : mapping of str to (tuple of int, torch.dtype)
        Shape and dtype of every tensor by name.
    optional : tuple of str
        Names that may be missing, all of them together.
    inside : Path
        The folder that it must lie in.

    Raises
    ------
    GoldenError
        A damaged file, other names, shapes or dtypes; or the package safetensors is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as reason:
        raise GoldenError(f"safetensors: expected the package ({EXTRA}), got {reason}") from reason
    real = checked_file(path, path.name, inside=inside)
    try:
        with safe_open(real, framework="pt") as file:
            found = set(file.keys())
            needed = set(wanted) if found & set(optional) else set(wanted) - set(optional)
            if found != needed:
                raise GoldenError(f"{path.name}: expected tensors {sorted(needed)}, got {sorted(found)[:8]}")
            for name in sorted(found):
                part = file.get_slice(name)
                shape, kind = wanted[name]
                got = tuple(part.get_shape()), SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                if got != (shape, kind):
                    what = dtype_name(got[1]) if isinstance(got[1], torch.dtype) else got[1]
                    raise GoldenError(f"{path.name}: expected {name} of {shape} {dtype_name(kind)}, got {got[0]} {what}")
            return {name: file.get_tensor(name) for name in sorted(found)}
    except (SafetensorError, OSError) as reason:
        raise GoldenError(f"{path.name}: expected a safetensors file, got {reason}") from reason


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file.

    Raises
    ------
    GoldenError
        The package safetensors is missing.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as reason:
        raise GoldenError(f"safetensors: expected the package ({EXTRA}), got {reason}") from reason
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
