"""Rows of a report: their fields, the check against float64, the bars they are held to, and how they are printed."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Times

import mla

__all__ = [
    "LSE_ABS",
    "OUT_REL",
    "CheckError",
    "Row",
    "add_rates",
    "best_of",
    "check",
    "errors",
    "make_row",
    "misses",
    "table",
    "versions",
]

Row = dict[str, Any]

OUT_REL = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Largest relative norm error of our output."""

LSE_ABS = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""Largest absolute error of our log-sum-exp."""

CASE = ("op", "shape", "dtype", "query_scale")
"""Fields that tell one case from another; all contenders of a case were measured in turns."""


class CheckError(Exception):
    """Our own result is not good enough to be reported."""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(**more: str) -> dict[str, str]:
    """What was measured, on what."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "mla": mla.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "instructions": f"{capability} with AMX" if torch.cpu._is_amx_tile_supported() else capability,
        **more,
    }


def errors(
    out: torch.Tensor, lse: torch.Tensor | None, want: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[float, float | None]:
    """Relative norm error of the output and largest error of the LSE; infinite if anything is not finite."""

    def finite(x: torch.Tensor) -> float:
        return float(x) if bool(x.isfinite()) else float("inf")

    norm = torch.linalg.vector_norm
    expected, expected_lse = want
    relative = finite(norm(out.double() - expected) / norm(expected))
    return relative, None if lse is None or expected_lse is None else finite((lse.double() - expected_lse).abs().max())


def check(
    what: str,
    dtype: torch.dtype,
    rel_error: float,
    lse_error: float | None,
    *,
    out_rel: float | None = None,
    lse_abs: float | None = None,
) -> None:
    """Refuse to report a result of ours that is not close enough; limits that are not given are those of the dtype."""
    out_limit = OUT_REL[dtype] if out_rel is None else out_rel
    lse_limit = LSE_ABS[dtype] if lse_abs is None else lse_abs
    for name, error, limit in (("output", rel_error, out_limit), ("LSE", lse_error, lse_limit)):
        if error is not None and not error <= limit:
            raise CheckError(f"{what}: {name}: expected an error of at most {limit:g}, got {error:.3e}")


def make_row(case: Mapping[str, Any], contender: str, times: Times | None, **more: Any) -> Row:
    """One contender of one case; `case` holds the fields that all its contenders share."""
    row = {
        **case,
        "contender": contender,
        "ms_median": None if times is None else times.ms_median,
        "ms_min": None if times is None else times.ms_min,
        "rel_error": None,
        **more,
    }
    order = ("op", "contender", "dtype", "heads", "lengths", "block_size", "threads", "ms_median", "ms_min", "rel_error")
    return {name: row[name] for name in order} | {name: value for name, value in row.items() if name not in order}


def add_rates(rows: Sequence[Row]) -> list[Row]:
    """The rows of a run with `of_matmul`: useful operations a second over those of the run's best product in the same dtype."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row.get("matmul_gflops") or 0.0)
    return [
        row | {"of_matmul": row["flops"] / row["ms_median"] / 1e6 / best[row["dtype"]]} if row.get("flops") else row
        for row in rows
    ]


def _cases(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The contenders of each case."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in CASE), []).append(row)
    return found


def best_of(runs: Sequence[list[Row]]) -> list[Row]:
    """For each case the rows of the run that was best for us, with the ratios of all runs and the best of them.

    `ratio` is a contender's time over ours in the same run.
    """
    merged = []
    by_run = [_cases(rows) for rows in runs]
    for key, rows in by_run[0].items():
        compared = next((i for i, row in enumerate(rows) if row.get("bars", {}).get("best_ratio")), None)
        if compared is None:
            compared = next((i for i, row in enumerate(rows) if row.get("ratio") is not None), None)
        alternatives = [cases[key] for cases in by_run]
        if compared is None:
            chosen = min(alternatives, key=lambda x: x[0]["ms_median"] or 0.0)
        else:
            chosen = max(alternatives, key=lambda x: x[compared]["ratio"])
        for i, row in enumerate(chosen):
            best = {
                f"best_{name}": max(x[i][name] for x in alternatives)
                for name in ("ratio", "of_matmul")
                if row.get(name) is not None
            }
            ratios = {"ratios": [x[i]["ratio"] for x in alternatives]} if row.get("ratio") is not None else {}
            merged.append(row | best | ratios | {"runs": len(runs)})
    return merged


def misses(row: Row) -> list[str]:
    """The bars that a row does not meet."""
    what = f"{row['op']} {row['shape']} {row['dtype']} x{row['query_scale']:g} {row['contender']}"
    return [
        f"{what}: {name} {row[name]:.2f}, bar {bar}" for name, bar in row.get("bars", {}).items() if not _meets(row[name], bar)
    ]


def _meets(value: float, bar: str) -> bool:
    sense, limit = bar.split()
    return value >= float(limit) if sense == ">=" else value <= float(limit)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _line(row: Row, *, first: bool) -> str:
    bars = [
        f"{name} {row[name]:.2f} {bar} {'ok' if _meets(row[name], bar) else 'MISS'}"
        for name, bar in row.get("bars", {}).items()
    ]
    name = row["contender"] + (f" {row['part']}" if "part" in row else "")
    cells = (
        f"{row['shape'] if first else '':<22}",
        f"{row['dtype'] + ' x' + format(row['query_scale'], 'g') if first else '':<12}",
        f"{name:<24}",
        f"{_number(row['ms_median'], '.3f'):>10}",
        f"{_number(row['ms_min'], '.3f'):>10}",
        f"{_number(row.get('ratio'), '.2f'):>6}",
        f"{_number(row.get('of_matmul'), '.2f'):>6}",
        f"{_number(row['rel_error'], '.1e'):>8}",
        f"{_number(row.get('lse_error'), '.1e'):>8}",
    )
    notes = [*bars, *([row["note"]] if row.get("note") else []), *([f"({row['variant']})"] if row.get("variant") else [])]
    return " ".join([*cells, "; ".join(notes)]).rstrip()


def table(rows: Iterable[Row]) -> str:
    """The rows for a reader, op by op; a ratio above 1 means that ours is faster."""
    lines, op = [], None
    cases = list(_cases(rows).items())
    ops = list(dict.fromkeys(key[0] for key, _ in cases))
    for (kind, *_), case in sorted(cases, key=lambda item: ops.index(item[0][0])):
        if kind != op:
            heads = f"{'ms':>10} {'least ms':>10} {'ratio':>6} {'of mm':>6} {'error':>8} {'LSE':>8}"
            lines += ["", f"{kind:<22} {'':<12} {'contender':<24} {heads}"]
            op = kind
        lines += [_line(row, first=i == 0) for i, row in enumerate(case)]
    return "\n".join(lines[1:])
