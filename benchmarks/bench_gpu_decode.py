"""Speed of the kernels of NVIDIA GPUs beside the copy bandwidth and the matmul rate measured in the same run.

    python benchmarks/bench_gpu_decode.py --bars --json benchmarks/results/gpu.json
    python benchmarks/bench_gpu_decode.py --op decode --shapes "H128 L8192" --sets TRITON_MLA,TRITON_MLA_BALANCED
    python benchmarks/bench_gpu_decode.py --device cpu --sets TORCH --quick     # to try the script

decode   `paged_decode` with a plan made before, eager and in a graph, some shapes also under lasting load; what making a plan
         takes; what a call costs the host
prefill  `varlen_attention` beside torch's SDPA with cuDNN
cache    cache writes and gathers beside a copy of as many bytes

Contenders take turns with a rest before each. Eager calls find a cold second-level cache. A graph holds several calls of the
same inputs, so that short shapes find part of their keys there: those times have a ~. Below about 60 us an eager time is the
host's.

Useful bytes are the cached rows, queries and outputs, each once; useful operations those of every key that a new token sees.
The ceilings are measured in the course of the run, under the same conditions, and their medians count. Under lasting load,
where the chip's clock falls, a matmul under the same load before and after is what counts.

Before anything is measured, every set is compared with float64 at every shape, over shuffled blocks whose unreachable rows are
NaN. If an error is beyond its limit (2.0e-3 relative, LSE 1e-5, and 5e-5 with eight times larger scores), nothing is reported
and the exit code is 1. With ``--bars`` a bar that is missed makes it 3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch
from gpu_bars import bars_of, misses, report
from gpu_measure import (
    Settings,
    checked_shapes,
    decode_shapes,
    first_calls,
    measure_decode,
    measure_host,
    measure_plan,
    measure_under_load,
    progress,
)
from gpu_other import measure_cache, measure_prefill
from gpu_rows import add_rates, commit_of, gpu_versions, rate_of_run, table
from gpu_shapes import kernel_class
from gpu_timing import Clock
from rows import CheckError, Row

from mla.compute import KernelSet, kernel_set
from mla.compute.select import KERNEL_SETS
from mla.errors import KernelError

ROOT = Path(__file__).parent.parent
SETS = "TRITON_MLA,TRITON_MLA_BALANCED,TRITON_MLA_PORTABLE"
OPS: dict[str, tuple[Callable[[Settings], list[Row]], ...]] = {
    "decode": (measure_decode, measure_under_load, measure_plan, measure_host),
    "prefill": (measure_prefill,),
    "cache": (measure_cache,),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="all", choices=[*OPS, "all"])
    parser.add_argument("--sets", default=SETS, metavar="NAMES", help="kernel sets, separated by commas")
    parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--bars", action="store_true", help="print what must hold; exit with 3 if something does not")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", help="that is measured, where git does not say")
    parser.add_argument("--compile-jobs", type=int, default=0, metavar="N", help="processes that compile the kernels first")
    parser.add_argument("--first-calls", metavar="I/N", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.compile_jobs < 0:
        parser.error("--rounds, --compile-jobs: expected at least 1 and 0")
    return args


def sets_of(names: str, device: torch.device) -> tuple[KernelSet, ...]:
    """The kernel sets that exist and run on the device, with a line for each that does not."""
    found = []
    for name in names.split(","):
        if name not in KERNEL_SETS:
            print(f"{name} is skipped: there is no kernel set of this name")
            continue
        try:
            kernels = kernel_set(name)
        except KernelError as error:
            print(f"{name} is skipped: {error}")
            continue
        if kernels.device_types and device.type not in kernels.device_types:
            print(f"{name} is skipped: it runs on {', '.join(kernels.device_types)} only")
            continue
        found.append(kernels)
    return tuple(found)


def settings_of(args: argparse.Namespace) -> Settings:
    """What to measure."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no GPU; --device cpu --quick --sets TORCH tries the script")
    clock = Clock(device=device, rounds=args.rounds)
    if args.quick:
        clock = attrs.evolve(clock, rounds=2, pause=0.0, budget_ms=2.0, load_ms=2.0)
    about = {"commit": args.commit or commit_of(ROOT), "versions": gpu_versions(device)}
    return Settings(sets=sets_of(args.sets, device), clock=clock, quick=args.quick, shape=args.shapes, about=about)


