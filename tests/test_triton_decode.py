"""The portable Triton decode against float64, and its bits: interpreted on the CPU, and compiled on a GPU.

Triton decides at import whether it compiles or interprets, so the interpreted tests run in a process of their own, which
`test_under_the_interpreter` starts. Tests marked `gpu` run compiled: ``pytest -m gpu tests/test_triton_decode.py``.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from batches import Row, row_groups, shuffled_tables
from compare import LSE_ABS, OUT_REL, assert_close
from triton_here import HAS_TRITON, needs_interpreter

from mla import DecodeGraphState, MLADims, RopeSpec, build_metadata
from mla.compute import (
    explain,
    kernel_set,
    reference,
    triton_decode,
    triton_hopper,
    triton_plan,
    triton_portable,
    triton_prefill,
)
from mla.errors import CacheError, KernelError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCALE = 192**-0.5

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter"))
CUDA = pytest.param("cuda", marks=ON_GPU)
F32_CPU = pytest.param("cpu", torch.float32, marks=CPU.marks, id="cpu-float32")
F16_CPU = pytest.param("cpu", torch.float16, marks=CPU.marks, id="cpu-float16")
F16_GPU = pytest.param("cuda", torch.float16, marks=ON_GPU, id="cuda-float16")
BF16_GPU = pytest.param("cuda", torch.bfloat16, marks=ON_GPU, id="cuda-bfloat16")
F32_GPU = pytest.param("cuda", torch.float32, marks=ON_GPU, id="cuda-float32")
PLACES = [F32_CPU, F16_CPU, F16_GPU, BF16_GPU]


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@needs_interpreter
def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


SMALL_PIECES = tuple(
    attrs.evolve(row_class, piece_keys=256, long_piece_keys=128, max_pieces=8) for row_class in triton_plan.ROW_CLASSES
)


@pytest.fixture
def fresh_launches():
    """Forget launches that were made with other row classes."""
    yield
    triton_plan.launches_for.cache_clear()


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """A decoding step whose cache holds every key, and NaN everywhere else; rows of q that no sequence has are NaN too."""

    q: torch.Tensor
    latent_cache: torch.Tensor
    metadata: object
    kv_lora_rank: int

    def run(self, **changes):
        case = attrs.evolve(self, **changes)
        return triton_decode.paged_decode(
            case.q, case.latent_cache, case.metadata, kv_lora_rank=case.kv_lora_rank, softmax_scale=SCALE
        )

    def expected(self):
        return reference.paged_decode(
            self.q, self.latent_cache, self.metadata, kv_lora_rank=self.kv_lora_rank, softmax_scale=SCALE
        )


def sequences(shapes, num_heads, latent_dim, dtype, *, seed=0, q_scale=1.0, cache_dtype=None):
    """Rows of q and of the cache for each (seq_len, query_len)."""
    made = []
    for i, (seq_len, query_len) in enumerate(shapes):
        gen = torch.Generator().manual_seed(1000 * seed + i)
        q = torch.randn(query_len, num_heads, latent_dim, generator=gen) * q_scale
        made.append((q.to(dtype), torch.randn(seq_len, latent_dim, generator=gen).to(cache_dtype or dtype)))
    return made


def step_of(made, *, where, kv_lora_rank, block_size, seed=0, pad_to=None, spare_rows=2):
    """A step of these sequences in blocks of random places; `pad_to` sequences, and more rows of q than tokens."""
    rows = [
        Row(query_len=len(q), context_len=len(keys) - len(q), is_prompt=False, lookahead=i % 2)
        for i, (q, keys) in enumerate(made)
    ]
    tables, num_blocks = shuffled_tables(rows, block_size, seed=seed)
    metadata = build_metadata(row_groups(rows, tables), block_size=block_size, pad_decodes_to=pad_to)
    num_heads, latent_dim = made[0][0].shape[1:]
    cache = torch.full((num_blocks, block_size, latent_dim), torch.nan, dtype=made[0][1].dtype)
    for (_, keys), table in zip(made, tables, strict=True):
        slots = [table[i // block_size] * block_size + i % block_size for i in range(len(keys))]
        cache.view(-1, latent_dim)[slots] = keys
    q = torch.full((metadata.num_tokens + spare_rows, num_heads, latent_dim), torch.nan, dtype=made[0][0].dtype)
    q[: sum(len(x) for x, _ in made)] = torch.cat([x for x, _ in made])
    return Case(q=q.to(where), latent_cache=cache.to(where), metadata=metadata.decode.to(where), kv_lora_rank=kv_lora_rank)


def assert_right(case, *, amp=1.0, rel=None, **changes):
    dtype = case.q.dtype
    out, lse = case.run(**changes)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    expected_out, expected_lse = case.expected()
    on_gpu = case.q.is_cuda and dtype != torch.float32
    # Few rows of few columns: the rounding of weights and output to bfloat16 is not yet an average.
    assert_close(out, expected_out, rel=rel or (3.0e-3 if on_gpu else OUT_REL[dtype] * amp), name="out")
    # Matrix units cut the running sum of products: with scores 8 times as large, where the LSE is about 65, an H200 comes to
    # 5.4e-5 in bfloat16 and 6.8e-5 in float16.
    assert_close(lse, expected_lse, abs=(1e-5 if amp == 1 else 1e-4) if on_gpu else LSE_ABS[dtype] * amp, name="lse")


SHAPES = [(1, 1), (15, 1), (16, 2), (17, 1), (33, 3), (4, 4), (64, 1), (65, 1), (129, 4), (700, 1), (530, 3)]


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_block_sizes(where, dtype, block_size):
    made = sequences(SHAPES, 5, 40, dtype)
    assert_right(step_of(made, where=where, kv_lora_rank=32, block_size=block_size, pad_to=13))


@pytest.mark.parametrize("num_heads", [1, 5, 16, 17, 40, 128])
@pytest.mark.parametrize(("where", "dtype"), [*PLACES, F32_GPU])
def test_head_counts(where, dtype, num_heads):
    shapes = [(33, 3), (1, 1), (4, 4), (1100, 1), (600, 2)]
    assert_right(step_of(sequences(shapes, num_heads, 40, dtype), where=where, kv_lora_rank=32, block_size=16))


@pytest.mark.parametrize(("kv_lora_rank", "latent_dim"), [(512, 576), (8, 8), (100, 130), (3, 24), (1024, 1088)])
@pytest.mark.parametrize(("where", "dtype"), [F32_CPU, F16_GPU, BF16_GPU, F32_GPU])
def test_widths(where, dtype, kv_lora_rank, latent_dim):
    made = sequences([(70, 1), (5, 2), (600, 1)], 16, latent_dim, dtype)
    assert_right(step_of(made, where=where, kv_lora_rank=kv_lora_rank, block_size=64))


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("where", "dtype"), [F16_GPU, BF16_GPU])
def test_large_batches(where, dtype, num_heads):
    rng = random.Random(3)
    shapes = [(rng.randint(4, 6000), rng.choice([1, 1, 2, 4])) for _ in range(70)]
    case = step_of(sequences(shapes, num_heads, 576, dtype), where=where, kv_lora_rank=512, block_size=64, pad_to=80)
    assert_right(case, rel=2.0e-3)


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_large_scores(where, dtype, num_heads):
    dims = (576, 512) if where == "cuda" else (40, 32)
    made = sequences([(700, 1), (64, 2), (1100, 1)], num_heads, dims[0], dtype, q_scale=8.0)
    assert_right(step_of(made, where=where, kv_lora_rank=dims[1], block_size=16), amp=8.0)


@pytest.mark.parametrize("up", [20, 60, 120])
@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_sinks(where, dtype, up):
    along = torch.where(torch.arange(192) % 3 == 0, 1.0, -1.0) / math.sqrt(192)
    for sinks in ((0,), (-1,), (0, 51), (1, 2, -1), (33,)):
        [(q, keys)] = sequences([(1300, 1)], 16, 192, dtype, seed=up)
        q += ((8 - q.float() @ along)[..., None] * along).to(dtype)
        keys[list(sinks)] += (up / SCALE / 8 * along).to(dtype)
        case = step_of([(q, keys)], where=where, kv_lora_rank=160, block_size=16)
        out, lse = case.run()
        expected_out, expected_lse = case.expected()
        factor = 1 + up / 20  # the logits of sinks are as coarse as they are high
        assert_close(out, expected_out, rel=(2e-3 if where == "cuda" else OUT_REL[dtype]) * factor)
        assert_close(lse, expected_lse, abs=5e-5 * factor)


@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_rows_without_keys(where, dtype):
    """Sequences without keys, more new tokens than keys, and rows behind the last sequence: 0 and -inf, whatever q holds."""
    case = step_of(
        sequences([(5, 1), (700, 1), (9, 3), (3, 1)], 5, 40, dtype), where=where, kv_lora_rank=32, block_size=16, pad_to=6
    )
    seq_lens = torch.tensor([0, 700, 1, 3, 0, 0], dtype=torch.int32, device=where)
    case = attrs.evolve(case, metadata=attrs.evolve(case.metadata, seq_lens=seq_lens))
    out, lse = case.run()
    assert_right(case)
    blind = [0, 2, 3, *range(6, len(out))]
    assert (out[blind] == 0).all()
    assert (lse[blind] == -torch.inf).all()
    assert lse[[1, 4, 5]].isfinite().all()


@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_strided_queries_and_other_cache_dtypes(where, dtype):
    case = step_of(sequences(SHAPES, 5, 40, dtype), where=where, kv_lora_rank=32, block_size=16)
    want = case.run()
    apart = case.q.new_full((case.q.shape[0], 7, 100), torch.nan)
    apart[:, 1:6, 30:70] = case.q
    across = case.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for q in (apart[:, 1:6, 30:70], across):
        assert not q.is_contiguous()
        assert all(map(torch.equal, case.run(q=q), want))
    assert all(map(torch.equal, case.run(latent_cache=case.latent_cache.float()), want))


@pytest.mark.parametrize("apart", ["block_table", "query_start_loc", "seq_lens"])
@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_metadata_whose_numbers_are_apart(where, dtype, apart):
    case = step_of(sequences(SHAPES, 5, 40, dtype), where=where, kv_lora_rank=32, block_size=16)
    numbers = getattr(case.metadata, apart)
    strided = torch.stack([numbers, torch.full_like(numbers, 2**30)], dim=-1)[..., 0]
    assert strided.stride(-1) == 2
    assert all(map(torch.equal, case.run(metadata=attrs.evolve(case.metadata, **{apart: strided})), case.run()))


@pytest.mark.parametrize("num_heads", [1, 16, 20, 72])
@pytest.mark.parametrize(("where", "dtype"), [F16_CPU, F16_GPU, BF16_GPU])
def test_bits_do_not_depend_on_the_batch(where, dtype, num_heads, monkeypatch, fresh_launches):
    """Alone, in any batch, in other blocks of another size, padded, with mates that have more new tokens: the same bits."""
    latent_dim, kv_lora_rank = (576, 512) if where == "cuda" else (24, 16)
    lens = [1, 17, 330, 64] if where == "cpu" else [1, 63, 64, 65, 530, 1100, 4097, 9000, 300, 70000]
    shapes = [*((n, 1) for n in lens), (40, 3), (300 if where == "cpu" else 600, 2)]
    if where == "cpu":
        monkeypatch.setattr(triton_plan, "ROW_CLASSES", SMALL_PIECES)
        triton_plan.launches_for.cache_clear()
    made = sequences(shapes, num_heads, latent_dim, dtype)
    options = {"where": where, "kv_lora_rank": kv_lora_rank}
    whole = step_of(made, block_size=16, **options).run()
    ends = list(itertools.accumulate(query_len for _, query_len in shapes))
    for block_size in (7, 64) if where == "cpu" else (1, 7, 64):
        again = step_of(made, block_size=block_size, seed=block_size, pad_to=len(made) + 3, **options).run()
        assert torch.equal(again[0][: ends[-1]], whole[0][: ends[-1]])
        assert torch.equal(again[1][: ends[-1]], whole[1][: ends[-1]])
    for i, (end, (_, query_len)) in enumerate(zip(ends, shapes, strict=True)):
        alone = step_of(made[i : i + 1], block_size=(16, 64)[i % 2], seed=i + 9, spare_rows=i % 3, **options).run()
        for x, y in zip(alone, whole, strict=True):
            assert torch.equal(x[:query_len], y[end - query_len : end]), shapes[i]
    backwards = step_of(made[::-1], block_size=16, seed=77, **options).run()
    places = [range(ends[-1] - end, ends[-1] - end + n) for end, (_, n) in zip(ends, shapes, strict=True)]
    order = [row for place in places for row in place]
    for x, y in zip(backwards, whole, strict=True):
        assert torch.equal(x[order], y[: ends[-1]])


@pytest.mark.parametrize(("where", "dtype"), PLACES)
def test_bits_do_not_depend_on_the_memory_for_pieces(where, dtype, monkeypatch):
    case = step_of(sequences(SHAPES, 5, 40, dtype), where=where, kv_lora_rank=32, block_size=16, pad_to=14)
    want = case.run()
    monkeypatch.setattr(triton_plan, "MAX_PART_BYTES", 100_000)
    assert triton_plan.seqs_at_a_time(20_000) == 5
    assert all(map(torch.equal, case.run(), want))
    assert_right(case)


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_more_sequences_than_a_program_scans(where, monkeypatch):
    case = step_of(
        sequences([(1 + i % 40, 1 + i % 2) for i in range(1, 131)], 2, 24, torch.float16),
        where=where, kv_lora_rank=16, block_size=16,
    )  # fmt: skip
    want = case.run()
    assert_right(case)
    monkeypatch.setattr(triton_portable, "MAX_SEQS", 50)
    assert all(map(torch.equal, case.run(), want))
    if where == "cuda":
        made = sequences([(1 + i % 40, 1) for i in range(1150)], 2, 24, torch.float16)
        assert_right(step_of(made, where=where, kv_lora_rank=16, block_size=16))


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_no_tokens_and_no_blocks(where):
    case = step_of(sequences([(5, 1)], 3, 24, torch.float32), where=where, kv_lora_rank=16, block_size=4)
    nothing = attrs.evolve(
        case.metadata,
        query_start_loc=torch.zeros(1, dtype=torch.int32, device=where),
        seq_start_loc=torch.zeros(1, dtype=torch.int32, device=where),
        seq_lens=case.metadata.seq_lens[:0],
        context_lens=case.metadata.context_lens[:0],
        slot_mapping=case.metadata.slot_mapping[:0],
        positions=case.metadata.positions[:0],
        block_table=case.metadata.block_table[:0],
        max_query_len=0,
        max_seq_len=0,
        min_num_blocks=0,
    )
    out, lse = case.run(metadata=nothing)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    out, lse = case.run(metadata=nothing, q=case.q[:0])
    assert out.shape == (0, 3, 16)
    assert lse.shape == (0, 3)


def test_refusals():
    case = step_of(sequences([(5, 1)], 3, 24, torch.float32), where="cpu", kv_lora_rank=16, block_size=4)
    for error, message, changes in (
        (KernelError, r"q: expected bfloat16 or float16 or float32, got torch.float64", {"q": case.q.double()}),
        (KernelError, r"latent_cache: expected bfloat16 or float16 or float32, got torch.float64",
         {"latent_cache": case.latent_cache.double()}),
        (KernelError, r"q: expected latent_dim 24 as in the cache, got 20", {"q": case.q[..., :20]}),
        (KernelError, r"kv_lora_rank: expected an int in 1\.\.24, got 25", {"kv_lora_rank": 25}),
        (KernelError, r"latent_cache: expected at least \d+ blocks, got 0", {"latent_cache": case.latent_cache[:0]}),
        (KernelError, r"latent_cache: expected blocks of 4 tokens, got 2", {"latent_cache": case.latent_cache.view(-1, 2, 24)}),
        (KernelError, r"q: expected at least 1 tokens, got 0", {"q": case.q[:0]}),
        (KernelError, r"metadata: expected DecodeMetadata, got None", {"metadata": None}),
        (CacheError, r"latent_cache: expected a contiguous cache", {"latent_cache": case.latent_cache.transpose(0, 1)}),
        (KernelError, r"latent_cache: expected device cpu as of q, got meta", {"latent_cache": case.latent_cache.to("meta")}),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            case.run(**changes)
    with pytest.raises(KernelError, match=r"^softmax_scale: expected a finite number > 0, got 0"):
        triton_decode.paged_decode(case.q, case.latent_cache, case.metadata, kv_lora_rank=16, softmax_scale=0)
    with pytest.raises(KernelError, match=r"^plan: expected what this kernel set.s plan\(\) returns, got object"):
        triton_decode.paged_decode(
            case.q, case.latent_cache, case.metadata, kv_lora_rank=16, softmax_scale=SCALE, plan=object()
        )


def test_a_plan_serves_its_own_record_and_set(monkeypatch):
    case = step_of(sequences([(5, 1)], 3, 24, torch.float16), where="cpu", kv_lora_rank=16, block_size=4)
    other = attrs.evolve(case.metadata)
    captured = triton_hopper.HopperPlan(metadata=case.metadata, balanced=False, captured=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for plan, message in (
        (triton_decode.make_balanced_plan(case.metadata), "expected what this kernel set's plan.. returns, got HopperPlan"),
        (triton_decode.make_plan(other), "expected the plan of this record, got that of another one"),
        (captured, "expected a plan made outside of graph capture, got one that is part of a graph"),
    ):
        with pytest.raises(KernelError, match=f"^plan: {message}"):
            triton_decode.paged_decode(
                case.q, case.latent_cache, case.metadata, kv_lora_rank=16, softmax_scale=SCALE, plan=plan
            )
    with pytest.raises(KernelError, match=r"^metadata: expected DecodeMetadata, got None"):
        triton_decode.make_plan(None)


@pytest.fixture
def a_gpu_of(monkeypatch):
    """Make routes believe in a GPU of some compute capability."""
    caches = triton_decode.decode_route, triton_prefill.prefill_route

    def set_capability(major, minor):
        for cache in caches:
            cache.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    yield set_capability
    for cache in caches:
        cache.cache_clear()


def test_routes_depend_on_device_widths_and_dtypes_only(a_gpu_of):
    cuda, bf16, f16, f32 = torch.device("cuda", 0), torch.bfloat16, torch.float16, torch.float32
    for capability, kind, name, reason in (
        ((9, 0), (bf16, bf16, 512, 576, cuda), "hopper", "compute capability 9.0"),
        ((9, 0), (f16, f16, 512, 576, cuda), "hopper", "compute capability 9.0"),
        ((9, 0), (bf16, f16, 512, 576, cuda), "portable", "not bfloat16 and float16"),
        ((9, 0), (f32, f32, 512, 576, cuda), "portable", "not float32 and float32"),
        ((9, 0), (bf16, bf16, 256, 320, cuda), "portable", "not 256 of 320"),
        ((8, 9), (bf16, bf16, 512, 576, cuda), "portable", "8.9 is not Hopper's 9.0"),
        ((10, 0), (bf16, bf16, 512, 576, cuda), "portable", "10.0 is not Hopper's 9.0"),
        ((9, 0), (bf16, bf16, 512, 576, torch.device("cpu")), "portable", "cpu is not an NVIDIA GPU"),
    ):
        a_gpu_of(*capability)
        route = triton_decode.decode_route(*kind)
        assert route.name == name
        assert reason in route.reason


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")
def test_explain_says_which_kernels_and_why(a_gpu_of):
    def dims(num_heads):
        return MLADims(
            num_heads=num_heads, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            rope=RopeSpec(dim=64, interleaved=True),
        )  # fmt: skip

    def said(name, num_heads):
        return explain(kernel_set(name), dims=dims(num_heads), dtype=torch.bfloat16)

    a_gpu_of(9, 0)
    assert "decode by the kernel for up to 16 rows with up to 2 new tokens a sequence" in said("TRITON_MLA", 8)
    assert "decode by the kernel for 64 rows, for a token has more than 16" in said("TRITON_MLA_BALANCED", 128)
    assert "decode by the portable kernel, as asked for; prefill by the hopper kernel" in said("TRITON_MLA_PORTABLE", 16)
    a_gpu_of(8, 0)
    assert "decode by the portable kernel, because compute capability 8.0 is not Hopper's 9.0" in said("TRITON_MLA", 16)
    assert "bits depend on the batch" in said("TRITON_MLA_BALANCED", 16)
    assert "bits do not depend on the batch" in said("TRITON_MLA", 16)


def test_a_missing_triton_is_named(monkeypatch):
    triton_portable._kernels.cache_clear()
    monkeypatch.delitem(sys.modules, "mla.compute.triton_decode_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelError, match=r"^triton: expected an installed Triton .* pip install triton"):
        triton_portable._kernels()


def test_launches_depend_on_a_sequences_own_rows():
    for itemsize, (rank, width) in itertools.product((2, 4), ((512, 576), (32, 40), (1024, 1088), (512, 512), (3, 3))):
        for num_heads in (1, 15, 16, 17, 32, 33, 64, 65, 128):
            alone = {n: triton_plan.launches_for(num_heads, n, rank, width, itemsize) for n in (1, 2, 4)}
            for launches in alone.values():
                taken = [(launch.rows_above, launch.rows_up_to) for launch in launches]
                assert taken[0][0] == 0
                assert all(before[1] == after[0] for before, after in itertools.pairwise(taken))
                assert len(launches) <= 2
            for n, longest in ((1, 2), (1, 4), (2, 4)):
                [own] = [x for x in alone[n] if x.rows_above < n * num_heads <= x.rows_up_to]
                [mixed] = [x for x in alone[longest] if x.rows_above < n * num_heads <= x.rows_up_to]
                assert own.tiling == mixed.tiling
            tiling = alone[1][0].tiling
            assert triton_plan.LONG_SEQ % triton_plan.UNIT == tiling.long_piece_keys % tiling.keys == 0
            assert tiling.latent >= rank
            assert tiling.latent + tiling.rope >= width
            assert triton_plan.UNIT % tiling.keys == 0
            assert tiling.piece_keys % tiling.keys == 0


def test_pieces_are_counted_alike_on_the_host():
    for num_heads in (16, 32, 128):
        [launch] = triton_plan.launches_for(num_heads, 1, 512, 576, 2)
        tiling, most = launch.tiling, 0
        for seq_len in [*range(3000), *range(3000, 200_000, 77)]:
            share = -(-seq_len // tiling.max_pieces)
            least = tiling.long_piece_keys if seq_len > triton_plan.LONG_SEQ else tiling.piece_keys
            most = max(most, -(-seq_len // max(least, -(-share // triton_plan.UNIT) * triton_plan.UNIT)))
            assert triton_plan.max_pieces_of(seq_len, tiling) >= most


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("where", "dtype"), [BF16_GPU, F16_GPU])
def test_replay_has_the_bits_of_an_eager_call(where, dtype, num_heads):
    rng, gen = random.Random(num_heads), torch.Generator(device=where).manual_seed(0)
    block_size, num_blocks, rows, query_len = 16, 4000, 12, 2
    state = DecodeGraphState(
        max_num_seqs=rows, max_seq_len=8000, block_size=block_size, num_blocks=num_blocks, query_len=query_len, device=where
    )
    cache = torch.randn(num_blocks, block_size, 576, device=where, dtype=dtype, generator=gen)
    q = torch.zeros(rows * query_len, num_heads, 576, device=where, dtype=dtype)
    with state.capture():
        captured = state.metadata_for(rows).decode
        options = {"kv_lora_rank": 512, "softmax_scale": SCALE}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            triton_decode.paged_decode(q, cache, captured, **options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = triton_decode.paged_decode(q, cache, captured, **options)
    for step in range(200):
        lens = [
            rng.choice([rng.randint(2, 40), rng.randint(2, 2000), rng.randint(2, 8000)]) for _ in range(rng.randint(1, rows))
        ]
        made = [
            Row(query_len=n, context_len=length - n, is_prompt=False) for length in lens for n in [rng.randint(1, query_len)]
        ]
        order = rng.sample(range(num_blocks), sum(-(-length // block_size) for length in lens))
        tables, start = [], 0
        for length in lens:
            tables.append(order[start : start + -(-length // block_size)])
            start += len(tables[-1])
        batch = build_metadata(row_groups(made, tables), block_size=block_size)
        q.normal_(generator=gen)
        state.load_(batch)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager, num_tokens = batch.decode.to(where), batch.num_tokens
        want_out, want_lse = triton_decode.paged_decode(q[:num_tokens], cache, eager, **options)
        assert torch.equal(out[:num_tokens], want_out), step
        assert torch.equal(lse[:num_tokens], want_lse), step
        assert (out[num_tokens:] == 0).all()
        assert (lse[num_tokens:] == -torch.inf).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("where", "dtype"), [BF16_GPU])
def test_the_host_reads_nothing(where, dtype):
    case = step_of(sequences(SHAPES, 16, 576, dtype), where=where, kv_lora_rank=512, block_size=16)
    want = case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("where", "dtype"), [BF16_GPU])
def test_offsets_beyond_32_bits(where, dtype):
    """A cache of 4.3 GB: element offsets of its last blocks do not fit int32."""
    cache = torch.empty(233_100, 16, 576, dtype=dtype, device=where)
    gen = torch.Generator(device=where).manual_seed(0)
    for block in (3, 233_050):
        cache[block].normal_(generator=gen)
    rows = [Row(query_len=1, context_len=30, is_prompt=False)]
    metadata = build_metadata(row_groups(rows, [(3, 233_050)]), block_size=16).decode.to(where)
    q = torch.randn(1, 16, 576, dtype=dtype, device=where, generator=gen)
    out, lse = triton_decode.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    keys = torch.cat([cache[3], cache[233_050]])[:31].double()
    scores = q[0].double() @ keys.T * SCALE
    assert_close(lse[0], scores.logsumexp(1), abs=1e-5)
    assert_close(out[0], scores.softmax(1) @ keys[:, :512], rel=2e-3)
