"""The drop-in for transformers' DeepSeek models: the same tokens, from latent rows."""

from __future__ import annotations

import copy
import sys

import attrs
import numpy as np
import pytest
import torch
from compare import assert_close

from mla import CacheError, KernelError, LatentCacheSpec, MLAError, WeightsError, kernel_set
from mla.compute.select import CPU_MLA
from mla.hf import latent_cache, replace_attention, restore_attention
from mla.hf_cache import PagedLatents

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NUM_NEW = 36
NUM_LAYERS, LATENT_DIM = 3, 32 + 8
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KINDS = {
    "v2": ("DeepseekV2", {"q_lora_rank": None}),
    "v3": ("DeepseekV3", {"q_lora_rank": 24, "attention_bias": True}),
    "v3 yarn": ("DeepseekV3", {"q_lora_rank": 24, "rope_parameters": YARN}),
}


def make_model(kind, dtype=F32, **changes):
    prefix, options = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**SIZES | options | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype).eval()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def prompts(lens, *, side="left", seed=1):
    """Token ids and mask of prompts of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lens)
    columns = torch.arange(width)
    starts = [width - n if side == "left" else 0 for n in lens]
    mask = torch.stack([(columns >= first) & (columns < first + n) for first, n in zip(starts, lens, strict=True)])
    return torch.randint(1, 97, mask.shape, generator=generator) * mask, mask.long()


def generate(model, ids, mask, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options)


def with_replaced(model, function, **options):
    replace_attention(model, **options)
    try:
        return function()
    finally:
        restore_attention(model)


# The same tokens -----------------------------------------------------------------------------------------------------

SEARCHES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "no cache": {"use_cache": False},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
    "prompts in chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_ragged_batch_generates_the_same_tokens(kind, search):
    model = make_model(kind)
    ids, mask = prompts([7, 11, 4])
    expected = generate(model, ids, mask, **SEARCHES[search])
    actual = with_replaced(model, lambda: generate(model, ids, mask, **SEARCHES[search]), block_size=4)
    assert expected.shape[1] == 11 + NUM_NEW
    assert torch.equal(actual, expected)
    assert len(set(actual[0, 11:].tolist())) > 4  # not one token over and over


def test_assisted_decoding_gives_the_same_tokens(kind):
    model = make_model(kind)
    ids, _ = prompts([9])
    ids = ids.repeat(1, 3)  # so that looking the continuation up in the prompt often is right, and often wrong
    expected = generate(model, ids, torch.ones_like(ids), prompt_lookup_num_tokens=3)
    actual = with_replaced(model, lambda: generate(model, ids, torch.ones_like(ids), prompt_lookup_num_tokens=3), block_size=4)
    assert torch.equal(actual, expected)


def logits_of(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[mask.bool()].float()


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_close_in_float32(kind, side):
    model = make_model(kind)
    ids, mask = prompts([7, 30, 4], side=side)
    expected = logits_of(model, ids, mask)
    assert_close(with_replaced(model, lambda: logits_of(model, ids, mask)), expected, rel=4e-6)


def test_logits_in_bfloat16_are_as_good_as_theirs(kind):
    model = make_model(kind, BF16, first_k_dense_replace=NUM_LAYERS)  # a router would turn rounding into another expert
    ids, mask = prompts([7, 30, 4])
    exact = logits_of(copy.deepcopy(model).float(), ids, mask)
    theirs = logits_of(model, ids, mask)
    ours = with_replaced(model, lambda: logits_of(model, ids, mask))
    distances = [float((x - exact).norm() / exact.norm()) for x in (ours, theirs)]
    assert distances[0] <= 1.2 * distances[1]
    assert_close(ours, theirs, rel=2e-2)


def test_decoded_logits_in_bfloat16_follow_the_prompts(kind):
    """Cached step by step or as one prompt: the same sequence."""
    model = make_model(kind, BF16, first_k_dense_replace=NUM_LAYERS)
    replace_attention(model, block_size=4)
    ids, mask = prompts([7, 14, 4])
    cache = latent_cache(model)
    with torch.no_grad():
        parts = [
            model(
                ids[:, i:j], attention_mask=mask[:, :j], cache=cache, position_ids=(mask.cumsum(1) - 1).clamp(0)[:, i:j]
            ).logits
            for i, j in ((0, 9), (9, 10), (10, 13), (13, 14))
        ]
        whole = model(ids, attention_mask=mask).logits
    assert_close(torch.cat(parts, dim=1)[mask.bool()], whole[mask.bool()], rel=2e-2)


def test_a_conversation_goes_on_from_its_cache(kind):
    model = make_model(kind)
    replace_attention(model, block_size=4)
    ids, mask = prompts([7, 11, 4])
    cache = latent_cache(model)
    first = generate(model, ids, mask, cache=cache, max_new_tokens=6)
    more, _ = prompts([20, 20, 20], seed=5)  # more than is decoded at a time: prompts over their context
    ids2 = torch.cat([first, more], dim=1)
    mask2 = torch.cat([mask, torch.ones(3, ids2.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
    actual = generate(model, ids2, mask2, cache=cache, max_new_tokens=6)
    restore_attention(model)
    assert torch.equal(actual, generate(model, ids2, mask2, max_new_tokens=6))


def test_rows_of_one_batch_may_be_prompts_and_decode():
    """A row that is masked out at first starts while the others go on."""
    model = make_model("v3")
    ids, mask = prompts([3, 9, 9])
    mask[0] = 0
    mask[0, 8] = 1
    expected = logits_of(model, ids, mask)
    replace_attention(model, block_size=4)
    cache = latent_cache(model)
    with torch.no_grad():
        parts = [model(ids[:, i:j], attention_mask=mask[:, :j], cache=cache).logits for i, j in ((0, 7), (7, 9))]
    assert_close(torch.cat(parts, dim=1)[mask.bool()], expected, rel=4e-6)


# What is stored ------------------------------------------------------------------------------------------------------


def test_the_cache_holds_latent_rows_and_nothing_else():
    model = make_model("v3")
    replace_attention(model, block_size=4)
    ids, mask = prompts([7, 11, 4])
    cache = latent_cache(model)
    generate(model, ids, mask, cache=cache)
    latents = cache.layers[0].latents
    assert latents.seq_lens == [n + NUM_NEW - 1 for n in (7, 11, 4)]  # the last token is never fed back; padding takes nothing
    assert latents.num_used_blocks == sum(-(-n // 4) for n in latents.seq_lens)
    assert latents.num_blocks <= 1.25 * latents.num_used_blocks
    assert latents.num_bytes == NUM_LAYERS * latents.num_blocks * 4 * LATENT_DIM * 4
    for i, layer in enumerate(cache.layers):
        assert layer.latent_cache.shape == (latents.num_blocks, 4, LATENT_DIM)
        assert layer.latent_cache is latents.caches[i]
        assert layer.keys is layer.values is None
    assert cache.get_seq_length() == latents.num_columns == 11 + NUM_NEW - 1
    assert latents.caches[1].view(-1, LATENT_DIM).any(1).sum() == sum(latents.seq_lens)
    cache.reset()
    assert (cache.get_seq_length(), latents.num_used_blocks) == (0, 0)


def test_the_cache_of_generate_is_made_a_latent_one():
    model = make_model("v2")
    replace_attention(model)
    ids, mask = prompts([7, 11])
    cache = generate(model, ids, mask, return_dict_in_generate=True, max_new_tokens=2).cache
    assert cache.layers[0].latents.seq_lens == [8, 12]
    mine = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, cache=mine)
    assert out.cache is mine
    assert mine.get_seq_length() == 11
    assert "LatentLayer(2 sequences, 2 blocks)" in repr(mine)


def test_beams_share_blocks():
    model = make_model("v3")
    replace_attention(model, block_size=4)
    ids, mask = prompts([21])
    cache = latent_cache(model)
    generate(model, ids, mask, num_beams=4, cache=cache, max_new_tokens=20)
    latents = cache.layers[0].latents
    assert latents.seq_lens == [40] * 4
    assert latents.num_used_blocks < 4 * 10


def test_a_cache_of_fixed_size_says_when_it_is_full():
    model = make_model("v2")
    replace_attention(model, block_size=4)
    ids, mask = prompts([7, 5])
    cache = latent_cache(model, num_blocks=8)
    before = cache.layers[1].latent_cache
    with pytest.raises(CacheError, match="num_blocks: expected 9 blocks for this step, got 8"):
        generate(model, ids, mask, cache=cache)
    assert cache.layers[1].latent_cache is before
    assert cache.layers[0].latents.num_used_blocks == 8


def test_shared_blocks_are_copied_before_they_are_written():
    spec = LatentCacheSpec(kv_lora_rank=2, qk_rope_head_dim=2, block_size=4, dtype=F32)
    latents = PagedLatents(spec, 2)

    def step(counts):
        tables = latents.reserve_(counts)
        new = torch.zeros(len(counts), max(counts), dtype=torch.bool)
        for seq, count in enumerate(counts):
            new[seq, :count] = True
        mask = new.numpy() if not latents.num_seqs else torch.cat([torch.from_numpy(latents.mask), new], 1).numpy()
        latents.commit_(mask)
        return tables

    first = step([6])[0]
    for i, cache in enumerate(latents.caches):
        cache[first[1]] = 1.0 + i
    latents.select_([0, 0, 0])
    assert latents.num_used_blocks == 2
    tables = step([0, 1, 1])
    assert len({table[1] for table in tables}) == 3  # two copies; a sequence without new tokens keeps the block
    assert tables[0] == first
    assert all(table[0] == first[0] for table in tables)
    for i, cache in enumerate(latents.caches):
        assert all((cache[table[1]] == 1.0 + i).all() for table in tables)
    latents.select_([0])
    assert (latents.num_used_blocks, latents.seq_lens) == (2, [6])
    latents.crop_(latents.num_columns - 4)
    assert (latents.num_used_blocks, latents.seq_lens) == (1, [4])
    with pytest.raises(CacheError, match=r"num_columns: expected an int in 0\.\.4, got 5"):
        latents.crop_(5)
    with pytest.raises(CacheError, match="cache: expected 1 sequences, got 2"):
        latents.reserve_([1, 1])


@pytest.mark.parametrize("seed", range(8))
def test_rows_stay_with_their_sequences_whatever_happens(seed):
    """Steps, reordering, repeating and cropping in random order, against plain lists."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    latents = PagedLatents(LatentCacheSpec(kv_lora_rank=1, qk_rope_head_dim=1, block_size=size, dtype=F64), 2)
    rows: list[list[float]] = [[] for _ in range(3)]  # a number for every column, nan where it is padding
    for value in range(60):
        action = rng.choice(["step", "step", "step", "select", "crop"]) if value else "step"
        if action == "step":
            new = rng.random((len(rows), int(rng.integers(1, 4)))) < 0.8
            tables = latents.reserve_(new.sum(1).tolist())
            for seq, (row, table) in enumerate(zip(rows, tables, strict=True)):
                row += [value + seq / 16 if wanted else np.nan for wanted in new[seq]]
                first = latents.seq_lens[seq] if latents.num_seqs else 0
                for position in range(first, first + int(new[seq].sum())):
                    for cache in latents.caches:
                        cache[table[position // size], position % size] = value + seq / 16
            latents.commit_(np.concatenate([latents.mask, new], axis=1) if latents.num_seqs else new)
        elif action == "select":
            chosen = rng.integers(len(rows), size=rng.integers(1, 5)).tolist()
            latents.select_(chosen)
            rows = [list(rows[seq]) for seq in chosen]
        else:
            count = int(rng.integers(0, min(4, len(rows[0])) + 1))
            latents.crop_(count)
            rows = [row[: len(row) - count] for row in rows]
        wanted = [[x for x in row if not np.isnan(x)] for row in rows]
        for cache in latents.caches:
            held = [cache[table].flatten(0, 1)[: len(w), 0].tolist() for table, w in zip(latents.tables, wanted, strict=True)]
            assert held == wanted
        assert latents.seq_lens == [len(w) for w in wanted]
        assert latents.num_used_blocks == len({block for table in latents.tables for block in table})
        assert latents.num_used_blocks <= sum(-(-len(w) // size) for w in wanted)


# Weights, training, other sets ---------------------------------------------------------------------------------------


def test_weights_are_shared_and_restored(kind):
    model = make_model(kind)
    before = dict(model.named_parameters())
    attention = [layer.self_attn for layer in model.model.layers]
    replace_attention(model)
    assert list(dict(model.named_parameters())) == list(before)
    assert all(value is before[name] for name, value in model.named_parameters())
    assert not any(layer.self_attn is old for layer, old in zip(model.model.layers, attention, strict=True))
    ids, mask = prompts([7, 11])
    first = logits_of(model, ids, mask)
    model.train().double()
    restore_attention(model)
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == F64
    model.float()
    assert [layer.self_attn for layer in model.model.layers] == attention
    assert all(module.training for module in attention)
    assert not model.model._forward_pre_hooks
    assert_close(logits_of(model.eval(), ids, mask), first, rel=4e-6)


def test_a_saved_model_and_a_copy_are_whole(tmp_path):
    model = make_model("v3")
    ids, mask = prompts([7, 11])
    replace_attention(model)
    expected = logits_of(model, ids, mask)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, ids, mask), expected)
    twin.model.layers[0].self_attn.o_proj.weight.data.zero_()
    assert not torch.equal(logits_of(twin, ids, mask), expected)
    assert torch.equal(logits_of(model, ids, mask), expected)
    restore_attention(twin)
    assert_close(logits_of(model, ids, mask), expected, rel=1e-7)
    model.save_pretrained(tmp_path)
    loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    assert_close(logits_of(loaded, ids, mask), expected, rel=4e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers(kind, checkpointing):
    model = make_model(kind).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids, mask = prompts([7, 11, 4], side="right")

    def grads():
        model.zero_grad()
        labels = ids.masked_fill(mask == 0, -100)
        outputs = model(ids, attention_mask=mask, labels=labels)
        assert (outputs.cache is None) == checkpointing
        outputs.loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, actual = grads(), with_replaced(model, grads)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, rel=1e-4, name=name)


def test_inference_mode_and_plain_code_may_share_a_model_and_a_cache():
    model = make_model("v2")
    replace_attention(model, block_size=4)
    ids, mask = prompts([7, 11])
    cache = latent_cache(model)
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache)
        made = latent_cache(model, num_blocks=1)
    assert not any(layer.latent_cache.is_inference() for layer in (*cache.layers, *made.layers))
    with torch.no_grad():
        model(ids[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), cache=cache)
    model(ids, attention_mask=mask).logits.sum().backward()
    assert model.model.layers[0].self_attn.kv_b_proj.weight.grad.any()


def test_the_functions_of_a_set_of_your_own_are_the_ones_called():
    counts = dict.fromkeys(("paged_decode", "varlen_attention", "write_latent_cache_", "make_plan"), 0)

    def counted(name):
        def call(*args, **options):
            counts[name] += 1
            return getattr(CPU_MLA, name)(*args, **options)

        return call

    kernels = attrs.evolve(CPU_MLA, name="RECORDING", **{name: counted(name) for name in counts})
    model = make_model("v3")
    ids, mask = prompts([7, 11, 4])
    expected = generate(model, ids, mask, max_new_tokens=5)
    assert torch.equal(with_replaced(model, lambda: generate(model, ids, mask, max_new_tokens=5), kernels=kernels), expected)
    # Five passes, the first of which is the prompts; a plan is made once for all layers.
    assert counts == {
        "paged_decode": 4 * NUM_LAYERS, "varlen_attention": NUM_LAYERS, "write_latent_cache_": 5 * NUM_LAYERS, "make_plan": 4,
    }  # fmt: skip


def test_a_set_that_reads_page_lists_gets_them():
    seen = []

    def paged_decode(q, latent_cache, metadata, **options):
        seen.append(metadata.paged_kv_of(1).paged_kv_indices.shape[0])
        return CPU_MLA.paged_decode(q, latent_cache, metadata, **options)

    model = make_model("v2")
    replace_attention(model, kernels=attrs.evolve(CPU_MLA, name="PAGED", page_size=1, paged_decode=paged_decode))
    ids, mask = prompts([7, 11])
    generate(model, ids, mask, max_new_tokens=2)
    assert seen == [8 + 12] * NUM_LAYERS


# What is refused -----------------------------------------------------------------------------------------------------


def test_other_models_are_refused():
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
        )
    )
    message = "model: expected a DeepSeek-V2 or DeepSeek-V3 model of transformers, got "
    for other, name in ((llama, "LlamaForCausalLM"), (torch.nn.Linear(1, 1), "Linear"), (None, "None")):
        for function in (replace_attention, restore_attention, latent_cache):
            with pytest.raises(WeightsError, match=message + name):
                function(other)


