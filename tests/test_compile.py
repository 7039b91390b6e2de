"""`torch.compile` of the layer: one graph, eager bits, and few compilations.

Tests marked `gpu` run on a machine with a GPU: ``pytest -m gpu tests/test_compile.py``.
"""

from __future__ import annotations

import shutil

import attrs
import pytest
import torch
from batches import Row, make_batch, row_groups, shuffled_tables, small_dims
from compare import OUT_REL, assert_close
from torch._dynamo.testing import CompileCounterWithBackend

from mla import (
    DecodeGraphState,
    KernelError,
    KernelSet,
    LatentCacheSpec,
    MLAError,
    MLAWeights,
    attend,
    build_metadata,
    decode_group,
    kernel_set,
    mla_attention,
    rope_table,
)
from mla.compute import as_operators, cpu, merge_attn_states
from mla.compute.select import CPU_MLA, KERNEL_SETS
from mla.metadata import advance_step

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")]
SETS = [
    ("CPU_MLA", "cpu", F32),
    *(pytest.param(name, "cuda", BF16, marks=GPU) for name in KERNEL_SETS if name.startswith("TRITON")),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
DIMS = attrs.evolve(small_dims(2), q_lora_rank=12)
HIDDEN = 20
BLOCK_SIZE = 16
STEPS, MOST_RECOMPILES = 200, 4

PROMPT, LATER_PROMPT = Row(query_len=7), Row(query_len=3, context_len=37)
DECODE, SPECULATIVE = Row(query_len=1, context_len=30, is_prompt=False), Row(query_len=3, context_len=18, is_prompt=False)
BATCHES = {
    "prompts": [PROMPT, Row(query_len=2)],
    "context": [LATER_PROMPT, PROMPT],
    "decode": [DECODE, SPECULATIVE],
    "mixed": [LATER_PROMPT, PROMPT, DECODE, SPECULATIVE],
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled before counts, and nothing is left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@attrs.frozen(kw_only=True, eq=False)
class Model:
    """One layer with its cache."""

    kernels: KernelSet
    weights: MLAWeights
    table: object
    cache: torch.Tensor
    dtype: torch.dtype

    def hidden(self, num_tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_tokens, HIDDEN, generator=generator).to(self.cache.device, self.dtype)

    def twin(self):
        """The same layer over a cache of its own."""
        return attrs.evolve(self, cache=self.cache.clone())

    def run(self, function, metadata, seed=0, **options):
        hidden = self.hidden(metadata.num_tokens, seed)
        return function(hidden, self.weights, self.cache, metadata, self.table, self.kernels, **options)


def make_model(name, device, dtype, *, num_blocks=64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    spec = LatentCacheSpec(
        kv_lora_rank=DIMS.kv_lora_rank, qk_rope_head_dim=DIMS.qk_rope_head_dim, block_size=BLOCK_SIZE, dtype=dtype
    )
    heads = DIMS.num_heads
    weights = MLAWeights(
        dims=DIMS,
        kv_a_proj_with_mqa=normal(DIMS.latent_dim, HIDDEN),
        kv_a_layernorm=normal(DIMS.kv_lora_rank),
        kv_b_proj=normal(heads * (DIMS.qk_nope_head_dim + DIMS.v_head_dim), DIMS.kv_lora_rank),
        o_proj=normal(HIDDEN, heads * DIMS.v_head_dim),
        q_a_proj=normal(12, HIDDEN),
        q_a_layernorm=normal(12),
        q_b_proj=normal(heads * DIMS.qk_head_dim, 12),
    )
    return Model(
        kernels=kernel_set(name),
        weights=weights.to(device, dtype),
        table=rope_table(DIMS.rope, 1024, device),
        cache=normal(*spec.shape(num_blocks)).to(device, dtype),
        dtype=dtype,
    )


def step_of(rows, device, seed=1):
    tables, _ = shuffled_tables(rows, BLOCK_SIZE, seed=seed)
    return build_metadata(row_groups(rows, tables), block_size=BLOCK_SIZE, context_chunk_tokens=16).to(device)


def assert_same(left, right):
    for x, y in zip(left, right, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_the_layer_is_one_graph_with_the_bits_of_eager_code(rows, name, device, dtype):
    eager = make_model(name, device, dtype)
    compiled = eager.twin()
    metadata = step_of(rows, device)
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = eager.run(mla_attention, metadata)
        actual = compiled.run(torch.compile(mla_attention, fullgraph=True, backend=counter), metadata)
    assert counter.frame_count == 1
    assert_same(actual, expected)
    assert torch.equal(compiled.cache, eager.cache)
    names = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}
    prefix = f"mla.{name.lower()}_"
    assert f"{prefix}write_latent_cache_.default" in names
    assert (f"{prefix}varlen_attention.default" in names) == (metadata.prefill is not None)
    assert (f"{prefix}paged_decode.default" in names) == (metadata.decode is not None)


@needs_compiler
@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
def test_inductor_runs_the_layer(name, device, dtype):
    eager = make_model(name, device, dtype)
    compiled = eager.twin()
    metadata = step_of(BATCHES["mixed"], device)
    with torch.no_grad():
        expected = eager.run(mla_attention, metadata)
        actual = compiled.run(torch.compile(mla_attention, fullgraph=True), metadata)
    assert_close(actual[0], expected[0], rel=2 * OUT_REL[dtype])  # it fuses norms and rotations, and rounds them otherwise
    assert_close(compiled.cache, eager.cache, rel=OUT_REL[dtype])


@needs_compiler
def test_inductor_keeps_the_bits_of_the_kernels():
    def run(batch):
        return attend(
            batch.q, batch.kv_c, batch.k_pe, batch.latent_cache, batch.metadata,
            kv_b_proj=batch.kv_b_proj, dims=batch.dims, kernels=CPU_MLA,
        )  # fmt: skip

    expected, actual = (
        make_batch(BATCHES["mixed"], block_size=4, dtype=F32, seed=1, context_chunk_tokens=16) for _ in range(2)
    )
    assert_same(torch.compile(run, fullgraph=True)(actual), run(expected))
    assert torch.equal(actual.latent_cache.nan_to_num(7), expected.latent_cache.nan_to_num(7))


def tables_for(lens, *, spare):
    """Blocks for these lengths and `spare` more of each, far from one another."""
    return [range(20 * i, 20 * i - (-n // BLOCK_SIZE) + spare) for i, n in enumerate(lens)]


@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
@pytest.mark.parametrize("stepping", ["built anew", "advanced"])
def test_a_long_decode_loop_is_compiled_few_times(stepping, name, device, dtype):
    eager = make_model(name, device, dtype)
    compiled = eager.twin()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(mla_attention, fullgraph=True, backend=counter)
    metadata = None
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=MOST_RECOMPILES + 1, fail_on_recompile_limit_hit=True):
        for step in range(STEPS):
            lens = [5 + step, 17 + step, 1 + step]
            if metadata is None or stepping == "built anew":
                tables = tables_for(lens, spare=0 if stepping == "built anew" else 14)
                groups = [decode_group(n, table) for n, table in zip(lens, tables, strict=True)]
                metadata = build_metadata(groups, block_size=BLOCK_SIZE).to(device)
            else:
                metadata = advance_step(metadata)
            actual = compiled.run(function, metadata, seed=step)
            assert_same(actual, eager.run(mla_attention, metadata, seed=step))
    assert counter.frame_count <= 1 + MOST_RECOMPILES
    assert torch.equal(compiled.cache, eager.cache)


@pytest.mark.parametrize(("name", "device", "dtype"), SETS)
def test_batches_of_other_sizes_are_not_compiled_anew(name, device, dtype):
    eager = make_model(name, device, dtype)
    compiled = eager.twin()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(mla_attention, fullgraph=True, backend=counter)
    sizes = [2, 3, 5, 9, 4, 17, 33, 2]
    with torch.no_grad():
        for i, size in enumerate(sizes):
            rows = [Row(query_len=size + i), Row(query_len=2 * size), *[attrs.evolve(DECODE, context_len=10 + size)] * size]
            metadata = step_of(rows, device, seed=i)
            cache = torch.empty(max(64, metadata.min_num_blocks), BLOCK_SIZE, DIMS.latent_dim, dtype=dtype, device=device)
            pair = [attrs.evolve(model, cache=cache.normal_(generator=None).clone()) for model in (eager, compiled)]
            pair[1].cache.copy_(pair[0].cache)
            assert_same(pair[1].run(function, metadata), pair[0].run(mla_attention, metadata))
    assert counter.frame_count <= 4


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_gradients_of_compiled_prompts(backend):
    def run(batch):
        out, lse = attend(
            batch.q, batch.kv_c, batch.k_pe, batch.latent_cache, batch.metadata,
            kv_b_proj=batch.kv_b_proj, dims=batch.dims, kernels=CPU_MLA,
        )  # fmt: skip
        return out.square().sum() + lse.sin().sum()

    found = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        batch = make_batch(BATCHES["prompts"], block_size=4, dtype=F64, seed=1)
        inputs = [x.requires_grad_() for x in (batch.q, batch.kv_c, batch.k_pe, batch.kv_b_proj)]
        found.append(torch.autograd.grad(function(batch), inputs))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, rel=1e-13)


def quoted(message, error=torch._dynamo.exc.Unsupported):
    """In a single graph an error of the code that is traced becomes torch's own, which quotes it; torch 2.8 only its class."""
    return message if error is KernelError else rf"{message}|UserDefinedExceptionObjectVariable\(KernelError\)"


@pytest.mark.parametrize(("fullgraph", "error"), [(False, KernelError), (True, torch._dynamo.exc.Unsupported)])
def test_gradients_through_cached_rows_are_refused_while_compiling(fullgraph, error):
    model = make_model("CPU_MLA", "cpu", F32)
    model.weights.q_b_proj.requires_grad_()
    metadata, before = step_of(BATCHES["mixed"], "cpu"), model.cache.clone()
    with pytest.raises(error, match=quoted("q: expected no gradients through cached rows", error)):
        model.run(torch.compile(mla_attention, fullgraph=fullgraph, backend="aot_eager"), metadata)
    assert torch.equal(model.cache, before)


def test_a_plan_is_taken_and_made_again():
    eager = make_model("CPU_MLA", "cpu", F32)
    compiled = eager.twin()
    metadata = step_of(BATCHES["mixed"], "cpu")
    plan = eager.kernels.plan(metadata.decode)
    function = torch.compile(mla_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled.run(function, metadata, plan=plan), eager.run(mla_attention, metadata, plan=plan))


def test_a_state_can_be_an_argument():
    eager = make_model("CPU_MLA", "cpu", F32)
    compiled = eager.twin()
    state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=BLOCK_SIZE, num_blocks=64, device="cpu")
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(mla_attention, fullgraph=True, backend=counter)
    with torch.no_grad():
        for lens in ([5, 17], [6, 18], [33, 1]):
            groups = [decode_group(n, table) for n, table in zip(lens, tables_for(lens, spare=1), strict=True)]
            metadata = state.load_(build_metadata(groups, block_size=BLOCK_SIZE))
            assert_same(compiled.run(function, metadata), eager.run(mla_attention, metadata))
    assert counter.frame_count == 1


def test_a_set_that_reads_page_lists():
    seen = []

    def paged_decode(q, latent_cache, metadata, *, kv_lora_rank, softmax_scale, plan=None):
        pages = metadata.paged_kv_of(1)
        seen.append((len(metadata.paged_kv), pages.paged_kv_indices.tolist(), metadata.over_buffers))
        return cpu.paged_decode(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)

    kernels = as_operators(attrs.evolve(CPU_MLA, name="PAGED", page_size=1, paged_decode=paged_decode))
    eager = attrs.evolve(make_model("CPU_MLA", "cpu", F32), kernels=kernels)
    compiled = eager.twin()
    metadata = build_metadata([decode_group(3, [2]), decode_group(18, [5, 1])], block_size=BLOCK_SIZE, page_sizes=(1, 4))
    with torch.no_grad():
        expected = eager.run(mla_attention, metadata)
        assert_same(compiled.run(torch.compile(mla_attention, fullgraph=True, backend="aot_eager"), metadata), expected)
    assert seen[0] == (2, [32, 33, 34, *range(80, 96), 16, 17], False)
    assert seen[1] == (1, *seen[0][1:])


def test_merging_is_one_call():
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randn(600, 2, *tail, generator=generator) for tail in ((3,), (), (3,), ())]
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(merge_attn_states, fullgraph=True, backend=counter)
    for rows in (600, 500, 300, 7):
        assert_same(function(*(x[:rows] for x in sides)), merge_attn_states(*(x[:rows] for x in sides)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_compiled_code_checks_its_arguments_too(is_dynamic):
    model = make_model("CPU_MLA", "cpu", F32)
    function = torch.compile(mla_attention, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)
    metadata, before = step_of(BATCHES["mixed"], "cpu"), model.cache.clone()
    hidden = model.hidden(metadata.num_tokens, 0)
    beyond = build_metadata([decode_group(3, [64])], block_size=BLOCK_SIZE)
    for tokens, cache, step, message in (
        (hidden[1:], model.cache, metadata, r"hidden_states: expected shape \(num_tokens, hidden_size\) with num_tokens="),
        (hidden.to(BF16), model.cache, metadata, "hidden_states: expected float32, got torch.bfloat16"),
        (hidden, model.cache[..., 1:].contiguous(), metadata, "latent_cache: expected blocks of "),
        (hidden[:1], model.cache, beyond, "latent_cache: expected at least 65 blocks, got 64"),
    ):
        expected = "KernelError|BUILD_STRING" if is_dynamic else quoted(message)  # symbolic sizes cannot be put into words
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match=expected):
            function(tokens, model.weights, cache, step, model.table, model.kernels)
        with torch.no_grad(), pytest.raises(MLAError, match=message):
            mla_attention(tokens, model.weights, cache, step, model.table, model.kernels)
    assert torch.equal(model.cache, before)
