"""Shapes that the GPU benchmark measures, and their inputs on the device: shuffled blocks, NaN where no sequence reaches."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import torch
from cpu_shapes import LATENT, RANK, DecodeInputs, DecodeShape, PrefillShape

from mla import build_metadata, decode_group

__all__ = [
    "CHECKED",
    "DECODE",
    "FEW_SHAPES",
    "LOADED",
    "PREFILL",
    "QUICK_CHECKED",
    "QUICK_DECODE",
    "QUICK_LOADED",
    "QUICK_PREFILL",
    "GpuShape",
    "decode_inputs",
    "kernel_class",
    "odd_shape",
    "ragged",
]

SPARE_BLOCKS = 3
MASK = 0xFFFFFFFF
ODD_LENGTHS = (3, 64, 65, 130, 1000, 4097)


def _hashes(count: int, salt: int) -> np.ndarray:
    """Integers below 2**32 that no release of any library changes."""
    h = (np.arange(count, dtype=np.uint64) * 2654435761 + salt) & MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> shift
        h = (h * factor) & MASK
    return h ^ (h >> 16)


def ragged(count: int, longest: int, salt: int = 1) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, each as likely."""
    return tuple(1 + h % longest for h in _hashes(count, salt).tolist())


@attrs.frozen(kw_only=True)
class GpuShape(DecodeShape):
    """A shape of decode with its block size, dtype, and a factor on the queries."""

    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    query_scale: float = 1.0

    @property
    def key_bytes(self) -> int:
        """Cached rows, each read once."""
        return sum(self.lengths) * LATENT * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Cached rows, queries and outputs."""
        return self.key_bytes + len(self.lengths) * self.query_len * self.heads * (LATENT + RANK) * self.dtype.itemsize


def _shape(batch: int, heads: int, length: int, note: str = "", **more: object) -> GpuShape:
    name = f"B{batch} H{heads} L{length}{' ' + note if note else ''}"
    return GpuShape(name=name, heads=heads, lengths=(length,) * batch, **more)


def _ragged_shape(heads: int) -> GpuShape:
    return GpuShape(name=f"B64 H{heads} ragged", heads=heads, lengths=ragged(64, 16384))


DECODE = (
    _shape(128, 16, 8192),
    _shape(128, 16, 4096),
    _shape(32, 16, 16384),
    _shape(8, 16, 8192),
    _ragged_shape(16),
    _shape(1, 16, 65536),
    _shape(1, 16, 8192),
    _shape(8, 16, 4096),
    _shape(16, 16, 1024),
    _shape(64, 16, 1024),
    _shape(128, 8, 8192),
    _shape(128, 32, 8192),
    _shape(128, 64, 8192),
    _shape(128, 128, 4096),
    _shape(128, 128, 8192),
    _ragged_shape(128),
    _shape(1, 128, 65536),
    _shape(1, 128, 8192),
    _shape(8, 128, 4096),
    _shape(32, 128, 1024),
    *(_shape(128, heads, 4096, f"bs{size}", block_size=size) for heads in (16, 128) for size in (1, 16)),
    *(_shape(128, 16, length, "new 3", query_len=3) for length in (4096, 8192)),
    *(_shape(128, heads, 4096, "float16", dtype=torch.float16) for heads in (16, 128)),
)
CHECKED = (
    _shape(8, 16, 8192, "x8", query_scale=8.0),
    _shape(8, 128, 4096, "x8", query_scale=8.0),
)
"""Eight times larger scores: compared with float64 and not measured."""

FEW_SHAPES = frozenset(
    f"B{batch} H{heads} L{length}"
    for batch, heads, length in (
        (128, 16, 8192), (128, 16, 4096), (32, 16, 16384), (1, 16, 65536),
        (128, 64, 8192), (128, 128, 4096), (128, 128, 8192), (1, 128, 65536),
    )
)  # fmt: skip
"""Where a set is measured that is there for comparison only."""

LOADED = frozenset({"B128 H128 L4096", "B128 H128 L8192", "B64 H128 ragged"})
"""What is also measured under lasting load, where the chip's clock is lower."""

