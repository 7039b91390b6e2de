"""Time of `build_metadata` against a builder that works token by token with Python lists, in the same run.

1024 decoding sequences of 8192 tokens, cache blocks of 16, page lists at page size 1 (as AITER takes them). Prints a table,
writes JSON with ``--json FILE``, and exits with 1 if a bound is missed: 1/25 of the baseline with block ids as tuples, 1/50 as
arrays.
Before anything is timed, both builders must agree on every number.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mla import MLAMetadata, SequenceGroup, build_metadata, decode_group

BOUNDS = {"tuples": 25.0, "arrays": 50.0}


def build_with_lists(tables: Sequence[Sequence[int]], seq_lens: Sequence[int], block_size: int) -> dict[str, torch.Tensor]:
    """The same fields of a decode batch, appended one token at a time."""
    slots, positions, indices, indptr, last_lens = [], [], [], [0], []
    query_start_loc, seq_start_loc, rows = [0], [0], []
    width = max(len(table) for table in tables)
    for table, seq_len in zip(tables, seq_lens, strict=True):
        for position in range(seq_len):
            indices.append(table[position // block_size] * block_size + position % block_size)  # noqa: PERF401
        indptr.append(len(indices))
        last_lens.append(1)
        positions.append(seq_len - 1)
        slots.append(indices[-1])
        query_start_loc.append(query_start_loc[-1] + 1)
        seq_start_loc.append(seq_start_loc[-1] + seq_len)
        rows.append(list(table) + [0] * (width - len(table)))
    fields = {
        "slot_mapping": (slots, torch.int64),
        "positions": (positions, torch.int64),
        "paged_kv_indices": (indices, torch.int32),
        "paged_kv_indptr": (indptr, torch.int32),
        "paged_kv_last_page_lens": (last_lens, torch.int32),
        "query_start_loc": (query_start_loc, torch.int32),
        "seq_start_loc": (seq_start_loc, torch.int32),
        "seq_lens": (list(seq_lens), torch.int32),
        "context_lens": ([n - 1 for n in seq_lens], torch.int32),
        "block_table": (rows, torch.int32),
    }
    return {name: torch.tensor(values, dtype=dtype) for name, (values, dtype) in fields.items()}


def check_equal(metadata: MLAMetadata, expected: dict[str, torch.Tensor]) -> None:
    """Refuse to time builders that disagree."""
    if metadata.decode is None:
        raise SystemExit("check failed: no decode part")
    paged = metadata.decode.paged_kv_of(1)
    for name, value in expected.items():
        ours = getattr(paged if name.startswith("paged_kv") else metadata.decode, name)
        if not torch.equal(ours, value):
            raise SystemExit(f"check failed: {name} differs from the baseline")


def median_ms(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and minimum of `repeats` calls, in milliseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times), min(times)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    width = -(-args.tokens // args.block_size)
    arrays = np.random.default_rng(0).permutation(args.sequences * width).reshape(args.sequences, width)
    tuples = [tuple(row) for row in arrays.tolist()]
    seq_lens = [args.tokens] * args.sequences
    groups: dict[str, list[SequenceGroup]] = {
        "tuples": [decode_group(args.tokens, row) for row in tuples],
        "arrays": [decode_group(args.tokens, row) for row in arrays],
    }

    def build(kind: str) -> MLAMetadata:
        return build_metadata(groups[kind], block_size=args.block_size, page_sizes=(1,))

    expected = build_with_lists(tuples, seq_lens, args.block_size)
    for kind in groups:
        check_equal(build(kind), expected)
    del expected
    rows: list[dict[str, Any]] = []
    baseline, fastest = median_ms(lambda: build_with_lists(tuples, seq_lens, args.block_size), 3)
    rows.append({"contender": "token by token", "ms_median": baseline, "ms_min": fastest, "ratio": 1.0, "bound": None})
    for kind, bound in BOUNDS.items():
        ours, fastest = median_ms(lambda kind=kind: build(kind), 15)
        rows.append(
            {
                "contender": f"build_metadata, {kind}",
                "ms_median": ours,
                "ms_min": fastest,
                "ratio": baseline / ours,
                "bound": bound,
            }
        )
    print(f"{args.sequences} sequences of {args.tokens} tokens, block_size {args.block_size}, page_size 1")
    for row in rows:
        bound = "" if row["bound"] is None else f" (bound {row['bound']:.0f})"
        print(f"{row['contender']:<24} {row['ms_median']:9.2f} ms  {row['ratio']:7.1f} times as fast{bound}")
    if args.json is not None:
        versions = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
        for row in rows:
            row.update(
                op="build_metadata", sequences=args.sequences, tokens=args.tokens, block_size=args.block_size, versions=versions
            )
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["bound"] is not None and row["ratio"] < row["bound"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
