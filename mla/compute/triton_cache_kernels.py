"""The Triton kernels of cache writes and gathers: a few rows a program, converted on the way.

Importing this module imports Triton; `mla.compute.triton_cache` does so when it launches.
"""

from __future__ import annotations

import triton  # noqa: TID253  (this module is imported inside the launching functions only)
import triton.language as tl  # noqa: TID253

__all__ = ["gather_kernel", "write_kernel"]


@triton.jit
def _copy_columns(
    source, source_rows, source_column, target, target_rows, target_column, inside, known, other,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """SIZE columns of the rows at 64-bit offsets `source_rows` to those at `target_rows`, where `inside` says so.

    Rows that are not `known` are not read; `other` stands for them.
    """
    columns = tl.arange(0, WIDTH)
    held = (columns < SIZE)[None, :]
    wide = columns[None, :].to(tl.int64)
    values = tl.load(source + source_rows[:, None] + wide * source_column, mask=known[:, None] & held, other=other)
    # Equal dtypes keep every bit; others go through float32, as torch's do.
    if values.dtype != target.dtype.element_ty:
        values = values.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target + target_rows[:, None] + wide * target_column, values, mask=inside[:, None] & held)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write_kernel(
    cache, kv_c, k_pe, slots, num_tokens, num_slots,
    kv_row, kv_column, pe_row, pe_column, slot_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH_C: tl.constexpr, WIDTH_R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of `kv_c` and `k_pe` side by side into the cache; slots outside of it are skipped."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tokens < num_tokens
    slot = tl.load(slots + tokens * slot_stride, mask=inside, other=-1)
    inside = inside & (slot >= 0) & (slot < num_slots)
    target = tl.where(inside, slot, 0) * (RANK + ROPE)
    _copy_columns(kv_c, tokens * kv_row, kv_column, cache, target, 1, inside, inside, 0.0, RANK, WIDTH_C)
    _copy_columns(k_pe, tokens * pe_row, pe_column, cache + RANK, target, 1, inside, inside, 0.0, ROPE, WIDTH_R)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def gather_kernel(
    cache, slots, out, num_rows, num_slots, slot_stride, out_row, out_column,
    SIZE_A: tl.constexpr, SIZE_B: tl.constexpr, WIDTH_A: tl.constexpr, WIDTH_B: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of the cache to the head of `out`, in two parts of powers of two; of a slot outside the cache, NaN."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    slot = tl.load(slots + rows * slot_stride, mask=inside, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    source = tl.where(known, slot, 0) * (SIZE_A + SIZE_B)
    nan = float("nan")
    _copy_columns(cache, source, 1, out, rows * out_row, out_column, inside, known, nan, SIZE_A, WIDTH_A)
    if SIZE_B > 0:
        start = out + SIZE_A * out_column
        _copy_columns(cache + SIZE_A, source, 1, start, rows * out_row, out_column, inside, known, nan, SIZE_B, WIDTH_B)
