"""AITER's path on a strict stand-in of each release: the pipeline against the reference, refusals, detection, explanations."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from batches import Row, make_batch
from compare import LSE_ABS, OUT_REL, assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

import mla
from mla import CacheError, KernelError, MetadataError, MLADims, RopeSpec, YarnSpec, build_metadata, decode_group, explain
from mla.cache import write_latent_cache_
from mla.compute import reference, rocm, rocm_decode, rocm_load, rocm_prefill, rocm_table
from mla.metadata import DecodeMetadata

STANDIN = Path(__file__).parent / "aiter_standin"
RELEASES = ("0.1.3", "0.1.7.post2.dev18", "0.1.10", "0.1.10.post3", "0.1.16", "0.1.20")
"""Of 2025-06, of PyPI, the last without and the first with page sizes, one that cannot return an LSE, and of 2026-08."""
BF16 = torch.bfloat16
SCALE = 0.0721688


@pytest.fixture(autouse=True)
def one_thread(restore_num_threads):
    torch.set_num_threads(1)


@pytest.fixture
def no_aiter(monkeypatch):
    """No module `aiter` before the test, and none that it imported after it."""
    before = {name for name in sys.modules if name.partition(".")[0] == "aiter"}
    assert not before
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.fixture
def standin(no_aiter, monkeypatch):
    """The stand-in, importable; `use_release` is still to be called."""
    monkeypatch.syspath_prepend(STANDIN)
    module = importlib.import_module("aiter")
    yield module
    module.close()


def kernels_of(standin, release, arch="gfx942"):
    """The kernel set over the stand-in of a release, allowed to run on the CPU."""
    standin.use_release(release, arch)
    made = rocm.make_kernel_set(arch=arch)
    assert (made.name, made.device_types, made.page_size) == ("ROCM_AITER_MLA", ("cuda",), 1)
    return attrs.evolve(made, device_types=("cpu",))


def deepseek_dims(num_heads=16, *, yarn=None, **changed):
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, **changed}
    rope = RopeSpec(dim=sizes["qk_rope_head_dim"], interleaved=True, yarn=yarn)
    return MLADims(num_heads=num_heads, rope=rope, **sizes)


def attended(batch, kernels):
    return mla.attend(
        batch.q,
        batch.kv_c,
        batch.k_pe,
        batch.latent_cache,
        batch.metadata,
        kv_b_proj=batch.kv_b_proj,
        dims=batch.dims,
        kernels=kernels,
    )


def expected(batch):
    write_latent_cache_(batch.latent_cache, batch.kv_c, batch.k_pe, batch.metadata.slot_mapping)
    parts, first = [], 0
    for part in (batch.metadata.prefill, batch.metadata.decode):
        if part is not None:
            q = batch.q[first : first + part.num_tokens]
            first += part.num_tokens
            options = {"kv_b_proj": batch.kv_b_proj, "dims": batch.dims}
            parts.append(reference.latent_attention(q, batch.latent_cache, part, **options))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def assert_attends(batch, kernels):
    out, lse = attended(batch, kernels)
    want_out, want_lse = expected(batch)
    assert (out.dtype, lse.dtype) == (BF16, torch.float32)
    assert out.is_contiguous()
    # Twice: the query is rounded once when it is folded into the latent space, and the output once when it comes back.
    assert_close(out, want_out, rel=2 * OUT_REL[BF16])
    assert_close(lse, want_lse, abs=2 * LSE_ABS[BF16])
    empty = want_lse == -torch.inf
    assert bool((out[empty] == 0).all())


def decode_rows(*lengths):
    return [Row(query_len=query_len, context_len=context_len, is_prompt=False) for query_len, context_len in lengths]


PROMPTS = [
    Row(query_len=7),
    Row(query_len=5, context_len=37),
    Row(query_len=1, context_len=16),
    Row(query_len=3, context_len=2),
]
DECODES = decode_rows((1, 70), (3, 20), (0, 9), (1, 0), (4, 0), (2, 15))


def latent_case(lengths, *, num_heads=16, query_len=1, block_size=16, seed=0, **build):
    """q, cache and decode metadata of sequences over a cache in which everything else is NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables, groups = [], []
    for n, count in zip(lengths, counts, strict=True):
        tables.append([order.pop() for _ in range(count)])
        groups.append(decode_group(n, tables[-1], query_len=min(query_len, n)))
    metadata = build_metadata(groups, block_size=block_size, page_sizes=(1,), **build).decode
    cache = torch.full((sum(counts) + 2, block_size, 576), torch.nan, dtype=BF16)
    for n, table in zip(lengths, tables, strict=True):
        for i, block in enumerate(torch.randn(n, 576, generator=generator).to(BF16).split(block_size)):
            cache[table[i], : len(block)] = block
    q = torch.randn(metadata.num_tokens, num_heads, 576, generator=generator).to(BF16)
    return q, cache, metadata