def test_what_cannot_be_replaced_is_named():
    model = make_model("v3")
    with pytest.raises(WeightsError, match="model: expected a model after `replace_attention`"):
        restore_attention(model)
    with pytest.raises(WeightsError, match="block_size: expected an int >= 1, got 0"):
        replace_attention(model, block_size=0)
    with pytest.raises(WeightsError, match="kernels: expected KernelSet, got str 'CPU_MLA'"):
        replace_attention(model, kernels="CPU_MLA")
    with pytest.raises(KernelError, match="dtype: expected float64, got float32"):
        replace_attention(model, kernels=kernel_set("REFERENCE"))
    model.model.layers[2].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[2].self_attn.kv_b_proj)
    with pytest.raises(WeightsError, match=r"layers.2.kv_b_proj: expected torch.nn.Linear, got Sequential"):
        replace_attention(model)
    mixed = make_model("v3")
    mixed.model.layers[1].self_attn.bfloat16()
    with pytest.raises(
        WeightsError, match=r"model: expected torch.float32 on cpu in all .* got torch.bfloat16 on cpu in layer 1"
    ):
        replace_attention(mixed)
    for untouched in (model, mixed):
        assert type(untouched.model.layers[0].self_attn).__name__ == "DeepseekV3Attention"
        assert not untouched.model._forward_pre_hooks
    model = make_model("v3")
    replace_attention(model)
    with pytest.raises(WeightsError, match="model: expected transformers' own attention, got one that is replaced already"):
        replace_attention(model)


