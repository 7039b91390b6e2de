"""The operators of IPEX 2.8 in a few lines, as strict as the real ones are deadly: what would crash the process is asserted.

`flash_attention` and `decode_attention` keep the layouts, masks and side effects of the originals; `VARLEN` holds a
`varlen_attention` with the parameters of each release. Written from their documentation and from trying them out.
"""

from __future__ import annotations

import math

import torch

__all__ = ["VARLEN", "decode_attention", "flash_attention"]


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, *, attention_mask=None, scale=None):
    assert query.dim() == key.dim() == value.dim() == 4
    assert query.shape[3] == key.shape[3] == value.shape[3], "equal head widths"
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[2], "SIGFPE"
    assert key.shape[2], "NaN"
    assert all(x.stride(3) == 1 and x.stride(2) >= 1 for x in (query, key, value))
    assert attention_mask is None
    assert dropout_p == 0.0
    q, k, v = (x.double() for x in (query, key, value))
    scores = q @ k.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if is_causal:  # aligned with the first key
        scores.masked_fill_(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    out = (scores.softmax(3) @ v).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, scores.logsumexp(3).float().transpose(1, 2).contiguous().transpose(1, 2)


def decode_attention(query, output, kv_cache, beam_idx, attn_logits, scaling, logit_cap, offset):
    batch, num_heads, width = query.shape
    assert all(x.is_contiguous() for x in (query, kv_cache, output, attn_logits))
    assert query.dtype == kv_cache.dtype == output.dtype == torch.bfloat16
    assert kv_cache.shape[1:] == (1, 1, width)
    assert beam_idx.dtype == torch.int32
    assert beam_idx.stride(1) == 1 or offset == 1
    assert beam_idx.shape == (batch, offset)
    assert logit_cap == 0.0
    assert 0 <= int(beam_idx.min()) <= int(beam_idx.max()) < len(kv_cache), "SIGSEGV or terminate"
    assert kv_cache.numel() <= 2**31, "SIGSEGV"
    assert attn_logits.dtype == torch.float32
    splits, rank = attn_logits.shape[2], attn_logits.shape[3] - 1
    assert attn_logits.shape[:2] == (batch, num_heads)
    size = -(-offset // splits)
    rows = kv_cache[:, 0, 0].index_select(0, beam_idx.flatten().long()).view(batch, offset, width).double()
    scores = torch.einsum("bhd,bkd->bhk", query.double(), rows) * scaling
    for i in range(splits):
        part, values = scores[..., i * size : (i + 1) * size], rows[:, i * size : (i + 1) * size, :rank]
        attn_logits[:, :, i, rank] = part.logsumexp(2)
        if part.shape[2]:
            attn_logits[:, :, i, :rank] = torch.einsum("bhk,bkd->bhd", part.softmax(2), values)
        else:  # an empty split
            attn_logits[:, :, i, :rank] = math.nan if num_heads == 1 else 0.0
    weights = attn_logits[..., rank].softmax(2)
    output.view(batch, num_heads, rank).copy_(torch.einsum("bhs,bhsd->bhd", weights, attn_logits[..., :rank]))
    return output


def _padded(query, key, value, out, seqlen_q, seqlen_k, is_causal):
    """Every sequence filled up to the longest; the scale is that of the width, and the causal mask hides no padding."""
    scale = query.shape[2] ** -0.5
    for i in range(len(seqlen_q) - 1):
        rows, keys = slice(*seqlen_q[i : i + 2].tolist()), slice(*seqlen_k[i : i + 2].tolist())
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), key[keys].double()) * scale
        if is_causal:
            scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(2), value[keys].double())
        out[rows] = mixed if len(key[keys]) else math.nan
    return out


def _varlen_2_4(
    query, key, value, out, seqlen_q, seqlen_k, max_seqlen_q, max_seqlen_k, pdropout, softmax_scale, zero_tensors, is_causal,
    return_softmax, gen_,
):  # fmt: skip
    assert (pdropout, zero_tensors, return_softmax, gen_) == (0.0, False, False, None)
    assert query.shape == out.shape
    assert (len(query), len(key)) == (seqlen_q[-1], seqlen_k[-1])
    assert (max_seqlen_q, max_seqlen_k) == (seqlen_q.diff().max(), seqlen_k.diff().max())
    return _padded(query, key, value, out, seqlen_q, seqlen_k, is_causal)


def _varlen_2_8(
    query, key, value, out, seqlen_q, seqlen_k, alibi_slopes, max_seqlen_q, max_seqlen_k, pdropout, softmax_scale, zero_tensors,
    is_causal, return_softmax, gen_, window_size_left=-1, window_size_right=-1, softcap=-1.0,
):  # fmt: skip
    assert alibi_slopes is None
    assert (window_size_left, window_size_right, softcap) == (-1, -1, -1.0)
    return _varlen_2_4(
        query, key, value, out, seqlen_q, seqlen_k, max_seqlen_q, max_seqlen_k, pdropout, softmax_scale, zero_tensors,
        is_causal, return_softmax, gen_,
    )  # fmt: skip


VARLEN = {"2.4.0": _varlen_2_4, "2.7.0": _varlen_2_4, "2.8.0": _varlen_2_8}
