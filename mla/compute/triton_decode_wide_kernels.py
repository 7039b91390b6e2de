"""The kernel of decode for Hopper with many heads, in Gluon: 64 rows (new tokens times heads) a program, in 16-bit floats.

A row of 576 numbers is the key, and its first 512 are the value, so a tile of 128 keys is loaded once and used twice. It lies
in shared memory as two halves of 64 keys, each in four quarters of 128 columns and 64 columns of RoPE. Every quarter has a
barrier of its own that says that it is there, and every two have one that says that they are no longer needed: they are
overwritten while the rest is still in use.

Two groups of four warps attend a tile. Each takes the scores of one half, and each owns 256 of the 512 columns of the result
for both halves: so the weights of a half go into a group's own sums out of registers, and into the other group's out of shared
memory, where they take the place of the half's RoPE columns. The second group raises the maximum that the first has found:

    first group    scores 0 | weights 0 |            add half 0 | add half 1
    second group   scores 1 |             add half 0, weights 1 | add half 1

Sums are rescaled when the maximum of a row rises, by each warp for itself: a pause in which the tensor cores wait. What sums
are relative to need not be the maximum, for it cancels when a sum is divided by the sum of its weights; so it stays as it is
until a score exceeds it by `SLACK`, which spares half of the pauses. A larger slack would spare nearly all of them, but then
the weight of the highest score is hardly ever 1, which is exact: its rounding raises the error of a result in bfloat16, with
1000 keys from 1.86e-3 to 1.91e-3 at a slack of 1, and to 2.1e-3 at 8.

Where quarters need not be waited for, a tile takes a tenth less. Tried against that, and slower: a ninth quarter, loaded ahead,
in the room of the queries' RoPE columns, which then are in registers (5 %). Without effect: a group's programs as a cluster of
neighbouring multiprocessors, a sequence's queries brought into the second-level cache before they are loaded, and the second
group's scores held back until the first group's are done.

Importing this module imports Triton; `mla.compute.triton_hopper` does so when it launches.
"""

from __future__ import annotations

from triton.experimental import gluon  # noqa: TID253  (this module is imported inside the launching function only)
from triton.experimental.gluon import language as gl  # noqa: TID253
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: TID253
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla.compute.triton_decode_wide_load_kernels import SHARED, TILE, load_all, piece_in, pieces_of, seq_at, seq_in, share_of
from mla.compute.triton_share_kernels import (
    await_state,
    barrier,
    hand_over,
    let_join_begin,
    opaque_zero,
    plan_of_seqs,
    scaled,
    view_as,
)

__all__ = ["attend_wide"]

SLACK = gl.constexpr(1.0)
"""By so much (base 2) a score may exceed what sums are relative to."""

UNSEEN = gl.constexpr(-3.0e38)
"""The maximum of a row that has seen no key: below every score, and finite, so that differences are numbers."""

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SUM_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS))
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)
"""Sums as they are stored: 8 columns side by side in each thread, and every row in the warp that has summed it."""


