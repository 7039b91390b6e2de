"""The kernels as operators of torch: what torch itself checks of an operator, and gradients.

Tests marked `gpu` run on a machine with a GPU: ``pytest -m gpu tests/test_operators.py``.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from batches import Row, make_batch, small_dims
from compare import assert_close

from mla import KernelError, KernelSet, attend, kernel_set
from mla.compute import as_operators, cpu, decode, linear, merge_attn_states, prefill, reference
from mla.compute.operators import operator_names
from mla.compute.select import CPU_MLA, KERNEL_SETS, REFERENCE, TORCH

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]
SETS = [
    ("CPU_MLA", "cpu", F32),
    ("REFERENCE", "cpu", F64),
    *(pytest.param(name, "cuda", BF16, marks=GPU) for name in KERNEL_SETS if name.startswith("TRITON")),
]
DIMS = small_dims(2)
RAGGED = ([5, 0, 1, 3, 2], [5, 2, 4, 0, 1])
"""New tokens and keys: no queries, more keys than queries, no keys, and more queries than keys."""


def starts(lens, device="cpu"):
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def ragged(dtype, device="cpu", *, spare=2, widths=(6, 4), heads=2):
    """q, k and v with some rows of no sequence, which hold NaN, and the arguments that go with them."""
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for lens, width in zip((RAGGED[0], RAGGED[1], RAGGED[1]), (widths[0], *widths), strict=True):
        x = torch.randn(sum(lens) + spare, heads, width, generator=generator, dtype=F64)
        x[sum(lens) :] = torch.nan
        tensors.append(x.to(device, dtype))
    loc = {name: starts(lens, device) for name, lens in zip(("query_start_loc", "kv_start_loc"), RAGGED, strict=True)}
    return tensors, {**loc, "max_query_len": max(RAGGED[0]), "max_kv_len": max(RAGGED[1]), "causal": True, "softmax_scale": 0.4}


def inputs_of(kind, device, dtype):
    """Arguments of the operator over a kernel, in the order of its schema."""
    rows = [Row(query_len=1, context_len=20, is_prompt=False), Row(query_len=2, context_len=3, is_prompt=False)]
    batch = make_batch(rows, block_size=4, dtype=dtype, seed=1, dims=DIMS)
    metadata = batch.metadata.decode.to(device)
    cache = torch.randn(batch.latent_cache.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if kind == "varlen_attention":
        tensors, options = ragged(dtype, device, spare=0)
        return (*tensors, *options.values())
    if kind == "write_latent_cache_":
        return (cache, batch.kv_c.to(device), batch.k_pe.to(device), metadata.slot_mapping)
    if kind == "gather_latent_cache":
        return (cache, metadata.slot_mapping, torch.zeros(5, DIMS.latent_dim, dtype=dtype, device=device))
    q = torch.randn(3, 2, DIMS.latent_dim, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    return (
        q, cache, metadata.query_start_loc, metadata.seq_start_loc, metadata.seq_lens, metadata.context_lens,
        metadata.slot_mapping, metadata.positions, metadata.block_table, [], [], metadata.block_size, metadata.max_query_len,
        metadata.max_seq_len, metadata.min_num_blocks, False, DIMS.kv_lora_rank, 0.3,
    )  # fmt: skip


def operators(name):
    names = [full.removeprefix("mla::") for full in operator_names(kernel_set(name))]
    return {short: getattr(torch.ops.mla, short).default for short in names}


def operator(name, kind):
    (found,) = (value for key, value in operators(name).items() if key.endswith(kind))
    return found


def requiring(arguments, *positions):
    return tuple(x.clone().requires_grad_() if i in positions else x for i, x in enumerate(arguments))


@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
@pytest.mark.parametrize("kind", ["paged_decode", "varlen_attention", "write_latent_cache_", "gather_latent_cache"])
def test_torch_finds_no_fault(kind, name, device, dtype):
    arguments = inputs_of(kind, device, dtype)
    torch.library.opcheck(operator(name, kind), arguments)
    if kind == "varlen_attention":
        torch.library.opcheck(operator(name, kind), requiring(arguments, 0, 1, 2))
    if kind == "write_latent_cache_":
        torch.library.opcheck(operator(name, kind), requiring(arguments, 1, 2))


@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
@pytest.mark.parametrize(
    ("kind", "position", "word"),
    [
        ("paged_decode", 0, "q"),
        ("paged_decode", 1, "latent_cache"),
        ("gather_latent_cache", 0, "latent_cache"),
        ("gather_latent_cache", 2, "out"),
    ],
)
def test_what_reads_the_cache_refuses_gradients(kind, position, word, name, device, dtype):
    arguments = requiring(inputs_of(kind, device, dtype), position)
    before = [x.detach().clone() for x in arguments if isinstance(x, torch.Tensor)]
    with pytest.raises(
        KernelError, match=rf"^{word}: expected no gradients through the latent cache .*, got requires_grad=True"
    ):
        operator(name, kind)(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(before, [x for x in arguments if isinstance(x, torch.Tensor)], strict=True))
    if position < 2:
        with torch.no_grad():
            operator(name, kind)(*arguments)


@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
def test_operators_are_the_kernels(name, device, dtype):
    kernels, with_gradients = kernel_set(name), requiring(inputs_of("varlen_attention", device, dtype), 0, 1, 2)
    tensors, options = with_gradients[:3], dict(zip(ragged(dtype)[1], with_gradients[3:], strict=True))
    out = kernels.varlen_attention(*tensors, **options)
    with torch.no_grad():
        plain = kernels.varlen_attention(*tensors, **options)
    made = operator(name, "varlen_attention")(*with_gradients)
    assert out[0].requires_grad
    assert not plain[0].requires_grad
    for x, y, z in zip(out, plain, made, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(y, z)


def test_operators_that_belong_to_no_set():
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    sides = (normal(5, 2, 4), normal(5, 2), normal(5, 2, 4).to(BF16), normal(5, 2))
    torch.library.opcheck(torch.ops.mla.merge_attn_states.default, sides)
    torch.library.opcheck(torch.ops.mla.merge_attn_states.default, requiring(sides, 0, 1, 2, 3))
    torch.library.opcheck(torch.ops.mla.merge_into_.default, sides)
    torch.library.opcheck(torch.ops.mla.cpu_head_linear.default, (normal(3, 2, 5), normal(2, 5, 4)))
    torch.library.opcheck(torch.ops.mla.cpu_head_linear.default, requiring((normal(3, 2, 5), normal(2, 5, 4)), 0, 1))
    (q, k, v), options = ragged(F32, spare=0)
    out, lse = cpu.varlen_attention(q, k, v, **options)
    loc = (options["query_start_loc"], options["kv_start_loc"])
    torch.library.opcheck(torch.ops.mla.varlen_attention_backward.default, (out, lse, q, k, v, lse, *loc, True, 0.4))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_finite_differences(causal):
    (q, k, v), options = ragged(F64, spare=0)
    options["causal"] = causal
    seen = attended_rows(causal=causal)

    def function(q, k, v):
        out, lse = CPU_MLA.varlen_attention(q, k, v, **options)
        return out, lse[seen]  # a difference of infinities is no number

    assert torch.autograd.gradcheck(function, requiring((q, k, v), 0, 1, 2), eps=1e-6, atol=1e-7)


def attended_rows(*, causal):
    """Which rows of `RAGGED` see a key."""
    pairs = zip(*RAGGED, strict=True)
    rows = [(kv_len - query_len + t + 1 if causal else kv_len) for query_len, kv_len in pairs for t in range(query_len)]
    return torch.tensor(rows) > 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_gradients_are_those_of_the_specification(causal, block, monkeypatch):
    monkeypatch.setattr("mla.compute.gradients.BLOCK_SCORES", block)
    (q, k, v), options = ragged(F64)
    options["causal"] = causal
    generator = torch.Generator().manual_seed(8)
    factor, lse_factor = (torch.randn(shape, generator=generator, dtype=F64) for shape in ((13, 2, 4), (13, 2)))
    seen = torch.cat([attended_rows(causal=causal), torch.tensor([False] * 2)])
    found = []
    for kernels in (REFERENCE, CPU_MLA):
        inputs = requiring((q, k, v), 0, 1, 2)
        out, lse = kernels.varlen_attention(*inputs, **options)
        found.append(torch.autograd.grad((out * factor)[seen].sum() + (lse * lse_factor)[seen].sum(), inputs))
    for name, expected, actual in zip("qkv", *found, strict=True):
        used = sum(RAGGED[name != "q"])
        assert_close(actual[:used], expected[:used], rel=1e-13, name=name)
        assert not actual[used:].any()  # rows of no sequence: zero, though they hold NaN


def test_rows_without_keys_give_zeros_whatever_arrives():
    (q, k, v), options = ragged(F64, spare=0)
    inputs = requiring((q, k, v), 0, 1, 2)
    out, lse = CPU_MLA.varlen_attention(*inputs, **options)
    blind = ~attended_rows(causal=True)
    assert blind.any()
    factors = [torch.where(blind.view(-1, *[1] * (x.dim() - 1)), torch.nan, torch.ones_like(x)) for x in (out, lse)]
    gradients = torch.autograd.grad((out, lse), inputs, factors)
    assert all(bool(x.isfinite().all()) for x in gradients)
    assert not gradients[0][blind].any()


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_gradients_of_narrow_inputs_are_rounded_once(dtype):
    found = []
    for kernels, kind in ((REFERENCE, F64), (CPU_MLA, dtype)):
        (q, k, v), options = ragged(dtype, spare=0, widths=(40, 24))
        inputs = requiring([x.to(kind) for x in (q, k, v)], 0, 1, 2)
        out, lse = kernels.varlen_attention(*inputs, **options)
        seen = attended_rows(causal=True)
        found.append(torch.autograd.grad(out.double().sum() + lse[seen].double().sum(), inputs))
    rel = {F32: 2e-6, BF16: 8e-3, torch.float16: 1e-3}[dtype]
    for expected, actual in zip(*found, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected, rel=rel)


def sides_to_merge(dtype=F64):
    """Two sides: a row empty in neither, in one, in the other, and in both, with NaN where nobody looks."""
    generator = torch.Generator().manual_seed(5)
    outs = [torch.randn(4, 2, 3, generator=generator, dtype=dtype) for _ in range(2)]
    lses = [torch.randn(4, 2, generator=generator, dtype=dtype) for _ in range(2)]
    for out, lse, rows, infinity in zip(outs, lses, ([1, 3], [2, 3]), (-torch.inf, torch.inf), strict=True):
        out[rows], lse[rows] = torch.nan, infinity
    return outs[0], lses[0], outs[1], lses[1]


def test_gradients_of_merging():
    sides = [x[:1] for x in sides_to_merge()]
    assert torch.autograd.gradcheck(merge_attn_states, requiring(sides, 0, 1, 2, 3))
    inputs = requiring(sides_to_merge(), 0, 1, 2, 3)
    out, lse = merge_attn_states(*inputs)
    with torch.no_grad():
        assert all(torch.equal(x, y) for x, y in zip((out, lse), merge_attn_states(*inputs), strict=True))
    gradients = torch.autograd.grad(out[:3].sum() + lse[:3].sum(), inputs)
    for (gradient, other), empty in zip((gradients[:2], gradients[2:]), ([1, 3], [2, 3]), strict=True):
        assert not gradient[empty].any()
        assert not other[empty].any()
        assert bool(gradient.isfinite().all() & other.isfinite().all())
    assert torch.equal(gradients[2][1], torch.ones(2, 3, dtype=F64))  # the other side is empty: everything is this one's
    assert torch.equal(gradients[3][1], torch.ones(2, dtype=F64))


PROMPTS = Row(query_len=5), Row(query_len=1), Row(query_len=9)


def prompts(dtype=F64, rows=PROMPTS, **options):
    return make_batch(rows, block_size=4, dtype=dtype, seed=1, dims=DIMS, context_chunk_tokens=8, **options)


def attend_batch(batch, kernels):
    return attend(
        batch.q, batch.kv_c, batch.k_pe, batch.latent_cache, batch.metadata,
        kv_b_proj=batch.kv_b_proj, dims=batch.dims, kernels=kernels,
    )  # fmt: skip


def prefill_batch(batch, kernels):
    return prefill(
        batch.q, batch.kv_c, batch.k_pe, batch.latent_cache, batch.metadata.prefill,
        kv_b_proj=batch.kv_b_proj, dims=batch.dims, kernels=kernels,
    )  # fmt: skip


def decode_batch(batch, kernels):
    return decode(
        batch.q, batch.latent_cache, batch.metadata.decode, kv_b_proj=batch.kv_b_proj, dims=batch.dims, kernels=kernels
    )


INPUTS = ("q", "kv_c", "k_pe", "kv_b_proj")


@pytest.mark.parametrize("function", [attend_batch, prefill_batch])
@pytest.mark.parametrize("cache_dtype", [F64, F32], ids=str)
def test_prompts_have_gradients(function, cache_dtype):
    found = []
    for kernels in (REFERENCE, CPU_MLA, TORCH):
        batch = prompts(cache_dtype=cache_dtype)
        inputs = [getattr(batch, name).requires_grad_() for name in INPUTS]
        out, lse = function(batch, kernels)
        found.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), inputs))
        assert not batch.latent_cache.requires_grad
        with torch.no_grad():
            plain = function(batch, kernels)
        assert_close(out, plain[0], rel=1e-14)
    for actual in found[1:]:
        for name, expected, x in zip(INPUTS, found[0], actual, strict=True):
            assert_close(x, expected, rel=1e-12, name=name)


@pytest.mark.parametrize("kernels", [CPU_MLA, TORCH, REFERENCE], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("name", [*INPUTS, "latent_cache"])
@pytest.mark.parametrize(
    ("function", "row"),
    [
        (attend_batch, Row(query_len=2, context_len=9)),
        (attend_batch, Row(query_len=2, context_len=9, is_prompt=False)),
        (prefill_batch, Row(query_len=2, context_len=9)),
        (decode_batch, Row(query_len=2, context_len=9, is_prompt=False)),
    ],
)
def test_cached_rows_have_no_gradients(function, row, name, kernels):
    if function is decode_batch and name in {"kv_c", "k_pe"}:
        return  # it takes neither
    batch = prompts(rows=[row])
    before = batch.latent_cache.clone()
    getattr(batch, name).requires_grad_()
    word = "kv_c_normed" if (function, name) == (attend_batch, "kv_c") else name
    with pytest.raises(KernelError, match=rf"^{word}: expected no gradients through cached rows .*, got requires_grad=True"):
        function(batch, kernels)
    assert torch.equal(batch.latent_cache.isnan(), before.isnan())
    with torch.no_grad():
        function(batch, kernels)


def own_kernels(name="OWN", **options):
    """A set of somebody's own, which knows nothing of operators."""
    options = {"paged_decode": reference.paged_decode, "varlen_attention": reference.varlen_attention, **options}
    return KernelSet(name=name, device_types=(), dtypes=(F64,), **options)


