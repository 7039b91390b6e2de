"""Decode in plain torch: which keys are multiplied together (the plan), and the products themselves.

Bits
----
A product's bits depend on its shape and, when it is alone or its sum is long, on the number of threads: the libraries
below torch cut the summed dimension by both. They do not depend on how many products of one shape run as a batch, if there
are two or more and none sums over more than 512 keys: each is then the work of one thread. So a sequence is cut into at
least two pieces of one length, which is a function of the sequence's own length; pieces of any sequences with that length
form a batch; the pieces of a sequence are merged in key order in the accumulation dtype. Nothing else about the batch can
enter a result. All this is measured, not promised by those libraries: `tests/test_cpu_bits.py` watches it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import attrs
import numpy as np
import torch
from torch.nn import functional

from mla.metadata.records import DecodeMetadata

__all__ = [
    "DecodeItem",
    "DecodePlan",
    "DecodeStack",
    "Workspace",
    "attend_stack",
    "make_plan",
    "merge_pieces",
    "run_stack",
]

LONGEST_PIECE = 512
"""Keys of a piece at most: with AMX, sums of more than about 800 products change bits with the number of threads."""

ITEM_KEYS = 4096
"""Keys that are gathered at a time: their rows and scores stay in the second-level cache."""

ITEM_PIECES = 64
"""Pieces that are gathered at a time: every piece brings a copy of its queries."""

UNIT = 16
"""Rows, keys and gathered runs come in multiples of this: the narrowest products are the work of other kernels."""

FOLD = 8
"""Keys that are moved next to the rows before a reduction: reducing over a slow dimension is slow when rows are few."""


MISSED = 1 / 32
"""Logits between a rounded row maximum and the true one that are left alone: all that maxima below 8 can miss."""


LARGE = 16.0
"""In float32 a row's largest scaled score is computed again in float64 when it is larger than this."""


@attrs.frozen(kw_only=True, eq=False)
class DecodeItem:
    """Pieces that are gathered and multiplied together.

    Parameters
    ----------
    num_pieces : int
        At least 2, all of the stack's `piece_len`.
    units : torch.Tensor of shape (num_pieces * piece_len / unit,), int64
        Runs of `DecodePlan.unit` cache rows; the padding repeats the first run of the same sequence.
    hidden : torch.Tensor of shape (num_hidden,), int64
        Keys, counted over all pieces, that no token of their sequence sees.
    partly : torch.Tensor of shape (num_partly,), int64
        Keys that some tokens of their sequence see.
    first_token : torch.Tensor of shape (num_partly,), int64
        The first token that sees each of those.
    """

    num_pieces: int
    units: torch.Tensor
    hidden: torch.Tensor
    partly: torch.Tensor
    first_token: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class DecodeStack:
    """Whole sequences of one shape: equally many new tokens, equally many pieces of one length.

    Parameters
    ----------
    num_seqs, query_len, num_pieces, piece_len : int
        Sequences, new tokens of each, pieces of each, keys of a piece (a multiple of 16).
    tokens : torch.Tensor of shape (num_seqs * query_len,), int64
        Their rows of q.
    items : tuple of DecodeItem
        All pieces, sequence by sequence; more than one item only for a single sequence.
    """

    num_seqs: int
    query_len: int
    num_pieces: int
    piece_len: int
    tokens: torch.Tensor
    items: tuple[DecodeItem, ...]


