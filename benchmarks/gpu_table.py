"""The table of decode on a GPU in the README, made from the JSON of `bench_gpu_decode.py`.

    python benchmarks/gpu_table.py                       # print it, from benchmarks/results/gpu.json
    python benchmarks/gpu_table.py --write README.md     # put it between the markers

Times are a call's share of a replayed CUDA graph. Shares of the copy rate are left out where keys partly stay in the
second-level cache, those of the matmul rate where it does not bound; the latter are of calls and matmuls under the same lasting
load.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speed_table import in_words, put

BEGIN, END = "<!-- gpu-speed:begin -->", "<!-- gpu-speed:end -->"
RESULTS = Path(__file__).parent / "results" / "gpu.json"
DEFAULT, BALANCED = "TRITON_MLA", "TRITON_MLA_BALANCED"

Row = dict[str, Any]


def _name(row: Row) -> str:
    block = "" if row["block_size"] == 64 else f", blocks of {row['block_size']}"
    new = "" if row["query_len"] == 1 else f", {row['query_len']} new tokens each"
    return f"{in_words(row['lengths'])} cached{block}{new}"


def _shares(case: dict[str, Row], field: str) -> str:
    """Of both sets, where they were measured."""
    return ", ".join(f"{case[name][field]:.2f}" for name in (DEFAULT, BALANCED) if name in case)


def make_table(rows: Sequence[Row]) -> str:
    """Markdown, from all rows of a run."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["shape"]), {})[row["contender"]] = row
    lines = ["|  | heads | ms | ms, balanced | of the copy rate | of the matmul rate | error |", "|---" * 7 + "|"]
    for (op, shape), case in found.items():
        ours, balanced = case.get(DEFAULT), case.get(BALANCED)
        if op != "decode" or ours is None or balanced is None or ours["dtype"] != "bfloat16":
            continue
        cells = [_name(ours), str(ours["heads"]), f"{ours['ms_graph']:.3f}", f"{balanced['ms_graph']:.3f}"]
        cells += ["" if ours["l2_warm"] else _shares(case, "of_copy_graph")]
        cells += [_shares(found.get(("under load", shape), {}), "of_matmul")]
        lines.append("| " + " | ".join([*cells, f"{max(ours['rel_error'], balanced['rel_error']):.1e}"]) + " |")
    if len(lines) == 2:
        raise SystemExit(f"expected decode rows of {DEFAULT} and {BALANCED} in bfloat16, got none")
    about = rows[0]["versions"]
    caption = (
        f"Decode in bfloat16 on one {about['gpu']}, torch {about['torch']}, Triton {about['triton']}, "
        f"commit {rows[0]['commit']}; shares are those of `{DEFAULT}` and `{BALANCED}`."
    )
    return "\n".join([caption, "", *lines]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table or write it into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, metavar="FILE", help="a document with both markers")
    args = parser.parse_args(argv)
    table = make_table(json.loads(args.json.read_text()))
    if args.write is None:
        print(f"{BEGIN}\n{table}{END}")
    else:
        args.write.write_text(put(args.write.read_text(), table, (BEGIN, END)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