def test_a_set_of_ones_own():
    plain = own_kernels()
    assert operator_names(plain) == ()
    batch = prompts()
    batch.k_pe.requires_grad_()
    with pytest.raises(KernelError, match="k_pe: expected no gradients with OWN "):
        prefill_batch(batch, plain)
    kernels = as_operators(plain)
    assert operator_names(kernels)[1] == "mla::own_varlen_attention"
    assert as_operators(kernels) is kernels
    assert attrs.astuple(as_operators(plain), recurse=False) == attrs.astuple(kernels, recurse=False)
    out, _ = prefill_batch(batch, kernels)
    out.sum().backward()
    assert batch.k_pe.grad.any()
    other = as_operators(own_kernels(paged_decode=cpu.paged_decode))
    assert operator_names(other)[0] == "mla::own_2_paged_decode"
    third = as_operators(own_kernels(name="OWN_2"))
    assert operator_names(third)[0] == "mla::own_2_2_paged_decode"
    again = as_operators(attrs.evolve(kernels, differentiable=False))
    assert again.differentiable
    assert again.paged_decode is kernels.paged_decode
    paged = as_operators(attrs.evolve(kernels, page_size=1))
    assert operator_names(paged)[0] == "mla::own_3_paged_decode"
    with pytest.raises(KernelError, match="kernels: expected KernelSet, got None"):
        as_operators(None)


def test_a_set_is_made_of_one_registration():
    assert operator_names(TORCH) == operator_names(CPU_MLA)
    assert kernel_set("CPU_MLA").varlen_attention is CPU_MLA.varlen_attention
    for name in KERNEL_SETS:
        if name.startswith("TRITON"):
            try:
                first, second = KERNEL_SETS[name](), KERNEL_SETS[name]()
            except KernelError:
                continue  # no Triton, or an old one
            assert operator_names(first)
            assert operator_names(first) == operator_names(second)
            assert first.paged_decode is second.paged_decode


def test_products_keep_their_bits_and_strides_as_operators():
    generator = torch.Generator().manual_seed(6)
    for dtype in (F32, BF16, torch.float16):
        x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 40), (24, 40)))
        out = torch.ops.mla.cpu_head_linear(x[:, None], weight.T[None])
        assert torch.equal(out[:, 0], linear(x, weight))
        assert out.is_contiguous()
