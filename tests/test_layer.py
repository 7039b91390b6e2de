"""The whole layer: against transformers, over every way to split a sequence into steps, and from checkpoints."""

from __future__ import annotations

import itertools
import json

import attrs
import pytest
import torch
from batches import Row, row_groups, shuffled_tables
from compare import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from mla import (
    BlockPool,
    KernelSet,
    LatentCacheSpec,
    WeightsError,
    allocate_latent_cache,
    attend,
    build_metadata,
    decode_group,
    dims_from_config,
    kernel_set,
    load_weights,
    mla_attention,
    prompt_group,
    rope_table,
    weights_from_state_dict,
)
from mla.cache import copy_blocks_
from mla.compute import apply_rope, linear
from mla.errors import KernelError
from mla.layer import rms_norm
from mla.loading import dequantize_block_fp8

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
modeling_deepseek_v2 = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
modeling_deepseek_v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
REL = {F64: 1e-12, F32: 4e-6}
CPU = kernel_set("CPU_MLA")
BLOCK_SIZE = 4
NUM_TOKENS = 37
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
ROPES = {
    "plain": {"rope_type": "default"},
    "yarn": YARN,
    "yarn equal mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn unequal mscales": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0},
}
STYLES = {
    "v2": (transformers.DeepseekV2Config, modeling_deepseek_v2, {}),
    "v3 interleaved": (transformers.DeepseekV3Config, modeling_deepseek_v3, {"rope_interleave": True}),
    "v3 halves": (transformers.DeepseekV3Config, modeling_deepseek_v3, {"rope_interleave": False}),
}


class WideTorch:
    """`torch` for a module that widens to float32 here and there: it gets float64 instead."""

    float = float32 = F64

    def __getattr__(self, name):
        return getattr(torch, name)


@attrs.frozen(kw_only=True, eq=False)
class Model:
    """One attention layer of ours and, for the same hidden states, what transformers makes of them."""

    weights: object
    table: object
    hidden: torch.Tensor
    expected: torch.Tensor
    module: object

    def new_cache(self, num_blocks=32, block_size=BLOCK_SIZE, dtype=None):
        dims = self.weights.dims
        spec = LatentCacheSpec(
            kv_lora_rank=dims.kv_lora_rank,
            qk_rope_head_dim=dims.qk_rope_head_dim,
            block_size=block_size,
            dtype=dtype or self.weights.dtype,
        )
        return allocate_latent_cache(spec, num_blocks).fill_(torch.nan)

    def step(self, cache, groups, hidden, **options):
        metadata = build_metadata(groups, block_size=BLOCK_SIZE, **options)
        return mla_attention(hidden, self.weights, cache, metadata, self.table, CPU)[0]

    def check(self, out, tokens=slice(None)):
        assert_close(out, self.expected[tokens], rel=REL[self.weights.dtype])


def tiny_config(style="v3 interleaved", rope="plain", *, q_lora_rank=24, attention_bias=False, **changes):
    config_class, _, options = STYLES[style]
    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "max_position_embeddings": 163840,
        "rope_parameters": {"rope_theta": 10000.0, **ROPES[rope]},
    }
    config = config_class(q_lora_rank=q_lora_rank, attention_bias=attention_bias, **(sizes | options | changes))
    config._attn_implementation = "eager"
    return config


def make_model(monkeypatch, dtype, style="v3 interleaved", rope="plain", num_tokens=NUM_TOKENS, **options):
    config, modeling = tiny_config(style, rope, **options), STYLES[style][1]
    if dtype == F64:
        # Norms, rotary tables, rotation and softmax of transformers widen to float32; here they widen to float64.
        monkeypatch.setattr(modeling, "torch", WideTorch())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        monkeypatch.setattr("transformers.modeling_rope_utils.torch", WideTorch())
    generator = torch.Generator().manual_seed(11)
    prefix = "DeepseekV2" if style == "v2" else "DeepseekV3"
    module = getattr(modeling, f"{prefix}Attention")(config, layer_idx=0).to(dtype)
    for name, parameter in module.named_parameters():
        spread = 0.3 if "layernorm" in name or parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        values = torch.randn(parameter.shape, generator=generator, dtype=F64) * spread
        parameter.data.copy_(values + (1.0 if "layernorm" in name else 0.0))
    hidden = torch.randn(num_tokens, config.hidden_size, generator=generator, dtype=F64).to(dtype)
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    mask = torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = module(
            hidden[None],
            position_embeddings=rotary(hidden[None], torch.arange(num_tokens)[None]),
            attention_mask=mask,
        )
    assert expected.dtype == dtype
    dims = dims_from_config(config)
    return Model(
        weights=weights_from_state_dict(module.state_dict(), dims),
        table=rope_table(dims.rope, num_tokens + 64, dtype=F64 if dtype == F64 else F32),
        hidden=hidden,
        expected=expected[0],
        module=module,
    )


