"""Decode in plain torch, the products: gather the pieces of a plan, attend them as batches, merge them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from mla.compute.cpu_flash import attend_flash, is_fast
from mla.compute.cpu_plan import UNIT, DecodeGroup, DecodeItem
from mla.compute.cpu_stack import Workspace, attend_stack, merge_pieces

__all__ = ["run_group"]


def _gather(units: torch.Tensor, item: DecodeItem, latent_dim: int, dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    """The cache rows of an item's pieces, as (pieces, keys, latent_dim) in `dtype`; rows that do not exist are 0."""
    raw = workspace.take("rows", (item.units.shape[0], units.shape[1]), units.dtype)
    rows = torch.index_select(units, 0, item.units, out=raw).view(-1, latent_dim)
    if item.missing.shape[0]:
        rows.index_fill_(0, item.missing, 0)
    if units.dtype != dtype:
        rows = workspace.take("converted", (rows.shape[0], latent_dim), dtype).copy_(rows)
    return rows.view(item.num_pieces, item.piece_len, latent_dim)


def _mask(item: DecodeItem, dtype: torch.dtype) -> torch.Tensor | None:
    """What to add to the scores of (pieces, query_len, keys): -inf where a token does not see a key, else 0.

    A token that sees no key of a piece is left the first, so that its row stays finite; the caller drops the result.
    """
    if not item.is_partial:
        return None
    keys = torch.arange(item.piece_len, device=item.seen.device)
    mask = torch.zeros((*item.seen.shape, item.piece_len), dtype=dtype, device=item.seen.device)
    return mask.masked_fill_(keys >= item.seen.clamp(min=1)[..., None], -torch.inf)


def _hider(item: DecodeItem, num_heads: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None] | None:
    """Writes -inf over the scores (pieces, keys, rows) of keys that a row does not see; None if all see all."""
    if not item.is_partial:
        return None
    query_len = item.seen.shape[1]
    mask = _mask(item, dtype) if query_len > 1 else None

    def hide(scores: torch.Tensor) -> None:
        if mask is not None:
            real = scores[..., : query_len * num_heads].unflatten(2, (query_len, num_heads))
            real.add_(mask.transpose(1, 2)[..., None])
        else:
            scores.view(-1, scores.shape[2]).index_fill_(0, item.missing, -torch.inf)

    return hide


def _by_row(per_token: torch.Tensor, num_heads: int, num_rows: int) -> torch.Tensor:
    """(pieces, query_len, ...) to (pieces, num_rows, ...): a row for each head, and copies of the last for the padding."""
    rows = per_token.repeat_interleave(num_heads, 1)
    missing = num_rows - rows.shape[1]
    return torch.cat([rows, rows[:, -1:].expand(-1, missing, *rows.shape[2:])], 1) if missing else rows


def _attend_fused(
    item: DecodeItem,
    queries: torch.Tensor,
    keys: torch.Tensor,
    num_heads: int,
    kv_lora_rank: int,
    softmax_scale: float,
    workspace: Workspace,
) -> tuple[torch.Tensor, ...]:
    """Output and LSE of an item's pieces by the fused operator."""
    mask = _mask(item, keys.dtype)
    if mask is not None and mask.shape[1] > 1:
        mask = _by_row(mask, num_heads, queries.shape[1])
    out, lse = attend_flash(queries, keys, keys, softmax_scale=softmax_scale, mask=mask)
    if item.has_blind:
        lse = lse.masked_fill(_by_row(item.seen == 0, num_heads, queries.shape[1]), -torch.inf)
    return out[..., :kv_lora_rank], lse


def _attend_products(
    item: DecodeItem,
    queries: torch.Tensor,
    keys: torch.Tensor,
    num_heads: int,
    kv_lora_rank: int,
    softmax_scale: float,
    workspace: Workspace,
) -> tuple[torch.Tensor, ...]:
    """Output, shift and sum of an item's pieces by separate products."""
    # Whole rows stand in for values: torch copies a batch of narrower views, which costs more than some more columns.
    out = torch.empty_like(queries)
    hide = _hider(item, num_heads, queries.dtype)
    shift, total = attend_stack(keys, keys, queries, out, softmax_scale=softmax_scale, hide=hide, workspace=workspace)
    if item.has_blind:
        blind = _by_row(item.seen == 0, num_heads, queries.shape[1])
        total.masked_fill_(blind, 0)
        shift.masked_fill_(blind, torch.finfo(shift.dtype).min)
    return out[..., :kv_lora_rank], shift, total


def _stack(queries: torch.Tensor, item: DecodeItem, workspace: Workspace, *, share: bool) -> torch.Tensor:
    """The queries of each piece; a view if all are the same and may share memory."""
    if share and queries.shape[0] == 1:
        return queries.expand(item.num_pieces, -1, -1)
    stacked = workspace.take("queries", (item.num_pieces, *queries.shape[1:]), queries.dtype)
    return torch.index_select(queries, 0, item.seqs, out=stacked)


def run_group(
    group: DecodeGroup,
    q: torch.Tensor,
    units: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the sequences of one group.

    Parameters
    ----------
    group : DecodeGroup
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
        In the order of ``group.tokens``.
    lse : torch.Tensor of shape (num_seqs * query_len, num_heads), float32 (float64 for float64)
        Natural logarithm.
    """
    _, num_heads, dim = q.shape
    used = group.query_len * num_heads
    queries = q[: len(group.tokens)] if group.is_whole else q.index_select(0, group.tokens)
    queries = queries.view(group.num_seqs, used, dim)
    if used % UNIT:
        queries = functional.pad(queries, (0, 0, 0, -used % UNIT))
    fused = is_fast(q.dtype, q.device)
    share = fused or (q.dtype != torch.bfloat16 and q.device.type == "cpu")  # batched products in bfloat16 would copy them
    has_blind = any(item.has_blind for item in group.items)
    results = []
    for item in group.items:
        keys = _gather(units, item, dim, q.dtype, workspace)
        stacked = _stack(queries, item, workspace, share=share)
        run = _attend_fused if fused else _attend_products
        results.append(run(item, stacked, keys, num_heads, kv_lora_rank, softmax_scale, workspace))
    whole = results[0] if len(results) == 1 else [torch.cat(x) for x in zip(*results, strict=True)]
    merged = []
    for some in group.merges:
        picked = whole if some.pieces is None else [x.index_select(0, some.pieces) for x in whole]
        shape = (some.num_seqs, some.num_pieces)
        merged.append(merge_pieces(*(x.unflatten(0, shape) for x in picked), workspace=workspace, has_blind=has_blind))
    out, lse = merged[0] if len(merged) == 1 else (torch.cat(x) for x in zip(*merged, strict=True))
    return out[:, :used].reshape(-1, num_heads, kv_lora_rank), lse[:, :used].reshape(-1, num_heads)
