"""Timing contenders in turns, peak memory of a call, and where its time goes."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Budget", "Times", "alternate", "gflops", "matmul", "peak_bytes", "self_times"]

MATMUL_SIZE = 1024
MATMUL_FLOPS = 2 * MATMUL_SIZE**3
LONG_CALL = 0.1
"""Seconds from which a call needs no warming up after another contender's turn."""

KINDS = {
    "gather": ("index_select", "index", "gather"),
    "products": ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "_scaled_dot_product_flash_attention_for_cpu"),
    "softmax": ("exp", "amax", "max", "sum", "log", "sub", "div", "softmax", "logsumexp"),
    "copies": ("copy", "clone", "cat", "fill", "zero", "index_copy", "index_fill", "constant_pad_nd"),
}
"""Operators by what they do, without a trailing underscore; fused attention counts as products, its softmax included."""


@attrs.frozen(kw_only=True)
class Budget:
    """Seconds that a contender has for each shape, about, and the turns that they are cut into."""

    seconds: float = 0.4
    blocks: int = 5
    most_calls: int = 50


@attrs.frozen(kw_only=True)
class Times:
    """Milliseconds of a call, and the median in a graph where one was captured."""

    ms_median: float
    ms_min: float
    ms_graph: float | None = None


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def alternate(functions: Mapping[str, Callable[[], object]], budget: Budget) -> dict[str, Times]:
    """Time all functions in turns of several calls each, so that what slows the machine down slows all of them down."""
    first = {name: _seconds(function) for name, function in functions.items()}
    first = {name: _seconds(functions[name]) if seconds < 1 else seconds for name, seconds in first.items()}
    blocks = budget.blocks if sum(first.values()) < 2 else 3
    share = budget.seconds / blocks
    calls = {name: max(1, min(budget.most_calls, int(share / max(seconds, 1e-9)))) for name, seconds in first.items()}
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(blocks):
        for name, function in functions.items():
            if first[name] < LONG_CALL:
                function()
            taken[name] += [_seconds(function) for _ in range(calls[name])]
    return {name: Times(ms_median=1e3 * statistics.median(x), ms_min=1e3 * min(x)) for name, x in taken.items()}


def matmul(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """The product that tells the rate of the machine: `MATMUL_FLOPS` operations."""
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, x, out=out)


def gflops(taken: Times) -> float:
    """The rate of `matmul` at its best."""
    return MATMUL_FLOPS / taken.ms_min / 1e6


def peak_bytes(function: Callable[[], object]) -> int:
    """Most bytes that torch's allocator held at a time beyond those held before, results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = function()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _kind(operator: str) -> str:
    name = operator.removeprefix("aten::").removesuffix("_")
    return next((kind for kind, names in KINDS.items() if name in names), "other operators")


def self_times(function: Callable[[], object], *, calls: int, rounds: int) -> dict[str, Times]:
    """Milliseconds of a call by kind of operator, by the profiler's self times; the rest is Python's and the profiler's."""
    taken: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "other operators", "python, profiler")}
    function()
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            wall = sum(_seconds(function) for _ in range(calls))
        spent = dict.fromkeys(taken, 0.0)
        for event in seen.key_averages():
            spent[_kind(event.key)] += event.self_cpu_time_total / 1e3 / calls
        spent["python, profiler"] = max(0.0, 1e3 * wall / calls - sum(spent.values()))
        for kind, ms in spent.items():
            taken[kind].append(ms)
    return {kind: Times(ms_median=statistics.median(x), ms_min=min(x)) for kind, x in taken.items()}
