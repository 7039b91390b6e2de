"""Gradients of attention, recomputed in plain torch from inputs and log-sum-exp: one formula for the kernels of all sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["backward_of_varlen", "save_for_varlen", "varlen_attention_backward"]

BLOCK_SCORES = 1 << 24
"""Scores of all heads that are recomputed at a time, unless a single row has more."""

SCHEMA = (
    "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor query_start_loc, "
    "Tensor kv_start_loc, bool causal, float softmax_scale) -> (Tensor, Tensor, Tensor)"
)


def varlen_attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `mla.compute.VarlenAttention` with respect to q, k and v.

    Computed in float32, in float64 for float64 inputs, and rounded once at the end. A row that sees no key and a row that
    belongs to no sequence give zeros, whatever arrives there. Reads the cumulative lengths, which synchronises on a device
    other than the CPU; there is no gradient of these gradients.

    Parameters
    ----------
    grad_out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        Of the output.
    grad_lse : torch.Tensor of shape (num_tokens, num_heads)
        Of the log-sum-exp.
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        As given to the kernel, like all that follow.
    k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
        Keys.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        Values.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        What the kernel returned.
    query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative lengths.
    causal : bool
        The last query is aligned with the last key of each sequence.
    softmax_scale : float
        Factor on q.k.

    Returns
    -------
    grad_q, grad_k, grad_v : torch.Tensor
        Of the shapes and dtypes of q, k and v, contiguous.

    References
    ----------
    Dao et al., "FlashAttention", appendix B.2, with the gradient of the log-sum-exp added to the row term.
    """
    grads = (q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape))
    queries, keys = query_start_loc.tolist(), kv_start_loc.tolist()
    for first, last, begin, end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        if first < last and begin < end and q.shape[1]:
            rows, cols = slice(first, last), slice(begin, end)
            parts = _of_sequence(
                grad_out[rows], grad_lse[rows], q[rows], k[cols], v[cols], lse[rows],
                causal=causal, softmax_scale=softmax_scale,
            )  # fmt: skip
            for grad, where, part in zip(grads, (rows, cols, cols), parts, strict=True):
                grad[where] = part.transpose(0, 1)
    return grads


def _of_sequence(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of one sequence, heads first, in the wide dtype; a block of rows at a time."""
    (query_len, num_heads, _), kv_len = q.shape, k.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    g, q, k, v = (x.transpose(0, 1).to(wide) for x in (grad_out, q, k, v))
    empty = lse.t() == -torch.inf
    shift, g_lse = (x.t().to(wide).masked_fill(empty, 0) for x in (lse, grad_lse))
    g = g.masked_fill(empty[..., None], 0)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, BLOCK_SCORES // (num_heads * kv_len))
    for first in range(0, query_len, step):
        rows = slice(first, first + step)
        weights = torch.baddbmm(-shift[:, rows, None], q[:, rows], k.mT, alpha=softmax_scale).exp_()
        if causal:
            position = torch.arange(kv_len - query_len, kv_len, device=q.device)[rows, None]
            weights.masked_fill_(torch.arange(kv_len, device=q.device) > position, 0)
        grad_v += weights.mT @ g[:, rows]
        grad_scores = g[:, rows] @ v.mT
        row_term = (weights * grad_scores).sum(-1) - g_lse[:, rows]
        grad_scores.sub_(row_term[..., None]).mul_(weights).mul_(softmax_scale)
        grad_q[:, rows] = grad_scores @ k
        grad_k += grad_scores.mT @ q[:, rows]
    return grad_q, grad_k, grad_v


_operator = torch.library.custom_op("mla::varlen_attention_backward", varlen_attention_backward, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _fake(
    grad_out: torch.Tensor, grad_lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def save_for_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep for `backward_of_varlen` what an operator over a `VarlenAttention` was given, in the order of its schema."""
    q, k, v, query_start_loc, kv_start_loc, _, _, ctx.causal, ctx.softmax_scale = inputs
    ctx.save_for_backward(q, k, v, output[1], query_start_loc, kv_start_loc)


def backward_of_varlen(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The autograd formula of every operator over a `VarlenAttention`."""
    # An operator of its own, so that compiled code does not have to trace the lengths.
    backward: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.mla.varlen_attention_backward.default
    grads = backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.causal, ctx.softmax_scale)
    return *grads, None, None, None, None, None, None