QUICK_DECODE = (
    GpuShape(name="B3 H2 ragged", heads=2, lengths=(40, 1, 33), block_size=16),
    GpuShape(name="B2 H2 L48 new 3", heads=2, lengths=(48, 48), query_len=3, block_size=16),
    GpuShape(name="B1 H3 L20 float16", heads=3, lengths=(20,), dtype=torch.float16, block_size=1),
)
QUICK_LOADED = frozenset({"B3 H2 ragged"})
QUICK_CHECKED = (GpuShape(name="B2 H2 L40 x8", heads=2, lengths=(40, 40), query_scale=8.0, block_size=16),)

PREFILL = (
    PrefillShape(name="H16 T4096", heads=16, query_lens=(4096,)),
    PrefillShape(name="H128 T4096", heads=128, query_lens=(4096,)),
    PrefillShape(name="H16 T16384", heads=16, query_lens=(16384,)),
    PrefillShape(name="H16 4 x T2048", heads=16, query_lens=(2048,) * 4),
    PrefillShape(name="H16 ragged", heads=16, query_lens=ragged(16, 4096, salt=2)),
    PrefillShape(name="H16 T2048 over 8192", heads=16, query_lens=(2048,), context_len=8192),
)
QUICK_PREFILL = (
    PrefillShape(name="H2 T20", heads=2, query_lens=(20,)),
    PrefillShape(name="H2 mix", heads=2, query_lens=(7, 20, 1)),
)


def kernel_class(shape: GpuShape) -> tuple[int, int, int, torch.dtype]:
    """What kernels are compiled for: shapes alike in it share them."""
    return shape.heads, shape.block_size, shape.query_len, shape.dtype


def odd_shape(shape: GpuShape, *, quick: bool = False) -> GpuShape:
    """Lengths beside tiles and blocks, for the same kernels."""
    heads, block_size, new, dtype = kernel_class(shape)
    name = f"H{heads} bs{block_size} new {new} {str(dtype).removeprefix('torch.')} odd"
    lengths = tuple(n for n in ODD_LENGTHS if n < 100 or not quick)
    return GpuShape(name=name, heads=heads, lengths=lengths, query_len=new, block_size=block_size, dtype=dtype)


@functools.lru_cache(maxsize=3)
def _paged(
    lengths: tuple[int, ...], block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, tuple[np.ndarray, ...]]:
    """A cache of random rows, and the blocks of each sequence; block 0, to which unused table entries point, is NaN."""
    counts = [-(-n // block_size) for n in lengths]
    used = sum(counts)
    order = 1 + np.random.default_rng(0).permutation(used + SPARE_BLOCKS - 1)
    tables = tuple(np.split(order[:used], np.cumsum(counts)[:-1]))
    generator = torch.Generator(device=device).manual_seed(0)
    cache = torch.randn(used + SPARE_BLOCKS, block_size, LATENT, generator=generator, dtype=dtype, device=device)
    cache[torch.from_numpy(np.append(order[used:], 0)).to(device)] = torch.nan
    tails = [
        table[-1] * block_size + np.arange(n % block_size, block_size)
        for n, table in zip(lengths, tables, strict=True)
        if n % block_size
    ]
    if tails:
        cache.view(-1, LATENT)[torch.from_numpy(np.concatenate(tails)).to(device)] = torch.nan
    return cache, tables


def decode_inputs(shape: GpuShape, device: torch.device, draw: int = 0) -> DecodeInputs:
    """Random inputs, the same in every run on a device; the queries are those of a draw."""
    cache, tables = _paged(shape.lengths, shape.block_size, shape.dtype, device)
    groups = [decode_group(n, table, query_len=shape.query_len) for n, table in zip(shape.lengths, tables, strict=True)]
    generator = torch.Generator(device=device).manual_seed(1 + draw)
    q = torch.randn(len(shape.lengths) * shape.query_len, shape.heads, LATENT, generator=generator, device=device)
    return DecodeInputs(
        shape=shape,
        q=(shape.query_scale * q).to(shape.dtype),
        latent_cache=cache,
        metadata=build_metadata(groups, block_size=shape.block_size, device=device).decode,
    )
