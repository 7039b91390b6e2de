"""``python -m mla.golden record|check|diff``: golden bundles from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mla.errors import MLAError
from mla.golden.bundle import save_bundle
from mla.golden.case import read_cases
from mla.golden.diff import diff
from mla.golden.replay import EXACT, check, record, with_bar

__all__ = ["main"]

KERNELS = "cpu, ipex, aiter, cuda, a name such as CPU_MLA, or module:name of your own, a dotted module (default: cpu)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mla.golden", description="Golden bundles of MLA kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("record", help="make bundles of the cases in a file")
    make.add_argument("cases", type=Path, help='JSON file: {"cases": [...]}')
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that the bundles go to")
    make.add_argument("--kernels", default="cpu", metavar="SET", help=KERNELS)
    make.add_argument("--no-bits", action="store_true", help="keep the float64 reference alone")
    make.add_argument("--overwrite", action="store_true", help="replace bundles of the same name")
    test = commands.add_parser("check", help="check a kernel set against bundles")
    test.add_argument("bundles", type=Path, nargs="?", help="folder of bundles, or one (default: those of the package)")
    test.add_argument("--kernels", default="cpu", metavar="SET", help=KERNELS)
    test.add_argument("--only", default="*", metavar="PATTERN", help="names to check, with * and ?")
    test.add_argument("--exact", choices=EXACT, default="auto", help="compare bits (default: where they must agree)")
    test.add_argument("--junit", type=Path, metavar="FILE", help="write the results as JUnit XML")
    for each in (make, test):
        each.add_argument("--device", help="where the kernels run (default: the set's own)")
    two = commands.add_parser("diff", help="compare two metadata records (JSON files) or two bundles, field by field")
    two.add_argument("first", type=Path)
    two.add_argument("second", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str or None
        As on the command line; None takes those of the process.

    Returns
    -------
    int
        0 if all is well, 1 for results that differ, 2 for input that cannot be used.

    Raises
    ------
    SystemExit
        Words that are no command.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "record":
            return _record(options)
        return _check(options) if options.command == "check" else _diff(options)
    except (MLAError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _record(options: argparse.Namespace) -> int:
    for case in with_bar(read_cases(options.cases), show=sys.stderr.isatty()):
        bundle = record(case, options.kernels, device=options.device, bits=not options.no_bits)
        folder = save_bundle(bundle, options.out, overwrite=options.overwrite)
        sys.stdout.write(f"recorded {folder}\n")
    return 0


def _check(options: argparse.Namespace) -> int:
    report = check(
        options.kernels,
        options.bundles,
        only=options.only,
        device=options.device,
        exact=options.exact,
        progress=sys.stderr.isatty(),
    )
    sys.stdout.write(f"{report}\n")
    if options.junit is not None:
        report.write_junit(options.junit)
    return 0 if report.passed else 1


def _diff(options: argparse.Namespace) -> int:
    lines = diff(options.first, options.second)
    sys.stdout.write("".join(f"{line}\n" for line in lines) or "equal\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