def assert_decodes(kernels, q, cache, metadata):
    options = {"kv_lora_rank": 512, "softmax_scale": SCALE}
    out, lse = kernels.paged_decode(q, cache, metadata, **options)
    want_out, want_lse = reference.paged_decode(q, cache, metadata, **options)
    assert out.shape == (*q.shape[:2], 512)
    assert out.is_contiguous()
    assert_close(out, want_out, rel=OUT_REL[BF16])
    assert_close(lse, want_lse, abs=LSE_ABS[BF16])
    return out, lse


# The pipeline


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_pipeline_equals_the_reference(standin, release, block_size):
    kernels = kernels_of(standin, release)
    yarn = YarnSpec(factor=40.0, original_max_position_embeddings=64, mscale_all_dim=1.0)
    batch = make_batch(
        [*PROMPTS, *DECODES],
        block_size=block_size,
        dtype=BF16,
        seed=block_size,
        dims=deepseek_dims(4, yarn=yarn),
        page_sizes=(1,),
        context_chunk_tokens=16,
        pad_decodes_to=8,
    )
    assert batch.dims.softmax_scale == pytest.approx(0.135234, rel=1e-5)
    assert len(batch.metadata.prefill.context_chunks) > 1
    assert_attends(batch, kernels)
    assert {name for name, _ in standin.calls} == {
        "flash_attn_varlen_func",
        "mla_decode_fwd" if release in ("0.1.3", "0.1.20") else "mla_decode_stage1_asm_fwd",
    }


def test_the_pipeline_compiles_and_has_gradients(standin):
    kernels = kernels_of(standin, "0.1.20")
    options = {
        "block_size": 16,
        "dtype": BF16,
        "seed": 1,
        "dims": deepseek_dims(4),
        "page_sizes": (1,),
        "context_chunk_tokens": 16,
    }
    expected, actual = (make_batch([*PROMPTS, *DECODES], **options) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(actual, kernels), attended(expected, kernels), strict=True):
        assert torch.equal(x, y)
    torch._dynamo.reset()
    found = []
    for chosen, dtype in ((mla.kernel_set("REFERENCE"), torch.float64), (kernels, BF16)):
        batch = make_batch([Row(query_len=7), Row(query_len=1)], **(options | {"dtype": dtype}))
        inputs = [x.requires_grad_() for x in (batch.q, batch.kv_c, batch.k_pe, batch.kv_b_proj)]
        found.append(torch.autograd.grad(attended(batch, chosen)[0].sum(), inputs))
    for x, y in zip(found[1], found[0], strict=True):
        assert_close(x, y, rel=2e-2)


@pytest.mark.parametrize("release", ["0.1.3", "0.1.10", "0.1.20"])
@pytest.mark.parametrize("num_heads", [1, 4, 8, 12, 16, 32, 64, 128])
def test_every_head_count(standin, release, num_heads):
    kernels = kernels_of(standin, release)
    batch = make_batch(
        [Row(query_len=3, context_len=9), *decode_rows((2, 18), (1, 3))],
        block_size=8,
        dtype=BF16,
        seed=num_heads,
        dims=deepseek_dims(num_heads),
        page_sizes=(1,),
        pad_decodes_to=3,
    )
    assert_attends(batch, kernels)
    ran = {a["q" if "q" in a else "Q"].shape[1] for name, a in standin.calls if name != "flash_attn_varlen_func"}
    native = {"0.1.3": (16, 128), "0.1.10": (16, 32, 64, 128), "0.1.20": (8, 16, 32, 128)}[release]
    assert ran == {min(n for n in native if n >= num_heads)}


@pytest.mark.parametrize("release", RELEASES)
def test_more_keys_than_one_split_holds(standin, release):
    assert_decodes(kernels_of(standin, release), *latent_case([1100, 63, 64, 65, 1, 260]))


@pytest.mark.parametrize("release", RELEASES)
def test_bits_do_not_depend_on_batch_mates(standin, release):
    kernels = kernels_of(standin, release)
    q, cache, metadata = latent_case([130, 5, 77], query_len=3, pad_decodes_to=5)
    out, lse = assert_decodes(kernels, q, cache, metadata)
    table = metadata.block_table[2]
    alone = build_metadata([decode_group(77, table[:5].tolist(), query_len=3)], block_size=16, page_sizes=(1,)).decode
    out_alone, lse_alone = kernels.paged_decode(q[6:9], cache, alone, kv_lora_rank=512, softmax_scale=SCALE)
    assert torch.equal(out[6:9], out_alone)
    assert torch.equal(lse[6:9], lse_alone)
    splits = {a.get("num_kv_splits", a["splitData"].shape[1] if "splitData" in a else None) for _, a in standin.calls}
    assert splits == {16}


