"""The specification: Multi-head Latent Attention in float64, one loop per sequence, nothing absorbed.

It shares no code with the fast paths, so it cannot inherit their mistakes. Inputs of any dtype are widened to float64 first;
outputs are float64.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from mla.compute.contracts import Plan
from mla.errors import KernelError
from mla.metadata.dims import MLADims
from mla.metadata.records import DecodeMetadata, PrefillMetadata

__all__ = ["latent_attention", "paged_decode", "varlen_attention"]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_visible: int, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, all heads: q (H, d), k (L, H, d), v (L, H, e); the first `num_visible` keys count."""
    if num_visible <= 0:
        return q.new_zeros(q.shape[0], v.shape[2]), q.new_full((q.shape[0],), -torch.inf)
    scores = torch.stack([k[:num_visible, h] @ q[h] for h in range(q.shape[0])]) * softmax_scale
    lse = torch.logsumexp(scores, dim=1)
    weights = torch.exp(scores - lse[:, None])
    return torch.stack([weights[h] @ v[:num_visible, h] for h in range(q.shape[0])]), lse


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    max_query_len: int,
    max_kv_len: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla.compute.VarlenAttention` in float64.

    Parameters
    ----------
    q, k : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Queries; keys have a first dimension of their own.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        Values.
    query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative lengths, from 0.
    max_query_len, max_kv_len : int
        Not needed here; part of the contract.
    causal : bool
        Aligned at the end.
    softmax_scale : float
        Factor on q.k.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim), float64
        0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithm, -inf for rows without keys.
    """
    wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
    out = wide_q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = wide_q.new_full(q.shape[:2], -torch.inf)
    queries, keys = query_start_loc.tolist(), kv_start_loc.tolist()
    for first, last, begin, end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        for t in range(first, last):
            visible = end - begin - (last - 1 - t) if causal else end - begin
            out[t], lse[t] = _attend(wide_q[t], wide_k[begin:end], wide_v[begin:end], visible, softmax_scale)
    return out, lse


def _cached_rows(latent_cache: torch.Tensor, block_table: torch.Tensor, seq: int, length: int) -> torch.Tensor:
    """The cache rows of one sequence, token by token."""
    block_size = latent_cache.shape[1]
    table = block_table[seq].tolist()
    rows = [latent_cache[table[p // block_size], p % block_size] for p in range(length)]
    return torch.stack(rows).double() if rows else latent_cache.new_zeros(0, latent_cache.shape[2]).double()


def paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla.compute.PagedDecode` in float64.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        Queries in the latent space.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        The cache.
    metadata : DecodeMetadata
        Where the rows lie.
    kv_lora_rank : int
        Columns of a value.
    softmax_scale : float
        Factor on q.k.
    plan : Plan or None
        Not used here; part of the contract.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank), float64
        0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithm, -inf for rows without keys.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], kv_lora_rank, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for seq, (first, last) in enumerate(pairwise(starts)):
        rows = _cached_rows(latent_cache, metadata.block_table, seq, lengths[seq])[:, None].expand(-1, q.shape[1], -1)
        for t in range(first, last):
            visible = lengths[seq] - (last - 1 - t)
            out[t], lse[t] = _attend(q[t].double(), rows, rows[..., :kv_lora_rank], visible, softmax_scale)
    return out, lse


def latent_attention(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: PrefillMetadata | DecodeMetadata,
    *,
    kv_b_proj: torch.Tensor,
    dims: MLADims,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of one part of a batch as the paper writes it: keys and values are made from the latent rows.

    ``k = [W_UK kv_c ; k_pe]``, ``v = W_UV kv_c``; token i of a sequence sees its context and the new tokens up to itself.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Rotated queries.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        The cache; it already holds the new tokens.
    metadata : PrefillMetadata or DecodeMetadata
        With a block table.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions and scale.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim), float64
        0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithm, -inf for rows without keys.

    Raises
    ------
    KernelError
        Metadata of a profile run, which has no blocks to read.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", section 2.1.2, equations 9 to 19.
    """
    if metadata.block_table is None:
        raise KernelError("metadata: expected a block table, got a profile run")
    out = q.new_zeros(q.shape[0], dims.num_heads, dims.v_head_dim, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    weight = kv_b_proj.double().reshape(dims.num_heads, -1, dims.kv_lora_rank)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for seq, (first, last) in enumerate(pairwise(starts)):
        rows = _cached_rows(latent_cache, metadata.block_table, seq, lengths[seq])
        expanded = torch.einsum("lc,hdc->lhd", rows[:, : dims.kv_lora_rank], weight)
        shared = rows[:, None, dims.kv_lora_rank :].expand(-1, dims.num_heads, -1)
        keys = torch.cat([expanded[..., : dims.qk_nope_head_dim], shared], dim=2)
        values = expanded[..., dims.qk_nope_head_dim :]
        for t in range(first, last):
            visible = lengths[seq] - (last - 1 - t)
            out[t], lse[t] = _attend(q[t].double(), keys, values, visible, dims.softmax_scale)
    return out, lse
