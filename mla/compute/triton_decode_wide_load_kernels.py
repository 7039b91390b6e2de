"""The loading half of the decode kernel for many heads on Hopper: queries and tiles, in the order in which they are attended.

Where blocks hold a multiple of 8 rows they come by the copy engine, in boxes of 64 columns by as many of 64 rows as lie within
one block for certain; rows of other blocks are fetched one by one. Every quarter has a barrier of its own that says that it is
there, and every two have one that says that they may be overwritten.

Asking for a tile earlier, by having it brought into the second-level cache while the one before is attended, costs 3 to 5 %.

Importing this module imports Triton; `mla.compute.triton_hopper` does so when it launches.
"""

from __future__ import annotations

from triton.experimental import gluon  # noqa: TID253  (this module is imported inside the launching function only)
from triton.experimental.gluon import language as gl  # noqa: TID253
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier  # noqa: TID253

from mla.compute.triton_share_kernels import load_box, load_rows, plan_of_seqs, view_as

__all__ = ["SHARED", "TILE", "load_all", "piece_in", "pieces_of", "seq_at", "seq_in", "share_of"]

TILE = gl.constexpr(128)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))
"""Of everything that the tensor cores read: chunks of 64 columns one after the other."""

GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
GATHER_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def share_of(plan, group):
    """A group's share of the tiles: (first_seq, first_tile, last_seq, end_tile).

    It is walked backwards, sequence by sequence and piece by piece, the tiles of a piece in their order. So a piece that the
    share's end cuts off comes first, and its state is there before the next group wants it; what the share's start has cut off
    comes last; and queries are loaded once a sequence. BALANCED shares have no such pieces: forwards they are 0.5 % faster.
    """
    at = plan + group * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def seq_at(i, share, PIECES: gl.constexpr):
    """The i-th sequence of a share."""
    return share[0] + i if PIECES[3] else share[2] - i


