"""Softmax attention of a batch of equal shapes in plain torch, for decode and prefill alike.

`mla.compute.cpu_plan` says why nothing here runs alone or sums over long rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import attrs
import torch
from torch.nn import functional

__all__ = ["Guess", "Workspace", "attend_stack", "borrow_workspace", "merge_pieces", "return_workspace"]

FOLD = 8
"""Keys that are moved next to the rows for elementwise work: a fast dimension of few rows is slow."""

COARSE = 8.0
"""In bfloat16 maxima below this miss the true ones by at most `MISSED` logits."""

MISSED = 1 / 32
"""Logits between a rounded row maximum and the true one that are left alone."""

LARGE = 10.0
"""In float32 a row's largest scaled score is computed again in float64 when it is larger than this."""

MOST_EXCESS, EXCESS_PER_SHARE, LEAST_EXCESS = 3.5, 0.35, 0.1
"""A guessed maximum may be missed by ``share * EXCESS_PER_SHARE - LEAST_EXCESS`` logits and `MOST_EXCESS` at most, where share
is the sum of exponentials in units of the largest: one key that dominates its row allows a quarter of a logit."""

FEW_PIECES = 4
"""Pieces up to which a sequence's are added one by one."""

MANY_ROWS = 128
"""Rows from which they always are: a small operator for each of many pieces costs more than its work."""

MERGED_PIECES = 16
"""Pieces that are added at a time otherwise."""

KEPT_BYTES = 64 << 20
"""Scratch memory that a thread keeps between calls at most."""


