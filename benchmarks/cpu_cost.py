"""What decode costs as the work grows, and which part of it takes the time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import cpu_shapes as shapes
import numpy as np
import torch
from cpu_contenders import decode_contenders
from cpu_measure import Settings, case_of
from rows import Row, check, errors, make_row
from timing import Times, alternate, gflops, matmul, self_times

__all__ = ["measure_cost", "measure_where", "plot_cost"]

PASSES = 3
WHERE = ("H16 L1024", "H16 L8192", "H128 L4096")
AXES = {
    # axis: (values, the shape of a value)
    "L": ([2**i for i in range(8, 15)], lambda n: shapes.DecodeShape(name=f"H16 L{n}", heads=16, lengths=(n,))),
    "B": ([2**i for i in range(7)], lambda n: shapes.DecodeShape(name=f"B{n} H16 L1024", heads=16, lengths=(1024,) * n)),
}
QUICK_VALUES = {"L": [64, 128, 256], "B": [1, 2]}


def fit(values: list[int], ms: list[float]) -> tuple[float, float]:
    """The a and b of ``t = a + b x`` with the smallest relative errors."""
    slope, constant = np.polyfit(values, ms, 1, w=1 / np.array(ms))
    return float(constant), float(slope)


def worst_doubling(values: list[int], passes: list[list[float]], above_ms: float) -> float | None:
    """Largest time(2x) / time(x) where time(2x) is above a bound; for each x the median of the passes."""
    ratios = []
    for i, x in enumerate(values):
        if 2 * x in values:
            j = values.index(2 * x)
            if statistics.median(ms[j] for ms in passes) > above_ms:
                ratios.append(statistics.median(ms[j] / ms[i] for ms in passes))
    return max(ratios, default=None)


def measure_cost(settings: Settings) -> list[Row]:
    """Decode of one sequence against its length, and of sequences of 1024 tokens against their number."""
    rows = []
    for axis in AXES:
        rows += _measure_axis(axis, settings)
    return rows


def _measure_axis(axis: str, settings: Settings) -> list[Row]:
    dtype, ours = torch.bfloat16, settings.ours
    values, shape_of = AXES[axis]
    values = QUICK_VALUES[axis] if settings.quick else values
    runs, found, cases = {}, {}, {}
    for x in values:
        shape = shape_of(x)
        inputs = shapes.decode_inputs(shape, dtype)
        contender = decode_contenders(inputs, (ours,), None, sdpa=False)[0]
        cases[x] = case_of(f"cost over {axis}", shape.name, dtype, shape.heads, shape.lengths, settings)
        found[x] = errors(*contender.run(), inputs.float64())
        check(f"cost {shape.name}", dtype, *found[x])
        runs[x] = contender.run
    passes = []
    for _ in range(PASSES):
        times = alternate({"matmul": matmul(dtype)} | {str(x): run for x, run in runs.items()}, settings.budget)
        passes.append(times)
    medians = {x: statistics.median(times[str(x)].ms_median for times in passes) for x in values}
    rows = []
    for x in values:
        taken = Times(ms_median=medians[x], ms_min=min(times[str(x)].ms_min for times in passes))
        rel_error, lse_error = found[x]
        rate = max(gflops(times["matmul"]) for times in passes)
        more = {"rel_error": rel_error, "lse_error": lse_error, "flops": shape_of(x).flops, "matmul_gflops": rate, axis: x}
        rows.append(make_row(cases[x], ours.name, taken, **more))
    constant, slope = fit(values, list(medians.values()))
    worst = worst_doubling(values, [[times[str(x)].ms_median for x in values] for times in passes], 1.0)
    unit = {"L": "key", "B": "sequence of 1024 keys"}[axis]
    note = f"{constant:.3f} ms + {1e3 * slope:.3f} us for each {unit}"
    fields = {"fit_ms": constant, f"fit_ms_per_{axis}": slope, "worst_doubling": worst, "note": note}
    case = case_of(f"cost over {axis}", "fit", dtype, 16, values, settings)
    return [*rows, make_row(case, ours.name, None, **fields)]


def plot_cost(rows: list[Row], path: Path) -> None:
    """Both curves with their fits."""
    from matplotlib.figure import Figure  # only who plots needs it

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, axes in zip(AXES, figure.subplots(1, 2), strict=True):
        points = [row for row in rows if row["op"] == f"cost over {axis}" and axis in row]
        line = next(row for row in rows if row["op"] == f"cost over {axis}" and row["shape"] == "fit")
        x = np.array([row[axis] for row in points])
        axes.plot(x, [row["ms_median"] for row in points], "o", label="measured")
        axes.plot(x, line["fit_ms"] + line[f"fit_ms_per_{axis}"] * x, label=line["note"])
        what = {"L": "tokens of one sequence", "B": "sequences of 1024 tokens"}[axis]
        axes.set(xlabel=f"{what}, 16 heads, bfloat16", ylabel="ms")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()
    figure.savefig(path)


def measure_where(settings: Settings) -> list[Row]:
    """Time of a decode call by kind of operator, from the profiler, which makes small calls slower than they are."""
    dtype, rows = torch.bfloat16, []
    for shape in shapes.QUICK_DECODE[:1] if settings.quick else [x for x in shapes.DECODE if x.name in WHERE]:
        inputs = shapes.decode_inputs(shape, dtype)
        contender = decode_contenders(inputs, (settings.ours,), None, sdpa=False)[0]
        check(f"where {shape.name}", dtype, *errors(*contender.run(), inputs.float64()))
        case = case_of("where", shape.name, dtype, shape.heads, shape.lengths, settings)
        plain = alternate({"ours": contender.run, "matmul": matmul(dtype)}, settings.budget)
        calls = max(1, min(50, int(100 / plain["ours"].ms_median)))
        parts = self_times(contender.run, calls=calls, rounds=3 if settings.quick else 7)
        rows += _parts(case, parts, plain, shape, settings)
    return rows


def _parts(
    case: dict[str, Any],
    parts: dict[str, Times],
    plain: dict[str, Times],
    shape: shapes.DecodeShape,
    settings: Settings,
) -> list[Row]:
    total = sum(x.ms_median for x in parts.values())
    rate = gflops(plain["matmul"])
    moved = 2 * sum(shape.lengths) * shapes.LATENT * torch.bfloat16.itemsize
    rows = [make_row(case, settings.ours.name, plain["ours"], part="whole, unprofiled")]
    for part, taken in parts.items():
        note = f"{taken.ms_median / total:.0%}"
        if part == "products":
            speed = shape.flops / max(taken.ms_median, 1e-9) / 1e6
            note += f", {speed:.0f} GFLOP/s, {speed / rate:.2f} of a square product"
        if part == "gather" and taken.ms_median:
            note += f", {moved / taken.ms_median / 1e6:.0f} GB/s read and written"
        more = {"share": taken.ms_median / total, "note": note}
        rows.append(make_row(case, settings.ours.name, taken, part=part, **more))
    return rows
