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


@triton.jit
def _sizes(total, numbers, longest, other, other_numbers, other_longest):
    """Combine what is asked of the whole batch."""
    return total + other, numbers + other_numbers, tl.maximum(longest, other_longest)


@triton.jit
def _sizes_and_units(total, numbers, longest, unit, other, other_numbers, other_longest, other_unit):
    """Combine what is asked of the whole batch, where units differ."""
    return total + other, numbers + other_numbers, tl.maximum(longest, other_longest), tl.maximum(unit, other_unit)


@triton.jit
def _places(start, stop, other_start, other_stop):
    """Combine what threads say of two places: all but one say the end of the line."""
    return tl.minimum(start, other_start), tl.minimum(stop, other_stop)


@triton.jit
def _by_warp(of_threads):
    """Numbers of threads, warp by warp: the sum or maximum of a warp is one instruction, and then few are left."""
    return tl.reshape(of_threads, [of_threads.shape[0] // 32, 32])


@triton.jit
def _ends(sizes):
    """The running sum: a thread's own first, and one over all threads."""
    own = tl.sum(sizes, 1)
    return tl.cumsum(sizes, 1) + (tl.cumsum(own, 0) - own)[:, None]


@triton.jit
def _divided(number, count):
    """The quotient of numbers that are not negative: without signs it is half as long."""
    return (number.to(tl.uint32) // count.to(tl.uint32)).to(tl.int32)


@triton.jit
def _cut(
    at, begins, ends, extra, slack, end_of_line,
    ALWAYS: tl.constexpr, NEVER: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, LONG_SEQ: tl.constexpr,
    LONG_PIECE: tl.constexpr,
):  # fmt: skip
    """A place on the line of costs, moved to a better one nearby, by each warp: only the thread with the sequence there knows.

    Every sequence with tiles costs `extra` before its first, and each tile 1. Pieces are powers of 2, and LONG_SEQ is
    a multiple of TILE.

    Sequences are not left or begun for a few tiles. Otherwise ALWAYS cuts at the ends of pieces only, NEVER cares for none, and
    else the end of a unit is taken where it is near.
    """
    is_here = (begins <= at) & (at < ends)
    end = tl.max(tl.where(is_here, ends, 0), 1)
    num_tiles = tl.max(tl.where(is_here, ends - begins, 0), 1) - extra
    first = end - num_tiles
    offset = tl.maximum(at - first, 0)
    if not NEVER:
        unit = PIECE if ALWAYS else tl.where(num_tiles > LONG_SEQ // TILE, LONG_PIECE, PIECE)
        nearest = tl.minimum((offset + unit // 2) & -unit, num_tiles)
        offset = nearest if ALWAYS else tl.where(tl.abs(nearest - offset) <= slack, nearest, offset)
    offset = tl.where(offset <= slack, -extra, tl.where(num_tiles - offset <= slack, num_tiles, offset))
    return tl.min(_by_warp(tl.where(end > 0, first + offset, end_of_line)), 1)


@triton.jit(do_not_specialize=["num_seqs", "num_groups", "num_flags", "rows_above", "rows_up_to"],
            do_not_specialize_on_alignment=["seq_lens", "query_start_loc"])  # fmt: skip
def plan_shares(
    plan, flags, seq_lens, query_start_loc, num_seqs, num_groups, num_flags, rows_above, rows_up_to,
    NUM_HEADS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, LONG_SEQ: tl.constexpr,
    LONG_PIECE: tl.constexpr, BALANCED: tl.constexpr, SEQS: tl.constexpr, THREADS: tl.constexpr, SEQ_COST: tl.constexpr,
):  # fmt: skip
    """Share the tiles of a batch out; every program finds its own group's share from all the lengths, and the sequences in it.

    One program more than there are groups writes what is the same for all of them, and takes flags down. SEQS, a power of 2,
    is at least `num_seqs` and THREADS, those of the launch.

    GROUP pieces are a unit where there is more than one; else units are pieces of PIECE tiles, or LONG_PIECE beyond LONG_SEQ
    keys. Where sequences differ and shares are long, each sequence counts SEQ_COST tiles more, which is about what beginning
    and ending one takes; not where units are groups of pieces, whose ends decide where shares may end. All costs of a batch
    are less than 2^31.

    Warps wait for each other whenever numbers of all sequences are combined, which takes much of the time of a large batch: so
    this happens three times, for the sizes of the batch, the line of costs, and the two places where the share begins and ends.
    The threads that have the sequences there store the share themselves.
    """
    group = tl.program_id(0)
    # A thread has EACH sequences, side by side, of which it makes sums by itself. "|" adds here; Triton does not see that it
    # does, so loads and stores keep to this order: else they get several, and masks go from one to another by shared memory.
    EACH: tl.constexpr = SEQS // THREADS
    seqs = EACH * tl.arange(0, THREADS)[:, None] | tl.arange(0, EACH)[None, :]
    is_seq = seqs < num_seqs
    rows = tl.load(query_start_loc + seqs + 1, mask=is_seq, other=0) - tl.load(query_start_loc + seqs, mask=is_seq, other=0)
    rows = rows * NUM_HEADS
    keys = tl.load(seq_lens + seqs, mask=is_seq, other=0)
    keys = tl.where((rows > rows_above) & (rows <= rows_up_to), keys, -1)  # behind the last sequence too: no rows
    tiles = ((keys + (TILE - 1)).to(tl.uint32) // TILE).to(tl.int32)
    units = tl.where(keys > LONG_SEQ, LONG_PIECE, PIECE) * GROUP
    # Two numbers in one: of sequences with tiles, and above 16 bits of all that this launch takes.
    numbers = tl.where(keys > 0, 1, 0) + tl.where(keys >= 0, 1 << 16, 0)
    total = tl.sum(_by_warp(tl.sum(tiles, 1)), 1)
    numbers = tl.sum(_by_warp(tl.sum(numbers, 1)), 1)
    longest = tl.max(_by_warp(tl.max(tiles, 1)), 1)
    if BALANCED or PIECE == LONG_PIECE:
        total, numbers, longest = tl.reduce((total, numbers, longest), 0, _sizes)
        longest_unit = tl.minimum(longest, PIECE * GROUP)
    else:
        longest_unit = tl.max(_by_warp(tl.max(tl.minimum(tiles, units), 1)), 1)
        total, numbers, longest, longest_unit = tl.reduce((total, numbers, longest, longest_unit), 0, _sizes_and_units)
    num_taken = numbers >> 16
    are_alike = longest.to(tl.int64) * num_taken == total
    extra = 0
    if BALANCED or GROUP == 1:
        # No sequence begins inside a unit, so a share of at least a unit still holds the rest of any that its start cuts.
        extra = tl.where(are_alike | (total <= 8 * SEQ_COST * num_groups), 0, SEQ_COST)
    total_cost = total + extra * (numbers & 0xFFFF)
    mean = _divided(total_cost, num_groups)
    rest = total_cost - mean * num_groups
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
            tl.store(of_seqs + num_seqs + seqs, _ends(parts) - parts, mask=is_seq)
        for begin in range(0, num_flags, SEQS):
            tl.store(flags + begin + seqs, tl.zeros_like(seqs), mask=begin + seqs < num_flags)
    else:
        # Whole sequences where all are alike, or else whole pieces, if that makes no share much longer.
        even = tl.maximum(_divided(num_taken + num_groups - 1, num_groups), 1) * longest
        step = tl.where(are_alike & (even * 20 <= step * 21), even, step)
        if not BALANCED:
            even = (step + PIECE - 1) // PIECE * PIECE
            step = tl.where(are_alike & (even * 20 <= step * 21), even, step)
        slack = tl.where(step > 8, step // 28, 0)
        # Groups without a tile come last: the parts of a BALANCED sequence are those of neighbours.
        is_stepped = (step > share) | (step % PIECE == 0) | (total < num_groups)
        spread = _divided(group * rest, num_groups)
        start = tl.where(is_stepped, group * step, group * mean + spread)
        stop = start + tl.where(is_stepped, step, mean + ((group + 1) * rest >= (spread + 1) * num_groups).to(tl.int32))
        # Steps may go beyond 2^31, not beyond 2^32.
        start = tl.minimum(start.to(tl.uint32), total_cost.to(tl.uint32)).to(tl.int32)
        stop = tl.minimum(stop.to(tl.uint32), total_cost.to(tl.uint32)).to(tl.int32)

        costs = tiles + tl.where(tiles > 0, extra, 0)
        ends = _ends(costs)
        begins = ends - costs
        start = _cut(start, begins, ends, extra, slack, total_cost, GROUP > 1, BALANCED, TILE, PIECE, LONG_SEQ, LONG_PIECE)
        stop = _cut(stop, begins, ends, extra, slack, total_cost, GROUP > 1, BALANCED, TILE, PIECE, LONG_SEQ, LONG_PIECE)
        start, stop = tl.reduce((start, stop), 0, _places)
        stop = tl.where(group == num_groups - 1, total_cost, stop)

        # A share without a tile is zeros, and nowhere on the line.
        start, stop = tl.where(start < stop, start, -1), tl.where(start < stop, stop, -1)
        own = plan + group * 4
        nothing = tl.zeros([4], tl.int32)
        tl.store(own + tl.arange(0, 4), nothing, mask=nothing > start)
        own = own + tl.zeros_like(seqs)
        is_first = (begins <= start) & (start < ends)
        is_last = (begins < stop) & (stop <= ends)
        tl.store(own, seqs, mask=is_first)
        tl.store(own + 1, tl.maximum(start - begins - extra, 0), mask=is_first)
        tl.store(own + 2, seqs, mask=is_last)
        tl.store(own + 3, stop - begins - extra, mask=is_last)
        groups = tl.zeros_like(seqs) + group
        begun = (tiles > 0) & (begins >= start) & (begins < stop)
        tl.store(of_seqs + 2 * num_seqs + seqs, groups, mask=begun)
        tl.store(of_seqs + 3 * num_seqs + seqs, groups, mask=(tiles > 0) & (ends > start) & (ends <= stop))
        if BALANCED:
            # A group has two slots: for the sequence that its share begins with, and for the one that it ends with.
            tl.store(of_seqs + num_seqs + seqs, 2 * group + tl.where(begins == start, 0, 1), mask=begun)


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
