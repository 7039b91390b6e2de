"""The decode kernel for Hopper with up to 16 query rows a sequence, in Gluon: latent rows of 512 + 64 numbers in 16-bit floats.

Few rows leave the matrix units idle, so what counts is that the cache streams: one group of four warps computes while another
loads tiles of 64 keys into two buffers. The products are turned round, ``scores.T = keys @ q.T`` and ``out.T = values.T @
weights.T``: tiles of keys fill the 64 rows that a matrix instruction has, and the queries are its few columns, so nothing is
padded. A tile is read once and used twice, as keys and as values.

A sequence is summed in pieces of PIECE tiles from its start, each from nothing; GROUP pieces are joined from left to right, and
so are those groups. All of this happens in registers and shared memory where a program has the whole sequence, and in
`join_parts` where it has not, by the same steps: so who does it changes no bit.

Importing this module imports Triton; `mla.compute.triton_hopper` does so when it launches.
"""

from __future__ import annotations

from triton.experimental import gluon  # noqa: TID253  (this module is imported inside the launching function only)
from triton.experimental.gluon import language as gl  # noqa: TID253
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: TID253
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla.compute.triton_share_kernels import (
    await_state,
    barrier,
    hand_over,
    let_join_begin,
    load_box,
    load_rows,
    plan_of_seqs,
    read_share,
    stretch,
    view_as,
    weights,
)

__all__ = ["attend_few"]


@gluon.jit
def _share(plan, num_groups, num_seqs, PIECE: gl.constexpr, GROUP: gl.constexpr, BALANCED: gl.constexpr):
    """The share of a program, and whether pieces stay apart: a whole group of them would be more than a share."""
    lens, _, _, _ = plan_of_seqs(plan, num_groups, num_seqs)
    apart = gl.load(plan + num_groups * 4) != 0
    unit = gl.where(apart, PIECE, PIECE * GROUP)
    return read_share(plan, lens, gl.program_id(0), unit, 64, BALANCED), apart


