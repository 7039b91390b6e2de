"""Cache writes and gathers in Triton against those in plain torch.

Without a GPU the cases run under Triton's interpreter, in a child process: TRITON_INTERPRET must be set before Triton is
imported. Functions named ``interpreted_...`` are the child's tests.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from triton_here import needs_interpreter

from mla.cache import paged
from mla.compute.triton_cache import gather_latent_cache, write_latent_cache_
from mla.errors import CacheError

HAS_GPU = torch.cuda.is_available()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [(512, 64), (16, 8), (24, 16), (7, 3), (1, 1)]
OUTSIDE = (-1, -7, 999, 10**12)

on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU that torch can use")


def run_interpreted(file):
    """Run the ``interpreted_...`` functions of a test file under Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-o", "python_functions=interpreted_*"]
    command += [
        "-W",
        "ignore::RuntimeWarning:triton.runtime.interpreter",
        "-W",
        "ignore::RuntimeWarning:numpy",
    ]  # of log(0), of NaN
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


@needs_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def rows_for(widths, dtype, *, num_tokens=9, seed=0):
    """New rows, as views that are not contiguous, and slots of which some lie outside a cache of 6 blocks of 4."""
    gen = torch.Generator().manual_seed(seed)
    wide = torch.randn(num_tokens, widths[0] + widths[1] + 2, generator=gen, dtype=torch.float64).to(dtype)
    k_pe = torch.randn(widths[1], num_tokens, generator=gen, dtype=torch.float64).to(dtype).T
    slots = torch.randperm(24, generator=gen)[:num_tokens]
    slots[torch.tensor([0, 3, 4, 8])] = torch.tensor(OUTSIDE)
    return wide[:, 1 : widths[0] + 1], k_pe, slots


def check_write(device, dtype, cache_dtype, widths):
    kv_c, k_pe, slots = rows_for(widths, dtype)
    cache = torch.randn(6, 4, sum(widths), dtype=torch.float64).to(cache_dtype)
    expected = cache.clone()
    inside = (slots >= 0) & (slots < 24)
    paged.write_latent_cache_(expected, kv_c[inside], k_pe[inside], slots[inside])
    got = cache.to(device)
    write_latent_cache_(got, kv_c.to(device), k_pe.to(device), slots.to(device))
    assert torch.equal(got.cpu(), expected)


def check_gather(device, cache_dtype, dtype, latent_dim):
    cache = torch.randn(6, 4, latent_dim, dtype=torch.float64).to(cache_dtype)
    slots = torch.randperm(24)[:11]
    for make in (lambda: torch.full((13, latent_dim), torch.nan), lambda: torch.full((latent_dim + 1, 13), torch.nan).T[:, 1:]):
        expected, out = make().to(dtype), make().to(device, dtype)
        paged.gather_latent_cache(cache, slots, out=expected)
        head = gather_latent_cache(cache.to(device), slots.to(device), out=out)
        assert head.shape == (11, latent_dim)
        assert head.data_ptr() == out.data_ptr()
        assert torch.equal(head.cpu(), expected[:11])
        assert out[11:].isnan().all()


def interpreted_writes():
    for widths in WIDTHS:
        check_write("cpu", torch.float32, torch.float32, widths)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def interpreted_conversions(dtype, cache_dtype):
    # The interpreter cuts what it turns into bfloat16 off; the GPU rounds it.
    if cache_dtype != torch.bfloat16 or dtype == torch.bfloat16:
        check_write("cpu", dtype, cache_dtype, (24, 16))
    if dtype != torch.bfloat16 or cache_dtype == torch.bfloat16:
        check_gather("cpu", cache_dtype, dtype, 40)


def interpreted_gathers():
    for latent_dim in (576, 40, 16, 1):
        check_gather("cpu", torch.float32, torch.float32, latent_dim)


def check_edges(device):
    """Nothing to do, every slot outside, NaN moved as it is, gradients not kept, a row of a slot outside is NaN."""
    cache = torch.zeros(2, 4, 12, device=device)
    for size in (0, 3):
        kv_c, k_pe = torch.ones(size, 8, device=device), torch.ones(size, 4, device=device)
        write_latent_cache_(cache, kv_c, k_pe, torch.tensor(OUTSIDE[:size], dtype=torch.int64, device=device))
        assert not cache.any()
        write_latent_cache_(cache[:0], kv_c, k_pe, torch.zeros(size, dtype=torch.int64, device=device))
    slots = torch.tensor([6, 1], device=device)
    kv_c = torch.tensor([[torch.nan] * 8, [2.0] * 8], device=device, requires_grad=True)
    write_latent_cache_(cache, kv_c, torch.full((2, 4), 3.0, device=device), slots)
    assert not cache.requires_grad
    assert cache.view(8, 12)[6, :8].isnan().all()
    assert cache.view(8, 12)[1].tolist() == [2.0] * 8 + [3.0] * 4
    assert not cache.view(8, 12)[[0, 2, 3, 4, 5, 7]].any()
    out = gather_latent_cache(cache, torch.tensor([1, -1, 8], device=device), out=torch.zeros(3, 12, device=device))
    assert out[0].tolist() == [2.0] * 8 + [3.0] * 4
    assert out[1:].isnan().all()
    assert gather_latent_cache(cache, slots[:0], out=torch.zeros(3, 12, device=device)).shape == (0, 12)


