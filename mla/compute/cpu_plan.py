"""Decode in plain torch, the plan: which keys are multiplied together.

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

import attrs
import numpy as np
import torch

from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = ["LONGEST_PIECE", "UNIT", "DecodeGroup", "DecodeItem", "DecodeMerge", "DecodePlan", "PlannedPiece", "make_plan"]

LONGEST_PIECE = 512
"""Keys of a piece at most: with AMX, sums of more than about 800 products change bits with the number of threads."""

ITEM_KEYS = 8192
"""Keys that are gathered at a time: fewer cost more calls, more cost memory."""

ITEM_PIECES = 64
"""Pieces that are gathered at a time: every piece brings a copy of its queries."""

UNIT = 16
"""Rows, keys and gathered runs come in multiples of this: the narrowest products are the work of other kernels."""


@attrs.frozen(kw_only=True, eq=False)
class DecodeItem:
    """Pieces of one length that are gathered and multiplied together.

    Parameters
    ----------
    num_pieces, piece_len : int
        At least 2 pieces, and the keys of each (a multiple of 16).
    seqs : torch.Tensor of shape (num_pieces,), int64
        The group's sequence of each piece.
    units : torch.Tensor of shape (num_pieces * piece_len / unit,), int64
        Runs of `DecodePlan.unit` cache rows; the padding repeats the first run of the same sequence.
    missing : torch.Tensor of shape (num_missing,), int64
        Keys, counted over all pieces, that do not exist.
    seen : torch.Tensor of shape (num_pieces, query_len), int64
        How many keys of the piece each new token sees, counted from the first.
    is_partial, has_blind : bool
        Whether some token does not see all keys of its piece; whether one sees none.
    """

    num_pieces: int
    piece_len: int
    seqs: torch.Tensor
    units: torch.Tensor
    missing: torch.Tensor
    seen: torch.Tensor
    is_partial: bool
    has_blind: bool


@attrs.frozen(kw_only=True, eq=False)
class DecodeMerge:
    """Sequences with equally many pieces, whose results are merged together.

    Parameters
    ----------
    num_seqs, num_pieces : int
        Sequences, and pieces of each.
    pieces : torch.Tensor of shape (num_seqs * num_pieces,), int64, or None
        The results of each sequence in key order, counted over the pieces of all items; None for all of them as they lie.
    """

    num_seqs: int
    num_pieces: int
    pieces: torch.Tensor | None


@attrs.frozen(kw_only=True, eq=False)
class DecodeGroup:
    """All sequences with equally many new tokens, those with equally many pieces together.

    Parameters
    ----------
    num_seqs, query_len : int
        Sequences, and new tokens of each.
    tokens : torch.Tensor of shape (num_seqs * query_len,), int64
        Their rows of q.
    is_whole : bool
        Whether those are all tokens of the step, in order.
    items : tuple of DecodeItem
        Every piece once.
    merges : tuple of DecodeMerge
        Every sequence once, in order.
    """

    num_seqs: int
    query_len: int
    tokens: torch.Tensor
    is_whole: bool
    items: tuple[DecodeItem, ...]
    merges: tuple[DecodeMerge, ...]


@attrs.frozen(kw_only=True)
class PlannedPiece:
    """One piece of one sequence.

    Parameters
    ----------
    seq : int
        Sequence of the record that was planned.
    begin, end : int
        Its keys are ``begin .. end - 1``; equal where rounding left a piece without keys.
    item : int
        Pieces with the same number are worked on together.
    """

    seq: int
    begin: int
    end: int
    item: int


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
    groups : tuple of DecodeGroup
        Every sequence that has keys and new tokens, once.
    """

    metadata: DecodeMetadata
    num_tokens: int
    block_size: int
    unit: int
    groups: tuple[DecodeGroup, ...]

    def work(self) -> tuple[PlannedPiece, ...]:
        """Every piece, by sequence and key range: to look at a plan, nothing computes with it. Reads the plan's values."""
        starts, lens = self.metadata.query_start_loc.cpu(), self.metadata.seq_lens.tolist()
        pieces = []
        first_item = 0
        for group in self.groups:
            tokens = group.tokens[:: group.query_len].cpu().contiguous()
            # The last of several equal starts: padded sequences repeat them.
            seqs = iter((torch.searchsorted(starts, tokens, right=True) - 1).tolist())
            item_of = [first_item + i for i, item in enumerate(group.items) for _ in range(item.num_pieces)]
            piece_lens = [item.piece_len for item in group.items for _ in range(item.num_pieces)]
            for merge in group.merges:
                count = merge.num_seqs * merge.num_pieces
                order = list(range(count)) if merge.pieces is None else merge.pieces.tolist()
                for first in range(0, count, merge.num_pieces):
                    seq = next(seqs)
                    for i, piece in enumerate(order[first : first + merge.num_pieces]):
                        begin = min(i * piece_lens[piece], lens[seq])
                        end = min(begin + piece_lens[piece], lens[seq])
                        pieces.append(PlannedPiece(seq=seq, begin=begin, end=end, item=item_of[piece]))
            first_item += len(group.items)
        return tuple(pieces)


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