def test_steps_that_cannot_run_are_refused_by_name():
    model = make_model("v3", attention_dropout=0.1)
    replace_attention(model, block_size=4)
    ids, mask = prompts([7, 11])
    cache = latent_cache(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    longer = torch.cat([mask, mask[:, -1:]], 1)
    other = longer.clone()
    other[0, 0] = 1
    offloading = transformers.DynamicCache(config=model.config)
    offloading.offloading = True  # one that is made so makes a stream, which a CUDA build of torch refuses without a GPU
    for error, message, options in (
        (CacheError, "cache: expected 2 sequences, got 1", {"input_ids": ids[:1, :1], "cache": cache}),
        (
            KernelError,
            r"attention_mask: expected shape \(2, 12\), got \(2, 11\)",
            {"attention_mask": longer[:, 1:], "cache": cache},
        ),
        (KernelError, "attention_mask: expected the cached tokens as they were", {"attention_mask": other, "cache": cache}),
        (KernelError, "attention_mask: expected the cached tokens as they were", {"cache": cache}),
        (
            KernelError,
            r"attention_mask: expected shape \(2, 1\), got \(2, 1, 1, 1\)",
            {"attention_mask": longer[:, :1, None, None]},
        ),
        (KernelError, "attention_mask: expected at least one new token", {"attention_mask": 0 * longer[:, :1]}),
        (KernelError, "position_ids: expected positions >= 0, got -1", {"position_ids": -torch.ones_like(ids[:, :1])}),
        (KernelError, r"position_ids: expected shape \(2, 1\), got \(2, 2\)", {"position_ids": ids[:, :2]}),
        (KernelError, "output_attentions: expected False", {"output_attentions": True}),
        (CacheError, "cache: expected a Cache of transformers, got tuple", {"cache": ()}),
        (
            CacheError,
            "got a StaticCache of 0 tokens",
            {"cache": transformers.StaticCache(config=model.config, max_cache_len=4)},
        ),
        (
            CacheError,
            "got a offloading DynamicCache",
            {"cache": offloading},
        ),
    ):
        with torch.no_grad(), pytest.raises(error, match=message):
            model(**{"input_ids": ids[:, :1]} | options)
    assert cache.get_seq_length() == 11
    with pytest.raises(KernelError, match=r"attention_dropout: expected 0 while training, got 0\.1"):
        model.train()(ids)


def test_caches_of_others_are_refused():
    model, other = make_model("v3"), make_model("v3", num_hidden_layers=2)
    ids, mask = prompts([7, 11])
    filled = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=filled)
    replace_attention(model)
    replace_attention(other)
    longer = torch.cat([mask, mask[:, -1:]], 1)
    with torch.no_grad(), pytest.raises(CacheError, match="got a DynamicCache of 11 tokens"):
        model(ids[:, :1], attention_mask=longer, cache=filled)
    with torch.no_grad(), pytest.raises(CacheError, match="cache: expected 3 layers of LatentCacheSpec"):
        model(ids, attention_mask=mask, cache=latent_cache(other))
    cache = latent_cache(model)
    restore_attention(model)
    with torch.no_grad(), pytest.raises(CacheError, match="cache: expected a model after `replace_attention`"):
        model(ids, attention_mask=mask, cache=cache)
    replace_attention(model)
    with pytest.raises(CacheError, match="got a StaticCache of 0 tokens"):
        generate(model, ids, mask, cache_implementation="static")
    with pytest.raises(KernelError, match="mla_step: expected a call through the model"):
        model.model.layers[0].self_attn(torch.randn(1, 2, 64))


def test_missing_transformers_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for function in (replace_attention, restore_attention):
        with pytest.raises(
            MLAError, match=r"^transformers: expected an installed package \(pip install 'mla\[hf\]'\), got none$"
        ):
            function(torch.nn.Linear(2, 2))
