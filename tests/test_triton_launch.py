"""Launching again: the first call goes through Triton, the others to the compiled kernel with the same arguments."""

from __future__ import annotations

import pytest
import torch
from batches import Row, row_groups, shuffled_tables
from triton_here import HAS_TRITON

from mla import build_metadata
from mla.compute import triton_hopper, triton_launch
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
        launch.way((i + 1, 1, 1), 7, f"x{i}", i)
    assert kernel.calls == [((1, 1, 1), ("x0", 0), {"SIZE": 8, "WIDE": True, "maxnreg": 168, **OPTIONS})]
    handles = 7, "function", "packed", None, None, None
    assert kernel.compiled.runs == [(2, 1, 1, *handles, "x1", 1, 8, True), (3, 1, 1, *handles, "x2", 2, 8, True)]


def test_an_interpreted_kernel_is_called_every_time():
    kernel = Kernel(None)
    launch = Launcher(kernel, {"SIZE": 8, "WIDE": True})
    for i in range(2):
        launch.way((1, 1, 1), 0, "x", i)
    assert [args for _, args, _ in kernel.calls] == [("x", 0), ("x", 1)]


def test_addresses_are_taken_once_compiled():
    launch = Launcher(Kernel(Compiled()), {"SIZE": 8, "WIDE": True})
    assert not launch.way.takes_addresses
    launch.way((1, 1, 1), 0, "x", 1)
    assert launch.way.takes_addresses
    interpreted = Launcher(Kernel(None), {"SIZE": 8, "WIDE": True})
    interpreted.way((1, 1, 1), 0, "x", 1)
    assert not interpreted.way.takes_addresses


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
def test_boxes_become_descriptors_for_calls_through_triton():
    """The first, and one of another thread that began before the first had compiled."""
    kernel = Kernel(Compiled())
    launch = Launcher(kernel, {"SIZE": 8, "WIDE": True})
    boxes = launch.way.boxes(torch.zeros(4, 576, dtype=torch.bfloat16), (4, 576), 576, (64, 128))
    for _ in range(2):
        launch((1, 1, 1), 0, *boxes, 1)
    for _, (described, _), _ in kernel.calls:
        assert (described.shape, described.strides, described.block_shape) == ([4, 576], [576, 1], [64, 128])
    again = launch.way.boxes(torch.zeros(4, 576, dtype=torch.bfloat16), (4, 576), 576, (64, 128))
    launch.way((1, 1, 1), 0, *again, 1)
    assert kernel.compiled.runs[0][9] is again[0]
    assert isinstance(again[0], RowBoxes)


KNOWN = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
NARROW, BROAD = (64, 64), (64, 512)


class InstalledCall:
    """What the installed release launches a kernel with two boxes, a number and two constants by, over a function in C."""

    def __init__(self, monkeypatch, **changed):
        from triton.backends.nvidia import driver as nvidia
        from triton.runtime import driver

        class Utils:
            fill_tma_descriptor = fill_tma_descriptor_tiled = staticmethod(self.encode)

        monkeypatch.setattr(driver, "_active", type("Active", (), {"utils": Utils}))
        self.launched, self.encoded = [], []
        signature = dict(enumerate(("tensordesc<bf16[64, 64]>", "tensordesc<bf16[64, 512]>", "i32", "constexpr", "constexpr")))
        metas = [{**KNOWN, "block_size": [64, 64]}, {**KNOWN, "block_size": [64, 256]}]
        attributes = {
            "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
            "profile_scratch_align": 1, "launch_cooperative_grid": "cooperative", "launch_pdl": "early",
            "gsan_enabled": False, "arg_annotations": "annotations", "kernel_signature": "signature",
            "launch": nvidia.wrap_handle_tensordesc(self.in_c, signature, metas), **changed,
        }  # fmt: skip
        self.run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        for name, value in attributes.items():
            setattr(self.run, name, value)
        self.function, self.packed_metadata = 17, (4, 1, 1000)
        self.is_of_3_6 = hasattr(nvidia, "_BASE_ARGS_FORMAT")

    def in_c(self, *args):
        self.launched.append(tuple(tuple(x) if isinstance(x, list) else x for x in args))

    def encode(self, *args):
        self.encoded.append(args)
        return repr(args)


def launch_boxes(call, caches, *, times, boxes=(NARROW, BROAD)):
    """Launch for each of the caches, and by Triton's own call; what reached the function in C of each."""
    launch = Launcher(Kernel(call), {"SIZE": 8, "WIDE": True})
    launch((1, 1, 1), 0, *launch.boxes(caches[0], (8, 576), 576, *boxes), 5)
    for cache in caches:
        call.run(3, 2, 1, 7, 17, (4, 1, 1000), None, None, None,
                 *(RowBoxes(cache, (8, 576), 576, box) for box in boxes), 5, 8, True)  # fmt: skip
    want, encoded = list(call.launched), list(call.encoded)
    call.launched.clear()
    call.encoded.clear()
    for _ in range(times):
        for cache in caches:
            way = launch.way
            way((3, 2, 1), 7, *way.boxes(cache, (8, 576), 576, *boxes), 5)
    return want * times, encoded


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
def test_the_function_in_c_is_told_the_same_as_by_the_installed_release(monkeypatch):
    """Of Triton 3.6 it is called itself, and what it is told of a cache is encoded once; later ones have a cheaper call."""
    call = InstalledCall(monkeypatch)
    caches = [torch.zeros(8, 576, dtype=torch.bfloat16) for _ in range(2)]
    want, encoded = launch_boxes(call, caches, times=3)
    assert len(want) == 6
    assert call.launched == want
    assert [args[0] for args in encoded] == [cache.data_ptr() for cache in caches for _ in range(2)]
    assert [64, 256] in encoded[1]
    assert call.encoded == encoded * (1 if call.is_of_3_6 else 3)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
@pytest.mark.parametrize("changed", ["global_scratch_size", "profile_scratch_size", "launch", "format", "boxes"])
def test_another_call_is_made_as_it_is(monkeypatch, changed):
    """One that allocates, that something was put around, of an unknown release, or with boxes alike that are encoded apart."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import _allocation

    call = InstalledCall(monkeypatch)
    allocator = type("Allocator", (), {"get": lambda self: lambda *size: size})()
    for name in ("_allocator", "_profile_allocator"):
        monkeypatch.setattr(_allocation, name, allocator)
    monkeypatch.setattr(_allocation, "has_profile_allocator", lambda: True, raising=False)
    own = call.run.launch
    if changed == "launch":
        call.run.launch = lambda *args: [own(*args)]
    elif changed == "format":
        monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOOO", raising=False)
        monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT_LEN", 13, raising=False)
    elif changed != "boxes":
        setattr(call.run, changed, 64)
    boxes = (NARROW, NARROW if changed == "boxes" else BROAD)
    want, encoded = launch_boxes(call, [torch.zeros(8, 576, dtype=torch.bfloat16)], times=2, boxes=boxes)
    assert call.launched == want
    assert call.encoded == encoded * 2


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
def test_few_descriptions_are_kept(monkeypatch):
    monkeypatch.setattr(triton_launch, "MAX_DESCRIBED", 2)
    call = InstalledCall(monkeypatch)
    want, _ = launch_boxes(call, [torch.zeros(8, 576, dtype=torch.bfloat16) for _ in range(5)], times=2)
    assert call.launched == want
    assert len(call.encoded) == 5 * 2 * 2, "those of the first caches are gone when they are needed again"


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