@attrs.frozen(kw_only=True, eq=False)
class DecodePlan:
    """What `paged_decode` derives from the metadata alone: made once a step, the same for all layers.

    Parameters
    ----------
    metadata : DecodeMetadata
        The very record that it was made of; it serves no other.
    num_tokens, block_size : int
        Rows of q that the sequences have, and tokens per block of the cache.
    unit : int
        Cache rows that are gathered as one run: the greatest common divisor of `block_size` and 16.
    stacks : tuple of DecodeStack
        Every sequence that has keys and new tokens, once.
    """

    metadata: DecodeMetadata
    num_tokens: int
    block_size: int
    unit: int
    stacks: tuple[DecodeStack, ...]


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def cut_lengths(seq_lens: Ints) -> tuple[Ints, Ints]:
    """Number of pieces of each sequence, and keys of a piece: functions of the sequence's length only.

    Parameters
    ----------
    seq_lens : numpy.ndarray of shape (num_seqs,), int64
        Positive lengths.

    Returns
    -------
    num_pieces, piece_len : numpy.ndarray of shape (num_seqs,), int64
        At least 2 pieces; the steps of `piece_len` grow with it, so that few lengths occur and little is padded.
    """
    num_pieces = np.maximum(2, -(-seq_lens // LONGEST_PIECE))
    share = -(-seq_lens // num_pieces)
    step = np.where(share <= 128, UNIT, 2 * UNIT)
    return num_pieces, -(-share // step) * step


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For groups of these sizes laid end to end: the group of each element, and its place in the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def _stack_bounds(query_lens: Ints, num_pieces: Ints, piece_len: Ints) -> list[tuple[int, int]]:
    """Ranges of sorted sequences that make a stack: one shape, and no more keys and pieces than an item takes."""
    shape = np.stack([query_lens, num_pieces, piece_len])
    edges = [0, *(np.flatnonzero((shape[:, 1:] != shape[:, :-1]).any(0)) + 1).tolist(), len(query_lens)]
    bounds = []
    for first, last in itertools.pairwise(edges):
        if first < last:
            pieces, keys = int(num_pieces[first]), int(piece_len[first])
            size = max(1, min(ITEM_KEYS // (pieces * keys), ITEM_PIECES // pieces))
            bounds += [(i, min(i + size, last)) for i in range(first, last, size)]
    return bounds


def _item_counts(num_pieces: int, piece_len: int) -> list[int]:
    """Sizes of the items that these pieces make, as equal as can be: none of them is a single piece."""
    parts = -(-num_pieces * piece_len // ITEM_KEYS) if num_pieces * piece_len > ITEM_KEYS else 1
    return [num_pieces * (i + 1) // parts - num_pieces * i // parts for i in range(parts)]


def make_plan(metadata: DecodeMetadata, block_size: int) -> DecodePlan:
    """Cut, sort and stack the sequences of a batch. Reads the metadata's values; moves the result to its device once.

    Parameters
    ----------
    metadata : DecodeMetadata
        Of the step.
    block_size : int
        Of the cache.

    Returns
    -------
    DecodePlan
        On the device of the metadata.
    """
    starts, lens, table = (
        x.cpu().numpy().astype(np.int64) for x in (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    )
    new = np.diff(starts)
    seqs = np.flatnonzero((lens > 0) & (new > 0))
    pieces, keys = cut_lengths(lens[seqs])
    order = np.lexsort((seqs, pieces, keys, new[seqs]))
    seqs, pieces, keys = seqs[order], pieces[order], keys[order]
    bounds = _stack_bounds(new[seqs], pieces, keys)

    # One row per piece from here on: its sequence, its first key, its length, the item that it belongs to.
    owner, index = _spread(pieces)
    seq, length = seqs[owner], keys[owner]
    start = index * length
    ends = np.cumsum(pieces)
    counts = [_item_counts(int(ends[last - 1] - ends[first] + pieces[first]), int(keys[first])) for first, last in bounds]
    item_sizes = np.array([n for c in counts for n in c], dtype=np.int64)
    offset = _spread(item_sizes)[1] * length

    unit = math.gcd(block_size, UNIT)
    piece, place = _spread(length // unit)
    run = start[piece] // unit + place
    run = np.where(run * unit < lens[seq][piece], run, 0)
    per_block = block_size // unit
    units = table[seq[piece], run // per_block] * per_block + run % per_block

    seen = np.clip(lens[seq] - start, 0, length)
    seen_first = np.clip(lens[seq] - new[seq] + 1 - start, 0, length)
    piece_h, place = _spread(length - seen)
    hidden = offset[piece_h] + seen[piece_h] + place
    piece_p, place = _spread(seen - seen_first)
    partly = offset[piece_p] + seen_first[piece_p] + place
    key = start[piece_p] + seen_first[piece_p] + place
    first_token = key - (lens[seq] - new[seq])[piece_p]

    token_seq, place = _spread(new[seqs])
    tokens = starts[seqs][token_seq] + place

    # One move for everything, then views of it.
    parts = (units, hidden, partly, first_token, tokens)
    whole = torch.from_numpy(np.concatenate(parts)).to(metadata.seq_lens.device)
    units_t, hidden_t, partly_t, first_t, tokens_t = whole.split([len(x) for x in parts])
    item_of = _spread(item_sizes)[0]

    def split(x: torch.Tensor, sizes: Ints) -> Iterable[torch.Tensor]:
        ends = np.cumsum(np.bincount(item_of, weights=sizes, minlength=len(item_sizes)).astype(np.int64)).tolist()
        return (x[first:last] for first, last in itertools.pairwise([0, *ends]))

    partly_sizes = seen - seen_first
    items = [
        DecodeItem(num_pieces=n, units=u, hidden=h, partly=p, first_token=f)
        for n, u, h, p, f in zip(
            item_sizes.tolist(),
            split(units_t, length // unit),
            split(hidden_t, length - seen),
            split(partly_t, partly_sizes),
            split(first_t, partly_sizes),
            strict=True,
        )
    ]
    stacks, next_item, next_token = [], 0, 0
    for (first, last), c in zip(bounds, counts, strict=True):
        num_tokens = (last - first) * int(new[seqs[first]])
        stacks.append(
            DecodeStack(
                num_seqs=last - first,
                query_len=int(new[seqs[first]]),
                num_pieces=int(pieces[first]),
                piece_len=int(keys[first]),
                tokens=tokens_t[next_token : next_token + num_tokens],
                items=tuple(items[next_item : next_item + len(c)]),
            )
        )
        next_item, next_token = next_item + len(c), next_token + num_tokens
    return DecodePlan(
        metadata=metadata,
        num_tokens=int(starts[-1]),
        block_size=block_size,
        unit=unit,
        stacks=tuple(stacks),
    )


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


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Maximum of (pieces, keys, rows) over the keys; finite also where no key is seen, for -inf - -inf would be NaN."""
    pieces, keys, rows = scores.shape
    if rows < FOLD * 8:
        scores = scores.view(pieces, keys // FOLD, FOLD * rows).amax(1).view(pieces, FOLD, rows)
    return scores.amax(1).clamp_(min=torch.finfo(scores.dtype).min)


def _sum(scores: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Sum of (pieces, keys, rows) over the keys, in float32 at least; `sum(dtype=...)` would allocate the wide copy."""
    pieces, keys, rows = scores.shape
    wide = torch.promote_types(scores.dtype, torch.float32)
    if scores.dtype != wide:
        scores = workspace.take("wide", (pieces, keys, rows), wide).copy_(scores)
    if rows < FOLD * 8:
        scores = scores.view(pieces, keys // FOLD, FOLD * rows).sum(1).view(pieces, FOLD, rows)
    return scores.sum(1)


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
        What was subtracted from the scaled scores, and the sum of their exponentials, which is 0 for a row without keys
        (its shift then means nothing).
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    columns = queries.transpose(1, 2)
    scores = workspace.take("scores", (keys.shape[0], keys.shape[1], queries.shape[1]), keys.dtype)
    if keys.dtype == wide:
        torch.bmm(keys, columns, out=scores)
        hide(scores)
        top = _largest(scores)
        shift = top * softmax_scale
        large = (shift.abs() > LARGE) & (top > torch.finfo(top.dtype).min)  # a row without keys has no largest score
        best = scores.argmax(1, keepdim=True) if keys.dtype == torch.float32 and bool(large.any()) else None
        scores.sub_(top[:, None]).mul_(softmax_scale)
        if best is not None:
            missed = _missed_by_float32(keys, queries, best, shift, softmax_scale)
            scores.scatter_(1, best, torch.where(large[:, None], missed[:, None], scores.gather(1, best)))
    else:
        # Scaled before it is rounded, the maximum is a number of this dtype and as near to the true one as that can be.
        torch.baddbmm(scores, keys, columns, beta=0, alpha=softmax_scale, out=scores)
        hide(scores)
        top = _largest(scores)
        torch.baddbmm(top[:, None].expand_as(scores), keys, columns, beta=-1, alpha=softmax_scale, out=scores)
        hide(scores)
        # Near a large maximum the dtype is coarse; what it missed is known now. Small misses stay, for this rounds again.
        missed = functional.hardshrink(_largest(scores), MISSED)
        scores.sub_(missed[:, None])
        shift = top.to(wide) + missed
    total = _sum(scores.exp_(), workspace)
    torch.bmm(scores.transpose(1, 2), values, out=out)
    return shift, total


def _missed_by_float32(
    keys: torch.Tensor, queries: torch.Tensor, best: torch.Tensor, shift: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """How far each row's largest scaled score lies above its float32 value.

    A float32 product of hundreds of terms misses a score of 100 by more than the LSE may be off. It matters for the largest
    score of a row alone, which is computed again in float64.
    """
    rows = keys.gather(1, best.transpose(1, 2).expand(-1, -1, keys.shape[2])).double()
    exact = (rows * queries.double()).sum(-1) * softmax_scale
    return (exact - shift).to(shift.dtype)


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


def merge_pieces(parts: torch.Tensor, shifts: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the results of `attend_stack` for the pieces of each sequence, in key order.

    Parameters
    ----------
    parts : torch.Tensor of shape (num_seqs, num_pieces, num_rows, value_dim)
        Outputs, not divided by their sums.
    shifts, totals : torch.Tensor of shape (num_seqs, num_pieces, num_rows), float32 (float64 for float64)
        As `attend_stack` returns them.

    Returns
    -------
    out : torch.Tensor of shape (num_seqs, num_rows, value_dim), float32 (float64 for float64)
        0 for rows without keys.
    lse : torch.Tensor of shape (num_seqs, num_rows), float32 (float64 for float64)
        -inf for rows without keys.
    """
    # The shift of a piece that a row does not see means nothing; it must not outweigh the others.
    shifts = shifts.masked_fill(totals == 0, -torch.inf)
    top = shifts.amax(1).clamp_(min=torch.finfo(shifts.dtype).min)
    weights = (shifts - top[:, None]).exp_()
    total = (weights * totals).sum(1)
    weights.div_(total.masked_fill(total == 0, 1)[:, None])
    out = parts[:, 0] * weights[:, 0, :, None]
    for i in range(1, parts.shape[1]):
        out.addcmul_(parts[:, i].to(weights.dtype), weights[:, i, :, None])
    return out, top + total.log_()
