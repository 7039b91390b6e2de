"""Rows of the GPU report: their fields, the limits of our own results, rates, and how they are printed."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import rows
import torch
from gpu_timing import Ceilings
from rows import Row
from timing import Times

__all__ = ["Limits", "add_rates", "commit_of", "gpu_versions", "limits_of", "make_row", "rate_of_run", "table"]

FIELDS = (
    "op", "shape", "contender", "dtype", "heads", "lengths", "block_size", "query_len", "ms_median", "ms_graph", "of_copy",
    "of_matmul", "rel_error", "lse_error",
)  # fmt: skip
"""Of every row, in this order; others follow."""

Limits = tuple[float, float]
"""The largest relative error of the output and the largest error of the LSE."""

DECODE_LIMITS = (2.0e-3, 1e-5)
PREFILL_LIMITS = (2.3e-3, 2e-5)
"""Where many keys weigh alike, rounding the weights and the result to bfloat16 is 2.2e-3 by itself."""
LARGE_SCORES_LSE = 5e-5
PORTABLE_LARGE_SCORES_LSE = 1e-4
"""Of the portable kernel, which is there for comparison: on an H200 it comes to 5.4e-5."""
WORST_ROW = 2.0
"""A single new token's relative error may be so many times the limit of the whole."""


def limits_of(contender: str, op: str, dtype: torch.dtype, query_scale: float = 1.0) -> Limits:
    """What a kernel set is held to: the limits of the GPU, or for other sets those of the tests on the CPU."""
    if not contender.startswith("TRITON_MLA"):
        return rows.OUT_REL[dtype], rows.LSE_ABS[dtype] * max(1.0, query_scale)
    if op == "varlen_attention":
        return PREFILL_LIMITS
    if query_scale > 1:
        lse = PORTABLE_LARGE_SCORES_LSE if contender.endswith("PORTABLE") else LARGE_SCORES_LSE
        return DECODE_LIMITS[0], lse
    return DECODE_LIMITS


def commit_of(folder: Path) -> str | None:
    """The commit of a working tree, marked where it has changes; None without git or a repository."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(folder), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return f"{commit} with changes" if commit and git("status", "--porcelain") else commit


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpu_versions(device: torch.device) -> dict[str, str]:
    """What was measured, on what."""
    more = {"triton": _package("triton") or "none"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        more |= {
            "gpu": properties.name,
            "processors": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": _driver() or "unknown",
        }
    return rows.versions(**more)


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*([\d.]+)", path.read_text()) if path.exists() else None
    return found.group(1) if found else None


def make_row(case: Mapping[str, Any], contender: str, times: Times | None, **more: Any) -> Row:
    """One contender of one case; `case` holds the fields that all its contenders share."""
    row = {
        **dict.fromkeys(FIELDS),
        **case,
        "contender": contender,
        "ms_median": None if times is None else times.ms_median,
        "ms_graph": None if times is None else times.ms_graph,
        "ms_min": None if times is None else times.ms_min,
        **more,
    }
    return {name: row[name] for name in FIELDS} | {name: value for name, value in row.items() if name not in FIELDS}


def rate_of_run(measured: Sequence[Ceilings]) -> Ceilings:
    """The run's ceilings: the middle of those measured in its course, as contenders' times are the middle of theirs."""
    return Ceilings(
        copy_gb_per_s=statistics.median(x.copy_gb_per_s for x in measured),
        matmul_tflops=statistics.median(x.matmul_tflops for x in measured),
    )


def add_rates(found: Iterable[Row], ceilings: Ceilings) -> list[Row]:
    """The rows with what share of the ceilings they reach, eager and (`..._graph`) replayed.

    `bytes` counts everything that has to be read and written once, `key_bytes` the cached rows alone. A row that brings its own
    `matmul_tflops`, measured under the same load, is compared with that.
    """

    def share(work: float | None, ms: float | None, per_ms: float) -> float | None:
        return None if work is None or ms is None else work / ms / per_ms

    rated = []
    for row in found:
        more = {}
        for suffix, ms in (("", row["ms_median"]), ("_graph", row["ms_graph"])):
            more[f"of_copy{suffix}"] = share(row.get("bytes"), ms, ceilings.copy_gb_per_s * 1e6)
            matmul_tflops = row.get("matmul_tflops", ceilings.matmul_tflops)
            more[f"of_matmul{suffix}"] = share(row.get("flops"), ms, matmul_tflops * 1e9)
            if "key_bytes" in row:
                more[f"keys_of_copy{suffix}"] = share(row["key_bytes"], ms, ceilings.copy_gb_per_s * 1e6)
        rated.append(row | more)
    return rated


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _line(row: Row, *, first: bool) -> str:
    cells = (
        f"{row['shape'] if first else '':<28}",
        f"{row['contender']:<20}",
        f"{_number(row['ms_median'], '.4f'):>9}",
        f"{_number(row['ms_graph'], '.4f') + ('~' if row['ms_graph'] and row.get('l2_warm') else ''):>9}",
        f"{_number(row['of_copy'], '.2f'):>5}",
        f"{_number(row.get('of_copy_graph'), '.2f'):>5}",
        f"{_number(row['of_matmul'], '.2f'):>5}",
        f"{_number(row.get('of_matmul_graph'), '.2f'):>5}",
        f"{_number(row['rel_error'], '.1e'):>8}",
        f"{_number(row['lse_error'], '.1e'):>8}",
    )
    return " ".join([*cells, row.get("note") or ""]).rstrip()


def table(found: Iterable[Row]) -> str:
    """The rows for a reader, op by op; ~ marks a replay whose keys partly lie in the second-level cache."""
    lines: list[str] = []
    op = shape = None
    for row in found:
        if row["op"] != op:
            op, shape = row["op"], None
            heads = f"{'ms eager':>9} {'ms graph':>9} {'of copy, g.':>11} {'of mm, g.':>11} {'error':>8} {'LSE':>8}"
            lines += ["", f"{op:<28} {'contender':<20} {heads}"]
        lines.append(_line(row, first=row["shape"] != shape))
        shape = row["shape"]
    return "\n".join(lines[1:])
