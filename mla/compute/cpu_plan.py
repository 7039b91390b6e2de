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
from collections.abc import Iterable

import attrs
import numpy as np
import torch

from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = ["LONGEST_PIECE", "UNIT", "DecodeItem", "DecodePlan", "DecodeStack", "make_plan"]

LONGEST_PIECE = 512
"""Keys of a piece at most: with AMX, sums of more than about 800 products change bits with the number of threads."""

ITEM_KEYS = 4096
"""Keys that are gathered at a time: their rows and scores stay in the second-level cache."""

ITEM_PIECES = 64
"""Pieces that are gathered at a time: every piece brings a copy of its queries."""

UNIT = 16
"""Rows, keys and gathered runs come in multiples of this: the narrowest products are the work of other kernels."""


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

    Raises
    ------
    KernelError
        A block outside ``0 .. min_num_blocks - 1``.
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
    blocks = table[seq[piece], run // per_block]
    if blocks.size and (blocks.min() < 0 or blocks.max() >= metadata.min_num_blocks):
        bad = blocks[(blocks < 0) | (blocks >= metadata.min_num_blocks)]
        raise KernelError(f"block_table: expected blocks in 0..{metadata.min_num_blocks - 1}, got {int(bad[0])}")
    units = blocks * per_block + run % per_block

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
