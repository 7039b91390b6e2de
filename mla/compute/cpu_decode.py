"""Decode in plain torch, the products: gather the pieces of a plan, attend them as a batch, merge them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from mla.compute.cpu_plan import UNIT, DecodeItem, DecodeStack
from mla.compute.cpu_stack import Workspace, attend_stack, merge_pieces

__all__ = ["run_stack"]


def _gather(
    units: torch.Tensor, item: DecodeItem, shape: tuple[int, int, int], dtype: torch.dtype, workspace: Workspace
) -> torch.Tensor:
    """The cache rows of an item's pieces, as (pieces, keys, latent_dim) in `dtype`; rows nobody sees are 0."""
    raw = workspace.take("rows", (item.units.shape[0], units.shape[1]), units.dtype)
    rows = torch.index_select(units, 0, item.units, out=raw).view(-1, shape[2])
    rows.index_fill_(0, item.hidden, 0)
    if units.dtype != dtype:
        rows = workspace.take("converted", (rows.shape[0], shape[2]), dtype).copy_(rows)
    return rows.view(shape)


def _hider(item: DecodeItem, query_len: int, num_heads: int) -> Callable[[torch.Tensor], None]:
    """Writes -inf where a key does not exist or comes after the token."""
    tokens = torch.arange(query_len, device=item.units.device)
    early = (tokens < item.first_token[:, None])[..., None] if item.partly.shape[0] else None

    def hide(scores: torch.Tensor) -> None:
        flat = scores.view(-1, scores.shape[2])
        if item.hidden.shape[0]:
            flat.index_fill_(0, item.hidden, -torch.inf)
        if early is not None:
            some = flat.index_select(0, item.partly)
            real = some[:, : query_len * num_heads].unflatten(1, (query_len, num_heads))
            real.masked_fill_(early, -torch.inf)
            flat.index_copy_(0, item.partly, some)

    return hide


def run_stack(
    stack: DecodeStack,
    q: torch.Tensor,
    units: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the sequences of one stack.

    Parameters
    ----------
    stack : DecodeStack
        The sequences.
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        All queries, contiguous, in the dtype of the products.
    units : torch.Tensor of shape (num_units, unit * latent_dim)
        The cache as runs of rows.
    kv_lora_rank : int
        Columns of a value.
    softmax_scale : float
        Factor on q.k.
    workspace : Workspace
        Of this call.

    Returns
    -------
    out : torch.Tensor of shape (num_seqs * query_len, num_heads, kv_lora_rank), float32 (float64 for float64)
        In the order of ``stack.tokens``.
    lse : torch.Tensor of shape (num_seqs * query_len, num_heads), float32 (float64 for float64)
        Natural logarithm.
    """
    _, num_heads, dim = q.shape
    used = stack.query_len * num_heads
    queries = q.index_select(0, stack.tokens).view(stack.num_seqs, used, dim)
    if used % UNIT:
        queries = functional.pad(queries, (0, 0, 0, -used % UNIT))
    num_rows = queries.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    all_pieces = stack.num_seqs * stack.num_pieces
    # Whole rows stand in for values: torch copies a batch of narrower views, which costs more than some more columns.
    parts = workspace.take("parts", (all_pieces, num_rows, dim), q.dtype)
    shifts, totals = q.new_empty(2, all_pieces, num_rows, dtype=wide)
    done = 0
    for item in stack.items:
        here = slice(done, done + item.num_pieces)
        done += item.num_pieces
        each = item.num_pieces // stack.num_seqs  # an item holds all pieces of its sequences, or some of the only one
        stacked = workspace.take("queries", (item.num_pieces, num_rows, dim), q.dtype)
        stacked.view(stack.num_seqs, each, num_rows, dim).copy_(queries[:, None])
        keys = _gather(units, item, (item.num_pieces, stack.piece_len, dim), q.dtype, workspace)
        shifts[here], totals[here] = attend_stack(
            keys, keys, stacked, parts[here],
            softmax_scale=softmax_scale, hide=_hider(item, stack.query_len, num_heads), workspace=workspace,
        )  # fmt: skip
    pieces = (stack.num_seqs, stack.num_pieces)
    out, lse = merge_pieces(
        parts.unflatten(0, pieces)[..., :kv_lora_rank], shifts.unflatten(0, pieces), totals.unflatten(0, pieces)
    )
    return out[:, :used].reshape(-1, num_heads, kv_lora_rank), lse[:, :used].reshape(-1, num_heads)
