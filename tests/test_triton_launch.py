"""Launching again: the first call goes through Triton, the others to the compiled kernel with the same arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from batches import Row, row_groups, shuffled_tables
from triton_here import HAS_TRITON

from mla import build_metadata
from mla.compute import triton_hopper
from mla.compute.triton_hopper import FEW, WIDE
from mla.compute.triton_launch import OPTIONS, Launcher, RowBoxes, raw_stream


class Compiled:
    function, packed_metadata = "function", "packed"

    def __init__(self):
        self.runs = []

    def run(self, *args):
        self.runs.append(args)


class Kernel:
    """A kernel with parameters x, n, SIZE and WIDE, the last two constants; `maxnreg` is an option."""

    arg_names = ("x", "n", "SIZE", "WIDE")

    def __init__(self, compiled):
        self.compiled = compiled
        self.calls = []

    def __getitem__(self, grid):
        def call(*args, **constants):
            self.calls.append((grid, args, constants))
            return self.compiled

        return call


def test_only_the_first_call_goes_through_triton():
    kernel = Kernel(Compiled())
    launch = Launcher(kernel, {"SIZE": 8, "WIDE": True, "maxnreg": 168})
    for i in range(3):
        launch((i + 1, 1, 1), 7, f"x{i}", i)
    assert kernel.calls == [((1, 1, 1), ("x0", 0), {"SIZE": 8, "WIDE": True, "maxnreg": 168, **OPTIONS})]
    handles = 7, "function", "packed", None, None, None
    assert kernel.compiled.runs == [(2, 1, 1, *handles, "x1", 1, 8, True), (3, 1, 1, *handles, "x2", 2, 8, True)]


def test_an_interpreted_kernel_is_called_every_time():
    kernel = Kernel(None)
    launch = Launcher(kernel, {"SIZE": 8, "WIDE": True})
    for i in range(2):
        launch((1, 1, 1), 0, "x", i)
    assert [args for _, args, _ in kernel.calls] == [("x", 0), ("x", 1)]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
def test_boxes_become_descriptors_for_the_first_call():
    kernel = Kernel(Compiled())
    launch = Launcher(kernel, {"SIZE": 8, "WIDE": True})
    boxes = RowBoxes(torch.zeros(4, 576, dtype=torch.bfloat16), (4, 576), 576, (64, 128))
    launch((1, 1, 1), 0, boxes, 1)
    launch((1, 1, 1), 0, boxes, 1)
    described = kernel.calls[0][1][0]
    assert (described.shape, described.strides, described.block_shape) == ([4, 576], [576, 1], [64, 128])
    assert kernel.compiled.runs[0][9] is boxes


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
def test_boxes_are_what_the_call_of_a_compiled_kernel_reads(monkeypatch):
    """By the installed release's own code, which asks a descriptor for more from release to release."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Active:
        class utils:  # noqa: N801  (its name there)
            fill_tma_descriptor = fill_tma_descriptor_tiled = staticmethod(lambda *args: args)

    monkeypatch.setattr(driver, "_active", Active())
    cache = torch.zeros(4, 576, dtype=torch.bfloat16)
    known = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    more = [None] * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)
    described, *numbers = nvidia.make_tensordesc_arg(RowBoxes(cache, (4, 576), 576, (64, 64)), known, *more)
    assert numbers == [4, 576, 576, 1]
    assert described[0] == cache.data_ptr()
    assert [64, 64] in described


def test_addresses_are_taken_once_compiled():
    kernel = Kernel(Compiled())
    launch = Launcher(kernel, {"SIZE": 8, "WIDE": True})
    assert not launch.takes_addresses
    launch((1, 1, 1), 0, "x", 1)
    assert launch.takes_addresses
    interpreted = Launcher(Kernel(None), {"SIZE": 8, "WIDE": True})
    interpreted((1, 1, 1), 0, "x", 1)
    assert not interpreted.takes_addresses


def test_the_cpu_has_no_stream():
    assert raw_stream(torch.device("cpu")) == 0


def shares_of(monkeypatch, *, num_heads, query_lens, over_buffers=False, balanced=False):
    """Which kernels a step launches: `few` of each share, and the sequences at a time."""
    launched = []
    monkeypatch.setattr(triton_hopper, "num_processors", lambda device: 132)
    monkeypatch.setattr(Launcher, "__call__", lambda self, *args: launched.append(args))
    monkeypatch.setattr(triton_hopper, "_module", lambda name: type("Kernels", (), dict.fromkeys(NAMES, Kernel(None))))
    triton_hopper._kernels.cache_clear()
    rows = [Row(query_len=n, context_len=9, is_prompt=False, lookahead=0) for n in query_lens]
    tables, _ = shuffled_tables(rows, 16, seed=0)
    metadata = build_metadata(row_groups(rows, tables), block_size=16).decode
    if over_buffers:
        object.__setattr__(metadata, "over_buffers", True)
    q = torch.zeros(metadata.num_tokens, num_heads, 576, dtype=torch.bfloat16)
    shares = triton_hopper._share_out(q, metadata, 0, balanced=balanced)
    triton_hopper._kernels.cache_clear()
    assert len(launched) == len(shares)
    return [(share.kernels.case.few, share.num_seqs) for share in shares]


NAMES = ("plan_shares", "join_parts", "attend_few", "attend_wide")


@pytest.mark.parametrize(("num_heads", "query_lens", "over_buffers", "kernels"), [
    (16, [1, 1, 1], False, [True]),
    (8, [2, 2], False, [True]),
    (8, [2, 1, 2], False, [True]),
    (16, [3, 3], False, [False]),  # all sequences have too many rows for the kernel for few
    (16, [3, 3], True, [True, False]),  # a state's numbers are capacities
    (16, [3, 1], False, [True, False]),
    (128, [1, 1], False, [False]),
    (17, [1], False, [False]),
])  # fmt: skip
def test_kernels_are_launched_for_the_rows_that_there_may_be(monkeypatch, num_heads, query_lens, over_buffers, kernels):
    shares = shares_of(monkeypatch, num_heads=num_heads, query_lens=query_lens, over_buffers=over_buffers)
    assert shares == [(few, len(query_lens)) for few in kernels]


def test_large_batches_go_in_several_launches(monkeypatch):
    """As many sequences at a time as memory for their parts is granted for, whatever kind of set."""
    monkeypatch.setattr(triton_hopper, "MAX_SEQS", 2)
    for balanced in (False, True):
        assert shares_of(monkeypatch, num_heads=16, query_lens=[1] * 5, balanced=balanced) == [(True, 2), (True, 2), (True, 1)]
    monkeypatch.setattr(triton_hopper, "MAX_SEQS", 1024)
    monkeypatch.setattr(triton_hopper, "MAX_PART_BYTES", 3 * 128 * 514 * 4)
    assert shares_of(monkeypatch, num_heads=128, query_lens=[1] * 5) == [(False, 3), (False, 2)]
    assert shares_of(monkeypatch, num_heads=128, query_lens=[1] * 5, balanced=True) == [(False, 5)]


def test_slots_hold_the_parts_of_any_lengths():
    for units in (FEW, WIDE):
        previous = 0
        for max_seq_len in (1, 64, 4096, 4097, 32768, 32769, 70000, 10**6):
            slots = units.max_slots(3, max_seq_len, 132, balanced=False)
            assert slots >= previous, "a longer limit never has fewer"
            previous = slots
        assert units.max_slots(3, 10**6, 132, balanced=True) == 264