def compile_first(args: argparse.Namespace) -> None:
    """Several processes make the first calls of the decode kernels: the compiled code is kept on disk and found there later.

    What goes wrong in them goes wrong again in the run, which says so.
    """
    options = ["--sets", args.sets, "--shapes", args.shapes, "--device", args.device, *(["--quick"] if args.quick else [])]
    command = [sys.executable, __file__, *options, "--first-calls"]
    count = args.compile_jobs
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    jobs = [subprocess.Popen([*command, f"{i}/{count}"], **quiet) for i in range(count)]  # noqa: S603  (this very script)
    for job in jobs:
        job.wait()


def _share(settings: Settings, which: str) -> None:
    """The first calls of one process, which takes every n-th pair of a set and a class of shapes."""
    i, n = map(int, which.split("/"))
    called = [*checked_shapes(settings), *decode_shapes(settings)]
    classes = sorted({kernel_class(shape) for shape in called}, key=str)
    for kernels, kind in list(itertools.product(settings.sets, classes))[i::n]:
        first_calls(attrs.evolve(settings, sets=(kernels,)), [shape for shape in called if kernel_class(shape) == kind])


def measure(args: argparse.Namespace, settings: Settings) -> list[Row]:
    """The rows of everything asked for."""
    wanted = [*OPS] if args.op == "all" else [args.op]
    found: list[Row] = []
    for measured in [measured for op in wanted for measured in OPS[op]]:
        found += measured(settings)
        if args.json is not None:  # what there is, should the run be cut short
            args.json.write_text(json.dumps(rated(found, settings), indent=1) + "\n")
    return rated(found, settings)


def rated(found: Sequence[Row], settings: Settings) -> list[Row]:
    """The rows with the ceilings of the run, and what share of them they reach."""
    if not found:
        return []
    ceilings = rate_of_run(settings.ceilings)
    every = {"measured": [attrs.asdict(x) for x in settings.ceilings]}
    return [row | {"ceilings": attrs.asdict(ceilings) | every} for row in add_rates(found, ceilings)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether there is something to report."""
    args = parse(argv)
    settings = settings_of(args)
    if not settings.sets:
        print("nothing was measured: there is none of these kernel sets", file=sys.stderr)
        return 1
    with torch.inference_mode():
        if args.first_calls is not None:
            _share(settings, args.first_calls)
            return 0
        if args.compile_jobs and args.op in {"decode", "all"}:
            progress(f"compile in {args.compile_jobs} processes")
            compile_first(args)
        try:
            found = measure(args, settings)
        except CheckError as error:
            print(f"nothing is reported, for a check failed: {error}", file=sys.stderr)
            return 1
    if not found:
        print("nothing was measured: no shape has such a name", file=sys.stderr)
        return 1
    print(_head(settings))
    print(table(found))
    bars = bars_of(found)
    if args.bars:
        print("\n" + report(bars))
    progress("done")
    return 3 if args.bars and misses(bars) else 0


def _head(settings: Settings) -> str:
    """What was measured, and the ceilings over the run."""
    versions = ", ".join(f"{name} {value}" for name, value in settings.about["versions"].items())
    copies = " ".join(f"{x.copy_gb_per_s / 1e3:.2f}" for x in settings.ceilings)
    products = " ".join(f"{x.matmul_tflops:.0f}" for x in settings.ceilings)
    return f"{versions}\ncommit {settings.about['commit']}\ncopy, TB/s: {copies}; bfloat16 matmul, TFLOP/s: {products}\n"


if __name__ == "__main__":
    sys.exit(main())
