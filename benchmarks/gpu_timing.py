"""Timing calls on a GPU: eager with a cold cache, replayed in a graph, what they cost the host, and what the chip can do.

On the CPU, where the scripts are tried, calls are timed one by one and there are no graphs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import attrs
import torch
from timing import Times

__all__ = ["Ceilings", "Clock", "host_ms", "matmul", "measure_ceilings"]

FLUSH_BYTES = 2**28
"""Zeroed before every eager call, so that the second-level cache (50 to 60 MB) holds nothing of the last one."""

GRAPH_MS = 4.0
"""Milliseconds of work in a graph, about: what replaying costs is spread over its calls."""

REPLAYS = 5


def _captured(function: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls; the function has run before, so that nothing is compiled in the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph


@attrs.frozen(kw_only=True, eq=False)
class Clock:
    """Times contenders in turns, as the chip's clock falls while it is busy; medians are over all rounds.

    Parameters
    ----------
    device : torch.device
        Where the calls run.
    rounds : int
        Turns of each contender.
    pause : float
        Seconds of rest before each turn.
    budget_ms : float
        Milliseconds of calls in a turn, about.
    load_ms : float
        Milliseconds of calls under lasting load, about.
    most_calls : int
        Of a turn.
    """

    device: torch.device
    rounds: int = 5
    pause: float = 0.08
    budget_ms: float = 12.0
    load_ms: float = 300.0
    most_calls: int = 40
    _flush: torch.Tensor = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        size = FLUSH_BYTES if self.on_gpu else 0
        object.__setattr__(self, "_flush", torch.empty(size, dtype=torch.uint8, device=self.device))

    @property
    def on_gpu(self) -> bool:
        """Whether events and graphs exist."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def alternate(
        self,
        functions: Mapping[str, Callable[[], object]],
        *,
        eager_calls: bool = True,
        graphs: bool = True,
        rounds: int | None = None,
    ) -> dict[str, Times]:
        """Time all functions in turns, eager and, with `graphs`, replayed; `ms_graph` is a call's share of a replay.

        Without `eager_calls` the eager time is that of a few calls before, a guess.
        """
        guess = {name: self._guess(function) for name, function in functions.items()}
        calls = {name: max(3, min(self.most_calls, int(self.budget_ms / ms))) for name, ms in guess.items()}
        captured: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
        if graphs and self.on_gpu:
            for name, function in functions.items():
                count = max(4, min(100, int(GRAPH_MS / guess[name])))
                captured[name] = _captured(function, count), count
        eager: dict[str, list[float]] = {name: [] if eager_calls else [guess[name]] for name in functions}
        replayed: dict[str, list[float]] = {name: [] for name in captured}
        for _ in range(self.rounds if rounds is None else rounds):
            for name, function in functions.items() if eager_calls else ():
                time.sleep(self.pause)
                eager[name] += self._each(function, calls[name])
            for name, (graph, count) in captured.items():
                time.sleep(self.pause)
                replayed[name] += [ms / count for ms in self._each(graph.replay, REPLAYS, flush=False)]
        return {
            name: Times(
                ms_median=statistics.median(taken),
                ms_min=min(taken),
                ms_graph=statistics.median(replayed[name]) if name in replayed else None,
            )
            for name, taken in eager.items()
        }

    def under_load(self, function: Callable[[], object]) -> Times:
        """Time a function called without a rest, as in a long generation: the chip's clock falls to what it can keep."""
        calls = max(3, int(self.load_ms / self._guess(function)))
        time.sleep(3 * self.pause)
        taken = self._each(function, calls)
        return Times(ms_median=statistics.median(taken), ms_min=min(taken))

    def _guess(self, function: Callable[[], object]) -> float:
        """Milliseconds of a call that has run before."""
        self._each(function, 2)
        return max(1e-3, statistics.median(self._each(function, 3)))

    def _each(self, function: Callable[[], object], calls: int, *, flush: bool = True) -> list[float]:
        """Milliseconds of each call; some before them wake the chip."""
        if not self.on_gpu:
            taken = []
            for _ in range(calls):
                started = time.perf_counter()
                function()
                taken.append(1e3 * (time.perf_counter() - started))
            return taken
        first = max(2, calls // 4)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(first + calls)]
        for before, after in events:
            if flush:
                self._flush.zero_()
            before.record()
            function()
            after.record()
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in events[first:]]


@attrs.frozen(kw_only=True)
class Ceilings:
    """What the chip does at best: bytes read plus bytes written by a copy, and operations of a bfloat16 product."""

    copy_gb_per_s: float
    matmul_tflops: float


def matmul(width: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """A bfloat16 product of width^3, and its operations."""
    # Random numbers: a chip that multiplies zeros stays cooler.
    x, y = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(x)
    return lambda: torch.mm(x, y, out=product), 2 * width**3


def measure_ceilings(clock: Clock) -> Ceilings:
    """A copy of 4 GiB on the device and a product of 8192^3; tiny ones on the CPU."""
    size, width = (2**32, 8192) if clock.on_gpu else (2**20, 128)
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    product, flops = matmul(width, clock.device)
    times = clock.alternate({"copy": lambda: target.copy_(source), "matmul": product}, graphs=False, rounds=3)
    return Ceilings(
        copy_gb_per_s=2 * size / times["copy"].ms_median / 1e6, matmul_tflops=flops / times["matmul"].ms_median / 1e9
    )


def host_ms(function: Callable[[], object], clock: Clock, *, calls: int = 200) -> Times:
    """Milliseconds that the host spends on a call which the device finishes at once; nothing is waited for in between.

    Short turns and many of them, for another process may take the processor away in any; no garbage is collected in a turn.
    """
    taken = []
    function()
    for _ in range(4 * (clock.rounds + 2)):
        clock.wait()
        gc.disable()
        try:
            started = time.perf_counter()
            for _ in range(calls // 4):
                function()
            taken.append(1e3 * (time.perf_counter() - started) / (calls // 4))
        finally:
            gc.enable()
        clock.wait()
    return Times(ms_median=statistics.median(taken), ms_min=min(taken))
