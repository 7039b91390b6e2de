"""Numbers of an integer hash, so that no release of a random generator shifts them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mla._checks import check_int
from mla.errors import GoldenError

__all__ = ["hash_tensor", "mixed_hash"]

MASK = 0xFFFFFFFF


def mixed_hash(count: int, salt: int) -> npt.NDArray[np.uint64]:
    """`count` values below ``2 ** 32``: the position times Knuth's factor plus `salt`, mixed.

    Raises
    ------
    GoldenError
        A negative count, or a salt that is not below ``2 ** 32``.

    References
    ----------
    The mixing is the finaliser of Appleby's MurmurHash3.

    Examples
    --------
    >>> mixed_hash(3, 0).tolist()
    [0, 301794027, 3140136926]
    """
    check_int("count", count, low=0, error=GoldenError)
    check_int("salt", salt, low=0, high=MASK, error=GoldenError)
    h: Any = (np.arange(count, dtype=np.uint64) * 2654435761 + salt) & MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> np.uint64(shift)
        h = (h * factor) & MASK
    mixed: npt.NDArray[np.uint64] = h ^ (h >> np.uint64(16))
    return mixed


def hash_tensor(shape: tuple[int, ...], salt: int, gain: float = 1.0) -> torch.Tensor:
    """Values in [-1, 1) of the hash, times `gain`, float64; with a power of two they are exact in float32 too.

    Raises
    ------
    GoldenError
        As `mixed_hash`.
    """
    values = (mixed_hash(math.prod(shape), salt) >> np.uint64(17)).astype(np.float64) / 2**14 - 1
    return torch.from_numpy(values * gain).reshape(shape)
