"""The loading half of the decode kernel for many heads on Hopper: queries and tiles, in the order in which they are attended.

Blocks of 64 rows or a multiple come by the copy engine, nine boxes of 64 columns for each half of a tile; rows of other blocks
are fetched one by one. Every quarter has a barrier of its own that says that it is there, and every two have one that says that
they may be overwritten.

Importing this module imports Triton; `mla.compute.triton_hopper` does so when it launches.
"""

from __future__ import annotations

from triton.experimental import gluon  # noqa: TID253  (this module is imported inside the launching function only)
from triton.experimental.gluon import language as gl  # noqa: TID253
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier  # noqa: TID253

from mla.compute.triton_share_kernels import load_box, load_rows, plan_of_seqs, read_share, stretch, view_as

__all__ = ["SHARED", "TILE", "load_all", "seq_in", "share_of", "unit_of"]

TILE = gl.constexpr(128)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16))
"""Of everything that the tensor cores read: chunks of 64 columns one after the other."""

GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
GATHER_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def unit_of(num_keys, PIECES: gl.constexpr):
    """Tiles of a piece, by the sequence's own length; `PIECES` is (SHORT_PIECE, LONG_SEQ, LONG_PIECE, BALANCED)."""
    return gl.where(num_keys > PIECES[1], PIECES[2], PIECES[0])


@gluon.jit
def share_of(plan, lens, group, PIECES: gl.constexpr):
    """The share of a group, as `mla.compute.triton_share_kernels.read_share` has it."""
    first = unit_of(gl.load(lens + gl.load(plan + group * 4)), PIECES)
    last = unit_of(gl.load(lens + gl.load(plan + group * 4 + 2)), PIECES)
    return read_share(plan, lens, group, (first, last), TILE, PIECES[3])


@gluon.jit
def seq_in(seq, run, lens, query_start_loc, row, NUM_HEADS: gl.constexpr):
    """A sequence's keys, its first row, its rows, and the tiles of it that are in `run`: none where it has no row `row`."""
    num_keys = gl.load(lens + seq)
    first = gl.load(query_start_loc + seq)
    num_rows = (gl.load(query_start_loc + seq + 1) - first) * NUM_HEADS
    start = gl.where(seq == run[0], run[1], 0)
    end = gl.where(seq == run[2], run[3], (num_keys + TILE - 1) // TILE)
    return num_keys, first * NUM_HEADS, num_rows, start, gl.where(row < num_rows, end, start)


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
def _load_half(kv, table, key, memory, bars, phase, HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Load 64 keys that lie within one block."""
    keys, rope, full, empty = memory[2], memory[3 + HALF], bars[0], bars[1]
    chunks = view_as(keys, [16, 64, 64], SHARED)
    row = gl.load(table + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
    for i in gl.static_range(HALF * 4, HALF * 4 + 4):
        if i % 2 == 0:
            mbarrier.wait(empty.index(i // 2), phase)
        mbarrier.expect(full.index(i), 64 * (192 if i == 3 + HALF * 2 else 128) * 2)
        load_box(kv, [row, i % 4 * 128], full.index(i), chunks.index(2 * i))
        load_box(kv, [row, i % 4 * 128 + 64], full.index(i), chunks.index(2 * i + 1))
        if i == 3 + HALF * 2:
            load_box(kv, [row, 512], full.index(i), rope)


@gluon.jit
def _pointers(latent_cache, table, key, last, BLOCK_SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the rows of 64 keys from `key` on begin; keys behind the last are the last."""
    keys = gl.minimum(key + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), last)
    rows = gl.load(table + keys // BLOCK_SIZE) * BLOCK_SIZE + keys % BLOCK_SIZE
    return latent_cache + rows.to(gl.int64) * 576


@gluon.jit
def _gather_half(latent_cache, table, key, last, memory, bars, phase, HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Fetch 64 keys row by row. The barrier of a quarter completes when the copies of all threads have landed."""
    keys, rope, full, empty = memory[2], memory[3 + HALF], bars[0], bars[1]
    rows = _pointers(latent_cache, table, key, last, BLOCK_SIZE, GATHER)[:, None]
    columns = gl.arange(0, 128, gl.SliceLayout(0, GATHER))[None, :]
    for i in gl.static_range(HALF * 4, HALF * 4 + 4):
        if i % 2 == 0:
            mbarrier.wait(empty.index(i // 2), phase)
        load_rows(keys.index(i), rows + (i % 4 * 128 + columns))
        if i == 3 + HALF * 2:
            rope_rows = _pointers(latent_cache, table, key, last, BLOCK_SIZE, GATHER_ROPE)[:, None]
            rope_columns = gl.arange(0, 64, gl.SliceLayout(0, GATHER_ROPE))[None, :]
            load_rows(rope, rope_rows + (512 + rope_columns))
        async_copy.mbarrier_arrive(full.index(i), increment_count=False)


@gluon.jit
def load_all(
    q, kv, latent_cache, block_table, table_stride, query_start_loc, plan, sizes, memory, bars,
    NUM_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Load queries and tiles in the order in which they are attended."""
    lens = plan_of_seqs(plan, sizes[0], sizes[1])[0]
    row = gl.program_id(0) % sizes[2] * 64
    share = share_of(plan, lens, gl.program_id(0) // sizes[2], PIECES)
    phase = 1
    loaded = 0
    for part in range(1 if PIECES[3] else 0, 2 if PIECES[3] else 3):
        run = stretch(part, share)
        for seq in range(run[0], run[2] + 1):
            num_keys, first_row, _rows, start, end = seq_in(seq, run, lens, query_start_loc, row, NUM_HEADS)
            table = block_table + seq.to(gl.int64) * table_stride
            if start < end:
                _load_queries(q, first_row + row, memory, bars, loaded)
                loaded += 1
            for tile in range(start, end):
                if BLOCK_SIZE % 64 == 0:
                    # The second half of the last tile may begin behind the last key: any block does, its rows are zeroed.
                    second = gl.minimum(tile * TILE + 64, (num_keys - 1) // 64 * 64)
                    _load_half(kv, table, tile * TILE, memory, bars, phase, 0, BLOCK_SIZE)
                    _load_half(kv, table, second, memory, bars, phase, 1, BLOCK_SIZE)
                else:
                    _gather_half(latent_cache, table, tile * TILE, num_keys - 1, memory, bars, phase, 0, BLOCK_SIZE)
                    _gather_half(latent_cache, table, tile * TILE + 64, num_keys - 1, memory, bars, phase, 1, BLOCK_SIZE)
                phase ^= 1
