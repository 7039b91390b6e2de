"""Around the decode kernels for Hopper: sharing the work of a batch out before, and joining parts of sequences after.

Importing this module imports Triton; `mla.compute.triton_hopper` does so when it launches.

The plan is a line of int32: four numbers a group of programs (first sequence, first tile, last sequence, end tile), a word that
says whether pieces stay apart, three unused ones, and then, of all sequences side by side, their keys, the slot of their first
part, and the first and last group that attends them. Keys are -1 for a sequence that another launch takes.
"""

from __future__ import annotations

import triton  # noqa: TID253  (this module is imported inside the launching function only)
import triton.language as tl  # noqa: TID253
from triton.language.extra.cuda import gdc_wait  # noqa: TID253

__all__ = ["join_parts", "plan_shares"]


COUNT = tl.constexpr(40)
"""Bits of a number of tiles where another number is packed above it: both grow along the line, so one maximum finds both."""

TILES = tl.constexpr(2**40 - 1)
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _sizes(line, longest, shortest, unit, other_line, other_longest, other_shortest, other_unit):
    """Combine what is asked of the whole batch."""
    return (
        tl.maximum(line, other_line),
        tl.maximum(longest, other_longest),
        tl.minimum(shortest, other_shortest),
        tl.maximum(unit, other_unit),
    )


@triton.jit
def _neighbours(before, after, before_2, after_2, other, other_after, other_2, other_after_2):
    """Combine what lies before two places, and what ends first behind them."""
    return (
        tl.maximum(before, other),
        tl.minimum(after, other_after),
        tl.maximum(before_2, other_2),
        tl.minimum(after_2, other_after_2),
    )


@triton.jit
def _last(before, before_2, other, other_2):
    """Combine what lies before two places."""
    return tl.maximum(before, other), tl.maximum(before_2, other_2)


@triton.jit
def _tiles_in(packed):
    return (packed & TILES).to(tl.int32)


@triton.jit
def _number_in(packed):
    return (packed >> COUNT).to(tl.int32)


