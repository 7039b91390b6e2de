"""Prefill in Triton against the float64 reference; under the interpreter where there is no GPU (see test_triton_cache.py)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from compare import OUT_REL, assert_close
from test_triton_cache import on_gpu, run_interpreted
from triton_here import needs_interpreter

from mla.compute import reference, triton_prefill
from mla.compute.triton_prefill import PrefillRoute, prefill_route, tiles_for, varlen_attention
from mla.errors import KernelError

SCALE = 192**-0.5
WIDTHS = [(192, 128), (24, 16), (48, 32), (40, 40)]
BATCHES = {
    "as many keys as queries": ([37, 1, 64, 20], [37, 1, 64, 20]),
    "more keys": ([5, 1, 33, 64, 0], [40, 33, 70, 65, 7]),
    "fewer keys and none": ([40, 7, 0, 33, 3], [17, 0, 0, 1, 35]),
    "no sequences": ([], []),
    "no keys": ([3, 2], [0, 0]),
}
LARGE_BATCHES = {
    "as many keys as queries": ([300, 1, 0, 77, 129, 128], [300, 1, 0, 77, 129, 128]),
    "more keys": ([300, 1, 64, 77, 129], [310, 400, 320, 78, 513]),
    "fewer keys and none": ([300, 1, 77, 129], [33, 0, 5, 128]),
}
FLAT_REL = 2.3e-3
"""bfloat16 where many keys weigh alike: rounding the result alone is 1.66e-3; with the weights 2.21e-3, here and in cuDNN."""
GPU_REL = {torch.bfloat16: 2.0e-3, torch.float16: OUT_REL[torch.float16], torch.float32: OUT_REL[torch.float32]}


@needs_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def cumulative(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


def ragged(query_lens, kv_lens, num_heads, dtype, *, dims=(192, 128), amp=1.0, seed=0):
    """Queries, keys and values, each with rows too many that hold NaN; values are columns of something wider."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.full((sum(query_lens) + 3, num_heads, dims[0]), math.nan)
    k = torch.full((sum(kv_lens) + 5, num_heads, dims[0]), math.nan)
    v = torch.full((sum(kv_lens) + 5, num_heads, dims[1] + 8), math.nan)
    q[:-3] = amp * torch.randn(q[:-3].shape, generator=gen)
    for x in (k, v):
        x[:-5] = torch.randn(x[:-5].shape, generator=gen)
    return q.to(dtype), k.to(dtype), v.to(dtype)[..., 8:]


def attend(q, k, v, query_lens, kv_lens, *, causal, device="cpu", scale=SCALE):
    """The kernel's result on the host; inputs keep their strides on the way to the device."""
    q, k, v = (x if device == "cpu" else to_device(x, device) for x in (q, k, v))
    out, lse = varlen_attention(
        q,
        k,
        v,
        query_start_loc=cumulative(query_lens).to(device),
        kv_start_loc=cumulative(kv_lens).to(device),
        max_query_len=max([0, *query_lens]),
        max_kv_len=max([0, *kv_lens]),
        causal=causal,
        softmax_scale=scale,
    )
    return out.cpu(), lse.cpu()


def to_device(x, device):
    """A copy with the strides of `x`."""
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def oracle(q, k, v, query_lens, kv_lens, *, causal):
    """What `reference.varlen_attention` computes, a sequence at a time."""
    q, k, v = (x.double() for x in (q, k, v))
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -math.inf)
    starts, kv_starts = cumulative(query_lens).tolist(), cumulative(kv_lens).tolist()
    for i, (n, m) in enumerate(zip(query_lens, kv_lens, strict=True)):
        rows, keys = slice(starts[i], starts[i + 1]), slice(kv_starts[i], kv_starts[i + 1])
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * SCALE
        if causal:
            scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + (m - n), -math.inf)
        lse[rows] = scores.logsumexp(-1).T
        weights = (scores - lse[rows].T[..., None]).nan_to_num(-math.inf).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v[keys])
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_oracle_is_the_reference(batch, causal):
    query_lens, kv_lens = BATCHES[batch]
    q, k, v = ragged(query_lens, kv_lens, 3, torch.float64)
    expected = reference.varlen_attention(
        q,
        k,
        v,
        query_start_loc=cumulative(query_lens),
        kv_start_loc=cumulative(kv_lens),
        max_query_len=0,
        max_kv_len=0,
        causal=causal,
        softmax_scale=SCALE,
    )
    for x, y in zip(oracle(q, k, v, query_lens, kv_lens, causal=causal), expected, strict=True):
        assert_close(x, y, rel=1e-12)


def check(query_lens, kv_lens, num_heads, dtype, *, causal, dims=(192, 128), device="cpu", amp=1.0, seed=0, **limits):
    q, k, v = ragged(query_lens, kv_lens, num_heads, dtype, dims=dims, amp=amp, seed=seed)
    got = attend(q, k, v, query_lens, kv_lens, causal=causal, device=device)
    assert_attention(got, q, k, v, query_lens, kv_lens, causal=causal, **limits)


def assert_attention(got, q, k, v, query_lens, kv_lens, *, causal, rel=None, lse=1e-5):
    expected, expected_lse = oracle(q, k, v, query_lens, kv_lens, causal=causal)
    assert got[0].dtype == q.dtype
    assert got[1].dtype == torch.float32
    assert_close(got[0], expected, rel=rel or OUT_REL[q.dtype], name="out")
    assert_close(got[1], expected_lse, abs=lse, name="lse")
    assert not got[0][expected_lse.isneginf()].any(), "rows without keys"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def interpreted_batches(dtype, batch, causal):
    check(*BATCHES[batch], 3, dtype, causal=causal)


@pytest.mark.parametrize("dims", [*WIDTHS, (16, 16), (8, 5), (80, 96)])
def interpreted_widths(dims):
    check([5, 0, 34], [40, 3, 34], 3, torch.float32, causal=True, dims=dims)


@pytest.mark.parametrize("num_heads", [1, 16, 17])
def interpreted_heads(num_heads):
    check([5, 0, 34], [40, 3, 34], num_heads, torch.float32, causal=True, dims=(24, 16))


def check_sinks(up, dtype, *, device="cpu", **limits):
    """One key whose score lies `up` above the others: the first, one in the middle, the last."""
    along = torch.where(torch.arange(192) % 3 == 0, 1.0, -1.0) / math.sqrt(192)
    for at, causal in itertools.product((0, 33, 99), (True, False)):
        q, k, v = ragged([60], [100], 2, dtype, seed=up)
        q[:60] += ((8 - q[:60].float() @ along)[..., None] * along).to(dtype)
        k[at] += (up / SCALE / 8 * along).to(dtype)
        got = attend(q, k, v, [60], [100], causal=causal, device=device)
        assert_attention(got, q, k, v, [60], [100], causal=causal, lse=2e-5 * (1 + up / 20), **limits)


@pytest.mark.parametrize("up", [20, 60, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def interpreted_sinks(dtype, up):
    check_sinks(up, dtype)


def check_alone(dtype, device, query_lens, kv_lens, num_heads=3):
    """The bits of a sequence alone, in a batch, with more rows behind it, and beside sequences of NaN."""
    q, k, v = ragged(query_lens, kv_lens, num_heads, dtype)
    starts, kv_starts = cumulative(query_lens).tolist(), cumulative(kv_lens).tolist()
    for causal in (True, False):
        together = attend(q, k, v, query_lens, kv_lens, causal=causal, device=device)
        for i, (n, m) in enumerate(zip(query_lens, kv_lens, strict=True)):
            rows, keys = slice(starts[i], starts[i + 1]), slice(kv_starts[i], kv_starts[i + 1])
            alone = attend(q[rows], k[keys], v[keys], [n], [m], causal=causal, device=device)
            poisoned = [torch.full_like(x, math.nan) for x in (q, k, v)]
            for x, poison, part in ((q, poisoned[0], rows), (k, poisoned[1], keys), (v, poisoned[2], keys)):
                poison[part] = x[part]
            beside = attend(*poisoned, query_lens, kv_lens, causal=causal, device=device)
            for x, y, z in zip(together, alone, beside, strict=True):
                assert torch.equal(x[rows], y)
                assert torch.equal(x[rows], z[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def interpreted_bits(dtype):
    check_alone(dtype, "cpu", [37, 1, 0, 20], [50, 9, 3, 20])


def check_strides(dtype, device):
    """The same bits whatever the strides: keys expanded over heads, transposed, reversed into other memory."""
    q, k, v = ragged([70, 3], [80, 3], 4, dtype)
    k, v = k[:, :1].expand(-1, 4, -1), v[:, 1:2].expand(-1, 4, -1)
    expected = attend(q, k.contiguous(), v.contiguous(), [70, 3], [80, 3], causal=True, device=device)
    for change in (
        lambda x: x,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        lambda x: torch.stack([x, x], dim=2)[:, :, 1],
        lambda x: torch.cat([torch.zeros(*x.shape[:2], 1, dtype=x.dtype), x], dim=2)[..., 1:],
    ):
        got = attend(*map(change, (q, k, v)), [70, 3], [80, 3], causal=True, device=device)
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, y)


def interpreted_strides():
    check_strides(torch.float32, "cpu")


def test_tiles():
    tiles = tiles_for(torch.bfloat16, 192, 128)
    assert (tiles.widths, tiles.sizes, tiles.v_width) == ((128, 64), (128, 64), 128)
    assert tiles_for(torch.bfloat16, 24, 16).v_width == 32
    for qk_head_dim in range(1, 600):
        tiles = tiles_for(torch.float32, qk_head_dim, 1)
        assert sum(tiles.sizes) == qk_head_dim
        assert all(width >= size for width, size in zip(tiles.widths, tiles.sizes, strict=True))
        assert all(width & (width - 1) == 0 for width in tiles.widths)
        assert tiles.widths[0] >= 16
        assert tiles.widths[1] == 0 or tiles.widths[1] >= 16


def test_the_route_is_explained():
    route = prefill_route(torch.bfloat16, 192, 128, torch.device("cpu"))
    assert (route.name, route.reason) == ("portable", "cpu is not an NVIDIA GPU")


Q, KV = torch.zeros(3, 2, 8), torch.zeros(4, 2, 8)
LOC = torch.tensor([0, 3], dtype=torch.int32)
BAD = [
    ({"q": Q.double()}, "q: expected bfloat16 or float16 or float32, got torch.float64"),
    ({"k": KV.half()}, "k: expected float32, got torch.float16"),
    ({"k": KV[..., 1:]}, r"k: expected shape .*qk_head_dim=8.*, got \(4, 2, 7\)"),
    ({"v": KV[1:]}, r"v: expected shape .*num_kv_tokens=4.*, got \(3, 2, 8\)"),
    ({"v": KV.to("meta")}, "v: expected device cpu, got meta"),
    ({"query_start_loc": LOC.long()}, "query_start_loc: expected int32, got torch.int64"),
    ({"kv_start_loc": LOC[:1]}, r"kv_start_loc: expected shape .*num_seqs=1.*, got \(1,\)"),
    ({"max_query_len": -1}, "max_query_len: expected an int >= 0, got -1"),
    ({"max_kv_len": 2.5}, "max_kv_len: expected an int >= 0, got 2.5"),
    ({"softmax_scale": 0}, "softmax_scale: expected a finite number > 0, got 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {
        "q": Q,
        "k": KV,
        "v": KV,
        "query_start_loc": LOC,
        "kv_start_loc": LOC,
        "max_query_len": 3,
        "max_kv_len": 3,
        "causal": True,
        "softmax_scale": 1.0,
    }
    with pytest.raises(KernelError, match=message):
        varlen_attention(**arguments | change)


@pytest.fixture(params=["hopper", "portable"])
def route(request, monkeypatch):
    """Both kernels on a GPU that has both, whatever `prefill_route` would say."""
    if request.param == "hopper":
        found = prefill_route(torch.bfloat16, 192, 128, torch.device("cuda"))
        if found.name != "hopper":
            pytest.skip(found.reason)
    monkeypatch.setattr(triton_prefill, "prefill_route", lambda *_: PrefillRoute(name=request.param, reason="the test"))
    return request.param


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", LARGE_BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batches_on_a_gpu(route, dtype, batch, causal):
    square = causal and batch == "as many keys as queries"
    rel = FLAT_REL if dtype == torch.bfloat16 and not square else GPU_REL[dtype]
    for num_heads in (1, 3, 16, 20):
        check(*LARGE_BATCHES[batch], num_heads, dtype, causal=causal, device="cuda", rel=rel)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_batches_on_a_gpu(route, dtype, batch):
    for causal in (True, False):
        check(*BATCHES[batch], 3, dtype, causal=causal, device="cuda", rel=max(FLAT_REL, GPU_REL[dtype]))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dims", [*WIDTHS, (576, 512), (8, 5), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_widths_on_a_gpu(dtype, dims):
    for batch in BATCHES.values():
        for causal in (True, False):
            check(*batch, 3, dtype, causal=causal, dims=dims, device="cuda", lse=5e-5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_larger_scores_on_a_gpu(route, dtype):
    for batch in LARGE_BATCHES.values():
        for causal in (True, False):
            check(*batch, 3, dtype, causal=causal, device="cuda", rel=GPU_REL[dtype], lse=5e-5, amp=8.0)
    for up in (20, 60, 120):
        check_sinks(up, dtype, device="cuda", rel=max(FLAT_REL, GPU_REL[dtype]))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_and_strides_on_a_gpu(route, dtype):
    check_alone(dtype, "cuda", [300, 1, 0, 77, 129, 128], [310, 40, 3, 77, 513, 100], num_heads=20)
    check_strides(dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.xdist_group("much memory")
@on_gpu
def test_offsets_beyond_31_bits(route):
    """Keys and values of 2^32 numbers; the sequence at their end has the bits that it has alone."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    num_rows, n = 2**16 + 200, 200
    k = torch.empty(num_rows, 256, 320, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(n, 256, 192, dtype=torch.bfloat16, device="cuda")
    k[-n:] = torch.randn(n, 256, 320, dtype=torch.bfloat16, device="cuda")

    def run(rows, lens, kv_lens):
        return varlen_attention(
            q,
            rows[..., :192],
            rows[..., 192:],
            query_start_loc=cumulative(lens).cuda(),
            kv_start_loc=cumulative(kv_lens).cuda(),
            max_query_len=n,
            max_kv_len=max(kv_lens),
            causal=True,
            softmax_scale=SCALE,
        )

    for x, y in zip(run(k, [0, n], [num_rows - n, n]), run(k[-n:].clone(), [n], [n]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_is_read_on_the_host_and_graphs_replay(route):
    lens = [70, 3]
    q, k, v = (x.cuda() for x in ragged(lens, lens, 4, torch.bfloat16))
    loc = cumulative(lens).cuda()

    def run():
        return varlen_attention(
            q, k, v, query_start_loc=loc, kv_start_loc=loc, max_query_len=73, max_kv_len=73, causal=True, softmax_scale=SCALE
        )

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for first in (10, 73, 0, 33):
        loc.copy_(torch.tensor([0, first, 73]))
        q.normal_()
        k.normal_()
        graph.replay()
        for x, y in zip(captured, run(), strict=True):
            assert torch.equal(x, y)