@pytest.fixture(params=[F32, F64], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def model(monkeypatch, dtype):
    return make_model(monkeypatch, dtype, rope="yarn unequal mscales", attention_bias=True)


def blocks_for(num_tokens, seed=0):
    """Shuffled blocks with room for a sequence."""
    return shuffled_tables([Row(query_len=num_tokens)], BLOCK_SIZE, seed=seed, spare_blocks=3)[0][0]


# Against transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("style", STYLES)
def test_layer_equals_transformers(monkeypatch, dtype, style, rope, q_lora_rank, attention_bias):
    model = make_model(monkeypatch, dtype, style, rope, q_lora_rank=q_lora_rank, attention_bias=attention_bias)
    cache, blocks = model.new_cache(), blocks_for(NUM_TOKENS)
    model.check(model.step(cache, [prompt_group(30, blocks)], model.hidden[:30]), slice(0, 30))
    model.check(model.step(cache, [prompt_group(4, blocks, context_len=30)], model.hidden[30:34]), slice(30, 34))
    model.check(model.step(cache, [decode_group(37, blocks, query_len=3)], model.hidden[34:]), slice(34, 37))


def test_the_comparison_notices_another_style_scale_or_norm(monkeypatch):
    model = make_model(monkeypatch, F64, rope="yarn equal mscales")
    dims, rope = model.weights.dims, model.weights.dims.rope
    wrong = {
        "style": attrs.evolve(dims, rope=attrs.evolve(rope, interleaved=False)),
        "scale": attrs.evolve(dims, softmax_scale=dims.qk_head_dim**-0.5),
        "eps": attrs.evolve(dims, rms_norm_eps=1e-5),
        "yarn": attrs.evolve(dims, rope=attrs.evolve(rope, yarn=None)),
    }
    for changed in wrong.values():
        other = attrs.evolve(
            model,
            weights=attrs.evolve(model.weights, dims=changed),
            table=rope_table(changed.rope, NUM_TOKENS, dtype=F64),
        )
        out = other.step(other.new_cache(), [prompt_group(NUM_TOKENS, blocks_for(NUM_TOKENS))], other.hidden)
        with pytest.raises(AssertionError, match="relative error"):
            other.check(out)


# Splits of the same tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [1, 5, 36])
def test_chunked_prefill_for_every_chunk_length(model, new_tokens):
    context_len, blocks = NUM_TOKENS - new_tokens, blocks_for(NUM_TOKENS)
    for chunk in {*range(BLOCK_SIZE, context_len + BLOCK_SIZE, BLOCK_SIZE), max(context_len, 1)}:
        cache = model.new_cache()
        model.check(model.step(cache, [prompt_group(context_len, blocks)], model.hidden[:context_len]), slice(0, context_len))
        out = model.step(
            cache,
            [prompt_group(new_tokens, blocks, context_len=context_len)],
            model.hidden[context_len:],
            context_chunk_tokens=chunk,
        )
        model.check(out, slice(context_len, None))


@pytest.mark.parametrize("lengths", [(37,), (16, 21), (9, 9, 9, 10), (1,) * 37, (4,) * 9 + (1,)], ids=len)
@pytest.mark.parametrize("decode_after", [1, 100])
def test_any_split_into_prefill_and_decode_steps(model, lengths, decode_after):
    cache, blocks = model.new_cache(), blocks_for(NUM_TOKENS, seed=1)
    for i, (end, length) in enumerate(zip(itertools.accumulate(lengths), lengths, strict=True)):
        if i >= decode_after:
            group = decode_group(end, blocks, query_len=length)
        else:
            group = prompt_group(length, blocks, context_len=end - length)
        out = model.step(cache, [group], model.hidden[end - length : end], context_chunk_tokens=8)
        model.check(out, slice(end - length, end))


def test_prefix_reuse_through_the_pool(model):
    cache, pool = model.new_cache(), BlockPool.empty(num_blocks=32, block_size=BLOCK_SIZE)
    tokens = list(range(NUM_TOKENS))

    def compute(pool, seq_id):
        sequence = pool[seq_id]
        group = prompt_group(sequence.num_new, sequence.block_ids, context_len=sequence.num_computed)
        out = model.step(cache, [group], model.hidden[sequence.num_computed : len(sequence.token_ids)], context_chunk_tokens=8)
        model.check(out, slice(sequence.num_computed, len(sequence.token_ids)))
        return pool.mark_computed(seq_id)

    pool = compute(pool.allocate("first", tokens[:30]), "first")
    pool = compute(pool.allocate("second", tokens[:35]), "second")
    assert pool["second"].num_reused == 28
    assert pool["second"].block_ids[:7] == pool["first"].block_ids[:7]

    # A fork writes to a copy of the last block: the first sequence goes on as if nothing had happened.
    pool = pool.fork("first", "fork")
    for seq_id in ("fork", "first"):
        for end in range(31, NUM_TOKENS + 1):
            pool, copies = pool.append(seq_id, tokens[end - 1 : end])
            if copies:
                copy_blocks_([cache], torch.tensor(copies))
            group = decode_group(end, pool[seq_id].block_ids)
            model.check(model.step(cache, [group], model.hidden[end - 1 : end]), slice(end - 1, end))
            pool = pool.mark_computed(seq_id)


def test_a_batch_of_sequences_equals_each_alone(model):
    rows = [
        Row(query_len=9),
        Row(query_len=5, context_len=17),
        Row(query_len=0, context_len=3),
        Row(query_len=1, context_len=30),
        Row(query_len=1, context_len=20, is_prompt=False),
        Row(query_len=3, context_len=11, is_prompt=False),
        Row(query_len=1, is_prompt=False),
    ]
    tables, num_blocks = shuffled_tables(rows, BLOCK_SIZE, seed=3)
    cache = model.new_cache(num_blocks)
    for row, table in zip(rows, tables, strict=True):
        if row.context_len:
            model.step(cache, [prompt_group(row.context_len, table)], model.hidden[: row.context_len])
    before, hidden = cache.clone(), [model.hidden[row.context_len : row.seq_len] for row in rows]
    groups = row_groups(rows, tables)
    padding = model.hidden.new_full((2 * 3, model.hidden.shape[1]), torch.nan)
    together = model.step(cache, groups, torch.cat([*hidden, padding]), context_chunk_tokens=8, pad_decodes_to=5)
    parts = together[: -len(padding)].split([row.query_len for row in rows])
    for row, group, tokens, out in zip(rows, groups, hidden, parts, strict=True):
        alone = model.step(before.clone(), [group], tokens, context_chunk_tokens=8)
        assert_close(out, alone, rel=1e-14 if out.dtype == F64 else 1e-6)
        model.check(out, slice(row.context_len, row.seq_len))
    bias = model.weights.o_proj_bias
    assert torch.equal(together[-len(padding) :], bias.expand(len(padding), -1))


def test_a_profile_run_equals_the_prefill(model):
    groups = [prompt_group(NUM_TOKENS), prompt_group(3)]
    hidden = torch.cat([model.hidden, model.hidden[:3]])
    metadata = build_metadata(groups, block_size=BLOCK_SIZE)
    for cache in (None, model.new_cache()):
        before = None if cache is None else cache.clone()
        out, _ = mla_attention(hidden, model.weights, cache, metadata, model.table, CPU)
        model.check(out[:NUM_TOKENS])
        model.check(out[NUM_TOKENS:], slice(0, 3))
        if cache is not None:
            assert_close(cache, before, abs=0.0, allow_nan=True)
    tables = [blocks_for(NUM_TOKENS), (29,)]
    real = model.step(model.new_cache(), [prompt_group(n, t) for n, t in zip((37, 3), tables, strict=True)], hidden)
    assert torch.equal(out, real)


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_add_up(monkeypatch, dtype, world_size, q_lora_rank):
    model = make_model(monkeypatch, dtype, q_lora_rank=q_lora_rank, attention_bias=True)
    blocks, total = blocks_for(NUM_TOKENS), torch.zeros_like(model.expected)
    for rank in range(world_size):
        shard = attrs.evolve(model, weights=model.weights.shard(rank, world_size))
        assert shard.weights.dims.num_heads == 4 // world_size
        cache = shard.new_cache()
        total[:30] += shard.step(cache, [prompt_group(30, blocks)], model.hidden[:30])
        total[30:34] += shard.step(cache, [prompt_group(4, blocks, context_len=30)], model.hidden[30:34])
        total[34:] += shard.step(cache, [decode_group(37, blocks, query_len=3)], model.hidden[34:])
    model.check(total)


def test_a_narrower_cache_is_attended_as_stored(monkeypatch):
    model = make_model(monkeypatch, F32, rope="yarn")
    blocks, outs = blocks_for(NUM_TOKENS), []
    for lengths in ((37,), (20, 17), (12, 12, 12, 1)):
        cache, parts = model.new_cache(dtype=BF16), []
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            group = prompt_group(length, blocks, context_len=end - length)
            parts.append(model.step(cache, [group], model.hidden[end - length : end], context_chunk_tokens=8))
        outs.append(torch.cat(parts))
    for out in outs[1:]:
        assert_close(out, outs[0], rel=1e-5)
    with pytest.raises(AssertionError, match="relative error"):
        model.check(outs[0])
    assert_close(outs[0], model.expected, rel=2e-2)


# Parts of the layer --------------------------------------------------------------------------------------------------


def test_rms_norm_in_bfloat16_is_computed_in_float32():
    generator = torch.Generator().manual_seed(12)
    x, weight = (torch.randn(shape, generator=generator).to(BF16) for shape in ((50, 300), (300,)))
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == BF16
    # One rounding at the end: within half a unit in the last place of the exact value, and a little for float32.
    assert bool(((out.double() - exact).abs() <= exact.abs() * 2**-8 * (1 + 1e-3)).all())
    assert torch.equal(out, rms_norm(x.float(), weight.float(), 1e-6).to(BF16))
    narrow = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    assert not torch.equal(out, narrow)
    assert rms_norm(x.double(), weight.double(), 1e-6).dtype == F64


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(monkeypatch, context):
    model = make_model(monkeypatch, F32)
    blocks = blocks_for(NUM_TOKENS)
    for weight in (model.weights.o_proj, model.weights.kv_b_proj):
        weight.requires_grad_()
    with context():
        cache = model.new_cache()
        model.check(model.step(cache, [prompt_group(20, blocks)], model.hidden[:20]), slice(0, 20))
        out = model.step(cache, [prompt_group(16, blocks, context_len=20)], model.hidden[20:36], context_chunk_tokens=8)
        model.check(out, slice(20, 36))
        out = model.step(cache, [decode_group(37, blocks)], model.hidden[36:])
        model.check(out, slice(36, None))
        assert not out.requires_grad


def test_the_cache_stores_detached_values(monkeypatch):
    model = make_model(monkeypatch, F64)
    model.weights.kv_a_proj_with_mqa.requires_grad_()
    cache = model.new_cache()
    metadata = build_metadata([prompt_group(NUM_TOKENS, blocks_for(NUM_TOKENS))], block_size=cache.shape[1])
    arguments = (model.hidden, model.weights, cache, metadata, model.table)
    gradients = []
    for name in ("REFERENCE", "CPU_MLA"):
        cache.fill_(torch.nan)
        out, _ = mla_attention(*arguments, kernel_set(name))
        gradients += torch.autograd.grad(out.square().sum(), model.weights.kv_a_proj_with_mqa)
        assert not cache.requires_grad
        assert not cache.isnan().all()
    assert_close(gradients[1], gradients[0], rel=1e-12)
    cache.fill_(torch.nan)
    blind = attrs.evolve(kernel_set("CPU_MLA"), differentiable=False)
    with pytest.raises(KernelError, match=r"kv_c_normed: expected no gradients with CPU_MLA .*, got requires_grad=True"):
        mla_attention(*arguments, blind)
    assert bool(cache.isnan().all())
    with torch.no_grad():
        mla_attention(*arguments, blind)


@attrs.frozen(kw_only=True, eq=False)
class FakePlan:
    """A plan that says who made it."""

    metadata: object
    maker: str


def fake_kernels(calls):
    """A set whose kernels only look at shapes, and note how they were called."""

    def paged_decode(q, latent_cache, metadata, *, kv_lora_rank, softmax_scale, plan=None):
        calls.append(("decode", q.shape[0], plan.maker))
        return q.new_empty(*q.shape[:2], kv_lora_rank), q.new_empty(q.shape[:2], dtype=F32)

    def varlen_attention(q, k, v, *, query_start_loc, kv_start_loc, max_query_len, max_kv_len, causal, softmax_scale):
        calls.append(("varlen", q.shape[0], k.shape[0], max_query_len, max_kv_len, causal))
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=F32)

    return KernelSet(
        name="FAKE",
        device_types=(),
        dtypes=(F32,),
        paged_decode=paged_decode,
        varlen_attention=varlen_attention,
        make_plan=lambda metadata: FakePlan(metadata=metadata, maker="the kernel set"),
    )


FAKE_ROWS = [
    Row(query_len=5),
    Row(query_len=3, context_len=11),
    Row(query_len=1, context_len=6, is_prompt=False),
    Row(query_len=2, context_len=4, is_prompt=False),
]
FAKE_CALLS = [("varlen", 8, 8, 5, 5, True), ("varlen", 3, 8, 3, 8, False), ("varlen", 3, 3, 3, 3, False)]


def fake_metadata(device):
    tables, num_blocks = shuffled_tables(FAKE_ROWS, BLOCK_SIZE, seed=5)
    options = {"context_chunk_tokens": 8, "pad_decodes_to": 3}
    return build_metadata(row_groups(FAKE_ROWS, tables), block_size=BLOCK_SIZE, device=device, **options), num_blocks


def test_the_layer_reads_no_value_on_a_device(monkeypatch):
    # The meta device stands for one that is not the CPU: a tensor on it has no value, and asking for one raises.
    weights, calls = make_model(monkeypatch, F32).weights.to("meta"), []
    (metadata, num_blocks), dims = fake_metadata("meta"), weights.dims
    cache = torch.empty(num_blocks, BLOCK_SIZE, dims.latent_dim, device="meta")
    hidden = torch.empty(13, weights.hidden_size, device="meta")
    table = rope_table(dims.rope, 64, "meta")
    out, lse = mla_attention(hidden, weights, cache, metadata, table, fake_kernels(calls))
    assert (out.shape, lse.shape) == ((13, weights.hidden_size), (13, dims.num_heads))
    assert calls == [*FAKE_CALLS, ("decode", 5, "the kernel set")]
    with pytest.raises(RuntimeError, match="meta tensors"):
        metadata.positions.max().item()


