"""The sequences of all groups as arrays, with everything refused that contradicts itself."""

from __future__ import annotations

from operator import add

import attrs
import numpy as np

from mla._checks import check_instance
from mla.errors import MetadataError
from mla.metadata.groups import SequenceGroup
from mla.metadata.indexing import Int64Array, RaggedTable, int_array, own_room, start_locs

__all__ = ["Batch", "read_groups", "refuse_shared_slots", "refuse_wide_slots"]

DENSE_IDS = 1 << 24


@attrs.frozen(eq=False)
class Batch:
    """All sequences of the groups as arrays; the first `num_prefills` are prompts.

    `room` holds the tokens that each sequence has blocks of its own for, 0 on a profile run.
    """

    query_lens: Int64Array
    context_lens: Int64Array
    table: RaggedTable | None
    room: Int64Array
    num_prefills: int
    seq_ids: list[int]

    @property
    def seq_lens(self) -> Int64Array:
        """Context plus new tokens."""
        return self.query_lens + self.context_lens

    def rows(self, first: int, last: int) -> Batch:
        """Sequences ``first .. last``."""
        table = None if self.table is None else self.table.rows(first, last)
        part = slice(first, last)
        return Batch(self.query_lens[part], self.context_lens[part], table, self.room[part], 0, self.seq_ids[part])


def read_groups(groups: list[SequenceGroup], block_size: int, max_blocks_per_seq: int | None) -> Batch:
    """Flatten the groups and refuse what contradicts itself.

    Raises
    ------
    MetadataError
        With the index of the group or the id of the sequence.
    """
    if not groups:
        raise MetadataError("groups: expected at least one sequence group, got none")
    for i, group in enumerate(groups):
        check_instance(f"groups[{i}]", group, SequenceGroup, MetadataError)
        if group.sliding_window is not None:
            raise MetadataError(
                f"sliding_window: expected None (not supported by MLA here), got {group.sliding_window} in groups[{i}]"
            )
        if i and group.is_prompt and not groups[i - 1].is_prompt:
            raise MetadataError(f"groups: expected prompts before decoding sequences, got prompt groups[{i}] after a decode")
    query_lens = int_array("query_lens", [n for group in groups for n in group.query_lens])
    context_lens = int_array("context_lens", [n for group in groups for n in group.context_lens])
    seq_ids: list[int] = []
    for group in groups:
        first = len(seq_ids)
        seq_ids.extend(group.seq_ids if group.seq_ids is not None else range(first, first + len(group.query_lens)))
    total = query_lens + context_lens
    # Before anything of that size is made.
    start_locs("query_lens", query_lens)
    start_locs("seq_lens", total)
    if any(group.seq_lens is not None for group in groups):
        said = [m for g in groups for m in (g.seq_lens or map(add, g.query_lens, g.context_lens))]
        wrong = np.flatnonzero(int_array("seq_lens", said) != total)
        if wrong.size:
            i = int(wrong[0])
            raise MetadataError(
                f"seq_lens: expected context {context_lens[i]} + query {query_lens[i]} = {total[i]} for sequence "
                f"{seq_ids[i]}, got {said[i]}"
            )
    num_prefills = sum(len(group.query_lens) for group in groups if group.is_prompt)
    table = _read_tables(groups, seq_ids, total, block_size, max_blocks_per_seq)
    room = np.zeros_like(total) if table is None else own_room(table, total, block_size)
    return Batch(query_lens, context_lens, table, room, num_prefills, seq_ids)


