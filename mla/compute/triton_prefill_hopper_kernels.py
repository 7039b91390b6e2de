"""The kernel of prefill for Hopper, in Gluon: keys of 128 + 64 numbers and values of 128, in 16-bit floats.

A program stays on its multiprocessor and takes blocks of 128 queries of a head, its items, from a counter. One warp loads tiles
of 128 keys and of their values into two buffers each; two groups of four warps attend them, 64 queries a group. While a group
takes the exponentials of one tile, its tensor cores add up the values of the tile before. What an item computes does not depend
on who takes it, or when.

Importing this module imports Triton; `mla.compute.triton_prefill` does so when it launches.
"""

from __future__ import annotations

from triton.experimental import gluon  # noqa: TID253  (this module is imported inside the launching function only)
from triton.experimental.gluon import language as gl  # noqa: TID253
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: TID253
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["hopper_varlen_kernel"]

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name up to Triton 3.6


@gluon.jit
def _zero():
    """A 0 that the compiler cannot see through: addresses made of it are computed where they are used, not kept."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take(item, item_full, item_empty, taken):
    """The next item that the loading warp has published; -1 after the last."""
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(item_full, taken & 1)
    number = gl.max(item.load(ALONE), 0)
    mbarrier.arrive(item_empty)
    return number


@gluon.jit
def _publish(item, item_full, item_empty, published, number):
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(item_empty, (published & 1) ^ 1)
    item.store(gl.full([1], number, gl.int32, ALONE))
    mbarrier.arrive(item_full)


@gluon.jit
def _unpack(item, query_start_loc, kv_start_loc, shape, CAUSAL: gl.constexpr):
    """Where an item's queries and keys lie, and the keys that it attends: all of `full`, some of those up to `end`."""
    num_seqs, num_blocks, num_heads, group_size = shape[1], shape[2], shape[3], shape[4]
    seq = item // (num_blocks * num_heads)
    rest = item % (num_blocks * num_heads)
    group = rest // (num_blocks * group_size)
    # The last group may be smaller: its blocks follow one another more closely.
    size = gl.minimum(group_size, num_heads - group * group_size)
    rest = rest % (num_blocks * group_size)
    block = num_blocks - 1 - rest // size
    head = group * group_size + rest % size
    first = gl.load(query_start_loc + seq)
    m = block * 128
    num_queries = 0
    first_key = 0
    num_keys = 0
    if seq < num_seqs:
        num_queries = gl.load(query_start_loc + seq + 1) - first
        first_key = gl.load(kv_start_loc + seq)
        num_keys = gl.load(kv_start_loc + seq + 1) - first_key
    end = num_keys
    full = num_keys
    if CAUSAL:
        full = gl.maximum(gl.minimum(num_keys - num_queries + 1 + m, num_keys), 0)
        end = gl.maximum(gl.minimum(num_keys - num_queries + m + 128, num_keys), 0)
    end = gl.where(m < num_queries, end, 0)
    return seq, head, first, m, num_queries, first_key, num_keys, full // 128, (end + 127) // 128