def test_attend_reads_no_value_beside_its_kernels():
    dims, calls = dims_from_config(tiny_config()), []
    metadata, num_blocks = fake_metadata("cpu")
    kernels = attrs.evolve(
        fake_kernels(calls),
        write_latent_cache_=lambda latent_cache, kv_c, k_pe, slot_mapping: calls.append(("write", *slot_mapping.shape)),
        gather_latent_cache=lambda latent_cache, slots, *, out: out[: len(slots)],
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        metadata = metadata.to("cpu")
        cache, workspace = torch.empty(num_blocks, BLOCK_SIZE, dims.latent_dim), torch.empty(8, dims.latent_dim)
        q, kv_c, k_pe = (
            torch.empty(13, *shape) for shape in ((dims.num_heads, dims.qk_head_dim), (dims.kv_lora_rank,), (dims.rope.dim,))
        )
        kv_b_proj = torch.empty(dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
        out, _ = attend(
            q,
            kv_c,
            k_pe,
            cache,
            metadata,
            kv_b_proj=kv_b_proj,
            dims=dims,
            kernels=kernels,
            plan=FakePlan(metadata=metadata.decode, maker="the caller"),
            workspace=workspace,
        )
        assert mode.is_our_fake(out)
    assert out.shape == (13, dims.num_heads, dims.v_head_dim)
    assert calls == [("write", 13), *FAKE_CALLS, ("decode", 5, "the caller")]


def test_compiled_code_takes_records_as_arguments():
    metadata = build_metadata([prompt_group(3, [5]), decode_group(5, [7, 2])], block_size=4)
    dims = dims_from_config(tiny_config())
    table = rope_table(dims.rope, 16)

    def project(x, weight, metadata, table):
        return linear(apply_rope(x, metadata.positions, table), weight) + metadata.decode.seq_lens[0]

    x, weight = torch.randn(4, dims.rope.dim), torch.randn(5, dims.rope.dim)
    torch._dynamo.reset()
    compiled = torch.compile(project, fullgraph=True, backend="eager")
    assert_close(compiled(x, weight, metadata, table), project(x, weight, metadata, table), rel=1e-6)
    torch._dynamo.reset()


# Checkpoints ---------------------------------------------------------------------------------------------------------


def tiny_causal_lm():
    torch.manual_seed(13)
    return transformers.DeepseekV3ForCausalLM(
        tiny_config(
            rope="yarn equal mscales",
            attention_bias=True,
            vocab_size=32,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            intermediate_size=16,
            moe_intermediate_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            num_mtp_layers=0,
        )
    )


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_load_weights_from_a_saved_model(tmp_path, max_shard_size):
    lm = tiny_causal_lm()
    lm.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (max_shard_size == "20KB")
    dims = dims_from_config(json.loads((tmp_path / "config.json").read_text()))
    assert dims == dims_from_config(lm.config)
    assert dims.rope.yarn is not None
    for layer in range(3):
        state = lm.model.layers[layer].self_attn.state_dict()
        weights = load_weights(tmp_path, layer)
        assert weights.dims == dims
        found = {name: value for name, value in attrs.asdict(weights, recurse=False).items() if isinstance(value, torch.Tensor)}
        assert len(found) == len(state)
        for name, value in found.items():
            key = name.removesuffix("_bias") + ".bias" if name.endswith("_bias") else f"{name}.weight"
            assert torch.equal(value, state[key])
        assert load_weights(tmp_path, layer, dtype=BF16).dtype == BF16
    with pytest.raises(WeightsError, match="layer: expected a layer of the checkpoint, got 3"):
        load_weights(tmp_path, 3)


def quantized(weight):
    """An fp8 weight with the scales of its 128 x 128 blocks, and the weight that they stand for, block by block."""
    row_starts, column_starts = (range(0, size, 128) for size in weight.shape)
    scales = torch.empty(len(row_starts), len(column_starts))
    narrow, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for (i, r), (j, c) in itertools.product(enumerate(row_starts), enumerate(column_starts)):
        block = weight[r : r + 128, c : c + 128]
        scales[i, j] = block.abs().max() / 448
        narrow[r : r + 128, c : c + 128] = (block / scales[i, j]).to(torch.float8_e4m3fn)
        exact[r : r + 128, c : c + 128] = narrow[r : r + 128, c : c + 128].float() * scales[i, j]
    return narrow, scales, exact


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 260)], ids=str)
def test_fp8_blocks_are_dequantised_exactly(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(14))
    narrow, scales, exact = quantized(weight * torch.arange(1, shape[1] + 1))
    assert torch.equal(dequantize_block_fp8(narrow, scales), exact)
    too_many = torch.ones(scales.shape[0] + 1, scales.shape[1])
    with pytest.raises(WeightsError, match=r"scale_inv: expected shape"):
        dequantize_block_fp8(narrow, too_many)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_load_weights_from_an_fp8_checkpoint(tmp_path, dtype):
    config = tiny_config(
        hidden_size=200, q_lora_rank=150, kv_lora_rank=130, qk_nope_head_dim=40, qk_rope_head_dim=24, v_head_dim=36
    )
    module = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0)
    prefix, state, expected = "model.layers.1.self_attn.", {}, {}
    generator = torch.Generator().manual_seed(15)
    for name, parameter in module.state_dict().items():
        values = torch.randn(parameter.shape, generator=generator)
        field = name.removesuffix(".weight")
        if parameter.dim() == 1:
            state[prefix + name] = values.to(BF16)
            expected[field] = values.to(BF16).to(dtype)
        else:
            narrow, scales, exact = quantized(values)
            state |= {prefix + name: narrow, f"{prefix + name}_scale_inv": scales}
            expected[field] = exact.to(dtype)
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    config.to_json_file(tmp_path / "config.json")
    weights = load_weights(tmp_path, 1, dtype=dtype)
    assert weights.dtype == dtype
    assert len(expected) == 7
    for field, value in expected.items():
        assert torch.equal(getattr(weights, field), value)