def _item_sizes(num_pieces: int, piece_len: int) -> list[int]:
    """Sizes of the items that these pieces make, as equal as can be: none of them is a single piece."""
    parts = max(-(-num_pieces * piece_len // ITEM_KEYS), -(-num_pieces // ITEM_PIECES))
    return [num_pieces * (i + 1) // parts - num_pieces * i // parts for i in range(parts)]


def _runs(lens: Ints, table: Ints, starts: Ints, length: int, block_size: int, num_blocks: int) -> Ints:
    """Which runs of cache rows pieces of one length read: those past a sequence's end repeat its first."""
    unit = math.gcd(block_size, UNIT)
    run = starts[:, None] // unit + np.arange(length // unit)
    run = np.where(run * unit < lens[:, None], run, 0)
    per_block = block_size // unit
    blocks = np.take_along_axis(table, run // per_block, 1)
    if blocks.min() < 0 or blocks.max() >= num_blocks:
        bad = blocks[(blocks < 0) | (blocks >= num_blocks)]
        raise KernelError(f"block_table: expected blocks in 0..{num_blocks - 1}, got {int(bad[0])}")
    return blocks * per_block + run % per_block


def _plan_group(lens: Ints, tokens: Ints, table: Ints, metadata: DecodeMetadata, block_size: int) -> DecodeGroup:
    """The pieces of sequences with equally many new tokens: `tokens` (num_seqs, query_len) are their rows of q."""
    device, query_len = metadata.seq_lens.device, tokens.shape[1]
    num_pieces, piece_len = cut_lengths(lens)
    order = np.argsort(num_pieces, kind="stable")
    lens, tokens, table, num_pieces, piece_len = (x[order] for x in (lens, tokens, table, num_pieces, piece_len))
    # One row per piece from here on: those of one length together.
    seqs, index = _spread(num_pieces)
    visible = lens[:, None] - query_len + 1 + np.arange(query_len)
    seen = np.clip(visible[seqs] - (index * piece_len[seqs])[:, None], 0, piece_len[seqs][:, None])
    order = np.lexsort((seen[:, 0] < piece_len[seqs], piece_len[seqs]))  # few items with a mask
    place = np.argsort(order, kind="stable")
    seqs, index, seen = seqs[order], index[order], seen[order]
    lengths = piece_len[seqs]
    starts = index * lengths

    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    items = []
    for first, last in itertools.pairwise(edges):
        keys = int(lengths[first])
        for begin, end in itertools.pairwise(first + np.cumsum([0, *_item_sizes(last - first, keys)])):
            here = slice(begin, end)
            real = lens[seqs[here]] - starts[here]
            units = _runs(lens[seqs[here]], table[seqs[here]], starts[here], keys, block_size, metadata.min_num_blocks)
            missing = np.flatnonzero(np.arange(keys) >= real[:, None])
            items.append(
                DecodeItem(
                    num_pieces=int(end - begin),
                    piece_len=keys,
                    seqs=torch.from_numpy(seqs[here]).to(device),
                    units=torch.from_numpy(units.ravel()).to(device),
                    missing=torch.from_numpy(missing).to(device),
                    seen=torch.from_numpy(seen[here]).to(device),
                    is_partial=bool((seen[here] < keys).any()),
                    has_blind=bool((seen[here] == 0).any()),
                )
            )
    merges = []
    for count in np.unique(num_pieces).tolist():
        pieces = place[np.repeat(num_pieces == count, num_pieces)]
        in_order = len(pieces) == len(place) and bool((np.diff(pieces) == 1).all())
        merges.append(
            DecodeMerge(
                num_seqs=len(pieces) // count,
                num_pieces=count,
                pieces=None if in_order else torch.from_numpy(pieces).to(device),
            )
        )
    return DecodeGroup(
        num_seqs=len(lens),
        query_len=query_len,
        tokens=torch.from_numpy(tokens.ravel()).to(device),
        is_whole=np.array_equal(tokens.ravel(), np.arange(metadata.query_start_loc[-1].item())),
        items=tuple(items),
        merges=tuple(merges),
    )


def make_plan(metadata: DecodeMetadata, block_size: int) -> DecodePlan:
    """Cut and sort the sequences of a batch. Reads the metadata's values; moves the result to its device once.

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

    Raises
    ------
    KernelError
        A block outside ``0 .. min_num_blocks - 1``.
    """
    first_tokens, lens, table = (
        x.cpu().numpy().astype(np.int64) for x in (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    )
    new = np.diff(first_tokens)
    groups = []
    for query_len in np.unique(new[(lens > 0) & (new > 0)]).tolist():
        seqs = np.flatnonzero((lens > 0) & (new == query_len))
        tokens = first_tokens[seqs][:, None] + np.arange(query_len)
        groups.append(_plan_group(lens[seqs], tokens, table[seqs], metadata, block_size))
    return DecodePlan(
        metadata=metadata,
        num_tokens=int(first_tokens[-1]),
        block_size=block_size,
        unit=math.gcd(block_size, UNIT),
        groups=tuple(groups),
    )
