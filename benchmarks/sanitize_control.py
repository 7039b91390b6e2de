"""A handshake that is right beyond doubt, to see what compute-sanitizer's racecheck makes of it.

    compute-sanitizer --tool racecheck python3 benchmarks/sanitize_control.py

One group of warps stores numbers in shared memory and arrives at an mbarrier; another waits there, loads them, and arrives at a
second one, which the first waits for before it stores the next. This is all that the decode kernels for Hopper do between their
groups of warps. Hazards that racecheck reports here show what its reports on them are worth: it follows barriers of a whole
block, not mbarriers.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROUNDS, SIZE = 8, 256


@gluon.jit
def _send(source, number, full, empty, ROUNDS: gl.constexpr, SIZE: gl.constexpr):
    at = gl.arange(0, SIZE, gl.BlockedLayout([2], [32], [4], [0]))
    for i in range(ROUNDS):
        mbarrier.wait(empty, (i & 1) ^ 1)
        number.store(gl.load(source + i * SIZE + at))
        mbarrier.arrive(full)


@gluon.jit
def _receive(target, number, full, empty, ROUNDS: gl.constexpr, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    at = gl.arange(0, SIZE, LAYOUT)
    for i in range(ROUNDS):
        mbarrier.wait(full, i & 1)
        gl.store(target + i * SIZE + at, number.load(LAYOUT))
        mbarrier.arrive(empty)


@gluon.jit
def handshake(source, target, ROUNDS: gl.constexpr, SIZE: gl.constexpr):
    """Copy SIZE numbers ROUNDS times, through shared memory from one group of warps to the other."""
    number = gl.allocate_shared_memory(gl.int32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    gl.warp_specialize(
        [
            (_send, (source, number, bars.index(0), bars.index(1), ROUNDS, SIZE)),
            (_receive, (target, number, bars.index(0), bars.index(1), ROUNDS, SIZE)),
        ],
        [4],
        [64],
    )


def main() -> None:
    """Copy, and compare."""
    source = torch.arange(ROUNDS * SIZE, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    handshake[(1,)](source, target, ROUNDS=ROUNDS, SIZE=SIZE, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(source, target)
    print("copied")


if __name__ == "__main__":
    main()
