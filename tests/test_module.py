"""`MLAAttention`: names and numbers of transformers' attention, compiled code, gradients, and whose kernels run."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from batches import Row, make_batch, row_groups, shuffled_tables, small_dims
from compare import OUT_REL, assert_close
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from mla import (
    KernelError,
    LatentCacheSpec,
    MLAAttention,
    WeightsError,
    allocate_latent_cache,
    attend,
    build_metadata,
    decode_group,
    dims_from_config,
    kernel_set,
    mla_attention,
    prompt_group,
    rope_table,
)
from mla.compute import as_operators
from mla.compute.select import CPU_MLA

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
DIMS = attrs.evolve(small_dims(2), q_lora_rank=12)
HIDDEN, BLOCK_SIZE = 20, 16
TABLE = rope_table(DIMS.rope, 256)
MIXED = [
    Row(query_len=3, context_len=37),
    Row(query_len=7),
    Row(query_len=1, context_len=30, is_prompt=False),
    Row(query_len=3, context_len=18, is_prompt=False),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layer(seed=0, **options):
    torch.manual_seed(seed)
    return MLAAttention(DIMS, HIDDEN, **options)


def make_cache(dtype=F32, *, num_blocks=32, dims=DIMS):
    spec = LatentCacheSpec(
        kv_lora_rank=dims.kv_lora_rank, qk_rope_head_dim=dims.qk_rope_head_dim, block_size=BLOCK_SIZE, dtype=dtype
    )
    return torch.randn(spec.shape(num_blocks), generator=torch.Generator().manual_seed(2)).to(dtype)


def make_step(rows, seed=1):
    tables, _ = shuffled_tables(rows, BLOCK_SIZE, seed=seed)
    return build_metadata(row_groups(rows, tables), block_size=BLOCK_SIZE, context_chunk_tokens=16)


def hidden_for(metadata, dtype=F32):
    return torch.randn(metadata.num_tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)


# Against transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_state_dict_of_transformers_loads_and_gives_its_output(version, q_lora_rank, attention_bias):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.deepseek_{version}.modeling_deepseek_{version}")
    prefix = f"Deepseek{version.upper()}"
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=10, q_lora_rank=q_lora_rank, attention_bias=attention_bias,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    theirs = getattr(modeling, f"{prefix}Attention")(config, layer_idx=0)
    for parameter in theirs.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    dims = dims_from_config(config)
    ours = MLAAttention(dims, 48, bias=attention_bias)
    assert list(ours.state_dict()) == [name for name in ours.state_dict() if name in theirs.state_dict()]
    ours.load_state_dict(theirs.state_dict())

    hidden = torch.randn(9, 48)
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    cache, table = make_cache(dims=dims), rope_table(dims.rope, 16)
    with torch.no_grad():
        expected, _ = theirs(hidden[None], position_embeddings=rotary(hidden[None], torch.arange(9)[None]), attention_mask=mask)
        prompt = ours(hidden[:8], cache, build_metadata([prompt_group(8, [3])], block_size=BLOCK_SIZE), table)
        decoded = ours(hidden[8:], cache, build_metadata([decode_group(9, [3])], block_size=BLOCK_SIZE), table)
    assert_close(torch.cat([prompt, decoded]), expected[0], rel=4e-6)


# The module ----------------------------------------------------------------------------------------------------------


def test_it_is_mla_attention_with_its_weights():
    layer, metadata = make_layer(bias=True), make_step(MIXED)
    caches = [make_cache(), make_cache()]
    hidden = hidden_for(metadata)
    with torch.no_grad():
        expected = mla_attention(hidden, layer.weights, caches[0], metadata, TABLE, CPU_MLA)
        plan = layer.kernels.plan(metadata.decode)
        out, lse = layer(hidden, caches[1], metadata, TABLE, plan, return_lse=True)
        assert torch.equal(layer(hidden, caches[1], metadata, TABLE), expected[0])
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert torch.equal(*caches)


def test_the_record_follows_the_parameters():
    layer, metadata = make_layer(), make_step([Row(query_len=4)])
    assert layer.weights is layer.weights
    assert layer.weights.o_proj is layer.o_proj.weight
    first = layer(hidden_for(metadata), None, build_metadata([prompt_group(4)], block_size=1), TABLE)
    step = build_metadata([prompt_group(4)], block_size=1), TABLE
    other = make_layer(seed=1)
    wanted = other(hidden_for(metadata), None, *step)
    assert not torch.equal(first, wanted)
    state = {name: value.detach() for name, value in other.named_parameters()}
    assert torch.equal(torch.func.functional_call(layer, state, (hidden_for(metadata), None, *step)), wanted)
    assert torch.equal(layer(hidden_for(metadata), None, *step), first)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(hidden_for(metadata), None, *step), wanted)
    wide = copy.deepcopy(layer).double()
    assert wide.weights.dtype == F64
    assert wide.weights.o_proj is wide.o_proj.weight
    assert layer.weights.dtype == F32


def test_a_module_is_saved_whole_and_chooses_its_kernels_again(tmp_path):
    layer, step = make_layer(bias=True), (build_metadata([prompt_group(4)], block_size=1), TABLE)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert loaded.kernels is CPU_MLA
    hidden = torch.randn(4, HIDDEN)
    assert torch.equal(loaded(hidden, None, *step), layer(hidden, None, *step))
    kernels = recording_set()[0]
    assert copy.deepcopy(make_layer(kernels=kernels)).kernels.paged_decode is kernels.paged_decode


def test_kernels_are_chosen_by_device_unless_given():
    assert make_layer().kernels is CPU_MLA
    torch_set = kernel_set("TORCH")
    assert make_layer(kernels=torch_set).to(BF16).kernels is torch_set
    meta = MLAAttention(DIMS, HIDDEN, device="meta")
    assert "kernels=none" in repr(meta)
    with pytest.raises(KernelError, match="kernels: expected a module on a device with kernels, got one on meta"):
        _ = meta.kernels
    assert meta.to_empty(device="cpu").kernels is CPU_MLA


def test_repr_and_new_parameters():
    layer = make_layer(bias=True)
    assert "num_heads=2, kv_lora_rank=16, q_lora_rank=12, qk_head_dim=10+6, v_head_dim=8, kernels=CPU_MLA" in repr(layer)
    nn.init.constant_(layer.kv_a_layernorm.weight, 3.0)
    before = {name: value.detach().clone() for name, value in layer.named_parameters()}
    layer.reset_parameters()
    changed = {name for name, value in layer.named_parameters() if not torch.equal(value, before[name])}
    assert changed == set(before) - {"q_a_layernorm.weight"}
    assert (layer.kv_a_layernorm.weight == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": 3}, "dims: expected MLADims, got int 3"),
        ({"hidden_size": 0}, "hidden_size: expected an int >= 1, got 0"),
        ({"bias": 1}, "bias: expected True or False, got int 1"),
        ({"kernels": "CPU_MLA"}, "kernels: expected KernelSet, got str 'CPU_MLA'"),
        ({"dtype": torch.int8}, "dtype: expected float64 or float32 or bfloat16 or float16, got torch.int8"),
        ({"device": "nowhere"}, "device: expected a device of torch, got str 'nowhere'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(WeightsError, match=message):
        MLAAttention(**{"dims": DIMS, "hidden_size": HIDDEN} | arguments)


def test_a_set_that_cannot_run_the_dtype_is_refused():
    layer = make_layer(kernels=kernel_set("REFERENCE"))
    with pytest.raises(KernelError, match=r"q: expected float64, got torch\.float32"):
        layer(torch.randn(2, HIDDEN), None, build_metadata([prompt_group(2)], block_size=1), TABLE)


# torch.compile -------------------------------------------------------------------------------------------------------


def test_it_compiles_to_one_graph_with_the_bits_of_eager_code():
    layer, metadata = make_layer(bias=True), make_step(MIXED)
    caches = [make_cache(), make_cache()]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    hidden = hidden_for(metadata)
    with torch.no_grad():
        expected = layer(hidden, caches[0], metadata, TABLE, return_lse=True)
        actual = compiled(hidden, caches[1], metadata, TABLE, return_lse=True)
    assert counter.frame_count == 1
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(*caches)


def test_compiled_gradients_are_eager_ones():
    metadata = make_step([Row(query_len=7), Row(query_len=2)])
    grads = []
    for wrap in (lambda layer: layer, lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer = make_layer()
        wrap(layer)(hidden_for(metadata), make_cache(), metadata, TABLE).square().sum().backward()
        grads.append([parameter.grad for parameter in layer.parameters()])
    for actual, expected in zip(*grads, strict=True):
        assert_close(actual, expected, rel=OUT_REL[F32])
        assert expected.any()


def test_compiled_code_does_not_run_on_parameters_of_before():
    layer, metadata = make_layer(), build_metadata([prompt_group(4)], block_size=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    hidden = hidden_for(metadata)
    compiled(hidden, None, metadata, TABLE)
    layer.o_proj.weight = nn.Parameter(torch.randn_like(layer.o_proj.weight))
    with pytest.raises((WeightsError, torch._dynamo.exc.Unsupported)):
        compiled(hidden, None, metadata, TABLE)
    expected = layer(hidden, None, metadata, TABLE)
    assert torch.equal(compiled(hidden, None, metadata, TABLE), expected)


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CPU_MLA", "REFERENCE"])
def test_gradients_of_the_module_are_right(name):
    layer = make_layer(bias=True, kernels=kernel_set(name), dtype=F64)
    metadata, table = make_step([Row(query_len=3), Row(query_len=1), Row(query_len=2)]), rope_table(DIMS.rope, 16, dtype=F64)
    names = [name for name, _ in layer.named_parameters()]
    cache = make_cache(F64)

    def run(hidden, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, state, (hidden, cache, metadata, table), {"return_lse": True})

    inputs = [hidden_for(metadata, F64).requires_grad_(), *[p.detach().requires_grad_() for p in layer.parameters()]]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["CPU_MLA", "REFERENCE"])
def test_gradients_of_attend_are_right(name):
    rows, dims = [Row(query_len=3), Row(query_len=1)], small_dims(2, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2)
    batch = make_batch(rows, block_size=4, dtype=F64, seed=1, dims=dims)

    def run(q, kv_c, k_pe, kv_b_proj):
        return attend(
            q, kv_c, k_pe, batch.latent_cache, batch.metadata, kv_b_proj=kv_b_proj, dims=batch.dims, kernels=kernel_set(name)
        )

    inputs = [x.requires_grad_() for x in (batch.q, batch.kv_c, batch.k_pe, batch.kv_b_proj)]
    assert torch.autograd.gradcheck(run, inputs)


def test_a_small_model_learns():
    """Copying the token before: attention has to look one position back, which no other part of the model can."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 32)
            self.attention = MLAAttention(attrs.evolve(DIMS, q_lora_rank=None), 32)
            self.head = nn.Linear(32, 8)

        def forward(self, tokens, metadata):
            hidden = self.embed(tokens)
            return self.head(hidden + self.attention(hidden, None, metadata, TABLE))

    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(8, (16, 12))
    metadata = build_metadata([prompt_group(12)] * 16, block_size=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(60):
        logits = model(tokens.flatten(), metadata).view(16, 12, 8)
        loss = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.8
    assert losses[-1] < 0.7


def test_decoding_refuses_gradients():
    layer, metadata = make_layer(), make_step(MIXED)
    with pytest.raises(KernelError, match=r"q: expected no gradients through cached rows \(use torch.no_grad\(\)\)"):
        layer(hidden_for(metadata), make_cache(), metadata, TABLE)


# A kernel set of your own --------------------------------------------------------------------------------------------


def recording_set(base=CPU_MLA):
    """A set that counts the calls of each of its functions; and the counts."""
    counts = dict.fromkeys(("paged_decode", "varlen_attention", "write_latent_cache_", "gather_latent_cache", "make_plan"), 0)

    def counted(name):
        function = getattr(base, name)

        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    return attrs.evolve(base, name="RECORDING", **{name: counted(name) for name in counts}), counts


# One write and, of the mixed batch: the new tokens and three passes over 37 cached ones; one decode with its plan.
CALLS = {"paged_decode": 1, "varlen_attention": 4, "write_latent_cache_": 1, "gather_latent_cache": 3, "make_plan": 1}


@pytest.mark.parametrize("how", ["attend", "mla_attention", "module", "module as operators"])
def test_the_functions_of_a_set_of_your_own_are_the_ones_called(how):
    kernels, counts = recording_set()
    metadata, cache = make_step(MIXED), make_cache()
    with torch.no_grad():
        if how == "attend":
            batch = make_batch(MIXED, block_size=BLOCK_SIZE, dtype=F32, seed=1, context_chunk_tokens=16)
            attend(
                batch.q, batch.kv_c, batch.k_pe, batch.latent_cache, batch.metadata,
                kv_b_proj=batch.kv_b_proj, dims=batch.dims, kernels=kernels,
            )  # fmt: skip
        elif how == "mla_attention":
            mla_attention(hidden_for(metadata), make_layer().weights, cache, metadata, TABLE, kernels)
        else:
            kernels = as_operators(kernels) if how.endswith("operators") else kernels
            make_layer(kernels=kernels)(hidden_for(metadata), cache, metadata, TABLE)
    assert counts == CALLS


def test_a_set_of_your_own_runs_in_compiled_code():
    kernels, counts = recording_set()
    layer, metadata = make_layer(kernels=as_operators(kernels)), make_step(MIXED)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    caches = [make_cache(), make_cache()]
    with torch.no_grad():
        actual = compiled(hidden_for(metadata), caches[0], metadata, TABLE)
    assert counts == CALLS | {"make_plan": 0}  # the kernel is an operator there, and derives it inside
    with torch.no_grad():
        assert torch.equal(actual, make_layer()(hidden_for(metadata), caches[1], metadata, TABLE))


def test_a_set_of_your_own_trains():
    kernels, counts = recording_set()
    layer = make_layer(kernels=as_operators(kernels))
    cache = allocate_latent_cache(
        LatentCacheSpec(kv_lora_rank=16, qk_rope_head_dim=6, block_size=BLOCK_SIZE, dtype=F32), num_blocks=1
    )
    metadata = build_metadata([prompt_group(5, [0])], block_size=BLOCK_SIZE)
    layer(hidden_for(metadata), cache, metadata, TABLE).sum().backward()
    assert counts == dict.fromkeys(counts, 0) | {"varlen_attention": 1, "write_latent_cache_": 1}
    assert all(parameter.grad.any() for parameter in layer.parameters())