def test_groups_of_rows_change_no_bits(standin, monkeypatch):
    for release in RELEASES:
        kernels = kernels_of(standin, release)
        q, cache, metadata = latent_case([70, 5, 33], query_len=2, pad_decodes_to=4)
        whole = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
        one_call = len(standin.calls)
        monkeypatch.setattr(rocm_decode, "MAX_SPLIT_BYTES", 3 * 16 * 16 * 512 * 4)
        parts = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
        monkeypatch.undo()
        monkeypatch.syspath_prepend(STANDIN)
        assert len(standin.calls) - one_call == 3
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_a_plan_serves_its_own_record_only(standin):
    kernels = kernels_of(standin, "0.1.20")
    q, cache, metadata = latent_case([20, 5], query_len=2)
    options = {"kv_lora_rank": 512, "softmax_scale": SCALE}
    plan = kernels.plan(metadata)
    assert plan.kv_indptr.dtype == plan.kv_indices.dtype == torch.int32
    assert plan.lengths.tolist() == [19, 20, 4, 5]
    assert len(plan.kv_indices) <= 25 * 2 + 4
    with_plan = kernels.paged_decode(q, cache, metadata, plan=plan, **options)
    assert all(torch.equal(a, b) for a, b in zip(with_plan, kernels.paged_decode(q, cache, metadata, **options), strict=True))
    for other in (object(), kernels.plan(attrs.evolve(metadata))):
        with pytest.raises(KernelError, match="plan: expected"):
            kernels.paged_decode(q, cache, metadata, plan=other, **options)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_the_list_written_out(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    block_size, groups = draw(1, 7), []
    for i in range(draw(1, 6)):
        length = draw(1, 40)
        first = 100 * i
        table = [first + int(b) for b in torch.randperm(-(-length // block_size) + draw(0, 2), generator=generator)]
        groups.append(decode_group(length, table, query_len=draw(1, min(length, 5) + 1)))
    padding = draw(0, 3)
    metadata = build_metadata(groups, block_size=block_size, page_sizes=(1,), pad_decodes_to=len(groups) + padding).decode
    plan = rocm.plan_decode(metadata)
    starts, lengths, written = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist(), []
    for seq, (first, last) in enumerate(itertools.pairwise(starts)):
        for t in range(first, last):
            seen = range(lengths[seq] - (last - 1 - t))
            written.append([int(metadata.block_table[seq, p // block_size]) * block_size + p % block_size for p in seen])
    written += [[0]] * (metadata.num_tokens - starts[-1])
    assert plan.is_empty.tolist() == [t >= starts[-1] for t in range(metadata.num_tokens)]
    assert plan.kv_indptr.tolist() == [0, *itertools.accumulate(map(len, written))]
    flat = list(itertools.chain.from_iterable(written))
    assert plan.kv_indices[: len(flat)].tolist() == flat
    assert not plan.kv_indices[len(flat) :].any()


def test_rows_beyond_the_metadata_are_empty(standin):
    kernels = kernels_of(standin, "0.1.20")
    q, cache, metadata = latent_case([20])
    wide = torch.cat([q, torch.full_like(q, torch.nan)])
    out, lse = kernels.paged_decode(wide, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all())
    assert out[0].isfinite().all()


def test_nothing_but_empty_rows(standin):
    kernels = kernels_of(standin, "0.1.7.post2.dev18")
    metadata = build_metadata([decode_group(3, [0])], block_size=16, page_sizes=(1,), pad_decodes_to=2).decode
    zeros = torch.zeros(2, dtype=torch.int32)
    empty = attrs.evolve(metadata, seq_lens=zeros, query_start_loc=torch.zeros(3, dtype=torch.int32), context_lens=zeros)
    cache = torch.full((1, 16, 576), torch.nan, dtype=BF16)
    for record in (empty, attrs.evolve(empty, max_seq_len=0)):
        out, lse = kernels.paged_decode(
            torch.full((2, 16, 576), torch.nan, dtype=BF16), cache, record, kv_lora_rank=512, softmax_scale=SCALE
        )
        assert bool((out == 0).all())
        assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("causal", [True, False])
def test_prefill_rows_without_keys_are_empty(standin, causal):
    kernels = kernels_of(standin, "0.1.20")
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 4, w, generator=generator).to(BF16) for n, w in ((9, 192), (8, 192), (8, 128)))
    options = {
        "query_start_loc": torch.tensor([0, 3, 5, 5, 8], dtype=torch.int32),
        "kv_start_loc": torch.tensor([0, 2, 2, 4, 7], dtype=torch.int32),
        "max_query_len": 3,
        "max_kv_len": 3,
        "causal": causal,
        "softmax_scale": SCALE,
    }
    got, want = (f(q, k, v, **options) for f in (kernels.varlen_attention, reference.varlen_attention))
    assert_close(got[0], want[0], rel=OUT_REL[BF16])
    assert_close(got[1], want[1], abs=LSE_ABS[BF16])
    nothing = kernels.varlen_attention(q, k[:0], v[:0], **{**options, "kv_start_loc": torch.zeros(5, dtype=torch.int32)})
    assert bool((nothing[0] == 0).all())
    assert bool((nothing[1] == -torch.inf).all())


def test_the_host_waits_for_nothing(standin):
    """A read of a value raises under fake tensors; the kernels themselves are replaced by their shapes."""
    q, cache, metadata = latent_case([20, 5], query_len=2, pad_decodes_to=3)
    k = torch.zeros(9, 4, 192, dtype=BF16)
    for release in RELEASES:
        standin.use_release(release)
        installed = rocm_load.inspect_aiter(None, arch="gfx942")

        def decode_fwd(q, kv, o, *_, release=release, **__):
            shape = (len(q), 16, q.shape[1], 1) if release == "0.1.3" else q.shape[:2]
            return o, q.new_empty(shape, dtype=torch.float32)

        def varlen(q, k, v, *_, **__):
            return q.new_empty(*q.shape[:2], 128), q.new_empty(q.shape[1], len(q), dtype=torch.float32)

        fake = attrs.evolve(installed, mla_decode_fwd=decode_fwd, flash_attn_varlen_func=varlen, stage_1=lambda *_: None)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            record = rocm_fake(metadata, mode)
            out, lse = rocm_decode.paged_decode_by(
                fake, mode.from_tensor(q), mode.from_tensor(cache), record, kv_lora_rank=512, softmax_scale=SCALE
            )
            assert (out.shape, lse.shape) == ((6, 16, 512), (6, 16))
            fk = mode.from_tensor(k)
            starts = mode.from_tensor(torch.tensor([0, 4, 9], dtype=torch.int32))
            options = {"query_start_loc": starts, "kv_start_loc": starts, "max_query_len": 5, "max_kv_len": 5}
            out, lse = rocm_prefill.varlen_attention_by(
                fake, fk, fk, fk[..., :128], causal=True, softmax_scale=SCALE, **options
            )
            assert (out.shape, lse.shape) == ((9, 4, 128), (9, 4))


def rocm_fake(metadata, mode):
    paged = metadata.paged_kv_of(1)
    fields = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_lens")
    paged = attrs.evolve(paged, **{name: mode.from_tensor(getattr(paged, name)) for name in fields})
    tensors = {
        field.name: mode.from_tensor(value)
        for field in attrs.fields(DecodeMetadata)
        if isinstance(value := getattr(metadata, field.name), torch.Tensor)
    }
    return attrs.evolve(metadata, paged_kv=(paged,), **tensors)


@pytest.mark.parametrize("split_tokens", [16, 32, 64])
def test_written_splits_are_those_that_aiter_counts(split_tokens):
    """AITER's two rules for which splits hold keys, of 2025 and of today, agree for the fixed number of splits."""
    lengths = torch.arange(1, 5000, dtype=torch.int32)
    splits = rocm_table.NUM_KV_SPLITS
    written = rocm_decode.weigh_splits(torch.zeros(len(lengths), splits, 1), lengths, split_tokens).is_written.sum(1)
    today = (lengths + split_tokens - 1).div(split_tokens, rounding_mode="floor").clamp(max=splits)
    assert torch.equal(written, today.long())


# Refusals


def test_what_aiter_cannot_decode_is_refused(standin):
    kernels = kernels_of(standin, "0.1.20")
    q, cache, metadata = latent_case([20, 5])
    wide = torch.zeros(2, 129, 576, dtype=BF16)
    refused = [
        ({"q": q.half()}, "q: expected bfloat16, got torch.float16"),
        ({"q": q[..., :575]}, "q: expected latent_dim 576"),
        ({"q": wide}, "num_heads: expected an int in 1..128, got 129"),
        ({"q": q[:1]}, "q: expected at least 2 tokens, got 1"),
        ({"kv_lora_rank": 448}, "kv_lora_rank, latent_dim: expected"),
        ({"softmax_scale": 0.0}, "softmax_scale: expected a finite number > 0"),
        ({"latent_cache": cache[:1]}, "latent_cache: expected at least"),
        ({"latent_cache": cache.view(-1, 8, 576)}, "latent_cache: expected blocks of 16 tokens, got 8"),
        ({"latent_cache": cache.transpose(0, 1).contiguous().transpose(0, 1)}, "latent_cache: expected a contiguous cache"),
        ({"metadata": None}, "metadata: expected DecodeMetadata"),
    ]
    given = {"q": q, "latent_cache": cache, "metadata": metadata, "kv_lora_rank": 512, "softmax_scale": SCALE}
    for changed, text in refused:
        with pytest.raises((KernelError, CacheError), match=text):
            kernels.paged_decode(**{**given, **changed})
    no_pages = attrs.evolve(metadata, paged_kv=())
    with pytest.raises(MetadataError, match=r"paged_kv: expected page size 1, got \[\]; build with page_sizes=\(1,\)"):
        kernels.paged_decode(**{**given, "metadata": no_pages})
    assert not standin.calls


def test_what_aiter_cannot_prefill_is_refused(standin):
    kernels = kernels_of(standin, "0.1.20")
    starts = torch.tensor([0, 2], dtype=torch.int32)
    q, v = torch.zeros(2, 4, 192, dtype=BF16), torch.zeros(2, 4, 128, dtype=BF16)
    options = {"query_start_loc": starts, "kv_start_loc": starts, "max_query_len": 2, "max_kv_len": 2, "causal": True}
    for args, text in (
        ((q.half(), q.half(), v.half()), "q: expected bfloat16, got torch.float16"),
        ((q, q, v.half()), "v: expected bfloat16, got torch.float16"),
        ((q, q[:, :2], v), "k: expected shape"),
        ((q, q, q), r"qk_head_dim, v_head_dim: expected \(192, 128\) for AITER's prefill, got \(192, 192\)"),
    ):
        with pytest.raises(KernelError, match=text):
            kernels.varlen_attention(*args, softmax_scale=SCALE, **options)
    with pytest.raises(KernelError, match="query_start_loc: expected int32"):
        kernels.varlen_attention(q, q, v, softmax_scale=SCALE, **{**options, "query_start_loc": starts.long()})


def test_the_module_functions_find_the_installed_package(standin):
    standin.use_release("0.1.20")
    q, cache, metadata = latent_case([20, 5])
    out, lse = rocm.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    kernels = rocm.make_kernel_set(standin, arch="gfx942")
    again = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    starts = torch.tensor([0, 2], dtype=torch.int32)
    k = torch.randn(2, 4, 192, generator=torch.Generator().manual_seed(1)).to(BF16)
    out, _ = rocm.varlen_attention(
        k, k, k[..., :128], query_start_loc=starts, kv_start_loc=starts, max_query_len=2, max_kv_len=2, causal=True,
        softmax_scale=SCALE,
    )  # fmt: skip
    assert torch.equal(out[0], k[0, :, :128])


# Cases from the field


def test_case_01_a_page_of_16_tokens_is_never_passed_through(standin):
    kernels = kernels_of(standin, "0.1.20")
    q, cache, metadata = latent_case([37, 20], block_size=16)
    assert_decodes(kernels, q, cache, metadata)
    ((_, call),) = standin.calls
    assert call["kv_buffer"].shape == (cache.shape[0] * 16, 1, 1, 576)
    assert call["page_size"] == 1
    assert call["kv_last_page_lens"].tolist() == [1, 1]
    assert call["kv_indices"][:37].tolist() == metadata.paged_kv_of(1).paged_kv_indices[:37].tolist()
    # What AITER itself does with pages of 16: an answer, and a wrong one.
    o = torch.empty(2, 16, 512, dtype=BF16)
    indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    standin.mla.mla_decode_fwd(
        q, cache[:, :, None], o, torch.arange(3, dtype=torch.int32), indptr, torch.zeros(5, dtype=torch.int32),
        torch.tensor([5, 4], dtype=torch.int32), 1, sm_scale=SCALE, num_kv_splits=16, page_size=16,
    )  # fmt: skip
    want, _ = reference.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    with pytest.raises(AssertionError):
        assert_close(o, want, rel=0.1)


@pytest.mark.parametrize("release", RELEASES)
def test_case_31_ragged_queries_come_back_packed(standin, release):
    groups = [decode_group(n, [i], query_len=m) for i, (n, m) in enumerate(((9, 1), (13, 3), (6, 2)))]
    metadata = build_metadata(groups, block_size=16, page_sizes=(1,), pad_decodes_to=5).decode
    cache = torch.randn(3, 16, 576, generator=torch.Generator().manual_seed(31)).to(BF16)
    q = torch.full((metadata.num_tokens, 16, 576), torch.nan, dtype=BF16)
    q[:6] = torch.randn(6, 16, 576, generator=torch.Generator().manual_seed(32)).to(BF16)
    out, _ = assert_decodes(kernels_of(standin, release), q, cache, metadata)
    assert bool((out[6:] == 0).all())


@pytest.mark.parametrize("release", RELEASES)
def test_case_42_the_lse_of_one_split_is_that_of_four(standin, release):
    kernels = kernels_of(standin, release)
    q, cache, metadata = latent_case([256])
    _, four = kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    scores = q[0].double() @ cache[metadata.block_table[0].long()].flatten(0, 1).double().T * SCALE
    pieces = torch.stack([torch.logsumexp(part, 1) for part in scores.split(64, dim=1)])
    assert_close(four[0].double(), torch.logsumexp(scores, 1), abs=1e-4)
    assert_close(four[0].double(), torch.logsumexp(pieces, 0), abs=1e-4)


@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
def test_case_44_several_new_tokens_are_rows_of_one(standin, query_len):
    for release in ("0.1.7.post2.dev18", "0.1.20"):
        kernels = kernels_of(standin, release)
        q, cache, metadata = latent_case([100, 8, 65], query_len=query_len, block_size=64)
        assert_decodes(kernels, q, cache, metadata)
        assert {a["max_seqlen_q"] for _, a in standin.calls} == {1}


def test_case_49_a_cache_past_4_gib_is_refused(standin):
    standin.use_release("0.1.20")
    metadata = build_metadata([decode_group(1, [0])], block_size=1, page_sizes=(1,)).decode.to("meta")
    q = torch.empty(1, 16, 576, dtype=BF16, device="meta")
    largest, beyond = (torch.empty(rows, 1, 576, dtype=BF16, device="meta") for rows in (3_728_270, 3_728_271))
    options = {"kv_lora_rank": 512, "softmax_scale": SCALE}
    rocm_decode._check_decode(q, largest, metadata, **options)
    kernels = rocm.make_kernel_set(arch="gfx942")
    with pytest.raises(
        KernelError, match=r"latent_cache: expected at most 4294967296 bytes \(3728270 tokens\).*got 4294968192"
    ):
        kernels.paged_decode(q, beyond, metadata, **options)


@pytest.mark.parametrize("num_heads", [32, 129])
def test_case_55_head_counts_are_checked_when_the_set_is_chosen(standin, num_heads):
    for release in RELEASES:
        kernels = kernels_of(standin, release)
        sentence = explain(kernels, dims=deepseek_dims(num_heads), dtype=BF16)
        if num_heads == 32:
            assert sentence.startswith("ROCM_AITER_MLA runs with 32 heads of latent width 576 in bfloat16: amd-aiter")
            assert "16" in sentence
            assert "128" in sentence
        else:
            assert sentence == "ROCM_AITER_MLA does not run: num_heads: expected an int in 1..128, got 129"


@pytest.mark.parametrize("num_heads", [1, 4, 8])
@pytest.mark.parametrize("release", RELEASES)
def test_case_56_few_heads(standin, release, num_heads):
    out, _ = assert_decodes(kernels_of(standin, release), *latent_case([40], num_heads=num_heads, query_len=2))
    assert out.shape == (2, num_heads, 512)


@pytest.mark.parametrize("release", RELEASES[4:])
def test_case_58_32_heads_on_gfx950_run_in_the_kernel_for_64(standin, release):
    kernels = kernels_of(standin, release, "gfx950")
    q, cache, metadata = latent_case([40, 300], num_heads=32)
    out, _ = assert_decodes(kernels, q, cache, metadata)
    want, _ = reference.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)
    assert torch.nn.functional.cosine_similarity(out.double().flatten(), want.flatten(), dim=0) > 0.9999
    assert {a["q" if "q" in a else "Q"].shape[1] for _, a in standin.calls} == {64}


@pytest.mark.parametrize("release", RELEASES)
def test_case_59_32_heads_and_one_short_sequence(standin, release):
    assert_decodes(kernels_of(standin, release), *latent_case([3], num_heads=32))


def test_case_65_mixed_types_are_refused(standin):
    kernels = kernels_of(standin, "0.1.20")
    q, cache, metadata = latent_case([20])
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(KernelError, match=r"latent_cache: expected bfloat16 \(AITER takes no mixed types here\), got"):
            kernels.paged_decode(q, cache.to(dtype), metadata, kv_lora_rank=512, softmax_scale=SCALE)
    assert not standin.calls


def test_case_88_changed_parameters_name_the_release(standin):
    standin.use_release("0.1.20")
    good = standin.mla.mla_decode_fwd, standin.flash_attn_varlen_func

    def moved(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, max_seqlen_q, kv_last_page_lens, sm_scale=None):
        pass

    def unscaled(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q):
        pass

    def more(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, new, softmax_scale=1, causal=0, return_lse=0):
        pass

    for decode, varlen, text in (
        (moved, good[1], r"aiter.mla.mla_decode_fwd of amd-aiter 0.1.20: expected parameters q, .* first, got"),
        (unscaled, good[1], r"aiter.mla.mla_decode_fwd of amd-aiter 0.1.20: expected a parameter sm_scale, got"),
        (good[0], more, r"flash_attn_varlen_func of amd-aiter 0.1.20: expected no other parameter to be required, got new"),
        (print, good[1], r"aiter.mla.mla_decode_fwd of amd-aiter 0.1.20: expected"),
    ):
        standin.mla.mla_decode_fwd, standin.flash_attn_varlen_func = decode, varlen
        with pytest.raises(KernelError, match=text):
            rocm.make_kernel_set(arch="gfx942")


def package(folder, files, distributions=()):
    """A package named `aiter`, with metadata of installed distributions beside it."""
    (folder / "aiter").mkdir(parents=True)
    for name, text in files.items():
        (folder / "aiter" / name).write_text(text)
    for name, version in distributions:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_case_92_another_package_of_the_name_is_recognised(no_aiter, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, {"__init__.py": "raise SystemExit('imported')\n"}, [("aiter", "0.13")])
    with pytest.raises(KernelError, match=r"got PyPI's aiter 0.13, an unrelated package .*then pip install amd-aiter"):
        rocm.load_aiter()
    assert "aiter" not in sys.modules
    both = tmp_path / "both"
    monkeypatch.syspath_prepend(both)
    package(both, {"__init__.py": "", "mla.py": "mla_decode_fwd = 0\n"}, [("aiter", "0.13"), ("amd-aiter", "0.1.10")])
    with pytest.raises(KernelError, match=r"got PyPI's aiter 0.13.*pip uninstall aiter, then pip install amd-aiter"):
        rocm.make_kernel_set()


def test_case_92_importing_mla_never_imports_aiter(tmp_path):
    package(tmp_path, {"__init__.py": "raise SystemExit('aiter was imported')\n", "mla.py": ""})
    script = "import mla, mla.compute.rocm, sys\nmla.kernels_for('cpu')\nassert 'aiter' not in sys.modules\n"
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_case_93_the_diagnostic_names_release_accelerator_and_file(standin):
    standin.use_release("0.1.10")
    line = rocm.diagnostic(arch="gfx942")
    assert line.startswith(f"amd-aiter 0.1.10 from {STANDIN / 'aiter' / '__init__.py'} on gfx942, torch {torch.__version__}")
    assert "LSE from stage 1" in line


# Detection


def test_no_aiter_says_what_to_install(no_aiter):
    if importlib.util.find_spec("aiter") is not None:
        pytest.skip("a package named aiter is installed")
    with pytest.raises(KernelError, match=r"^aiter: expected AMD's AITER, got no package of that name; pip install amd-aiter"):
        rocm.load_aiter()
    q, cache, metadata = latent_case([20])
    with pytest.raises(KernelError, match=r"^aiter: expected AMD's AITER"):
        rocm.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=SCALE)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import a_missing_module\n", "ModuleNotFoundError: No module named 'a_missing_module'"),
        (
            "raise ImportError('libamdhip64.so.6: cannot open shared object file')\n",
            "ImportError: libamdhip64.so.6: cannot open",
        ),
        ("raise RuntimeError('no GPU')\n", "RuntimeError: no GPU"),
    ],
)
def test_an_error_inside_aiter_is_reported_as_itself(no_aiter, monkeypatch, tmp_path, text, kind):
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, {"__init__.py": text, "mla.py": ""}, [("amd-aiter", "0.1.10")])
    with pytest.raises(KernelError, match=f"^aiter: expected amd-aiter 0.1.10 to import, got {kind}") as caught:
        rocm.load_aiter()
    assert type(caught.value.__cause__).__name__ == kind.partition(":")[0]


def test_the_accelerator_and_the_release_need_kernels(standin):
    standin.use_release("0.1.20")
    with pytest.raises(
        KernelError, match=r"arch: expected gfx942 or gfx950 \(AITER has no decode kernel for others\), got 'gfx90a'"
    ):
        rocm.make_kernel_set(arch="gfx90a")
    standin.__version__ = "0.1.1"
    with pytest.raises(KernelError, match=r"amd-aiter: expected release 0.1.3 or newer, got 0.1.1"):
        rocm.make_kernel_set(arch="gfx942")


def test_the_accelerator_is_the_one_that_torch_names(standin, monkeypatch):
    standin.use_release("0.1.20")
    assert rocm_load.inspect_aiter(standin, arch=None).arch is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, arch in (("gfx950:sramecc+:xnack-", "gfx950"), ("gfx942", "gfx942")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, name=name: SimpleNamespace(gcnArchName=name))
        assert rocm_load.inspect_aiter(standin, arch=None).arch == arch


@pytest.mark.parametrize("release", RELEASES)
def test_an_unknown_version_uses_what_all_releases_share(standin, release):
    standin.use_release(release)
    standin.__version__ = ""
    kernels = attrs.evolve(rocm.make_kernel_set(), device_types=("cpu",))
    assert "unknown release" in kernels.remark
    assert_decodes(kernels, *latent_case([70, 9], num_heads=32))


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"VLLM_ROCM_USE_AITER": "1"}, True),
        ({"VLLM_ROCM_USE_AITER": "TRUE", "VLLM_ROCM_USE_AITER_MLA": "true"}, True),
        ({"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MLA": "0"}, False),
        ({"VLLM_ROCM_USE_AITER": "0", "VLLM_ROCM_USE_AITER_MLA": "1"}, False),
        ({"VLLM_ROCM_USE_AITER": "yes"}, False),
        ({"VLLM_ROCM_USE_AITER_MLA": "1"}, False),
    ],
)
def test_the_switches_of_the_environment(environ, on):
    assert rocm.is_aiter_mla_enabled(environ) is on


