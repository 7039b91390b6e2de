"""Random batches over a paged latent cache in which every slot that no valid index reaches holds NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from mla import MLADims, MLAMetadata, RopeSpec, SequenceGroup, build_metadata

__all__ = ["Batch", "Row", "context_slots", "make_batch", "row_groups", "shuffled_tables", "small_dims"]


@attrs.frozen(kw_only=True)
class Row:
    """One sequence of a step; `lookahead` counts blocks beyond those that its tokens need."""

    query_len: int
    context_len: int = 0
    is_prompt: bool = True
    lookahead: int = 0

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Everything that `mla.attend` takes; the cache holds the context, the new tokens are still to be written."""

    dims: MLADims
    metadata: MLAMetadata
    q: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_b_proj: torch.Tensor
    latent_cache: torch.Tensor


def small_dims(
    num_heads: int = 3, *, kv_lora_rank: int = 16, qk_nope_head_dim: int = 10, qk_rope_head_dim: int = 6, v_head_dim: int = 8
) -> MLADims:
    """Dimensions that all differ, so that a swap of two of them shows."""
    return MLADims(
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=v_head_dim,
        rope=RopeSpec(dim=qk_rope_head_dim, interleaved=True),
    )


def shuffled_tables(
    rows: Sequence[Row], block_size: int, *, seed: int, spare_blocks: int = 2
) -> tuple[list[tuple[int, ...]], int]:
    """Blocks of each row, none held twice, in random order with `spare_blocks` that nobody holds; and how many exist."""
    counts = [-(-row.seq_len // block_size) + row.lookahead for row in rows]
    num_blocks = sum(counts) + spare_blocks
    order = np.random.default_rng(seed).permutation(num_blocks).tolist()
    ends = np.cumsum(counts).tolist()
    return [tuple(order[end - count : end]) for count, end in zip(counts, ends, strict=True)], num_blocks


def row_groups(rows: Sequence[Row], tables: Sequence[Sequence[int]]) -> list[SequenceGroup]:
    """One group for each row."""
    return [
        SequenceGroup(is_prompt=row.is_prompt, query_lens=(row.query_len,), context_lens=(row.context_len,), block_ids=(table,))
        for row, table in zip(rows, tables, strict=True)
    ]


def context_slots(rows: Sequence[Row], tables: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Slots that hold the context of the rows."""
    return [
        table[position // block_size] * block_size + position % block_size
        for row, table in zip(rows, tables, strict=True)
        for position in range(row.context_len)
    ]


def make_batch(
    rows: Sequence[Row],
    *,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    dims: MLADims | None = None,
    cache_dtype: torch.dtype | None = None,
    spare_blocks: int = 2,
    q_scale: float = 1.0,
    **build_options: Any,
) -> Batch:
    """A step of these rows, prompts first; the inputs of padded tokens are NaN, as is every slot outside the contexts."""
    dims = small_dims() if dims is None else dims
    tables, num_blocks = shuffled_tables(rows, block_size, seed=seed, spare_blocks=spare_blocks)
    metadata = build_metadata(row_groups(rows, tables), block_size=block_size, **build_options)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    latent_cache = torch.full((num_blocks, block_size, dims.latent_dim), torch.nan, dtype=cache_dtype or dtype)
    slots = context_slots(rows, tables, block_size)
    latent_cache.view(-1, dims.latent_dim)[slots] = normal(len(slots), dims.latent_dim).to(latent_cache.dtype)
    num_real = sum(row.query_len for row in rows)
    inputs = []
    for shape in ((dims.num_heads, dims.qk_head_dim), (dims.kv_lora_rank,), (dims.qk_rope_head_dim,)):
        values = torch.full((metadata.num_tokens, *shape), torch.nan, dtype=dtype)
        values[:num_real] = (normal(num_real, *shape) * (q_scale if len(shape) == 2 else 1.0)).to(dtype)
        inputs.append(values)
    up_rows = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    kv_b_proj = (normal(up_rows, dims.kv_lora_rank) * dims.kv_lora_rank**-0.5).to(dtype)
    return Batch(
        dims=dims,
        metadata=metadata,
        q=inputs[0],
        kv_c=inputs[1],
        k_pe=inputs[2],
        kv_b_proj=kv_b_proj,
        latent_cache=latent_cache,
    )
