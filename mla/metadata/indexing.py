"""Index arithmetic of the builders: numpy in, numpy out, no loop over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from mla._checks import describe
from mla.errors import MetadataError
from mla.metadata.groups import BlockIds

__all__ = [
    "Int64Array",
    "Piece",
    "RaggedTable",
    "cut_at_equal_shares",
    "cut_at_fixed_positions",
    "int_array",
    "own_room",
    "page_list",
    "ragged_arange",
    "start_locs",
    "table_slots",
]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
INT32_MAX = 2**31 - 1


def _refuse_non_ints(field: str, items: BlockIds) -> None:
    # A set of types is the one pass over many items that Python makes quickly.
    if not set(map(type, items)) <= {int}:
        for i, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
                raise MetadataError(f"{field}[{i}]: expected an int in 0..{INT32_MAX}, got {item!r}")


def int_array(field: str, values: Iterable[int]) -> Int64Array:
    """`values` as int64; anything but integers >= 0 that fit is refused with its index.

    Raises
    ------
    MetadataError
        Naming `field`, the index and the value.
    """
    items = list(values)
    _refuse_non_ints(field, items)
    try:
        array = np.array(items, np.int64)
    except OverflowError:
        array = np.array([min(max(int(item), -1), INT32_MAX + 1) for item in items], np.int64)
    if array.size and (array.min() < 0 or array.max() > INT32_MAX):
        i = int(np.argmax((array < 0) | (array > INT32_MAX)))
        raise MetadataError(f"{field}[{i}]: expected an int in 0..{INT32_MAX}, got {items[i]}")
    return array


def start_locs(field: str, lens: Int64Array) -> Int32Array:
    """Cumulative sum from 0, shape (n + 1,), int32.

    Raises
    ------
    MetadataError
        The sum does not fit int32.
    """
    out = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=out[1:])
    if out[-1] > INT32_MAX:
        raise MetadataError(f"{field}: expected a total of at most {INT32_MAX}, got {int(out[-1])}")
    return out.astype(np.int32)


def ragged_arange(lens: Int64Array, first: Int64Array | int = 0) -> Int64Array:
    """``first[i], first[i] + 1, ...`` (`lens[i]` numbers) for each row, one row after another.

    Examples
    --------
    >>> ragged_arange(np.array([2, 3]), np.array([5, 0])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends: Int64Array = np.cumsum(lens)
    total = int(ends[-1]) if len(ends) else 0
    shift: Int64Array = first - (ends - lens)
    return np.arange(total, dtype=np.int64) + np.repeat(shift, lens)


@attrs.frozen(eq=False)
class RaggedTable:
    """The block ids of all sequences, one after another.

    Parameters
    ----------
    flat : numpy.ndarray of shape (num_ids,), int64
        Block ids.
    counts : numpy.ndarray of shape (num_seqs,), int64
        Ids of each sequence.
    """

    flat: Int64Array
    counts: Int64Array

    @classmethod
    def of(cls, tables: Sequence[BlockIds]) -> RaggedTable:
        """Pack tables of tuples, lists or numpy arrays.

        Raises
        ------
        MetadataError
            Ids that are not integers in ``0 .. 2**31 - 1``, or a table with more than one dimension.
        """
        for i, table in enumerate(tables):
            if isinstance(table, (str, bytes)) or not isinstance(table, (Sequence, np.ndarray)):
                raise MetadataError(f"block_ids[{i}]: expected a sequence of ints, got {describe(table)}")
        counts = np.fromiter(map(len, tables), np.int64, len(tables))
        if tables and all(isinstance(table, np.ndarray) for table in tables):
            arrays: list[npt.NDArray[Any]] = [np.asarray(table) for table in tables]
            for i, array in enumerate(arrays):
                if array.ndim != 1 or array.dtype.kind not in "iu":
                    raise MetadataError(
                        f"block_ids[{i}]: expected a 1-D array of ints, got shape {array.shape} of {array.dtype}"
                    )
            whole = np.concatenate(arrays)
        else:
            for i, table in enumerate(tables):
                _refuse_non_ints(f"block_ids[{i}]", table)
            try:
                whole = np.fromiter(chain.from_iterable(tables), np.int64, int(counts.sum()))
            except OverflowError:
                whole = np.concatenate([int_array(f"block_ids[{i}]", table) for i, table in enumerate(tables)])
        if whole.size and (whole.min() < 0 or whole.max() > INT32_MAX):
            where = int(np.argmax((whole < 0) | (whole > INT32_MAX)))
            row = int(np.searchsorted(np.cumsum(counts), where, side="right"))
            raise MetadataError(f"block_ids[{row}]: expected ids in 0..{INT32_MAX}, got {int(whole[where])}")
        return cls(whole.astype(np.int64, copy=False), counts)

    @property
    def starts(self) -> Int64Array:
        """Where each sequence's ids begin in `flat`."""
        starts: Int64Array = np.cumsum(self.counts) - self.counts
        return starts

    def rows(self, first: int, last: int) -> RaggedTable:
        """Sequences ``first .. last``."""
        begin = int(self.counts[:first].sum())
        end = begin + int(self.counts[first:last].sum())
        return RaggedTable(self.flat[begin:end], self.counts[first:last])

    def cut(self, counts: Int64Array) -> RaggedTable:
        """The first `counts[i]` ids of each sequence."""
        if np.array_equal(counts, self.counts):
            return self
        return RaggedTable(self.flat[ragged_arange(counts, self.starts)], counts)

    def dense(self, num_rows: int) -> Int32Array:
        """0-padded table of shape (num_rows, longest row), int32; rows past the last sequence are 0."""
        width = int(self.counts.max()) if len(self.counts) else 0
        out = np.zeros((num_rows, width), np.int32)
        if len(self.flat) == width * len(self.counts):
            out[: len(self.counts)] = self.flat.reshape(len(self.counts), width)
        else:
            out[: len(self.counts)][np.arange(width) < self.counts[:, None]] = self.flat
        return out


def table_slots(table: RaggedTable, lens: Int64Array, first: Int64Array, block_size: int) -> Int64Array:
    """Cache slots of positions ``first[i] .. first[i] + lens[i]`` of each sequence, one row after another."""
    positions = ragged_arange(lens, first)
    block, offset = np.divmod(positions, block_size)
    slots: Int64Array = table.flat[block + np.repeat(table.starts, lens)] * block_size + offset
    return slots


def own_room(table: RaggedTable, seq_lens: Int64Array, block_size: int) -> Int64Array:
    """Tokens that each sequence has blocks for, up to the first look-ahead block that stands anywhere else too."""
    needed = -(-seq_lens // block_size)
    counts = table.counts.copy()
    extra = counts - needed
    if extra.any():
        rows = np.repeat(np.arange(len(counts)), extra)
        places = ragged_arange(extra, table.starts + needed)
        ids, index, times = np.unique(table.flat[places], return_inverse=True, return_counts=True)
        used = np.isin(ids, table.flat[ragged_arange(needed, table.starts)])
        shared = np.flatnonzero((times > 1)[index] | used[index])
        np.minimum.at(counts, rows[shared], (places - table.starts[rows])[shared])
    room: Int64Array = counts * block_size
    return room


def page_list(
    table: RaggedTable, seq_lens: Int64Array, *, block_size: int, page_size: int
) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Pages in use at another page size: pages per sequence, page numbers, tokens in the last pages.

    Each block is ``block_size / page_size`` pages, ``block * ratio + j``, cut at ``ceil(seq_len / page_size)``.

    Raises
    ------
    MetadataError
        Page numbers past int32.
    """
    ratio = block_size // page_size
    num_pages = -(-seq_lens // page_size)
    used = table.cut(-(-seq_lens // block_size))
    if used.flat.size and (int(used.flat.max()) + 1) * ratio - 1 > INT32_MAX:
        raise MetadataError(
            f"page_sizes: expected page numbers of at most {INT32_MAX}, got {(int(used.flat.max()) + 1) * ratio - 1}"
        )
    blocks = used.flat.astype(np.int32)
    # One outer sum writes the pages of whole blocks; only then are the last blocks of the sequences cut.
    pages: Int32Array = np.add.outer(blocks * np.int32(ratio), np.arange(ratio, dtype=np.int32)).reshape(-1)
    if len(pages) != int(num_pages.sum()):
        starts = used.starts * ratio
        pages = np.concatenate([pages[a:b] for a, b in zip(starts, starts + num_pages, strict=True)])
    last: Int64Array = np.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0)
    return num_pages, pages, last


@attrs.frozen
class Piece:
    """`num_tokens` context tokens of prompt `seq`, from position `start`."""

    seq: int
    start: int
    num_tokens: int


def cut_at_fixed_positions(context_lens: Int64Array, chunk_tokens: int, workspace_tokens: int) -> list[list[Piece]]:
    """Pieces at multiples of `chunk_tokens` of each sequence's own positions, as many in a pass as the workspace holds.

    The cuts and their order depend on the sequence alone; the workspace only decides which sequences share a pass.
    """
    passes: list[list[Piece]] = []
    for start in range(0, int(context_lens.max(initial=0)), chunk_tokens):
        room = 0
        for seq in np.flatnonzero(context_lens > start).tolist():
            piece = Piece(seq, start, min(chunk_tokens, int(context_lens[seq]) - start))
            if not passes or passes[-1][0].start != start or piece.num_tokens > room:
                passes.append([])
                room = workspace_tokens
            passes[-1].append(piece)
            room -= piece.num_tokens
    return passes


def cut_at_equal_shares(context_lens: Int64Array, workspace_tokens: int, block_size: int) -> list[list[Piece]]:
    """VLLM's rule: the prompts with context share the workspace equally, so cuts depend on the batch.

    Raises
    ------
    MetadataError
        A share of less than one block.
    """
    sharers = int((context_lens > 0).sum())
    if not sharers:
        return []
    share = workspace_tokens // sharers // block_size * block_size
    if share < 1:
        raise MetadataError(
            f"context_workspace_tokens: expected at least {sharers * block_size} "
            f"(one block of {block_size} for each of {sharers} prompts with context), got {workspace_tokens}"
        )
    return [
        [Piece(seq, start, min(max(int(n) - start, 0), share)) for seq, n in enumerate(context_lens)]
        for start in range(0, int(context_lens.max()), share)
    ]