class Workspace:
    """Scratch memory of one kernel call: a name is one growing buffer, because fresh pages cost more than the work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the buffer of this name; its content is whatever was there."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(mode=False):  # an inference tensor could not be written outside of that mode later
                buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return buffer[:size].view(shape)

    def can_be_kept(self) -> bool:
        """Whether the buffers are real memory of the CPU (not a tracer's) and few enough bytes."""
        buffers = self._buffers.values()
        return sum(x.nbytes for x in buffers) <= KEPT_BYTES and all(type(x) is torch.Tensor for x in buffers)


@attrs.frozen(kw_only=True, eq=False)
class Guess:
    """What keys attended before say of those to come.

    Parameters
    ----------
    shift : torch.Tensor of shape (num_stacked, num_rows), bfloat16
        Their maximum.
    total : torch.Tensor of shape (num_stacked, num_rows), float32
        Sum of the exponentials of their scores less `shift`.
    """

    shift: torch.Tensor
    total: torch.Tensor


_kept = threading.local()


def borrow_workspace(device: torch.device) -> Workspace:
    """Scratch memory for one call, to be given back with `return_workspace`: what this thread's last call had, if it was kept.

    Nothing is ever read from it that the same call has not written. It is kept because the C library gives freed memory back
    to the system, and mapping it anew costs a short prompt more than its products.
    """
    workspace = getattr(_kept, "workspace", None) if device.type == "cpu" else None
    _kept.workspace = None  # a call inside this one gets memory of its own
    return Workspace(device) if workspace is None else workspace


def return_workspace(workspace: Workspace) -> None:
    """Keep scratch memory for this thread's next call if it is the CPU's and not too large."""
    if workspace.device.type == "cpu" and workspace.can_be_kept():
        _kept.workspace = workspace


def _fold(scores: torch.Tensor) -> torch.Tensor:
    """(pieces, keys, rows) with some keys beside the rows: (pieces, keys / fold, fold * rows)."""
    pieces, keys, rows = scores.shape
    return scores.view(pieces, keys // FOLD, FOLD * rows) if rows < FOLD * 8 else scores


def _unfold(reduced: torch.Tensor, rows: int) -> torch.Tensor:
    """(pieces, fold * rows) to (pieces, fold, rows)."""
    return reduced.view(reduced.shape[0], -1, rows)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Maximum of (pieces, keys, rows) over the keys."""
    return _unfold(_fold(scores).amax(1), scores.shape[2]).amax(1)


def _sum(scores: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Sum of (pieces, keys, rows) over the keys, in float32 at least; `sum(dtype=...)` would allocate the wide copy."""
    if scores.dtype.itemsize < 4:
        scores = workspace.take("wide", tuple(scores.shape), torch.float32).copy_(scores)
    return _unfold(_fold(scores).sum(1), scores.shape[2]).sum(1)


def _largest_seen(scores: torch.Tensor, hide: Callable[[torch.Tensor], None] | None) -> torch.Tensor:
    """Maximum over the keys once hidden ones are; finite also where no key is seen, for -inf - -inf would be NaN."""
    if hide is None:
        return _largest(scores)
    hide(scores)
    return _largest(scores).clamp_(min=torch.finfo(scores.dtype).min)


def _magnitude(x: torch.Tensor) -> float:
    return torch.linalg.vector_norm(x, torch.inf).item() if x.numel() else 0.0


def attend_stack(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    hide: Callable[[torch.Tensor], None] | None,
    workspace: Workspace,
    guess: Guess | None = None,
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
    hide : callable or None
        Writes -inf over the scores (num_stacked, num_keys, num_rows) that do not exist; None if all do.
    workspace : Workspace
        Holds the scores.
    guess : Guess or None
        In bfloat16, what the keys before say about the maximum: if it is a good one, a product is saved.

    Returns
    -------
    shift, total : torch.Tensor of shape (num_stacked, num_rows), float32 (float64 for float64)
        What was subtracted from the scaled scores (the guess itself if it was taken), and the sum of their exponentials. For a
        row without keys the sum is 0 and the shift hugely negative, so that it outweighs nothing.
    """
    columns = queries.mT
    scores = workspace.take("scores", (keys.shape[0], keys.shape[1], queries.shape[1]), keys.dtype)
    if guess is not None:
        total = _exponentials_of_guess(scores, keys, queries, guess, softmax_scale, hide, workspace)
        if total is not None:
            torch.bmm(scores.mT, values, out=out)
            return guess.shift, total
    if keys.dtype.itemsize >= 4:
        # Logits to the base 2: exp is several times slower where results are 0, as they are for hidden keys; exp2 is not.
        torch.baddbmm(scores, keys, columns, beta=0, alpha=softmax_scale / math.log(2), out=scores)
        top = _largest_seen(scores, hide)
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
        top = _largest_seen(scores, hide)
        torch.baddbmm(top[:, None].expand_as(scores), keys, columns, beta=-1, alpha=softmax_scale, out=scores)
        if hide is not None:
            hide(scores)
        shift = top.float()
        if _magnitude(shift) >= COARSE:
            # Near a large maximum the dtype is coarse; what it missed is known now. Small misses stay: this rounds again.
            missed = functional.hardshrink(_largest(scores).nan_to_num_(neginf=0.0), MISSED)
            folded = _fold(scores)
            folded.sub_(missed.repeat(1, folded.shape[2] // missed.shape[1])[:, None])
            shift += missed
        scores.exp_()
    total = _sum(scores, workspace)
    torch.bmm(scores.mT, values, out=out)
    return shift, total


def _exponentials_of_guess(
    scores: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    guess: Guess,
    softmax_scale: float,
    hide: Callable[[torch.Tensor], None] | None,
    workspace: Workspace,
) -> torch.Tensor | None:
    """Exponentials into `scores` and their sum, with a guess for the row maximum; None if it is poor for some row.

    A score above the guess by x is rounded by up to x / 512. That is fine while many keys share the sum, whose errors then
    cancel out, and not where one key dominates it. Scores far below the guess weigh too little to matter.
    """
    torch.baddbmm(guess.shift[:, None].expand_as(scores), keys, queries.mT, beta=-1, alpha=softmax_scale, out=scores)
    if hide is not None:
        hide(scores)
    excess = _largest(scores).float()
    total = _sum(scores.exp_(), workspace)
    share = (total + guess.total).mul_(excess.neg().exp_())  # in units of the largest exponential
    limit = share.mul_(EXCESS_PER_SHARE).sub_(LEAST_EXCESS).clamp_(max=MOST_EXCESS)
    return total if bool((excess <= limit).all()) else None  # NaN and inf are poor guesses too


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


def merge_pieces(
    parts: torch.Tensor,
    shifts: torch.Tensor,
    totals: torch.Tensor | None = None,
    *,
    workspace: Workspace,
    has_blind: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the results for the pieces of each sequence, in key order.

    Parameters
    ----------
    parts : torch.Tensor of shape (num_seqs, num_pieces, num_rows, value_dim)
        Outputs, not divided by their sums; finite also where a row sees no key.
    shifts, totals : torch.Tensor of shape (num_seqs, num_pieces, num_rows), float32 (float64 for float64)
        As `attend_stack` returns them. Without totals the outputs are divided already, and the shifts are their LSE.
    workspace : Workspace
        Holds weighted pieces.
    has_blind : bool
        Whether some row may see no key of some piece; False saves the guards.

    Returns
    -------
    out : torch.Tensor of shape (num_seqs, num_rows, value_dim), float32 (float64 for float64)
        0 for rows without keys.
    lse : torch.Tensor of shape (num_seqs, num_rows), float32 (float64 for float64)
        -inf for rows without keys.
    """
    top = shifts.amax(1, keepdim=True)
    if has_blind:
        top.clamp_(min=torch.finfo(top.dtype).min)  # -inf - -inf would be NaN
    weights = (shifts - top).exp_()
    total = (weights if totals is None else weights * totals).sum(1, keepdim=True)
    lse = total.log().add_(top)[:, 0]
    if has_blind:
        total.masked_fill_(total == 0, torch.inf)
    return _weighted_sum(parts, weights.div_(total)[..., None], workspace), lse


def _weighted_sum(parts: torch.Tensor, weights: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Sum of ``parts * weights`` over the pieces; how it is summed depends on the number of pieces and rows alone."""
    num_seqs, num_pieces, num_rows, value_dim = parts.shape
    if num_pieces <= FEW_PIECES or num_rows >= MANY_ROWS:
        total = parts[:, 0] * weights[:, 0]
        for i in range(1, num_pieces):
            total.addcmul_(parts[:, i], weights[:, i])
        return total
    total = weights.new_zeros(num_seqs, num_rows, value_dim)
    for seq in range(num_seqs):
        for some, weight in zip(parts[seq].split(MERGED_PIECES), weights[seq].split(MERGED_PIECES), strict=True):
            total[seq] += workspace.take("merged", tuple(some.shape), total.dtype).copy_(some).mul_(weight).sum(0)
    return total