def interpreted_edges():
    check_edges("cpu")


CACHE, KV_C, K_PE = torch.zeros(2, 4, 12), torch.zeros(3, 8), torch.zeros(3, 4)
SLOTS, OUT = torch.tensor([0, 1, 2]), torch.zeros(3, 12)
BAD_WRITES = [
    ((CACHE[0], KV_C, K_PE, SLOTS), r"latent_cache: expected shape \(num_blocks, block_size, latent_dim\), got \(4, 12\)"),
    ((CACHE.int(), KV_C, K_PE, SLOTS), r"latent_cache: expected .*, got torch\.int32"),
    ((CACHE, KV_C, K_PE, SLOTS.int()), r"slot_mapping: expected int64, got torch\.int32"),
    ((CACHE, KV_C, K_PE, SLOTS[:2]), r"kv_c: expected shape .* with num_tokens=2.*, got \(3, 8\)"),
    ((CACHE, KV_C, K_PE.double(), SLOTS), r"k_pe: expected float32, got torch\.float64"),
    ((CACHE, KV_C, K_PE[:, 1:], SLOTS), r"kv_c, k_pe: expected 12 columns together .*, got 8 \+ 3"),
    ((CACHE, KV_C.int(), K_PE.int(), SLOTS), r"kv_c: expected .*, got torch\.int32"),
    ((CACHE, KV_C.to("meta"), K_PE, SLOTS), "kv_c: expected device cpu, got meta"),
]
BAD_GATHERS = [
    ((CACHE, SLOTS.int(), OUT), r"slots: expected int64, got torch\.int32"),
    ((CACHE, SLOTS, OUT[:2]), "out: expected at least 3 rows, got 2"),
    ((CACHE, SLOTS, OUT[:, 1:]), r"out: expected shape .* with .*latent_dim=12, got \(3, 11\)"),
    ((CACHE, SLOTS, OUT.int()), r"out: expected .*, got torch\.int32"),
    ((CACHE, SLOTS, OUT.to("meta")), "out: expected device cpu, got meta"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_WRITES)
def test_writes_refuse_what_plain_torch_refuses(arguments, message):
    for write in (write_latent_cache_, paged.write_latent_cache_):
        with pytest.raises(CacheError, match=message):
            write(*arguments)


@pytest.mark.parametrize(("arguments", "message"), BAD_GATHERS)
def test_gathers_refuse_what_plain_torch_refuses(arguments, message):
    cache, slots, out = arguments
    for gather in (gather_latent_cache, paged.gather_latent_cache):
        with pytest.raises(CacheError, match=message):
            gather(cache, slots, out=out)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_and_gathers_on_a_gpu(dtype, cache_dtype):
    for widths in WIDTHS:
        check_write("cuda", dtype, cache_dtype, widths)
        check_gather("cuda", cache_dtype, dtype, sum(widths))
    check_edges("cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_is_read_on_the_host():
    kv_c, k_pe, slots = (x.cuda() for x in rows_for((512, 64), torch.bfloat16))
    cache = torch.zeros(6, 4, 576, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(9, 576, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_latent_cache_(cache, kv_c, k_pe, slots)
        gather_latent_cache(cache, slots, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.xdist_group("much memory")
@on_gpu
def test_offsets_beyond_31_bits():
    """A cache of 2^32 numbers; the slots at its end."""
    free = torch.cuda.mem_get_info()[0]
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    cache = torch.empty(2**16, 128, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([2**23 - 1, 2**23 - 130, 5], device="cuda")
    kv_c, k_pe = (torch.randn(3, n, dtype=torch.bfloat16, device="cuda") for n in (512, 64))
    write_latent_cache_(cache, kv_c, k_pe, slots)
    rows = torch.cat([kv_c, k_pe], dim=1)
    assert torch.equal(cache.view(-1, 576)[slots], rows)
    assert torch.equal(gather_latent_cache(cache, slots, out=torch.empty_like(rows)), rows)


@pytest.mark.gpu
@on_gpu
def test_graphs_replay_writes_and_gathers():
    cache = torch.zeros(6, 4, 576, dtype=torch.bfloat16, device="cuda")
    kv_c, k_pe, slots = (x.cuda() for x in rows_for((512, 64), torch.float32))
    read, out = torch.zeros(9, dtype=torch.int64, device="cuda"), torch.empty(9, 576, device="cuda")

    def step():
        write_latent_cache_(cache, kv_c, k_pe, slots)
        gather_latent_cache(cache, read, out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles outside of the graph
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected = cache.clone()
    for seed in range(5):
        for buffer, values in zip((kv_c, k_pe, slots), rows_for((512, 64), torch.float32, seed=seed), strict=True):
            buffer.copy_(values)
        read.copy_(torch.randperm(24)[:9])
        graph.replay()
        paged.write_latent_cache_(expected, kv_c, k_pe, slots)
        assert torch.equal(cache, expected)
        assert torch.equal(out, expected.view(24, 576)[read].float())
