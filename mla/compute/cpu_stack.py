"""Softmax attention of a batch of equal shapes in plain torch, for decode and prefill alike.

`mla.compute.cpu_plan` says why nothing here runs alone or sums over long rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["Workspace", "attend_stack", "merge_pieces"]

FOLD = 8
"""Keys that are moved next to the rows for elementwise work: a fast dimension of few rows is slow."""

COARSE = 8.0
"""In bfloat16 maxima below this miss the true ones by at most `MISSED` logits."""

MISSED = 1 / 32
"""Logits between a rounded row maximum and the true one that are left alone."""

LARGE = 10.0
"""In float32 a row's largest scaled score is computed again in float64 when it is larger than this."""


class Workspace:
    """Scratch memory of one kernel call: a name is one growing buffer, because fresh pages cost more than the work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the buffer of this name; its content is whatever was there."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:size].view(shape)


def _fold(scores: torch.Tensor) -> torch.Tensor:
    """(pieces, keys, rows) with some keys beside the rows: (pieces, keys / fold, fold * rows)."""
    pieces, keys, rows = scores.shape
    return scores.view(pieces, keys // FOLD, FOLD * rows) if rows < FOLD * 8 else scores


def _unfold(reduced: torch.Tensor, rows: int) -> torch.Tensor:
    """(pieces, fold * rows) to (pieces, fold, rows)."""
    return reduced.view(reduced.shape[0], -1, rows)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Maximum of (pieces, keys, rows) over the keys; finite also where no key is seen, for -inf - -inf would be NaN."""
    top = _unfold(_fold(scores).amax(1), scores.shape[2]).amax(1)
    return top.clamp_(min=torch.finfo(scores.dtype).min)


def _sum(scores: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Sum of (pieces, keys, rows) over the keys, in float32 at least; `sum(dtype=...)` would allocate the wide copy."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if scores.dtype != wide:
        scores = workspace.take("wide", tuple(scores.shape), wide).copy_(scores)
    return _unfold(_fold(scores).sum(1), scores.shape[2]).sum(1)


def _magnitude(x: torch.Tensor) -> float:
    return torch.linalg.vector_norm(x, torch.inf).item() if x.numel() else 0.0


def attend_stack(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    hide: Callable[[torch.Tensor], None],
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of a batch of equal shapes, not yet divided by its sum.

    Scores lie keys by rows: the queries, which are few, are then the operand that the library packs, and reductions run
    over the slow dimension. In bfloat16 a score is rounded after a row's maximum has been subtracted inside the product;
    rounded before that, the error would grow with the logits.

    Parameters
    ----------
    keys : torch.Tensor of shape (num_stacked, num_keys, dim)
        At least two stacked; `num_keys` a multiple of 16.
    values : torch.Tensor of shape (num_stacked, num_keys, value_dim)
        May be `keys` itself.
    queries : torch.Tensor of shape (num_stacked, num_rows, dim)
        `num_rows` a multiple of 16.
    out : torch.Tensor of shape (num_stacked, num_rows, value_dim)
        Written.
    softmax_scale : float
        Factor on q.k.
    hide : callable
        Writes -inf over the scores (num_stacked, num_keys, num_rows) that do not exist.
    workspace : Workspace
        Holds the scores.

    Returns
    -------
    shift, total : torch.Tensor of shape (num_stacked, num_rows), float32 (float64 for float64)
        What was subtracted from the scaled scores, and the sum of their exponentials. For a row without keys the sum is 0 and
        the shift hugely negative, so that it outweighs nothing.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    columns = queries.transpose(1, 2)
    scores = workspace.take("scores", (keys.shape[0], keys.shape[1], queries.shape[1]), keys.dtype)
    if keys.dtype == wide:
        # Logits to the base 2: exp is several times slower where results are 0, as they are for hidden keys; exp2 is not.
        torch.baddbmm(scores, keys, columns, beta=0, alpha=softmax_scale / math.log(2), out=scores)
        hide(scores)
        top = _largest(scores)
        shift = top * math.log(2)
        refine = keys.dtype == torch.float32 and _magnitude(shift) > LARGE
        best = scores.max(1).indices if refine else None  # twice as fast as argmax
        scores.sub_(top[:, None])
        if best is not None:
            large = (shift.abs() > LARGE) & (top > torch.finfo(top.dtype).min)  # a row without keys has no largest score
            missed = _missed_by_float32(keys, queries, best, shift, softmax_scale).div_(math.log(2))
            place = best[:, None]
            scores.scatter_(1, place, torch.where(large[:, None], missed[:, None], scores.gather(1, place)))
        scores.exp2_()
    else:
        # Scaled before it is rounded, the maximum is a number of this dtype and as near to the true one as that can be.
        torch.baddbmm(scores, keys, columns, beta=0, alpha=softmax_scale, out=scores)
        hide(scores)
        top = _largest(scores)
        torch.baddbmm(top[:, None].expand_as(scores), keys, columns, beta=-1, alpha=softmax_scale, out=scores)
        hide(scores)
        shift = top.to(wide)
        if _magnitude(shift) >= COARSE:
            # Near a large maximum the dtype is coarse; what it missed is known now. Small misses stay: this rounds again.
            missed = functional.hardshrink(_largest(scores), MISSED)
            folded = _fold(scores)
            folded.sub_(missed.repeat(1, folded.shape[2] // missed.shape[1])[:, None])
            shift += missed
        scores.exp_()
    total = _sum(scores, workspace)
    torch.bmm(scores.transpose(1, 2), values, out=out)
    return shift, total


def _missed_by_float32(
    keys: torch.Tensor, queries: torch.Tensor, best: torch.Tensor, shift: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """How far each row's largest scaled score lies above its float32 value.

    A float32 product of hundreds of terms misses a score of 100 by more than the LSE may be off. It matters for the largest
    score of a row alone, which is computed again in float64.
    """
    first_key = torch.arange(keys.shape[0], device=keys.device)[:, None] * keys.shape[1]
    rows = keys.flatten(0, 1).index_select(0, (best + first_key).flatten()).view_as(queries)
    exact = (rows.double() * queries.double()).sum(-1) * softmax_scale
    return (exact - shift).to(shift.dtype)


def merge_pieces(parts: torch.Tensor, shifts: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the results of `attend_stack` for the pieces of each sequence, in key order.

    Parameters
    ----------
    parts : torch.Tensor of shape (num_seqs, num_pieces, num_rows, value_dim)
        Outputs, not divided by their sums.
    shifts, totals : torch.Tensor of shape (num_seqs, num_pieces, num_rows), float32 (float64 for float64)
        As `attend_stack` returns them: where a row sees no key of a piece, hugely negative and 0.

    Returns
    -------
    out : torch.Tensor of shape (num_seqs, num_rows, value_dim), float32 (float64 for float64)
        0 for rows without keys.
    lse : torch.Tensor of shape (num_seqs, num_rows), float32 (float64 for float64)
        -inf for rows without keys.
    """
    top = shifts.amax(1, keepdim=True)
    weights = (shifts - top).exp_()
    total = (weights * totals).sum(1)
    lse = top[:, 0] + total.log()
    weights = weights.div_(total.masked_fill_(total == 0, torch.inf)[:, None])[..., None]
    out = parts[:, 0] * weights[:, 0]
    for i in range(1, parts.shape[1]):
        out.addcmul_(parts[:, i].to(out.dtype), weights[:, i])
    return out, lse
