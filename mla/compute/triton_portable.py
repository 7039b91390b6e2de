"""Decode in Triton for any GPU that Triton compiles for: every shape, one kernel for the pieces and one that joins them.

The specification on the GPU. Nothing is read on the host, so a call can be captured in a CUDA graph; its grid depends on
shapes and on the record's host integers only. A sequence has the same bits alone and in any batch, eager and replayed, with any
padding, placement of blocks and block size: `mla.compute.triton_plan` says why.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import attrs
import torch

from mla.compute.triton_launch import OPTIONS, num_processors, rows_side_by_side
from mla.compute.triton_plan import (
    LONG_SEQ,
    MAX_SEQS,
    UNIT,
    Launch,
    Tiling,
    launches_for,
    max_pieces_of,
    seqs_at_a_time,
)
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = ["attend"]

LOG2_E = 1.4426950408889634
FEW_SEQS = 64
MERGE_TOGETHER, MERGE_WARPS = 8, 4


@functools.cache
def _kernels() -> ModuleType:
    """The module of the kernels, imported at the first launch and not before: it imports Triton."""
    try:
        return importlib.import_module("mla.compute.triton_decode_kernels")
    except ImportError as error:
        raise KernelError(f"triton: expected an installed Triton for these kernels, got {error}; pip install triton") from error


def _alignment(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def attend(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
) -> None:
    """Fill `out` and `lse` for every row of q.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        Copied unless its rows are contiguous.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Contiguous; of a floating dtype, products run in that of q.
    metadata : DecodeMetadata
        Where the rows lie; with at least one sequence.
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
        In the dtype of q, contiguous.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float32.
    softmax_scale : float
        Factor on q.k.

    Raises
    ------
    KernelError
        No Triton.

    References
    ----------
    Dao et al., "Flash-Decoding" (merging splits of the keys by their log-sum-exp).
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    itemsize = max(q.itemsize, latent_cache.itemsize)
    launches = launches_for(q.shape[1], metadata.max_query_len, out.shape[2], latent_cache.shape[2], itemsize)
    for i, launch in enumerate(launches):
        _run(launch, q, latent_cache, metadata, out, lse, scale_log2=softmax_scale * LOG2_E, fills_tail=i == 0)


@attrs.frozen(kw_only=True, eq=False)
class _Constants:
    """What the two kernels are compiled for."""

    attend: dict[str, int]
    merge: dict[str, int]


@functools.lru_cache(maxsize=256)
def _constants(
    tiling: Tiling, num_heads: int, kv_lora_rank: int, latent_dim: int, block_size: int, q_align: int, max_seqs: int
) -> _Constants:
    common = {
        "NUM_HEADS": num_heads,
        "KV_LORA_RANK": kv_lora_rank,
        "OUT_ALIGN": _alignment(kv_lora_rank),
        "LATENT": tiling.latent,
        "PIECE_KEYS": tiling.piece_keys,
        "LONG_SEQ": LONG_SEQ,
        "LONG_PIECE_KEYS": tiling.long_piece_keys,
        "MAX_PIECES": tiling.max_pieces,
        "UNIT": UNIT,
    }
    attend = {
        **common,
        "ROPE_DIM": latent_dim - kv_lora_rank,
        "BLOCK_SIZE": block_size,
        "Q_ALIGN": q_align,
        "LATENT_ALIGN": _alignment(latent_dim),
        "SEQS": max_seqs,
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "ROPE": tiling.rope,
        "STAGES": tiling.num_stages,
        "num_warps": tiling.num_warps,
        **OPTIONS,
    }
    return _Constants(attend=attend, merge={**common, "TOGETHER": MERGE_TOGETHER, "num_warps": MERGE_WARPS, **OPTIONS})


def _run(
    launch: Launch,
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale_log2: float,
    fills_tail: bool,
) -> None:
    """Attend the sequences of one launch and join their pieces, as many sequences at a time as memory is granted for."""
    kernels, tiling, num_seqs = _kernels(), launch.tiling, metadata.num_seqs
    num_tokens, num_heads, kv_lora_rank = out.shape
    pieces, rows = max_pieces_of(metadata.max_seq_len, tiling), metadata.max_query_len * num_heads
    if pieces > 1:
        step = min(num_seqs, seqs_at_a_time(pieces * rows * (kv_lora_rank + 1) * 4))
        part_out = lse.new_empty(step * pieces * rows * kv_lora_rank)
        part_log = lse.new_empty(step * pieces * rows)
    else:
        step = min(num_seqs, MAX_SEQS)
        part_out = part_log = lse  # not used
    _, block_size, latent_dim = latent_cache.shape
    q_token, q_head, _ = q.stride()
    q_align = _alignment(q_token | q_head | 16)
    max_seqs = FEW_SEQS if step <= FEW_SEQS else MAX_SEQS
    constants = _constants(tiling, num_heads, kv_lora_rank, latent_dim, block_size, q_align, max_seqs)
    programs = min(step * pieces * -(-rows // tiling.rows), num_processors(q.device) * tiling.programs_per_processor)
    for first in range(0, num_seqs, step):
        last = min(first + step, num_seqs)
        table, starts, lens = rows_side_by_side(metadata)
        if step < num_seqs:
            table, starts, lens = table[first:last], starts[first : last + 1], lens[first:last]
        limits = launch.rows_above, launch.rows_up_to, pieces, rows
        # Tokens behind the last sequence are filled by the launch that has it.
        tail = num_tokens if fills_tail and last == num_seqs else 0
        numbers = q_token, q_head, table.stride(0), last - first, tail, *limits, scale_log2
        kernels.attend_pieces[programs,](
            q, latent_cache, table, starts, lens, out, lse, part_out, part_log, *numbers, **constants.attend
        )
        if pieces > 1:
            kernels.merge_pieces[rows, last - first](part_out, part_log, starts, lens, out, lse, *limits, **constants.merge)