def _read_tables(
    groups: list[SequenceGroup], seq_ids: list[int], seq_lens: Int64Array, block_size: int, max_blocks_per_seq: int | None
) -> RaggedTable | None:
    """The block ids of all sequences, or None on a profile run."""
    without = [i for i, group in enumerate(groups) if group.block_ids is None]
    if without:
        for i in without:
            if not groups[i].is_prompt or groups[i].prefix_cache_hit:
                what = "a decoding group" if not groups[i].is_prompt else "a group with prefix_cache_hit"
                raise MetadataError(f"block_ids: expected blocks for {what}, got None in groups[{i}]")
        if len(without) < len(groups):
            raise MetadataError(
                f"block_ids: expected blocks for all groups or for none (profile run), got None in groups[{without[0]}]"
            )
        return None
    tables = [ids for group in groups for ids in (group.block_ids or ())]
    for i, ids in enumerate(tables):
        if ids is None:
            raise MetadataError(f"block_ids: expected blocks for sequence {seq_ids[i]}, got None")
    table = RaggedTable.of(tables)
    needed = -(-seq_lens // block_size)
    limit = None
    if max_blocks_per_seq is not None:
        limit = max_blocks_per_seq
        if needed.max() > limit:
            i = int(np.argmax(needed > limit))
            raise MetadataError(
                f"max_blocks_per_seq: expected at least {needed[i]} for the {seq_lens[i]} tokens of sequence {seq_ids[i]}, "
                f"got {limit}"
            )
    short = np.flatnonzero(table.counts < needed)
    if short.size:
        i = int(short[0])
        raise MetadataError(
            f"block_ids: expected at least {needed[i]} blocks of {block_size} for the {seq_lens[i]} tokens of sequence "
            f"{seq_ids[i]}, got {table.counts[i]}"
        )
    return table if limit is None else table.cut(np.minimum(table.counts, limit))


def refuse_wide_slots(table: RaggedTable, block_size: int) -> None:
    """Refuse blocks whose slots do not fit int64.

    Raises
    ------
    MetadataError
        With the largest slot.
    """
    last = (int(table.flat.max(initial=0)) + 1) * block_size - 1
    if last > np.iinfo(np.int64).max:
        raise MetadataError(f"block_size: expected slots of at most {np.iinfo(np.int64).max}, got {last} with {block_size}")


def refuse_shared_slots(slots: Int64Array, batch: Batch, table: RaggedTable, block_size: int) -> None:
    """Refuse new tokens that share a slot or overwrite what a sequence has as context.

    Raises
    ------
    MetadataError
        With the slot and the sequences.
    """
    order = np.argsort(slots, kind="stable")
    same = np.flatnonzero(slots[order][1:] == slots[order][:-1])
    if same.size:
        first, second = (int(np.searchsorted(np.cumsum(batch.query_lens), order[same[0] + k], side="right")) for k in (0, 1))
        raise MetadataError(
            f"block_ids: expected a slot of its own for every new token, got slot {int(slots[order[same[0]]])} for "
            f"sequences {batch.seq_ids[first]} and {batch.seq_ids[second]}"
        )
    blocks, offsets = np.divmod(slots, block_size)
    written, index = np.unique(blocks, return_inverse=True)
    first_offset = np.full(len(written), block_size, np.int64)
    np.minimum.at(first_offset, index, offsets)
    # Only places in the tables whose block is written matter: as a rule one for each sequence.
    places = np.flatnonzero(_contains(written, table.flat))
    rows = np.searchsorted(np.cumsum(table.counts), places, side="right")
    held = batch.context_lens[rows] - (places - table.starts[rows]) * block_size
    overwritten = first_offset[np.searchsorted(written, table.flat[places])]
    lost = np.flatnonzero(overwritten < np.minimum(held, block_size))
    if lost.size:
        slot = int(table.flat[places[lost[0]]]) * block_size + int(overwritten[lost[0]])
        raise MetadataError(
            f"block_ids: expected no new token in the context of sequence {batch.seq_ids[int(rows[lost[0]])]}, got slot {slot} "
            f"written"
        )


def _contains(written: Int64Array, ids: Int64Array) -> np.typing.NDArray[np.bool_]:
    """Whether each id is one of the sorted `written`."""
    highest = int(written[-1]) if written.size else 0
    if highest > DENSE_IDS:
        return np.isin(ids, written)
    # One table look-up an id is several times as fast as a search, and block ids are small numbers.
    table = np.zeros(highest + 2, bool)
    table[written] = True
    return table[np.minimum(ids, highest + 1)]