@gluon.jit
def _produce(q, k, v, counter, query_start_loc, kv_start_loc, shape, columns, memory, bars, CAUSAL: gl.constexpr):
    """Take items as they come, publish them, and load their queries and then their tiles, from the last to the first."""
    queries, keys, values, number = memory[0], memory[1], memory[2], memory[3]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars[0], bars[1], bars[2], bars[3], bars[4], bars[5]
    item_full, item_empty, tail = bars[6], bars[7], bars[8]
    num_tokens, num_seqs, num_blocks, num_heads = shape[0], shape[1], shape[2], shape[3]
    TAIL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    num_items = (num_seqs + 1) * num_blocks * num_heads
    published = 0
    attended = 0
    count = 0
    tails = 0
    item = gl.atomic_add(counter, 1)
    while item < num_items:
        seq, head, first, m, num_queries, first_key, num_keys, _, num_tiles = _unpack(
            item, query_start_loc, kv_start_loc, shape, CAUSAL
        )
        if gl.where(seq == num_seqs, first + m < num_tokens, m < num_queries):
            _publish(number, item_full, item_empty, published, item)
            published += 1
            if num_tiles > 0:
                mbarrier.wait(q_empty, (attended & 1) ^ 1)
                attended += 1
                mbarrier.expect(q_full, 128 * 192 * 2)
                for i in gl.static_range(6):
                    at = [first + m + i // 3 * 64, head * columns[0] + i % 3 * 64]
                    load_tile(q, at, q_full, queries.index(i))
                for i in range(num_tiles):
                    n = (num_tiles - 1 - i) * 128
                    stage = count % 2
                    phase = (count // 2 & 1) ^ 1
                    count += 1
                    mbarrier.wait(k_empty.index(stage), phase)
                    mbarrier.expect(k_full.index(stage), 128 * 192 * 2)
                    for j in gl.static_range(3):
                        at = [first_key + n, head * columns[1] + j * 64]
                        load_tile(k, at, k_full.index(stage), keys.index(stage * 3 + j))
                    mbarrier.wait(v_empty.index(stage), phase)
                    left = num_keys - n
                    at = [first_key + n, head * columns[2]]
                    if left < 128:
                        # Rows behind the last key may hold NaN, which a weight of 0 does not undo.
                        mbarrier.expect(tail, 128 * 128 * 2)
                        load_tile(v, at, tail, values.index(stage))
                        mbarrier.wait(tail, tails & 1)
                        tails += 1
                        rows = gl.arange(0, 8, gl.SliceLayout(1, TAIL))
                        for r in gl.static_range(16):
                            if left < r * 8 + 8:
                                part = values.index(stage).slice(r * 8, 8, 0)
                                part.store(gl.where((rows + r * 8 < left)[:, None], part.load(TAIL), 0.0))
                        fence_async_shared()
                        mbarrier.arrive(v_full.index(stage))
                    else:
                        mbarrier.expect(v_full.index(stage), 128 * 128 * 2)
                        load_tile(v, at, v_full.index(stage), values.index(stage))
        item = gl.atomic_add(counter, 1)
    _publish(number, item_full, item_empty, published, -1)


@gluon.jit
def _scores(queries, keys, k_full, count, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin the products of this half's queries with a tile of keys, 64 columns at a time."""
    stage = count % 2
    zero = _zero()
    mbarrier.wait(k_full.index(stage), count // 2 & 1)
    scores = gl.zeros([64, 128], gl.float32, LAYOUT)
    for j in gl.static_range(3):
        tile = keys.index(stage * 3 + j).permute((1, 0))
        scores = warpgroup_mma(queries.index(zero + HALF * 3 + j), tile, scores, use_acc=j > 0, is_async=True)
    return scores


@gluon.jit
def _softmax(scores, high, visible, n, scale_log2, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of a tile under the new maximum, and what that leaves of sums under the old one."""
    if MASKED:
        keys = n + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(keys[None, :] < visible[:, None], scores, -float("inf"))
    new_high = gl.maximum(high, gl.max(scores, 1) * scale_log2)
    shift = new_high
    if MASKED:  # rows that have seen no key: exp2(-inf - -inf) would be NaN
        shift = gl.where(new_high == -float("inf"), 0.0, new_high)
    return gl.exp2(scores * scale_log2 - shift[:, None]), gl.exp2(high - shift), new_high


@gluon.jit
def _step(
    acc, high, total, weights, memory, bars, count, visible, n, scale_log2,
    HALF: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """The scores and weights of tile `count`, while the values of the tile before are added up."""
    queries, keys, values = memory[0], memory[1], memory[2]
    k_full, k_empty, v_full, v_empty = bars[2], bars[3], bars[4], bars[5]
    scores = _scores(queries, keys, k_full, count, HALF, LAYOUT)
    before = (count - 1) % 2
    mbarrier.wait(v_full.index(before), (count - 1) // 2 & 1)
    acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(count % 2))
    raw, kept, high = _softmax(scores, high, visible, n, scale_log2, MASKED, LAYOUT)
    total = total * kept + gl.sum(raw, 1)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * kept[:, None]
    weights = gl.convert_layout(raw.to(values.dtype), OPERAND)
    return acc, high, total, weights


@gluon.jit
def _consume(
    out, lse, query_start_loc, kv_start_loc, shape, scale_log2, memory, bars,
    HALF: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attend half of every item's queries."""
    queries, keys, values, number = memory[0], memory[1], memory[2], memory[3]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars[0], bars[1], bars[2], bars[3], bars[4], bars[5]
    item_full, item_empty = bars[6], bars[7]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    rows = HALF * 64 + gl.arange(0, 64, ROWS)
    columns = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    num_tokens, num_seqs, num_blocks, num_heads = shape[0], shape[1], shape[2], shape[3]
    taken = 0
    attended = 0
    count = 0
    item = _take(number, item_full, item_empty, taken)
    while item >= 0:
        taken += 1
        seq, head, first, m, num_queries, _, num_keys, full_tiles, num_tiles = _unpack(
            item, query_start_loc, kv_start_loc, shape, CAUSAL
        )
        acc = gl.zeros([64, 128], gl.float32, LAYOUT)
        high = gl.full([64], -float("inf"), gl.float32, ROWS)
        total = gl.zeros([64], gl.float32, ROWS)
        if num_tiles > 0:
            visible = gl.minimum(num_keys - num_queries + 1 + m + rows, num_keys) if CAUSAL else num_keys + rows * 0
            mbarrier.wait(q_full, attended & 1)
            attended += 1
            scores = _scores(queries, keys, k_full, count, HALF, LAYOUT)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(count % 2))
            raw, _, high = _softmax(scores, high, visible, num_tiles * 128 - 128, scale_log2, True, LAYOUT)
            total = gl.sum(raw, 1)
            weights = gl.convert_layout(raw.to(values.dtype), OPERAND)
            count += 1
            masked = gl.maximum(num_tiles - 1 - full_tiles, 0)
            for i in range(masked):
                acc, high, total, weights = _step(
                    acc, high, total, weights, memory, bars, count, visible, (num_tiles - 2 - i) * 128, scale_log2,
                    HALF, True, LAYOUT, OPERAND,
                )  # fmt: skip
                count += 1
            for _ in range(num_tiles - 1 - masked):
                acc, high, total, weights = _step(
                    acc, high, total, weights, memory, bars, count, visible, 0, scale_log2, HALF, False, LAYOUT, OPERAND
                )
                count += 1
            mbarrier.arrive(q_empty)
            before = (count - 1) % 2
            mbarrier.wait(v_full.index(before), (count - 1) // 2 & 1)
            acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(before))
        acc = acc / gl.where(total == 0.0, 1.0, total)[:, None]
        high = high * 0.6931471805599453 + gl.log(total)
        # A block of a sequence is stored once; the rows behind the last sequence are shared by the blocks of its place.
        last = gl.where(seq == num_seqs, num_tokens, first + num_queries)
        for start in range(first + m, last, num_blocks * 128):
            at = (start + rows).to(gl.int64) * num_heads + head
            inside = start + rows < last
            gl.store(out + at[:, None] * 128 + columns[None, :], acc.to(values.dtype), mask=inside[:, None])
            gl.store(lse + at, high, mask=inside)
        item = _take(number, item_full, item_empty, taken)


@gluon.jit
def _barriers(count: gl.constexpr, number: gl.constexpr):
    """`number` barriers that complete when `count` have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


UNSPECIAL = ["num_tokens", "num_seqs", "num_blocks", "num_heads", "group_size", "q_head", "k_head", "v_head"]


@gluon.jit(do_not_specialize=UNSPECIAL, do_not_specialize_on_alignment=["counter", "query_start_loc", "kv_start_loc"])
def hopper_varlen_kernel(
    q, k, v, out, lse, counter, query_start_loc, kv_start_loc,
    num_tokens, num_seqs, num_blocks, num_heads, group_size, q_head, k_head, v_head, scale_log2,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attention over ragged batches; see the head of this file.

    `q`, `k` and `v` are descriptors of matrices with a token a row, of tiles of 64 x 64, 128 x 64 and 128 x 128; head h of them
    begins at column ``h * q_head`` and so on. `counter` holds 0.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    memory = (
        gl.allocate_shared_memory(dtype, [2 * 3, 64, 64], LAYOUT),
        gl.allocate_shared_memory(dtype, [2 * 3, 128, 64], LAYOUT),
        gl.allocate_shared_memory(dtype, [2, 128, 128], LAYOUT),
        gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    single = _barriers(1, 3)
    double = _barriers(2, 2)
    k_full, v_full = _barriers(1, 2), _barriers(1, 2)
    k_empty, v_empty = _barriers(2, 2), _barriers(2, 2)
    fence_async_shared()
    bars = (
        single.index(0), double.index(0), k_full, k_empty, v_full, v_empty, single.index(1), double.index(1), single.index(2),
    )  # fmt: skip
    shape = (num_tokens, num_seqs, num_blocks, num_heads, group_size)
    columns = (q_head, k_head, v_head)
    gl.warp_specialize(
        [
            (_consume, (out, lse, query_start_loc, kv_start_loc, shape, scale_log2, memory, bars, 0, CAUSAL)),
            (_consume, (out, lse, query_start_loc, kv_start_loc, shape, scale_log2, memory, bars, 1, CAUSAL)),
            (_produce, (q, k, v, counter, query_start_loc, kv_start_loc, shape, columns, memory, bars, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )
