"""A sequence's bits: alone or in any batch, padded, placed anywhere, any block size, one thread or two."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla.compute import cpu

pytestmark = pytest.mark.usefixtures("bfloat16_way")

SCALE = 192**-0.5
SEQ_LENS = [1, 17, 128, 333, 1024, 1024, 1025, 2500]
QUERY_LENS = [1, 2, 3, 4, 1, 2, 3, 1]
LONG = [9000, 4100, 2049]


def starts(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


def place(rows, query_lens, block_size, seed, *, padding=0):
    """Metadata and a cache that hold these rows in blocks of this size in random order; everything else is NaN."""
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-len(r) // block_size) for r in rows]
    order = torch.randperm(sum(counts) + 2, generator=gen)
    cache = torch.full((len(order), block_size, rows[0].shape[1]), math.nan, dtype=rows[0].dtype)
    table = torch.zeros(len(rows) + padding, max(counts) + seed % 3, dtype=torch.int32)
    used = 0
    for seq, (r, count) in enumerate(zip(rows, counts, strict=True)):
        ids = order[used : used + count]
        used += count
        table[seq, :count] = ids.int()
        block = torch.full((count * block_size, r.shape[1]), math.nan, dtype=r.dtype)
        block[: len(r)] = r
        cache[ids] = block.view(count, block_size, -1)
    metadata = SimpleNamespace(
        block_size=block_size,
        query_start_loc=starts([*query_lens, *[0] * padding]),
        seq_lens=torch.tensor([*map(len, rows), *[0] * padding], dtype=torch.int32),
        block_table=table,
        max_query_len=max(query_lens),
        max_seq_len=max(map(len, rows)),
        min_num_blocks=len(order),
    )
    return cache, metadata


def decode(queries, rows, block_size, seed=0, *, padding=0, rank):
    """Attention of these sequences as one batch: outputs and log-sum-exps, one pair a sequence."""
    cache, metadata = place(rows, [len(q) for q in queries], block_size, seed, padding=padding)
    q = torch.cat([*queries, queries[0].new_full((padding, *queries[0].shape[1:]), math.nan)])
    out, lse = cpu.paged_decode(q, cache, metadata, kv_lora_rank=rank, softmax_scale=SCALE)
    sizes = [*map(len, queries), padding]
    return list(zip(out.split(sizes), lse.split(sizes), strict=True))[: len(queries)]


def equal(got, want):
    return all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in zip(got, want, strict=True))


def check_decode(num_heads, dtype, seq_lens, query_lens, dims):
    gen = torch.Generator().manual_seed(num_heads)
    rows = [torch.randn(n, dims[0], generator=gen).to(dtype) for n in seq_lens]
    queries = [(2 * torch.randn(n, num_heads, dims[0], generator=gen)).to(dtype) for n in query_lens]
    many = range(len(rows))
    torch.set_num_threads(1)
    want = decode(queries, rows, 16, rank=dims[1])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for block_size in (1, 16, 64):
            got = decode(queries, rows, block_size, seed=block_size + threads, padding=3, rank=dims[1])
            assert equal(got, want), f"block size {block_size}, {threads} threads"
        for i in many:
            alone = decode([queries[i]], [rows[i]], 16, seed=i, rank=dims[1])
            assert equal(alone, [want[i]]), f"{seq_lens[i]} keys alone, {threads} threads"
        turned = [*many[3:], *many[:3], 0, len(rows) - 1]
        got = decode([queries[i] for i in turned], [rows[i] for i in turned], 16, seed=9, rank=dims[1])
        assert equal(got, [want[i] for i in turned]), f"other order and mates, {threads} threads"


def check_varlen(num_heads, dtype, dims):
    gen = torch.Generator().manual_seed(num_heads)
    query_lens, kv_lens = [1, 300, 17, 64, 256], [900, 300, 33, 20, 1100]
    q = [(2 * torch.randn(n, num_heads, dims[0], generator=gen)).to(dtype) for n in query_lens]
    k, v = ([torch.randn(n, num_heads, d, generator=gen).to(dtype) for n in kv_lens] for d in dims)

    def run(which, *, causal):
        lens = [len(q[i]) for i in which], [len(k[i]) for i in which]
        out, lse = cpu.varlen_attention(
            *(torch.cat([x[i] for i in which]) for x in (q, k, v)),
            query_start_loc=starts(lens[0]),
            kv_start_loc=starts(lens[1]),
            max_query_len=max(lens[0]),
            max_kv_len=max(lens[1]),
            causal=causal,
            softmax_scale=SCALE,
        )
        return list(zip(out.split(lens[0]), lse.split(lens[0]), strict=True))

    for causal in (True, False):
        torch.set_num_threads(1)
        want = run(range(5), causal=causal)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for which in ([4, 2, 0, 1, 3], [0], [1], [2], [3], [4]):
                got = run(which, causal=causal)
                assert equal(got, [want[i] for i in which]), f"{which}, causal {causal}, {threads} threads"


@pytest.mark.usefixtures("restore_num_threads")
@pytest.mark.parametrize("num_heads", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_bits(dtype, num_heads):
    check_decode(num_heads, dtype, SEQ_LENS, QUERY_LENS, (576, 512))


@pytest.mark.usefixtures("restore_num_threads")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decode_bits_of_narrow_rows(dtype):
    check_decode(3, dtype, SEQ_LENS, QUERY_LENS, (40, 32))


@pytest.mark.usefixtures("restore_num_threads")
def test_decode_bits_of_many_heads_and_of_long_sequences():
    check_decode(128, torch.bfloat16, [700, 33, 1100, 2], [1, 2, 1, 1], (576, 512))
    check_decode(128, torch.float32, [300, 33, 1100], [1, 2, 1], (96, 64))
    check_decode(16, torch.bfloat16, LONG, [1, 2, 4], (576, 512))
    check_decode(16, torch.float32, LONG, [1, 2, 4], (96, 64))


@pytest.mark.usefixtures("restore_num_threads")
@pytest.mark.parametrize("num_heads", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_varlen_bits(dtype, num_heads):
    check_varlen(num_heads, dtype, (192, 128) if dtype in (torch.float32, torch.bfloat16) else (24, 16))


def check_products():
    """The rule that the kernels rest on, with inputs whose product is nothing but the rounding of its partial sums."""
    gen = torch.Generator().manual_seed(0)

    def cancelling(num_rows, num_terms):
        half = torch.randn(num_rows, num_terms // 2, generator=gen).bfloat16()
        return torch.cat([half, half], 1), torch.cat([half, -half], 1)

    shapes = [(512, 16, 576), (512, 128, 576), (256, 512, 576), (512, 256, 192), (16, 16, 576), (416, 48, 40)]
    for num_keys, num_rows, dim in shapes:
        order = torch.randperm(dim, generator=gen)
        keys, queries = cancelling(num_keys, dim)[0][:, order], cancelling(num_rows, dim)[1][:, order]
        order = torch.randperm(num_keys, generator=gen)
        weights, values = cancelling(num_rows, num_keys)[0][:, order].t(), cancelling(dim, num_keys)[1][:, order].t()
        want = None
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for batch in (2, 3, 8):
                k, q, w, x = (t.repeat(batch, 1, 1) for t in (keys, queries, weights, values))
                got = torch.bmm(k, q.transpose(1, 2)), torch.bmm(w.transpose(1, 2), x)
                want = want or [y[0] for y in got]
                assert all((y == z).all() for y, z in zip(got, want, strict=True)), (num_keys, num_rows, dim, threads, batch)


@pytest.mark.usefixtures("restore_num_threads")
def test_products_that_run_together_keep_their_bits():
    check_products()


@pytest.mark.parametrize(
    ("setting", "value", "fused"),
    [("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", False), ("MKL_ENABLE_INSTRUCTIONS", "AVX512", True)],
)
def test_bits_on_other_instructions(setting, value, fused):
    """A library's own choice of kernels is a setting of the process, read once: so another process."""
    script = (
        "import test_cpu_bits as t, torch\n"
        "from mla.compute import cpu_decode, cpu_prefill\n"
        f"cpu_decode.is_fast = cpu_prefill.is_fast = lambda dtype, device: {fused} and dtype == torch.bfloat16\n"
        "t.check_decode(16, torch.bfloat16, [1, 333, 1025, 2500], [1, 4, 2, 1], (576, 512))\n"
        "t.check_decode(5, torch.bfloat16, [1, 333, 1025], [1, 4, 2], (40, 32))\n"
        "t.check_varlen(2, torch.bfloat16, (192, 128))\n"
        "t.check_products()\n"
    )
    here = Path(__file__).parent
    environment = {**os.environ, setting: value, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