@gluon.jit
def _load_boxes(keys, ropes, latent, rope, table, tile, full, stage, BLOCK_SIZE: gl.constexpr):
    """A tile that lies within one block, by the copy engine."""
    row = gl.load(table + tile // (BLOCK_SIZE // 64)) * BLOCK_SIZE + tile % (BLOCK_SIZE // 64) * 64
    mbarrier.expect(full, 64 * 576 * 2)
    load_box(latent, [row, 0], full, keys.index(stage))
    load_box(rope, [row, 512], full, ropes.index(stage))


@gluon.jit
def _slots(table, tile, num_keys, row, BLOCK_SIZE: gl.constexpr):
    """Where the rows of a tile lie; behind the last key, that key again."""
    position = gl.minimum(tile * 64 + row, num_keys - 1)
    return gl.load(table + position // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@gluon.jit
def _load_rows(keys, ropes, latent_cache, slots, rope_slots, stage, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """A tile row by row, wherever its rows lie."""
    columns = gl.arange(0, 512, gl.SliceLayout(0, WIDE))
    load_rows(keys.index(stage), latent_cache + slots[:, None] * 576 + columns[None, :])
    columns = 512 + gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    load_rows(ropes.index(stage), latent_cache + rope_slots[:, None] * 576 + columns[None, :])
    async_copy.commit_group()


@gluon.jit
def _produce(
    latent, rope, latent_cache, block_table, plan, memory, bars, table_stride, num_groups, num_seqs,
    BLOCK_SIZE: gl.constexpr, PIECE: gl.constexpr, GROUP: gl.constexpr, BALANCED: gl.constexpr,
):  # fmt: skip
    """Load the tiles of this program's share in the order in which they are attended."""
    BOXES: gl.constexpr = BLOCK_SIZE % 64 == 0
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys, ropes, full, empty = memory[0], memory[1], bars[0], bars[1]
    lens, _, _, _ = plan_of_seqs(plan, num_groups, num_seqs)
    share, _ = _share(plan, num_groups, num_seqs, PIECE, GROUP, BALANCED)
    count = 0
    for part in range(1 if BALANCED else 0, 2 if BALANCED else 3):
        first_seq, first_tile, last_seq, end_tile = stretch(part, share)
        for seq in range(first_seq, last_seq + 1):
            num_keys = gl.load(lens + seq)
            table = block_table + seq.to(gl.int64) * table_stride
            begin = gl.where(seq == first_seq, first_tile, 0)
            end = gl.where(seq == last_seq, end_tile, (num_keys + 63) // 64)
            for tile in range(begin, end):
                stage = count % 2
                if BOXES:
                    mbarrier.wait(empty.index(stage), (count // 2 & 1) ^ 1)
                    _load_boxes(keys, ropes, latent, rope, table, tile, full.index(stage), stage, BLOCK_SIZE)
                else:
                    slots = _slots(table, tile, num_keys, gl.arange(0, 64, gl.SliceLayout(1, WIDE)), BLOCK_SIZE)
                    rope_slots = _slots(table, tile, num_keys, gl.arange(0, 64, gl.SliceLayout(1, NARROW)), BLOCK_SIZE)
                    mbarrier.wait(empty.index(stage), (count // 2 & 1) ^ 1)
                    _load_rows(keys, ropes, latent_cache, slots, rope_slots, stage, WIDE, NARROW)
                    if count > 0:  # the tile before has landed once only this one is on its way
                        async_copy.wait_group(1)
                        fence_async_shared()
                        mbarrier.arrive(full.index(stage ^ 1))
                count += 1
    if not BOXES:
        if count > 0:
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(full.index((count - 1) % 2))


@gluon.jit
def _attend_tiles(
    memory, bars, count, begin, end, num_keys, visible, always_visible, scale_log2, ROWS: gl.constexpr, WARPS: gl.constexpr
):
    """Attend the tiles from `begin` to `end` from nothing: (out.T not yet divided, maximum, sum, tiles so far).

    Every row sees the keys before `always_visible`, and row i those before ``visible[i]``.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS // (WARPS // 4), 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    keys, ropes, chunks, q_chunks, q_rope, p = memory[0], memory[1], memory[2], memory[7], memory[4], memory[5]
    full, empty = bars[0], bars[1]
    high = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
    totals = gl.zeros([64, ROWS], gl.float32, SCORES)
    acc = gl.zeros([512, ROWS], gl.float32, OUT)
    for tile in range(begin, end):
        stage = count % 2
        mbarrier.wait(full.index(stage), count // 2 & 1)
        # Three sums that are added in float32: matrix units cut what they add to a running sum.
        first = gl.zeros([64, ROWS], gl.float32, SCORES)
        second = gl.zeros([64, ROWS], gl.float32, SCORES)
        third = gl.zeros([64, ROWS], gl.float32, SCORES)
        third = warpgroup_mma(ropes.index(stage), q_rope.permute((1, 0)), third, use_acc=False, is_async=True)
        for i in gl.static_range(3):
            first = warpgroup_mma(
                chunks.index(stage * 8 + i), q_chunks.index(i).permute((1, 0)), first, use_acc=i > 0, is_async=True
            )
            second = warpgroup_mma(
                chunks.index(stage * 8 + 3 + i), q_chunks.index(3 + i).permute((1, 0)), second, use_acc=i > 0, is_async=True
            )
            if i < 2:
                third = warpgroup_mma(
                    chunks.index(stage * 8 + 6 + i), q_chunks.index(6 + i).permute((1, 0)), third, is_async=True
                )
        first, second, third = warpgroup_mma_wait(0, deps=[first, second, third])
        scores = ((first + second) + third) * scale_log2
        if tile * 64 + 64 > always_visible:
            position = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
            scores = gl.where(position[:, None] < visible[None, :], scores, float("-inf"))
        if tile * 64 + 64 > num_keys:
            # What does not exist must be 0 as a value: a weight of 0 would not silence a NaN.
            exists = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, COLUMNS)) < num_keys
            for column in range(8):
                chunk = chunks.index(stage * 8 + column)
                chunk.store(gl.where(exists[:, None], chunk.load(COLUMNS), 0.0).to(chunk.dtype))
            fence_async_shared()
            barrier()
        new_high = gl.maximum(high, gl.max(scores, 0))
        shift = gl.where(new_high == float("-inf"), 0.0, new_high)
        kept = gl.exp2(high - shift)
        weight = gl.exp2(scores - shift[None, :])
        totals = totals * kept[None, :] + weight
        p.permute((1, 0)).store(weight.to(p.dtype))
        fence_async_shared()
        high = new_high
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(0, OUT))[None, :]
        acc = warpgroup_mma(keys.index(stage).permute((1, 0)), p.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))
        count += 1
    return acc, high, gl.sum(totals, 0), count


@gluon.jit
def _join(acc, high, total, part, part_high, part_total, OUT: gl.constexpr, ROWS: gl.constexpr):
    """What has been summed, joined with a part behind it."""
    high, first, second = weights(high, part_high)
    total = gl.fma(part_total, second, total * first)
    first = gl.convert_layout(first, gl.SliceLayout(0, OUT))[None, :]
    second = gl.convert_layout(second, gl.SliceLayout(0, OUT))[None, :].broadcast_to([512, ROWS])
    return gl.fma(part, second, acc * first), high, total


@gluon.jit
def _store_state(out, stat, acc, high, total, SCORES: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr):
    """Rows of 512 numbers at `out`; maxima and then sums at `stat`."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    column = gl.arange(0, 512, gl.SliceLayout(1, OUT))
    gl.store(out + row[None, :] * 512 + column[:, None], acc)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    gl.store(stat + row, high)
    gl.store(stat + ROWS + row, total)


@gluon.jit
def _load_state(out, stat, SCORES: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr):
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    column = gl.arange(0, 512, gl.SliceLayout(1, OUT))
    acc = gl.load(out + row[None, :] * 512 + column[:, None], cache_modifier=".cg")
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    return acc, gl.load(stat + row, cache_modifier=".cg"), gl.load(stat + ROWS + row, cache_modifier=".cg")


@gluon.jit
def _store_result(out, lse, acc, high, total, num_rows, SCORES: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr):
    """Divide and store the rows of a sequence; 0 and -inf for those that have seen no key."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    column = gl.arange(0, 512, gl.SliceLayout(1, OUT))
    divisor = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(0, OUT))
    result = (acc / divisor[None, :]).to(out.dtype.element_ty)
    gl.store(out + row[None, :] * 512 + column[:, None], result, mask=(row < num_rows)[None, :])
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    gl.store(lse + row, (high + gl.log2(total)) * 0.6931471805599453, mask=row < num_rows)


@gluon.jit
def _attend(
    q, query_start_loc, plan, out, lse, part_out, part_stat, hand_out, hand_stat, flags, memory, bars,
    num_groups, num_seqs, scale_log2,
    NUM_HEADS: gl.constexpr, PIECE: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BALANCED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Attend this program's share: results of the sequences that it has alone, parts of the others."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS // (WARPS // 4), 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    LATENT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    program = gl.program_id(0)
    q_latent, q_rope, joined = memory[3], memory[4], memory[6]
    lens, first_slots, _, _ = plan_of_seqs(plan, num_groups, num_seqs)
    share, apart = _share(plan, num_groups, num_seqs, PIECE, GROUP, BALANCED)
    count = 0
    for stage in range(1 if BALANCED else 0, 2 if BALANCED else 3):
        first_seq, first_tile, last_seq, end_tile = stretch(stage, share)
        for seq in range(first_seq, last_seq + 1):
            num_keys = gl.load(lens + seq)
            num_tiles = (num_keys + 63) // 64
            begin = gl.where(seq == first_seq, first_tile, 0)
            end = gl.where(seq == last_seq, end_tile, num_tiles)
            if end > begin:
                first_token = gl.load(query_start_loc + seq)
                query_len = gl.load(query_start_loc + seq + 1) - first_token
                num_rows = query_len * NUM_HEADS
                first_row = first_token.to(gl.int64) * NUM_HEADS
                row = gl.arange(0, ROWS, gl.SliceLayout(1, LATENT))
                column = gl.arange(0, 512, gl.SliceLayout(0, LATENT))
                at = q + first_row * 576 + row[:, None] * 576 + column[None, :]
                q_latent.store(gl.load(at, mask=(row < num_rows)[:, None], other=0.0))
                row = gl.arange(0, ROWS, gl.SliceLayout(1, ROPE))
                column = gl.arange(0, 64, gl.SliceLayout(0, ROPE))
                at = q + first_row * 576 + 512 + row[:, None] * 576 + column[None, :]
                q_rope.store(gl.load(at, mask=(row < num_rows)[:, None], other=0.0))
                fence_async_shared()
                barrier()
                always_visible = num_keys - query_len + 1
                visible = always_visible + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES)) // NUM_HEADS
                visible = gl.minimum(visible, num_keys)
                is_whole = (begin == 0) & (end == num_tiles)
                out_rows = out + first_row * 512
                lse_rows = lse + first_row
                if BALANCED:
                    acc, high, total, count = _attend_tiles(
                        memory, bars, count, begin, end, num_keys, visible, always_visible, scale_log2, ROWS, WARPS
                    )
                    if is_whole:
                        _store_result(out_rows, lse_rows, acc, high, total, num_rows, SCORES, OUT, ROWS)
                    else:
                        slot = program * 2 + gl.where(seq == first_seq, 0, 1)
                        _store_state(
                            part_out + slot * (ROWS * 512), part_stat + slot * (ROWS * 2), acc, high, total, SCORES, OUT, ROWS
                        )
                else:
                    num_pieces = (num_tiles + PIECE - 1) // PIECE
                    is_one_group = num_pieces <= GROUP
                    first_slot = gl.load(first_slots + seq).to(gl.int64)
                    joins = is_whole | (apart == 0)
                    first_piece = begin // PIECE
                    end_piece = (end + PIECE - 1) // PIECE
                    group_high = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
                    group_total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, SCORES))
                    group_acc = gl.zeros([512, ROWS], gl.float32, OUT)
                    seq_high = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
                    seq_total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, SCORES))
                    if joins & (first_piece % GROUP != 0):
                        await_state(flags + program - 1)
                        group_acc, group_high, group_total = _load_state(
                            hand_out + (program - 1) * (ROWS * 512), hand_stat + (program - 1) * (ROWS * 2), SCORES, OUT, ROWS
                        )
                    for piece in range(first_piece, end_piece):
                        acc, high, total, count = _attend_tiles(
                            memory, bars, count, piece * PIECE, gl.minimum(piece * PIECE + PIECE, end),
                            num_keys, visible, always_visible, scale_log2, ROWS, WARPS,
                        )  # fmt: skip
                        if joins:
                            group_acc, group_high, group_total = _join(
                                group_acc, group_high, group_total, acc, high, total, OUT, ROWS
                            )
                            if (piece % GROUP == GROUP - 1) | (piece == num_pieces - 1):
                                is_last = is_one_group
                                if is_whole & (is_one_group == 0):
                                    seq_acc = gl.zeros([512, ROWS], gl.float32, OUT)
                                    if piece >= GROUP:
                                        seq_acc = joined.load(OUT)
                                    seq_acc, seq_high, seq_total = _join(
                                        seq_acc, seq_high, seq_total, group_acc, group_high, group_total, OUT, ROWS
                                    )
                                    if piece == num_pieces - 1:
                                        is_last = is_last | True
                                        group_acc = seq_acc
                                        group_high = seq_high
                                        group_total = seq_total
                                    else:
                                        joined.store(seq_acc)
                                if is_last:
                                    _store_result(
                                        out_rows, lse_rows, group_acc, group_high, group_total, num_rows, SCORES, OUT, ROWS
                                    )
                                elif is_whole == 0:
                                    slot = first_slot + piece // GROUP
                                    _store_state(
                                        part_out + slot * (ROWS * 512), part_stat + slot * (ROWS * 2),
                                        group_acc, group_high, group_total, SCORES, OUT, ROWS,
                                    )  # fmt: skip
                                group_high = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
                                group_total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, SCORES))
                                group_acc = gl.zeros([512, ROWS], gl.float32, OUT)
                            elif piece == end_piece - 1:
                                _store_state(
                                    hand_out + program * (ROWS * 512), hand_stat + program * (ROWS * 2),
                                    group_acc, group_high, group_total, SCORES, OUT, ROWS,
                                )  # fmt: skip
                                hand_over(flags + program)
                        else:
                            slot = first_slot + piece
                            _store_state(
                                part_out + slot * (ROWS * 512), part_stat + slot * (ROWS * 2),
                                acc, high, total, SCORES, OUT, ROWS,
                            )  # fmt: skip


@gluon.jit(
    do_not_specialize=["table_stride", "num_groups", "num_seqs"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc"],
)
def attend_few(
    q, latent, rope, latent_cache, block_table, query_start_loc, plan, out, lse,
    part_out, part_stat, hand_out, hand_stat, flags, table_stride, num_groups, num_seqs, scale_log2,
    NUM_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PIECE: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    BALANCED: gl.constexpr, LOAD_REGS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend the share of this program, one of `num_groups`, as `plan` has it.

    Rows of a sequence are its new tokens times the heads, at most ROWS. `latent` and `rope` describe the cache as boxes of 64
    rows by 512 and 64 columns: used where blocks hold a multiple of 64 rows. Others are read from `latent_cache` row by row.
    """
    let_join_begin()
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = latent.dtype
    chunks = gl.allocate_shared_memory(dtype, [16, 64, 64], SWIZZLED)
    keys = view_as(chunks, [2, 64, 512], SWIZZLED)
    ropes = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED)
    q_chunks = gl.allocate_shared_memory(dtype, [8, ROWS, 64], SWIZZLED)
    q_latent = view_as(q_chunks, [ROWS, 512], SWIZZLED)
    q_rope = gl.allocate_shared_memory(dtype, [ROWS, 64], SWIZZLED)
    p = gl.allocate_shared_memory(dtype, [ROWS, 64], SWIZZLED)
    joined = gl.allocate_shared_memory(gl.float32, [512, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    memory = (keys, ropes, chunks, q_latent, q_rope, p, joined, q_chunks)
    bars = (full, empty)
    LOAD_WARPS: gl.constexpr = 1 if BLOCK_SIZE % 64 == 0 else 4
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q, query_start_loc, plan, out, lse, part_out, part_stat, hand_out, hand_stat, flags, memory, bars,
                    num_groups, num_seqs, scale_log2, NUM_HEADS, PIECE, GROUP, ROWS, BALANCED, num_warps,
                ),
            ),
            (
                _produce,
                (
                    latent, rope, latent_cache, block_table, plan, memory, bars, table_stride, num_groups, num_seqs,
                    BLOCK_SIZE, PIECE, GROUP, BALANCED,
                ),
            ),
        ],
        [LOAD_WARPS],
        [LOAD_REGS],
    )  # fmt: skip
