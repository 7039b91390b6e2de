"""Prefill by IPEX: its flash-attention kernel, and the call that vLLM's `CPU_MLA` backend made."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from mla._checks import check_positive_float, check_tensor
from mla.compute.ipex_load import Installed
from mla.compute.merge import merge_attn_states
from mla.errors import KernelError

__all__ = ["functional_varlen_attention_by", "varlen_attention_by"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    softmax_scale: float,
) -> tuple[list[int], list[int]]:
    """Refuse what IPEX would crash on; the cumulative lengths on the host."""
    bound = check_tensor("q", q, "(num_tokens, num_heads, qk_head_dim)", DTYPES, device=CPU, error=KernelError)
    checks = (
        ("k", k, "(num_kv_tokens, num_heads, qk_head_dim)", q.dtype),
        ("v", v, "(num_kv_tokens, num_heads, v_head_dim)", q.dtype),
        ("query_start_loc", query_start_loc, "(num_seqs + 1,)", torch.int32),
        ("kv_start_loc", kv_start_loc, "(num_seqs + 1,)", torch.int32),
    )
    for name, x, shape, dtype in checks:
        check_tensor(name, x, shape, dtype, device=CPU, bound=bound, error=KernelError)
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    starts, kv_starts = query_start_loc.tolist(), kv_start_loc.tolist()
    for name, values, rows in (("query_start_loc", starts, q.shape[0]), ("kv_start_loc", kv_starts, k.shape[0])):
        if values[0] != 0 or any(first > last for first, last in pairwise(values)) or values[-1] > rows:
            raise KernelError(f"{name}: expected ascending values from 0 to at most {rows}, got {values}")
    return starts, kv_starts


def _empty(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of rows without keys."""
    return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)


def _readable(x: torch.Tensor, width: int) -> torch.Tensor:
    """The rows as IPEX reads them: heads filled with zeros to `width`, numbers of a head side by side, rows apart."""
    if x.shape[2] < width:
        return functional.pad(x, (0, width - x.shape[2]))
    return x if x.stride(2) == 1 and x.stride(0) > 0 else x.clone(memory_format=torch.contiguous_format)


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
    """`mla.compute.ipex.varlen_attention` by an IPEX whose signatures have been read.

    Raises
    ------
    KernelError
        Naming the argument.
    """
    starts, kv_starts = _check(q, k, v, query_start_loc, kv_start_loc, softmax_scale)
    out, lse = _empty(q, v)
    if 0 in (q.shape[1], starts[-1], kv_starts[-1]):
        return out, lse
    width = max(q.shape[2], v.shape[2])
    v_head_dim = v.shape[2]
    q, k, v = (_readable(x, width) for x in (q, k, v))

    def attend(rows: slice, keys: slice, *, top_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence in one call: which code IPEX takes depends on the number of sequences in a call."""
        seq = (x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys]))
        part, part_lse = installed.flash_attention(*seq, 0.0, top_left, attention_mask=None, scale=softmax_scale)
        return part[0].transpose(0, 1)[..., :v_head_dim], part_lse[0].T

    for (first, last), (begin, end) in zip(pairwise(starts), pairwise(kv_starts), strict=True):
        num_rows = min(last - first, end - begin) if causal else last - first
        # IPEX dies of a call without queries and returns NaN without keys. The rows before `rows` see no key.
        if num_rows == 0 or begin == end:
            continue
        rows = slice(last - num_rows, last)
        if not causal:
            out[rows], lse[rows] = attend(rows, slice(begin, end), top_left=False)
            continue
        # IPEX's mask starts at the first key: it is right for the last keys, as many as there are rows.
        part, part_lse = attend(rows, slice(end - num_rows, end), top_left=True)
        if end - begin > num_rows:
            before, before_lse = attend(rows, slice(begin, end - num_rows), top_left=False)
            part, part_lse = merge_attn_states(before, before_lse, part, part_lse)
        out[rows], lse[rows] = part, part_lse
    return out, lse


def functional_varlen_attention_by(
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
) -> torch.Tensor:
    """`mla.compute.ipex.functional_varlen_attention` by an IPEX whose signatures have been read.

    Raises
    ------
    KernelError
        Naming the argument.
    """
    starts, kv_starts = _check(q, k, v, query_start_loc, kv_start_loc, softmax_scale)
    if causal and starts != kv_starts:
        raise KernelError(
            f"causal: expected as many keys as queries in each sequence (IPEX's mask starts at the first key), "
            f"got query_start_loc {starts} and kv_start_loc {kv_starts}"
        )
    out = _empty(q, v)[0]
    if 0 in (q.shape[1], starts[-1], kv_starts[-1]):
        return out
    width = max(q.shape[2], v.shape[2])
    v_head_dim = v.shape[2]
    # IPEX always scales by width ** -0.5, whatever softmax_scale says.
    q = _readable(q[: starts[-1]] * (softmax_scale * width**0.5), width)
    k, v = (_readable(x[: kv_starts[-1]], width) for x in (k, v))
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    values = {
        "query": q, "key": k, "value": v, "out": result, "seqlen_q": query_start_loc, "seqlen_k": kv_start_loc,
        "alibi_slopes": None, "max_seqlen_q": max(b - a for a, b in pairwise(starts)),
        "max_seqlen_k": max(b - a for a, b in pairwise(kv_starts)), "pdropout": 0.0, "softmax_scale": softmax_scale,
        "zero_tensors": False, "is_causal": causal, "return_softmax": False, "gen_": None,
        "window_size_left": -1, "window_size_right": -1, "softcap": -1.0,
    }  # fmt: skip
    installed.varlen_attention(**{name: x for name, x in values.items() if name in installed.varlen_parameters})
    for (first, last), (begin, end) in zip(pairwise(starts), pairwise(kv_starts), strict=True):
        if begin < end:
            out[first:last] = result[first:last, :, :v_head_dim]
    return out