@gluon.jit
def _scores(zero, work, phase, tile, HALF: gl.constexpr, MASKED: gl.constexpr, GATHERED: gl.constexpr):
    """Products of the queries with a half of the tile, quarter by quarter as they arrive."""
    memory, full, view = work[0], work[1][0], work[3]
    queries, query_rope, keys, rope = memory[0], memory[1], memory[2], memory[3 + HALF]
    # Two sums that are added in float32: matrix units cut what they add to a running sum.
    scores = gl.zeros([64, 64], gl.float32, SCORES)
    others = gl.zeros([64, 64], gl.float32, SCORES)
    for i in gl.static_range(4):
        mbarrier.wait(full.index(HALF * 4 + i), phase)
        if GATHERED:
            fence_async_shared()
        half = keys.index(zero + HALF * 4 + i).permute((1, 0))
        if i < 2:
            scores = warpgroup_mma(queries.index(zero + i), half, scores, use_acc=i > 0, is_async=True)
        else:
            others = warpgroup_mma(queries.index(zero + i), half, others, use_acc=i > 2, is_async=True)
        if i == 3 - HALF * 2:
            scores = warpgroup_mma(query_rope, rope.permute((1, 0)), scores, is_async=True)
    scores, others = warpgroup_mma_wait(0, deps=[scores, others])
    scores = scores + others
    if MASKED:
        rows = zero + view[2] + gl.arange(0, 64, ROWS)
        visible = gl.minimum(view[1] + rows // view[3], view[0])
        at = tile * TILE + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        scores = gl.where(at[None, :] < visible[:, None], scores, -float("inf"))
    return scores


@gluon.jit
def _release_queries(bars, tile, released):
    """After the scores of a sequence's last tile in the share those of the next may be loaded."""
    if tile == released:
        mbarrier.arrive(bars[3])


@gluon.jit
def _clear_tail(keys, quarter: gl.constexpr, left):
    """Zero the rows of two quarters from row `left` on: they may hold NaN, which a weight of 0 does not undo."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if left < 64:
        rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        for i in gl.static_range(quarter, quarter + 2):
            keys.index(i).store(gl.where((rows < left)[:, None], keys.index(i).load(LAYOUT), 0.0))
        fence_async_shared()
        barrier()


@gluon.jit
def _rescale(acc, kept):
    """The sums times a factor of each row."""
    return scaled(acc, gl.convert_layout(kept, SUM_ROWS))


@gluon.jit
def _raise(high, scores, scale_log2):
    """What sums are relative to from here on: as before, or where a score exceeds that, the highest score."""
    peak = gl.max(scores, 1) * scale_log2
    return gl.where(peak > high + SLACK, peak, high)


@gluon.jit
def _step_of_first(state, work, phase, tile, MASKED: gl.constexpr, GATHERED: gl.constexpr):
    """A tile, by the group that takes the scores of half 0 and owns columns 0 to 255."""
    acc, high, total = state[0], state[1], state[2]
    memory, bars, shared, num_keys, scale_log2 = work[0], work[1], work[2], work[3][0], work[4]
    keys, rope_0, rope_1, empty, ready = memory[2], memory[3], memory[4], bars[1], bars[4]
    values = view_as(keys, [4, 64, 256], SHARED)
    high_0, high_1 = shared[0], shared[1]
    zero = opaque_zero()
    scores = _scores(zero, work, phase, tile, 0, MASKED, GATHERED)
    _release_queries(bars, tile, work[5])
    new_high = _raise(high, scores, scale_log2)
    high_0.store(new_high)
    raw = gl.exp2(scores * scale_log2 - new_high[:, None])
    weights = raw.to(keys.dtype)
    # Every warp's products with the RoPE columns must be through before weights take their place.
    barrier()
    rope_0.store(weights)
    fence_async_shared()
    mbarrier.arrive(ready.index(0))
    if MASKED and not GATHERED:
        _clear_tail(keys, 0, num_keys - tile * TILE)
    kept = gl.exp2(high - new_high)
    weights = gl.convert_layout(weights, WEIGHTS)
    acc = _rescale(acc, kept)
    acc = warpgroup_mma(weights, values.index(zero), acc, is_async=True)
    total = total * kept + gl.sum(raw, 1)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(empty.index(0))
    mbarrier.wait(ready.index(1), phase)
    high = high_1.load(ROWS)
    if MASKED and not GATHERED:
        _clear_tail(keys, 4, num_keys - tile * TILE - 64)
    kept = gl.exp2(new_high - high)
    total = total * kept
    acc = _rescale(acc, kept)
    acc = warpgroup_mma(rope_1, values.index(zero + 2), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(2))
    return acc, high, total


@gluon.jit
def _step_of_second(state, work, phase, tile, MASKED: gl.constexpr, GATHERED: gl.constexpr):
    """A tile, by the group that takes the scores of half 1 and owns columns 256 to 511."""
    acc, high, total = state[0], state[1], state[2]
    memory, bars, shared, num_keys, scale_log2 = work[0], work[1], work[2], work[3][0], work[4]
    keys, rope_0, rope_1, empty, ready = memory[2], memory[3], memory[4], bars[1], bars[4]
    values = view_as(keys, [4, 64, 256], SHARED)
    high_0, high_1 = shared[0], shared[1]
    zero = opaque_zero()
    scores = _scores(zero, work, phase, tile, 1, MASKED, GATHERED)
    _release_queries(bars, tile, work[5])
    mbarrier.wait(ready.index(0), phase)
    first_high = high_0.load(ROWS)
    if MASKED and not GATHERED:
        _clear_tail(keys, 2, num_keys - tile * TILE)
    first_kept = gl.exp2(high - first_high)
    acc = _rescale(acc, first_kept)
    acc = warpgroup_mma(rope_0, values.index(zero + 1), acc, is_async=True)
    high = _raise(first_high, scores, scale_log2)
    high_1.store(high)
    raw = gl.exp2(scores * scale_log2 - high[:, None])
    weights = raw.to(keys.dtype)
    barrier()  # as in the first group
    rope_1.store(weights)
    fence_async_shared()
    mbarrier.arrive(ready.index(1))
    kept = gl.exp2(first_high - high)
    total = total * (first_kept * kept) + gl.sum(raw, 1)
    weights = gl.convert_layout(weights, WEIGHTS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(1))
    if MASKED and not GATHERED:
        _clear_tail(keys, 6, num_keys - tile * TILE - 64)
    acc = _rescale(acc, kept)
    acc = warpgroup_mma(weights, values.index(zero + 3), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(empty.index(3))
    return acc, high, total


@gluon.jit
def _step(state, work, phase, tile, HALF: gl.constexpr, MASKED: gl.constexpr, GATHERED: gl.constexpr):
    if HALF == 0:
        state = _step_of_first(state, work, phase, tile, MASKED, GATHERED)
    else:
        state = _step_of_second(state, work, phase, tile, MASKED, GATHERED)
    return state


@gluon.jit
def _both_totals(total, shared, summed, finished, HALF: gl.constexpr):
    """The sum of the weights of both halves, in the same order in both groups."""
    mine, other = shared[2 + HALF], shared[3 - HALF]
    mine.store(total)
    mbarrier.arrive(summed.index(HALF))
    mbarrier.wait(summed.index(1 - HALF), finished & 1)
    return total + other.load(ROWS) if HALF == 0 else other.load(ROWS) + total


@gluon.jit
def _pointers_of_state(hand, owner):
    zero = opaque_zero()
    columns = gl.arange(0, 256, gl.SliceLayout(0, SUMS))
    at = hand[0] + owner * (64 * 256) + (zero + gl.arange(0, 64, SUM_ROWS))[:, None] * 256 + columns[None, :]
    return at, hand[1] + owner * 128 + zero + gl.arange(0, 64, ROWS)


@gluon.jit
def _take_state(hand, owner):
    """What the neighbour's group of warps has summed of the piece."""
    at, stat = _pointers_of_state(hand, owner)
    await_state(hand[2] + owner)
    acc = gl.load(at, cache_modifier=".cg")
    return acc, gl.load(stat, cache_modifier=".cg"), gl.load(stat + 64, cache_modifier=".cg")


@gluon.jit
def _leave_state(state, hand, owner):
    at, stat = _pointers_of_state(hand, owner)
    gl.store(at, state[0])
    gl.store(stat, state[1])
    gl.store(stat + 64, state[2])
    hand_over(hand[2] + owner)


@gluon.jit
def _write(state, total, results, place, slot, whole_seq, HALF: gl.constexpr):
    """Store what rows of the sequence there are: the result if all of it has been summed, else the sums as a part of it."""
    acc, high = state[0], state[1]
    out, lse, part_out, part_stat = results[0], results[1], results[2], results[3]
    first_row, row, num_rows, part_rows = place[0], place[1], place[2], place[3]
    zero = opaque_zero()
    stat_rows = zero + row + gl.arange(0, 64, ROWS)
    stat_inside = stat_rows < num_rows
    if whole_seq:  # a row that has seen no key gets 0 and -inf
        inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), SUM_ROWS)[:, None]
        out_rows = zero + row + gl.arange(0, 64, gl.SliceLayout(1, STORED))
        out_columns = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, STORED))
        at = out + (first_row + out_rows).to(gl.int64)[:, None] * 512 + out_columns[None, :]
        result = gl.convert_layout((acc * inverse).to(out.dtype.element_ty), STORED)
        gl.store(at, result, mask=(out_rows < num_rows)[:, None])
        if HALF == 0:
            seen = gl.where(total == 0.0, 0.0, high)
            gl.store(lse + first_row + stat_rows, (seen + gl.log2(total)) * 0.6931471805599453, mask=stat_inside)
    else:
        rows = zero + row + gl.arange(0, 64, SUM_ROWS)
        columns = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
        first = slot.to(gl.int64) * part_rows
        gl.store(part_out + (first + rows)[:, None] * 512 + columns[None, :], acc, mask=(rows < num_rows)[:, None])
        if HALF == 0:
            stat = part_stat + first * 2 + stat_rows
            gl.store(stat, gl.where(total == 0.0, -float("inf"), high), mask=stat_inside)
            gl.store(stat + part_rows, total, mask=stat_inside)