@triton.jit
def _cut(
    at, before, after, extra, slack,
    ALWAYS: tl.constexpr, NEVER: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, LONG_SEQ: tl.constexpr,
    LONG_PIECE: tl.constexpr,
):  # fmt: skip
    """A place on the line of costs, as one on the line of tiles, moved to a better one nearby.

    Every sequence with tiles costs `extra` before its first, and each tile 1. `before` has the tiles of the sequences that lie
    wholly before the place, and their number; the sequence there ends at tile `after` of the line. LONG_SEQ is
    a multiple of TILE.

    Sequences are not left or begun for a few tiles. Otherwise ALWAYS cuts at the ends of pieces only, NEVER cares for none, and
    else the end of a unit is taken where it is near.
    """
    start = _tiles_in(before)
    num_tiles = tl.where(after == NONE, 0, after - start)
    offset = tl.maximum(at - start - extra * (_number_in(before) + 1), 0)
    if not NEVER:
        unit = PIECE if ALWAYS else tl.where(num_tiles > LONG_SEQ // TILE, LONG_PIECE, PIECE)
        nearest = tl.minimum((offset + unit // 2) // unit * unit, num_tiles)
        offset = nearest if ALWAYS else tl.where(tl.abs(nearest - offset) <= slack, nearest, offset)
    offset = tl.where(offset <= slack, 0, tl.where(num_tiles - offset <= slack, num_tiles, offset))
    return start + offset


@triton.jit(do_not_specialize=["num_seqs", "num_groups", "num_flags", "rows_above", "rows_up_to"],
            do_not_specialize_on_alignment=["seq_lens", "query_start_loc"])  # fmt: skip
def plan_shares(
    plan, flags, seq_lens, query_start_loc, num_seqs, num_groups, num_flags, rows_above, rows_up_to,
    NUM_HEADS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, LONG_SEQ: tl.constexpr,
    LONG_PIECE: tl.constexpr, BALANCED: tl.constexpr, SEQS: tl.constexpr, SEQ_COST: tl.constexpr,
):  # fmt: skip
    """Share the tiles of a batch out; every program finds its own group's share from all the lengths, and the sequences in it.

    One program more than there are groups writes what is the same for all of them, and takes flags down.

    GROUP pieces are a unit where there is more than one; else units are pieces of PIECE tiles, or LONG_PIECE beyond LONG_SEQ
    keys. Where sequences differ and shares are long, each sequence counts SEQ_COST tiles more, which is about what beginning
    and ending one takes; not where units are groups of pieces, whose ends decide where shares may end.

    Warps wait for each other in every sum over all sequences, which takes much of the time of a large batch: so there is one
    running sum, and three maxima of several numbers at once.
    """
    group = tl.program_id(0)
    seqs = tl.arange(0, SEQS)
    is_seq = seqs < num_seqs
    rows = tl.load(query_start_loc + seqs + 1, mask=is_seq, other=0) - tl.load(query_start_loc + seqs, mask=is_seq, other=0)
    rows = rows * NUM_HEADS
    keys = tl.load(seq_lens + seqs, mask=is_seq, other=0)
    keys = tl.where((rows > rows_above) & (rows <= rows_up_to), keys, -1)
    tiles = (tl.maximum(keys, 0) + TILE - 1) // TILE
    pieces = tl.where(keys > LONG_SEQ, LONG_PIECE, PIECE)
    units = pieces * GROUP
    # Tiles up to the end of each sequence, and sequences with tiles.
    line = tl.cumsum(tiles.to(tl.int64) + ((tiles > 0).to(tl.int64) << COUNT), 0)
    ends = _tiles_in(line)
    shortest = tl.where(is_seq & (keys >= 0), tiles, NONE)
    whole_line, longest, shortest, longest_unit = tl.reduce((line, tiles, shortest, tl.minimum(tiles, units)), 0, _sizes)
    shortest = tl.minimum(shortest, longest)
    total = _tiles_in(whole_line)
    extra = 0
    if BALANCED or GROUP == 1:
        # No sequence begins inside a unit, so a share of at least a unit still holds the rest of any that its start cuts.
        extra = tl.where((longest != shortest) & (total > 8 * SEQ_COST * num_groups), SEQ_COST, 0)
    cost_ends = ends + extra * _number_in(line)
    total_cost = total + extra * _number_in(whole_line)
    mean = total_cost // num_groups
    rest = total_cost % num_groups
    share = tl.maximum(mean + (rest > 0).to(tl.int32), 1)
    apart = 0
    step = share
    if not BALANCED:
        if GROUP > 1:
            # A program must have at least a unit: only neighbours hand over. Small batches leave the pieces of a group apart.
            apart = (longest_unit > share + share // 10 + 1).to(tl.int32)
            longest_unit = tl.where(apart != 0, tl.minimum(longest, PIECE), longest_unit)
        step = tl.maximum(step, longest_unit)
    of_seqs = plan + num_groups * 4 + 4
    if group == num_groups:
        tl.store(plan + num_groups * 4, apart)
        tl.store(of_seqs + seqs, keys, mask=is_seq)
        if not BALANCED:
            parts = (tiles + units - 1) // units
            if GROUP > 1:
                parts = tl.where(apart != 0, (tiles + PIECE - 1) // PIECE, parts)
            parts = tl.where(parts > 1, parts, 0)
            tl.store(of_seqs + num_seqs + seqs, tl.cumsum(parts, 0) - parts, mask=is_seq)
        for begin in range(0, num_flags, SEQS):
            tl.store(flags + begin + seqs, tl.zeros([SEQS], tl.int32), mask=begin + seqs < num_flags)
    else:
        if longest == shortest:
            # Whole sequences, or else whole pieces, if that makes no share much longer.
            even = (step + longest - 1) // tl.maximum(longest, 1) * longest
            step = tl.where(even * 20 <= step * 21, even, step)
            if not BALANCED:
                even = (step + PIECE - 1) // PIECE * PIECE
                step = tl.where(even * 20 <= step * 21, even, step)
        slack = tl.where(step > 8, step // 28, 0)
        # Groups without a tile come last: the parts of a BALANCED sequence are those of neighbours.
        is_stepped = (step > share) | (step % PIECE == 0) | (total < num_groups)
        start = tl.where(is_stepped, group.to(tl.int64) * step, group * mean + group * rest // num_groups)
        stop = tl.where(is_stepped, (group + 1).to(tl.int64) * step, (group + 1) * mean + (group + 1) * rest // num_groups)
        start = tl.minimum(start, total_cost).to(tl.int32)
        stop = tl.minimum(stop, total_cost).to(tl.int32)
        before_start = cost_ends <= start
        before_stop = cost_ends <= stop
        left, start_seq, right, stop_seq = tl.reduce(
            (
                tl.where(before_start, line, 0), tl.where(before_start, NONE, ends),
                tl.where(before_stop, line, 0), tl.where(before_stop, NONE, ends),
            ),
            0, _neighbours,
        )  # fmt: skip
        start = _cut(start, left, start_seq, extra, slack, GROUP > 1, BALANCED, TILE, PIECE, LONG_SEQ, LONG_PIECE)
        stop = _cut(stop, right, stop_seq, extra, slack, GROUP > 1, BALANCED, TILE, PIECE, LONG_SEQ, LONG_PIECE)
        stop = tl.where(group == num_groups - 1, total, stop)

        is_busy = stop > start
        numbered = ends.to(tl.int64) + ((seqs + 1).to(tl.int64) << COUNT)
        left, right = tl.reduce((tl.where(ends <= start, numbered, 0), tl.where(ends <= stop - 1, numbered, 0)), 0, _last)
        first_seq = _number_in(left)
        last_seq = _number_in(right)
        tl.store(plan + group * 4, tl.where(is_busy, first_seq, 0))
        tl.store(plan + group * 4 + 1, tl.where(is_busy, start - _tiles_in(left), 0))
        tl.store(plan + group * 4 + 2, tl.where(is_busy, last_seq, 0))
        tl.store(plan + group * 4 + 3, tl.where(is_busy, stop - _tiles_in(right), 0))
        begins = ends - tiles
        groups = tl.zeros([SEQS], tl.int32) + group
        begun = (tiles > 0) & (begins >= start) & (begins < stop)
        tl.store(of_seqs + 2 * num_seqs + seqs, groups, mask=begun)
        tl.store(of_seqs + 3 * num_seqs + seqs, groups, mask=(tiles > 0) & (ends > start) & (ends <= stop))
        if BALANCED:
            # A group has two slots: for the sequence that its share begins with, and for the one that it ends with.
            tl.store(of_seqs + num_seqs + seqs, 2 * group + tl.where(seqs == first_seq, 0, 1), mask=begun)


@triton.jit
def _join(acc, high, total, part, part_high, part_total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What has been summed, joined with a part behind it, as `mla.compute.triton_share_kernels.weights` says."""
    new_high = tl.maximum(high, part_high)
    shift = tl.where(new_high == float("-inf"), 0.0, new_high)
    first = tl.exp2(high - shift)
    second = tl.exp2(part_high - shift)
    total = tl.fma(part_total, second, total * first)
    return tl.fma(part, tl.broadcast_to(second[:, None], [ROWS, COLUMNS]), acc * first[:, None]), new_high, total


@triton.jit
def _highest_of_all(part_stat, row, num_parts, first_slot, second_slot, step, rows_per_slot, MOST: tl.constexpr):
    """The maximum over all parts of a row, and their sum relative to it."""
    part = tl.arange(0, MOST)
    slot = tl.where(part == 0, first_slot, second_slot + (part - 1) * step).to(tl.int64)
    stat = part_stat + slot * 2 * rows_per_slot + row
    highs = tl.load(stat, mask=part < num_parts, other=float("-inf"))
    totals = tl.load(stat + rows_per_slot, mask=part < num_parts, other=0.0)
    high = tl.max(highs, 0)
    shift = tl.where(high == float("-inf"), 0.0, high)
    return high, tl.sum(totals * tl.exp2(highs - shift), 0)


@triton.jit
def _clear(out, lse, row, is_row, first_column, COLUMNS: tl.constexpr):
    columns = first_column + tl.arange(0, COLUMNS)
    zeros = tl.zeros([row.shape[0], COLUMNS], out.dtype.element_ty)
    tl.store(out + row[:, None] * 512 + columns[None, :], zeros, mask=is_row[:, None])
    if first_column == 0:
        tl.store(lse + row, tl.full([row.shape[0]], float("-inf"), tl.float32), mask=is_row)


@triton.jit(do_not_specialize=["num_seqs", "num_groups", "num_tokens", "rows_per_slot"],
            do_not_specialize_on_alignment=["query_start_loc"])  # fmt: skip
def join_parts(
    part_out, part_stat, plan, query_start_loc, out, lse, num_seqs, num_groups, num_tokens, rows_per_slot,
    NUM_HEADS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, LONG_SEQ: tl.constexpr,
    LONG_PIECE: tl.constexpr, BALANCED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, LAUNCHED_EARLY: tl.constexpr,
):  # fmt: skip
    """Join the parts of a sequence's rows from left to right, pieces to groups and groups to the sequence.

    A program has ROWS rows at a time and COLUMNS of their 512 columns. Sequences without keys get 0 and -inf; so do the rows
    of `out` behind the last sequence, up to `num_tokens` tokens, by the programs of one more sequence. SIDE_BY_SIDE above 0, at
    least the number of groups, takes the weights of all parts of a BALANCED batch from their highest maximum, with one row a
    program: faster where parts are many.
    LAUNCHED_EARLY (programmatic dependent launch) begins while the attention still runs, and waits for it here.
    """
    seq = tl.program_id(1)
    first_column = tl.program_id(2) * COLUMNS
    own_rows = tl.arange(0, ROWS)
    step_of_rows = tl.num_programs(0) * ROWS
    begin_of_rows = tl.program_id(0) * ROWS
    first_token = tl.load(query_start_loc + seq)
    next_token = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=num_tokens)
    first_row = first_token.to(tl.int64) * NUM_HEADS
    num_rows = (next_token - first_token) * NUM_HEADS
    of_seqs = plan + num_groups * 4 + 4 + tl.minimum(seq, num_seqs - 1)
    if LAUNCHED_EARLY:
        gdc_wait()
    num_keys = tl.load(of_seqs)
    first_slot = tl.load(of_seqs + num_seqs)
    first_group = tl.load(of_seqs + 2 * num_seqs)
    last_group = tl.load(of_seqs + 3 * num_seqs)
    is_apart = tl.load(plan + num_groups * 4) != 0
    if (seq == num_seqs) | (num_keys == 0):
        for begin in range(begin_of_rows, num_rows, step_of_rows):
            row = begin + own_rows
            _clear(out, lse, first_row + row, row < num_rows, first_column, COLUMNS)
    elif num_keys > 0:
        num_parts = last_group - first_group + 1
        step = 1
        second_slot = first_slot + 1
        if BALANCED:
            step = 2
            second_slot = 2 * first_group + 2
        else:
            num_tiles = (num_keys + TILE - 1) // TILE
            is_cut = num_parts > 1
            piece = tl.where(num_keys > LONG_SEQ, LONG_PIECE, PIECE)
            num_parts = (num_tiles + piece - 1) // piece
            if GROUP > 1:
                num_parts = tl.where(is_apart, num_parts, (num_parts + GROUP - 1) // GROUP)
                num_parts = tl.where(is_cut, num_parts, 1)  # whole sequences are joined where they are attended
        if num_parts > 1:
            for begin in range(begin_of_rows, num_rows, step_of_rows):
                row = begin + own_rows
                is_row = row < num_rows
                columns = first_column + tl.arange(0, COLUMNS)
                high = tl.full([ROWS], 0.0 if SIDE_BY_SIDE > 0 else float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, COLUMNS], tl.float32)
                if SIDE_BY_SIDE > 0:
                    of_row = _highest_of_all(
                        part_stat, begin, num_parts, first_slot, second_slot, step, rows_per_slot, SIDE_BY_SIDE
                    )
                    high += of_row[0]
                    total += of_row[1]
                for first in range(0, num_parts, TOGETHER):
                    highs = ()
                    totals = ()
                    parts = ()
                    # Parts behind the last are empty, which changes nothing.
                    for i in tl.static_range(TOGETHER):
                        part = first + i
                        slot = tl.where(part == 0, first_slot, second_slot + (part - 1) * step).to(tl.int64)
                        exists = row < tl.where(part < num_parts, num_rows, 0)
                        stat = part_stat + slot * 2 * rows_per_slot + row
                        highs = highs + (tl.load(stat, mask=exists, other=float("-inf")),)
                        totals = totals + (tl.load(stat + rows_per_slot, mask=exists, other=0.0),)
                        at = part_out + (slot * rows_per_slot + row)[:, None] * 512 + columns[None, :]
                        parts = parts + (tl.load(at, mask=exists[:, None], other=0.0),)
                    if SIDE_BY_SIDE > 0:
                        shift = tl.where(high == float("-inf"), 0.0, high)
                        for i in tl.static_range(TOGETHER):
                            weight = tl.broadcast_to(tl.exp2(highs[i] - shift)[:, None], [ROWS, COLUMNS])
                            acc = tl.fma(parts[i], weight, acc)
                    elif BALANCED or GROUP == 1:
                        for i in tl.static_range(TOGETHER):
                            acc, high, total = _join(acc, high, total, parts[i], highs[i], totals[i], ROWS, COLUMNS)
                    elif is_apart:
                        for i in tl.static_range(0, TOGETHER, GROUP):
                            group_high = highs[i]
                            group_total = totals[i]
                            group_acc = parts[i]
                            for j in tl.static_range(1, GROUP):
                                group_acc, group_high, group_total = _join(
                                    group_acc, group_high, group_total, parts[i + j], highs[i + j], totals[i + j], ROWS, COLUMNS
                                )
                            acc, high, total = _join(acc, high, total, group_acc, group_high, group_total, ROWS, COLUMNS)
                    else:
                        for i in tl.static_range(TOGETHER):
                            acc, high, total = _join(acc, high, total, parts[i], highs[i], totals[i], ROWS, COLUMNS)
                total = tl.where(total == 0.0, 1.0, total)  # rows that have seen no key: 0 and -inf
                acc = acc / total[:, None]
                at = out + (first_row + row)[:, None] * 512 + columns[None, :]
                tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[:, None])
                if first_column == 0:
                    tl.store(lse + first_row + row, (high + tl.log2(total)) * 0.6931471805599453, mask=is_row)
