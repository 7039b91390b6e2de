"""Prefill by AITER: its attention over ragged batches, and the rows that it leaves unwritten."""

from __future__ import annotations

import torch

from mla._checks import check_positive_float, check_tensor
from mla.compute.rocm_decode import visible_keys
from mla.compute.rocm_load import Installed
from mla.compute.rocm_table import check_prefill_head_dims
from mla.errors import KernelError

__all__ = ["varlen_attention_by"]


def varlen_attention_by(
    installed: Installed,
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
    """`mla.compute.rocm.varlen_attention` by an AITER whose signatures have been read.

    Raises
    ------
    KernelError
        Naming the argument, or what AITER returned.
    """
    bound = check_tensor("q", q, "(num_tokens, num_heads, qk_head_dim)", torch.bfloat16, error=KernelError)
    checks = (
        ("k", k, "(num_kv_tokens, num_heads, qk_head_dim)", torch.bfloat16),
        ("v", v, "(num_kv_tokens, num_heads, v_head_dim)", torch.bfloat16),
        ("query_start_loc", query_start_loc, "(num_seqs + 1,)", torch.int32),
        ("kv_start_loc", kv_start_loc, "(num_seqs + 1,)", torch.int32),
    )
    for name, x, shape, dtype in checks:
        check_tensor(name, x, shape, dtype, device=q.device, bound=bound, error=KernelError)
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    check_prefill_head_dims(q.shape[2], v.shape[2])
    num_tokens, num_heads = q.shape[:2]
    if 0 in (num_tokens, num_heads, k.shape[0], query_start_loc.shape[0] - 1, max_query_len, max_kv_len):
        return q.new_zeros(num_tokens, num_heads, v.shape[2]), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = installed.flash_attn_varlen_func(
        q,
        k,
        v,
        query_start_loc,
        kv_start_loc,
        max_query_len,
        max_kv_len,
        softmax_scale=softmax_scale,
        causal=causal,
        return_lse=True,
    )
    if lse.shape != (num_heads, num_tokens):
        raise KernelError(
            f"flash_attn_varlen_func: expected an LSE of shape {(num_heads, num_tokens)} from amd-aiter {installed.release}, "
            f"got {tuple(lse.shape)}"
        )
    # Rows without keys, and those behind the last sequence, were not written.
    seen = visible_keys(query_start_loc, kv_start_loc.diff(), num_tokens, causal=causal)[1]
    empty = (seen == 0)[:, None]
    return out.masked_fill(empty[..., None], 0), lse.T.masked_fill(empty, -torch.inf)