@gluon.jit
def seq_in(seq, share, lens, query_start_loc, row, NUM_HEADS: gl.constexpr):
    """A sequence's keys, its first row, its rows, and the tiles of it that are in a share: none where it has no row `row`."""
    num_keys = gl.load(lens + seq)
    first = gl.load(query_start_loc + seq)
    num_rows = (gl.load(query_start_loc + seq + 1) - first) * NUM_HEADS
    start = gl.where(seq == share[0], share[1], 0)
    end = gl.where(seq == share[2], share[3], (num_keys + TILE - 1) // TILE)
    return num_keys, first * NUM_HEADS, num_rows, start, gl.where(row < num_rows, end, start)


@gluon.jit
def pieces_of(num_keys, start, end, PIECES: gl.constexpr):
    """Tiles of a piece, by the sequence's own length; the first piece of tiles `start` to `end`, and the one behind the last.

    `PIECES` is (SHORT_PIECE, LONG_SEQ, LONG_PIECE, BALANCED), where all of a sequence is one piece.
    """
    unit = gl.where(num_keys > PIECES[1], PIECES[2], PIECES[0])
    first = start // unit
    last = (end + unit - 1) // unit
    if PIECES[3]:
        unit = (num_keys + TILE - 1) // TILE
        first = gl.to_tensor(0)
        last = gl.to_tensor(1)
    return unit, first, last


@gluon.jit
def piece_in(piece, unit, start, end):
    """The tiles of a piece that are between `start` and `end`."""
    return gl.maximum(start, piece * unit), gl.minimum(end, piece * unit + unit)


@gluon.jit
def _load_queries(q, row, memory, bars, loaded):
    """Load a sequence's 64 rows of queries when both groups are through with those of the sequence before."""
    queries, query_rope, q_full, q_empty = memory[0], memory[1], bars[2], bars[3]
    mbarrier.wait(q_empty, (loaded & 1) ^ 1)
    mbarrier.expect(q_full, 64 * 576 * 2)
    chunks = view_as(queries, [8, 64, 64], SHARED)
    for i in gl.static_range(8):
        load_box(q, [row, i * 64], q_full, chunks.index(i))
    load_box(q, [row, 512], q_full, query_rope)


@gluon.jit
def _row_of(table, key, BLOCK_SIZE: gl.constexpr):
    """Where keys lie in the cache, in rows."""
    return gl.load(table + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE


@gluon.jit
def _load_half(kv, table, key, last, memory, bars, phase, HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Load 64 keys, as many in a box as lie within one block for certain.

    A box behind the last key is that of the last key: any block does, its rows are zeroed.
    """
    keys, rope, full, empty = memory[2], memory[3 + HALF], bars[0], bars[1]
    HIGH: gl.constexpr = kv.block_shape[0]
    BOXES: gl.constexpr = 64 // HIGH
    chunks = view_as(keys, [16 * BOXES, HIGH, 64], SHARED)
    ropes = view_as(rope, [BOXES, HIGH, 64], SHARED)
    rows = ()
    for j in gl.static_range(BOXES):
        rows = rows + (_row_of(table, gl.minimum(key + j * HIGH, last // HIGH * HIGH), BLOCK_SIZE),)
    for i in gl.static_range(HALF * 4, HALF * 4 + 4):
        if i % 2 == 0:
            mbarrier.wait(empty.index(i // 2), phase)
        mbarrier.expect(full.index(i), 64 * (192 if i == 3 + HALF * 2 else 128) * 2)
        for j in gl.static_range(BOXES):
            load_box(kv, [rows[j], i % 4 * 128], full.index(i), chunks.index(2 * i * BOXES + j))
            load_box(kv, [rows[j], i % 4 * 128 + 64], full.index(i), chunks.index((2 * i + 1) * BOXES + j))
            if i == 3 + HALF * 2:
                load_box(kv, [rows[j], 512], full.index(i), ropes.index(j))


@gluon.jit
def _rows_of_half(table, key, last, BLOCK_SIZE: gl.constexpr):
    """Where 64 keys from `key` on lie, as threads need them for columns of values and of RoPE; those behind the last are it."""
    keys = gl.minimum(key + gl.arange(0, 64, gl.SliceLayout(1, GATHER)), last)
    rope_keys = gl.minimum(key + gl.arange(0, 64, gl.SliceLayout(1, GATHER_ROPE)), last)
    return _row_of(table, keys, BLOCK_SIZE), _row_of(table, rope_keys, BLOCK_SIZE)


@gluon.jit
def _gather_half(latent_cache, rows, memory, bars, phase, HALF: gl.constexpr):
    """Fetch 64 keys row by row. The barrier of a quarter completes when the copies of all threads have landed."""
    keys, rope, full, empty = memory[2], memory[3 + HALF], bars[0], bars[1]
    of_values = latent_cache + rows[0].to(gl.int64)[:, None] * 576
    columns = gl.arange(0, 128, gl.SliceLayout(0, GATHER))[None, :]
    for i in gl.static_range(HALF * 4, HALF * 4 + 4):
        if i % 2 == 0:
            mbarrier.wait(empty.index(i // 2), phase)
        load_rows(keys.index(i), of_values + (i % 4 * 128 + columns))
        if i == 3 + HALF * 2:
            rope_columns = gl.arange(0, 64, gl.SliceLayout(0, GATHER_ROPE))[None, :]
            load_rows(rope, latent_cache + rows[1].to(gl.int64)[:, None] * 576 + (512 + rope_columns))
        async_copy.mbarrier_arrive(full.index(i), increment_count=False)


@gluon.jit
def load_all(
    q, kv, latent_cache, block_table, table_stride, query_start_loc, plan, sizes, memory, bars,
    NUM_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PIECES: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """Load queries and tiles in the order in which they are attended."""
    lens = plan_of_seqs(plan, sizes[0], sizes[1])[0]
    row = gl.program_id(0) % sizes[2] * 64
    share = share_of(plan, gl.program_id(0) // sizes[2])
    phase = 1
    loaded = 0
    for i in range(share[2] - share[0] + 1):
        seq = seq_at(i, share, PIECES)
        num_keys, first_row, _rows, start, end = seq_in(seq, share, lens, query_start_loc, row, NUM_HEADS)
        table = block_table + seq.to(gl.int64) * table_stride
        if start < end:
            _load_queries(q, first_row + row, memory, bars, loaded)
            loaded += 1
            last = num_keys - 1
            unit, first_piece, end_piece = pieces_of(num_keys, start, end, PIECES)
            for j in range(end_piece - first_piece):
                first_tile, end_tile = piece_in(end_piece - 1 - j, unit, start, end)
                rows = ()
                if GATHERED:
                    rows = _rows_of_half(table, first_tile * TILE, last, BLOCK_SIZE)
                for tile in range(first_tile, end_tile):
                    if GATHERED:
                        # The block table is asked half a tile ahead.
                        second = _rows_of_half(table, tile * TILE + 64, last, BLOCK_SIZE)
                        _gather_half(latent_cache, rows, memory, bars, phase, 0)
                        rows = _rows_of_half(table, tile * TILE + 128, last, BLOCK_SIZE)
                        _gather_half(latent_cache, second, memory, bars, phase, 1)
                    else:
                        _load_half(kv, table, tile * TILE, last, memory, bars, phase, 0, BLOCK_SIZE)
                        _load_half(kv, table, tile * TILE + 64, last, memory, bars, phase, 1, BLOCK_SIZE)
                    phase ^= 1