@gluon.jit
def _attend(
    query_start_loc, plan, sizes, results, hand, scale_log2, memory, bars, shared,
    HALF: gl.constexpr, NUM_HEADS: gl.constexpr, PIECES: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """One group of warps: attend the program's rows of the share, piece by piece."""
    BALANCED: gl.constexpr = PIECES[3]
    q_full, summed = bars[2], bars[5]
    row_tiles = sizes[2]
    seqs = plan_of_seqs(plan, sizes[0], sizes[1])
    lens, first_slot = seqs[0], seqs[1]
    program = gl.program_id(0)
    group = program // row_tiles
    row = program % row_tiles * 64
    share = share_of(plan, group)
    phase = 0
    attended = 0
    finished = 0
    for i in range(share[2] - share[0] + 1):
        seq = seq_at(i, share, PIECES)
        num_keys, first_row, num_rows, start, end = seq_in(seq, share, lens, query_start_loc, row, NUM_HEADS)
        num_tiles = (num_keys + TILE - 1) // TILE
        if start < end:
            mbarrier.wait(q_full, attended & 1)
            attended += 1
            # Keys that the first token sees, and the tiles that every row here sees whole.
            visible = num_keys - num_rows // NUM_HEADS + 1
            whole = gl.maximum(visible + row // NUM_HEADS, 0) // TILE
            unit, first_piece, end_piece = pieces_of(num_keys, start, end, PIECES)
            released = piece_in(first_piece, unit, start, end)[1] - 1  # after the scores of this tile queries may go
            work = (memory, bars, shared, (num_keys, visible, row, NUM_HEADS), scale_log2, released)
            place = (first_row, row, num_rows, row_tiles * 64)
            for j in range(end_piece - first_piece):
                piece = end_piece - 1 - j
                first, last = piece_in(piece, unit, start, end)
                acc = gl.zeros([64, 256], gl.float32, SUMS)
                high = gl.full([64], UNSEEN, gl.float32, ROWS)
                total = gl.zeros([64], gl.float32, ROWS)
                if not BALANCED and first > piece * unit:
                    acc, high, total = _take_state(hand, (program - row_tiles) * 2 + HALF)
                state = (acc, high, total)
                for tile in range(first, gl.minimum(last, whole)):
                    state = _step(state, work, phase, tile, HALF, False, GATHERED)
                    phase ^= 1
                for tile in range(gl.maximum(first, whole), last):
                    state = _step(state, work, phase, tile, HALF, True, GATHERED)
                    phase ^= 1
                if BALANCED:
                    total = _both_totals(state[2], shared, summed, finished, HALF)
                    finished += 1
                    slot = group * 2 + gl.where(seq == share[0], 0, 1)
                    _write(state, total, results, place, slot, end - start == num_tiles, HALF)
                elif last < gl.minimum(piece * unit + unit, num_tiles):
                    _leave_state(state, hand, program * 2 + HALF)
                else:
                    total = _both_totals(state[2], shared, summed, finished, HALF)
                    finished += 1
                    slot = gl.load(first_slot + seq) + piece
                    _write(state, total, results, place, slot, num_tiles <= unit, HALF)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    """`number` barriers that complete when `count` have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit(
    do_not_specialize=["table_stride", "num_groups", "num_seqs", "row_tiles"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc"],
)
def attend_wide(
    q, kv, latent_cache, block_table, query_start_loc, plan, out, lse, part_out, part_stat, hand_out, hand_stat, flags,
    table_stride, num_groups, num_seqs, row_tiles, scale_log2,
    NUM_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SHORT_PIECE: gl.constexpr, LONG_SEQ: gl.constexpr,
    LONG_PIECE: gl.constexpr, BALANCED: gl.constexpr,
):  # fmt: skip
    """Decode of every sequence that the plan has; see the head of this file.

    `q` describes the queries, with a token's head a row, as boxes of 64 rows by 64 columns, and `kv` the cache, with a slot a
    row, as boxes of 64 columns by 8 to 64 rows: used where blocks hold a multiple of so many. `flags` holds 0, and does so
    again afterwards.
    """
    let_join_begin()
    GATHERED: gl.constexpr = BLOCK_SIZE % kv.block_shape[0] != 0
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PIECES: gl.constexpr = (SHORT_PIECE, LONG_SEQ, LONG_PIECE, BALANCED)
    queries = gl.allocate_shared_memory(q.dtype, [4, 64, 128], SHARED)
    keys = gl.allocate_shared_memory(q.dtype, [8, 64, 128], SHARED)
    ropes = gl.allocate_shared_memory(q.dtype, [3, 64, 64], SHARED)
    floats = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
    memory = (queries, ropes.index(0), keys, ropes.index(1), ropes.index(2))
    shared = (floats.index(0), floats.index(1), floats.index(2), floats.index(3))
    # Full quarters and empty pairs of them, full and empty queries, weights ready for the other group, totals likewise.
    q_full, q_empty = _barriers(1, 1).index(0), _barriers(1, 2).index(0)
    bars = (_barriers(8, 128 if GATHERED else 1), _barriers(4, 1), q_full, q_empty, _barriers(2, 1), _barriers(2, 1))
    fence_async_shared()
    results = (out, lse, part_out, part_stat)
    sizes = (num_groups, num_seqs, row_tiles)
    hand = (hand_out, hand_stat, flags)
    gl.warp_specialize(
        [
            (_attend, (query_start_loc, plan, sizes, results, hand, scale_log2, memory, bars, shared,
                       0, NUM_HEADS, PIECES, GATHERED)),
            (_attend, (query_start_loc, plan, sizes, results, hand, scale_log2, memory, bars, shared,
                       1, NUM_HEADS, PIECES, GATHERED)),
            (load_all, (q, kv, latent_cache, block_table, table_stride, query_start_loc, plan, sizes, memory,
                     bars, NUM_HEADS, BLOCK_SIZE, PIECES, GATHERED)),
        ],
        [4, 4 if GATHERED else 1],
        [224, 56] if GATHERED else [240, 24],
    )  # fmt: skip