# The table and its sentences


def test_releases_are_ordered():
    names = [
        "0.1.3",
        "0.1.6.post2",
        "0.1.7",
        "0.1.7.post2.dev18+g12",
        "0.1.7.post2",
        "0.1.10",
        "0.1.10.post3",
        "0.1.19.dev3",
        "0.1.19",
    ]
    keys = [rocm_table.release_key(name) for name in names]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert rocm_table.release_key("unknown") is None
    assert rocm_table.lse_source("0.1.18") == rocm_table.lse_source("0.1.19.dev3") == "stage 1"
    assert rocm_table.lse_source("0.1.19") == "return_lse"
    assert rocm_table.lse_source(None) is None


@pytest.mark.parametrize("arch", rocm_table.ARCHS)
def test_every_release_has_one_row(standin, arch):
    ends = [row for row in rocm.CAPABILITIES if arch in row.archs]
    assert all(a.before == b.since for a, b in itertools.pairwise(ends))
    assert ends[-1].before == ""
    for release in RELEASES:
        kernels = rocm_table.head_kernels(release, arch)
        assert {k.num_heads: k.split_tokens for k in kernels} == standin.HEADS[release][arch]
        assert [k.num_heads for k in kernels] == sorted(k.num_heads for k in kernels)


OWN_LSE = "LSE and output from the splits of AITER's first stage, since its own LSE is not to be trusted"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            {"num_heads": 16, "release": "0.1.20", "arch": "gfx942"},
            [
                "runs 16 heads in bfloat16 with amd-aiter 0.1.20 on gfx942 by the kernel for 16 heads, one new token per row;",
                "page size 1, 16 fixed splits, LSE from AITER",
            ],
        ),
        (
            {"num_heads": 12, "release": "0.1.3", "arch": "gfx942", "query_len": 4},
            [
                "runs 12 heads in bfloat16 with amd-aiter 0.1.3 on gfx942 by the kernel for 16 heads, 4 of them zero, one new",
                "token per row; 4 new tokens of a sequence are 4 rows (AITER's kernel for several at once would make bits",
                "depend on the batch); page size 1, 16 fixed splits, LSE from the splits that AITER returns",
            ],
        ),
        (
            {"num_heads": 32, "release": "0.1.7.post2.dev18", "arch": "gfx950", "query_len": 8},
            [
                "runs 32 heads in bfloat16 with amd-aiter 0.1.7.post2.dev18 on gfx950 by the kernel for 128 heads, 96 of them",
                f"zero, one new token per row; 8 new tokens of a sequence are 8 rows; page size 1, 16 fixed splits, {OWN_LSE}",
            ],
        ),
        ({"num_heads": 0}, ["does not run: num_heads: expected an int in 1..128, got 0"]),
        (
            {"num_heads": 16, "dtype": torch.float16},
            ["does not run: dtype: expected bfloat16 (AITER's decode kernels take no other), got float16"],
        ),
        (
            {"num_heads": 16, "latent_dim": 320},
            ["does not run: latent_dim: expected 576 (AITER's decode kernels have no other), got 320"],
        ),
        ({"num_heads": 16, "release": "0.1.0"}, ["does not run: amd-aiter: expected release 0.1.3 or newer, got 0.1.0"]),
    ],
)
def test_explain_decode(call, words):
    options = dict(call)
    assert rocm.explain_decode(options.pop("num_heads"), **options) == " ".join(["ROCM_AITER_MLA", *words])


def test_explain_by_dims(standin):
    kernels = kernels_of(standin, "0.1.7.post2.dev18")
    assert explain(kernels, dims=deepseek_dims(12), dtype=BF16) == (
        "ROCM_AITER_MLA runs with 12 heads of latent width 576 in bfloat16: amd-aiter 0.1.7.post2.dev18 on gfx942, heads "
        f"filled up with zeros to 16, 128, every new token a row of its own, 16 fixed splits, {OWN_LSE}"
    )
    assert explain(kernels, dtype=torch.float16).endswith("dtype: expected bfloat16, got float16")
    narrow = explain(kernels, dims=deepseek_dims(16, kv_lora_rank=256))
    assert narrow.endswith("kv_lora_rank: expected 512 (AITER's decode kernels have no other), got 256")
    assert "qk_head_dim, v_head_dim: expected (192, 128)" in explain(kernels, dims=deepseek_dims(16, v_head_dim=96))
