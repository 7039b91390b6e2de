"""The Triton kernel of prefill: attention over ragged batches, one program per sequence, head and block of queries.

Importing this module imports Triton; `mla.compute.triton_prefill` does so when it launches.
"""

from __future__ import annotations

import triton  # noqa: TID253  (this module is imported inside the launching function only)
import triton.language as tl  # noqa: TID253

__all__ = ["varlen_kernel"]


@triton.jit
def _load_rows(
    pointer, stride, first, row, num_rows, column,
    ALL_ROWS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a sequence from `row` on and SIZE columns from `column` on, in a tile WIDTH wide filled up with 0."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = pointer + (first + row).to(tl.int64) * stride + column + rows[:, None] * stride + columns[None, :]
    if ALL_ROWS and SIZE == WIDTH:
        tile = tl.load(at)
    elif ALL_ROWS:
        tile = tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(at, mask=(rows < num_rows - row)[:, None] & (columns < SIZE)[None, :], other=0.0)
    return tile


@triton.jit
def _attend(
    acc, high, total, q_a, q_b, k, v, k_token, v_token, first_key, num_keys, begin, end, visible, scale_log2,
    MASKED: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr, V_DIM: tl.constexpr,
    WIDTH_A: tl.constexpr, WIDTH_B: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk the keys `begin` to `end` in tiles: the usual running maximum, sum and output, in powers of 2."""
    for n in tl.range(begin, end, BLOCK_N):
        keys_a = _load_rows(k, k_token, first_key, n, num_keys, 0, not MASKED, BLOCK_N, SIZE_A, WIDTH_A)
        scores = tl.dot(q_a, keys_a.T, input_precision=PRECISION)
        if WIDTH_B > 0:
            keys_b = _load_rows(k, k_token, first_key, n, num_keys, SIZE_A, not MASKED, BLOCK_N, SIZE_B, WIDTH_B)
            scores = tl.dot(q_b, keys_b.T, scores, input_precision=PRECISION)
        positions = n + tl.arange(0, BLOCK_N)
        if MASKED:
            scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
        new_high = tl.maximum(high, tl.max(scores, 1) * scale_log2)
        # Rows that have seen no key: exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        kept = tl.exp2(high - shift)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None]
        values = _load_rows(v, v_token, first_key, n, num_keys, 0, not MASKED, BLOCK_N, V_DIM, WIDTH_V)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        high = new_high
    return acc, high, total


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_blocks", "num_heads", "group"])
def varlen_kernel(
    q, k, v, out, lse, query_start_loc, kv_start_loc,
    num_tokens, num_seqs, num_blocks, num_heads, group,
    q_token, q_head, k_token, k_head, v_token, v_head, scale_log2,
    CAUSAL: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr, V_DIM: tl.constexpr,
    WIDTH_A: tl.constexpr, WIDTH_B: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one block of queries; the programs of "sequence" `num_seqs` fill the rows behind the last sequence.

    Grid: ``(num_seqs + 1) * cdiv(num_heads, group) * num_blocks * group``. Within `group` heads, whose keys stay in the second
    cache, the blocks with most keys come first.
    """
    program = tl.program_id(0)
    head_in_group = program % group
    block = num_blocks - 1 - program // group % num_blocks
    num_groups = tl.cdiv(num_heads, group)
    head = program // (group * num_blocks) % num_groups * group + head_in_group
    seq = program // (group * num_blocks * num_groups)
    if head >= num_heads:
        return
    rows, columns_v = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH_V)
    first = tl.load(query_start_loc + seq)
    if seq == num_seqs:
        for m in tl.range(first + block * BLOCK_M, num_tokens, num_blocks * BLOCK_M):
            at = (m + rows).to(tl.int64) * num_heads + head
            inside = m + rows < num_tokens
            tl.store(
                out + at[:, None] * V_DIM + columns_v[None, :],
                tl.zeros([BLOCK_M, WIDTH_V], out.dtype.element_ty),
                mask=inside[:, None] & (columns_v < V_DIM)[None, :],
            )
            tl.store(lse + at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=inside)
        return
    num_queries = tl.load(query_start_loc + seq + 1) - first
    m = block * BLOCK_M
    if m >= num_queries:
        return
    first_key = tl.load(kv_start_loc + seq)
    num_keys = tl.load(kv_start_loc + seq + 1) - first_key

    q += head.to(tl.int64) * q_head
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    q_a = _load_rows(q, q_token, first, m, num_queries, 0, False, BLOCK_M, SIZE_A, WIDTH_A)
    q_b = q_a
    if WIDTH_B > 0:
        q_b = _load_rows(q, q_token, first, m, num_queries, SIZE_A, False, BLOCK_M, SIZE_B, WIDTH_B)

    # The last query sees the last key. Keys before `full` are seen by every row of the block.
    if CAUSAL:
        visible = num_keys - num_queries + 1 + m + rows
        full = tl.maximum(tl.minimum(num_keys - num_queries + 1 + m, num_keys), 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(num_keys, num_keys - num_queries + m + BLOCK_M)
    else:
        visible = tl.zeros([BLOCK_M], tl.int32) + num_keys
        full = num_keys // BLOCK_N * BLOCK_N
        end = num_keys
    visible = tl.minimum(visible, num_keys)
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, high, total = _attend(
        acc, high, total, q_a, q_b, k, v, k_token, v_token, first_key, num_keys, 0, full, visible, scale_log2,
        False, SIZE_A, SIZE_B, V_DIM, WIDTH_A, WIDTH_B, WIDTH_V, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, high, total = _attend(
        acc, high, total, q_a, q_b, k, v, k_token, v_token, first_key, num_keys, full, end, visible, scale_log2,
        True, SIZE_A, SIZE_B, V_DIM, WIDTH_A, WIDTH_B, WIDTH_V, BLOCK_N, PRECISION,
    )  # fmt: skip

    inside = rows < num_queries - m
    at = (first + m + rows).to(tl.int64) * num_heads + head
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + at[:, None] * V_DIM + columns_v[None, :],
        result.to(out.dtype.element_ty),
        mask=inside[:, None] & (columns_v < V_DIM)[None, :],
    )
    tl.store(lse + at, high * 0.6931471805599453 + tl.log(total), mask=inside)
