"""What the kernels of NVIDIA GPUs are held to on one H200, and whether a run holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
from rows import Row

__all__ = ["Bar", "bars_of", "misses", "report"]

DEFAULT, BALANCED = "TRITON_MLA", "TRITON_MLA_BALANCED"
EQUAL_16 = ("B128 H16 L8192", "B128 H16 L4096", "B32 H16 L16384")
LARGE_128 = ("B128 H128 L4096", "B128 H128 L8192")
SMALL_128 = ("B8 H128 L4096", "B32 H128 L1024")


@attrs.frozen(kw_only=True)
class Bar:
    """One number and its limit.

    Parameters
    ----------
    what : str
        The number in words.
    value : float or None
        None where it was not measured.
    sense : str
        ``">="`` or ``"<="``.
    limit : float
        What must hold.
    aim : float or None
        What was hoped for.
    """

    what: str
    value: float | None
    sense: str
    limit: float
    aim: float | None = None

    @property
    def holds(self) -> bool | None:
        """None where it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.sense == ">=" else self.value <= self.limit

    def __str__(self) -> str:
        verdict = {True: "holds", False: "MISSES", None: "not measured"}[self.holds]
        value = "" if self.value is None else f"{self.value:.4g}"
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        return f"{self.what:<64} {value:>8} {self.sense} {self.limit:g}{aim}: {verdict}"


class _Found:
    """Looks numbers up in the rows of a run."""

    def __init__(self, found: Iterable[Row]) -> None:
        self._rows = {(row["op"], row["shape"], row["contender"], row.get("part")): row for row in found}

    def number(self, op: str, shape: str, contender: str, field: str, part: str | None = None) -> float | None:
        row = self._rows.get((op, shape, contender, part))
        return None if row is None else row.get(field)

    def decode(self, shape: str, contender: str, field: str) -> float | None:
        return self.number("decode", shape, contender, field)

    def ratio(self, over: tuple[str, str], under: tuple[str, str], field: str) -> float | None:
        """Of the same field of two (shape, contender) of one run."""
        high, low = self.decode(*over, field), self.decode(*under, field)
        return None if high is None or not low else high / low


def bars_of(found: Sequence[Row]) -> list[Bar]:
    """Every bar with the run's number; shares of the copy count the cached rows alone."""
    look = _Found(found)
    groups: tuple[Callable[[_Found], Iterator[Bar]], ...] = (_balanced, _default, _tokens, _plan_and_host)
    return [bar for group in groups for bar in group(look)]


def _balanced(look: _Found) -> Iterator[Bar]:
    shares = (
        *((shape, "keys_of_copy", 0.88, 0.95) for shape in EQUAL_16),
        ("B128 H64 L8192", "keys_of_copy", 0.92, None),
        ("B64 H16 ragged", "keys_of_copy", 0.80, None),
    )
    for shape, field, limit, aim in shares:
        value = look.decode(shape, BALANCED, field)
        yield Bar(what=f"balanced, {shape}, share of the copy rate", value=value, sense=">=", limit=limit, aim=aim)
    for shape, limit, aim in (*((shape, 0.85, 0.92) for shape in LARGE_128), ("B64 H128 ragged", 0.75, None)):
        for op, when in (("under load", "under lasting load"), ("decode", "in short bursts")):
            value = look.number(op, shape, BALANCED, "of_matmul")
            yield Bar(what=f"balanced, {shape}, of the matmul rate {when}", value=value, sense=">=", limit=limit, aim=aim)
    for shape, limit in (("B1 H16 L65536", 35.0), ("B1 H128 L65536", 52.0)):
        ms = look.decode(shape, BALANCED, "ms_graph")
        value = None if ms is None else 1e3 * ms
        yield Bar(what=f"balanced, {shape}, microseconds in a graph", value=value, sense="<=", limit=limit)
    for name, contender in (("balanced", BALANCED), ("default", DEFAULT)):
        for heads, limit in ((16, 1.05), (128, 1.10)):
            whole = f"B128 H{heads} L4096"
            for size in (1, 16):
                value = look.ratio((f"{whole} bs{size}", contender), (whole, contender), "ms_median")
                yield Bar(what=f"{name}, {whole}, blocks of {size} over blocks of 64", value=value, sense="<=", limit=limit)


def _default(look: _Found) -> Iterator[Bar]:
    wanted = (
        *((shape, "ms_median", 1.04, 1.02) for shape in EQUAL_16),
        ("B64 H16 ragged", "ms_median", 1.15, 1.07),
        ("B1 H16 L65536", "ms_graph", 1.5, 1.2),
        *((shape, "ms_median", 1.15, 1.05) for shape in (*LARGE_128, "B64 H128 ragged")),
        *((shape, "ms_graph", 1.15, 1.05) for shape in SMALL_128),
        ("B1 H128 L65536", "ms_graph", 2.5, 1.3),
    )
    for shape, field, limit, aim in wanted:
        where = "eager" if field == "ms_median" else "in a graph"
        value = look.ratio((shape, DEFAULT), (shape, BALANCED), field)
        yield Bar(what=f"default over balanced, {shape}, {where}", value=value, sense="<=", limit=limit, aim=aim)


def _tokens(look: _Found) -> Iterator[Bar]:
    for name, contender in (("balanced", BALANCED), ("default", DEFAULT)):
        for shape in ("B128 H16 L4096", "B128 H16 L8192"):
            value = look.ratio((f"{shape} new 3", contender), (shape, contender), "ms_median")
            yield Bar(what=f"{name}, {shape}, three new tokens over one", value=value, sense="<=", limit=1.15)


def _plan_and_host(look: _Found) -> Iterator[Bar]:
    for name, contender in (("balanced", BALANCED), ("default", DEFAULT)):
        for heads in (16, 128):
            for batch in (1, 32, 128, 512, 1024):
                ms = look.number("plan", f"B{batch} H{heads} plan", contender, "ms_graph")
                value = None if ms is None else 1e3 * ms
                yield Bar(what=f"{name}, plan of {batch} at {heads} heads, microseconds", value=value, sense="<=", limit=4.0)
        for heads in (16, 128):
            parts = ("a plan given", "no plan given")
            times = [look.number("host", f"B1 H{heads} L64", contender, "ms_median", part) for part in parts]
            ms = next((x for x in times if x is not None), None)
            value = None if ms is None else 1e3 * ms
            yield Bar(what=f"{name}, {heads} heads, host microseconds of a call", value=value, sense="<=", limit=40.0)


def misses(bars: Iterable[Bar]) -> list[Bar]:
    """Those that were measured and do not hold."""
    return [bar for bar in bars if bar.holds is False]


def report(bars: Sequence[Bar]) -> str:
    """All of them, a line each, and a count."""
    counts = {verdict: sum(bar.holds is verdict for bar in bars) for verdict in (True, False, None)}
    last = f"{counts[True]} hold, {counts[False]} miss, {counts[None]} not measured"
    return "\n".join([*(str(bar) for bar in bars), last])
