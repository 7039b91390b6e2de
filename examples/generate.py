"""Serve a DeepSeek-style model from a paged latent cache and check every token against transformers.

A small random DeepSeek-V3 checkpoint is written and loaded back, unless ``--checkpoint`` names a real one. English prompts of
unequal lengths run as one batch: `BlockPool` hands out blocks and finds the shared prefix again, each step's sequence groups
become metadata, prompts are prefilled in chunks while others already decode. Every attention layer is this package's;
embedding, norms, MLP and head are transformers' own modules. At the end transformers generates from each prompt alone, and all
tokens must be equal.

Run it with ``make demo`` or ``python examples/generate.py --help``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from mla import (
    BlockPool,
    KernelSet,
    LatentCacheSpec,
    MLAMetadata,
    MLAWeights,
    RopeTable,
    SequenceGroup,
    allocate_latent_cache,
    build_metadata,
    decode_group,
    kernels_for,
    load_weights,
    mla_attention,
    prompt_group,
    rope_table,
)

PREFIX = (
    "You are the night librarian of a small harbour town. You answer in plain words, you never guess, and you name the shelf "
    "on which a reader can check what you say. "
)
PROMPTS = (
    PREFIX + "A sailor asks how long a letter to Lisbon takes in winter, and whether the mail boat waits for the tide.",
    PREFIX + "A child asks why the moon follows the tram.",
    PREFIX
    + "The baker wants the oldest recipe for rye bread that the town has kept, together with the name of whoever wrote it "
    "down, the year, and what they paid for a sack of flour.",
    "The ferry leaves at noon.",
    (
        "Explain, to someone who has never seen snow, how a village sounds on the morning after the first heavy fall of the "
        "year, before anybody has opened a door."
    ),
    PREFIX + "Someone has returned a book that was never lent.",
)


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """A random float32 DeepSeek-V3 with YaRN and compressed queries; weights large enough for attention to matter."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)


@attrs.frozen(kw_only=True, eq=False)
class Model:
    """A transformers model whose attention is replaced: its own modules, our weights, caches, table and kernels."""

    torso: Any
    weights: tuple[MLAWeights, ...]
    caches: tuple[torch.Tensor, ...]
    rope: RopeTable
    kernels: KernelSet

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        return self.caches[0].shape[1]


def load_model(folder: Path, *, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> Model:
    """Read a checkpoint: attention through `mla.load_weights`, everything else through transformers."""
    from transformers import AutoModelForCausalLM

    torso = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    weights = tuple(load_weights(folder, layer, dtype=dtype) for layer in range(torso.config.num_hidden_layers))
    dims = weights[0].dims
    spec = LatentCacheSpec(
        kv_lora_rank=dims.kv_lora_rank, qk_rope_head_dim=dims.qk_rope_head_dim, block_size=block_size, dtype=dtype
    )
    return Model(
        torso=torso,
        weights=weights,
        caches=tuple(allocate_latent_cache(spec, num_blocks) for _ in weights),
        rope=rope_table(dims.rope, num_blocks * block_size),
        kernels=kernels_for("cpu", dims=dims, dtype=dtype),
    )


def next_tokens(model: Model, token_ids: Sequence[int], metadata: MLAMetadata) -> list[int]:
    """One step: the most likely token after the last new token of each sequence."""
    inner = model.torso.model
    hidden = inner.embed_tokens(torch.tensor(token_ids))
    plan = None if metadata.decode is None else model.kernels.plan(metadata.decode)
    for layer, weights, cache in zip(inner.layers, model.weights, model.caches, strict=True):
        attended, _ = mla_attention(
            layer.input_layernorm(hidden), weights, cache, metadata, model.rope, model.kernels, plan=plan
        )
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
    ends = []
    for part, first in ((metadata.prefill, 0), (metadata.decode, metadata.num_prefill_tokens)):
        if part is not None:
            ends.append(part.query_start_loc[1:].long() - 1 + first)
    logits = model.torso.lm_head(inner.norm(hidden[torch.cat(ends)]))
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def step_groups(pool: BlockPool, num_prompt_tokens: dict[int, int], chunk: int) -> tuple[list[int], list[SequenceGroup]]:
    """What runs next: prompts that are not computed yet, up to `chunk` tokens of each, then the decoding sequences."""
    live = [i for i in num_prompt_tokens if i in pool.sequences]
    prompts = [i for i in live if pool[i].num_computed < num_prompt_tokens[i]]
    others = [i for i in live if i not in prompts]
    groups = []
    for i in prompts:
        count = min(chunk, pool[i].num_new)
        groups.append(prompt_group(count, pool[i].block_ids, context_len=pool[i].num_computed))
    groups += [decode_group(len(pool[i].token_ids), pool[i].block_ids) for i in others]
    return [*prompts, *others], groups


def serve(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    num_new_tokens: int,
    chunk: int,
    groups_of: Callable[[BlockPool, dict[int, int], int], tuple[list[int], list[SequenceGroup]]] = step_groups,
) -> tuple[list[list[int]], dict[str, float]]:
    """Greedy continuation of every prompt, batched; the first prompt runs alone until the others can share its prefix.

    Returns
    -------
    tokens : list of list of int
        New tokens of each prompt.
    numbers : dict of str to float
        What the table prints.
    """
    pool = BlockPool.empty(num_blocks=model.caches[0].shape[0], block_size=model.block_size)
    lengths = {i: len(prompt) for i, prompt in enumerate(prompts)}
    done: dict[int, list[int]] = {}
    reused = used_blocks = 0
    started = time.perf_counter()
    pool = pool.allocate(0, prompts[0])
    waiting = list(range(1, len(prompts)))
    progress = tqdm(total=num_new_tokens * len(prompts), unit="token", desc="generate", file=sys.stderr)
    while len(done) < len(prompts):
        if waiting and (0 in done or pool[0].num_computed >= lengths[0]):
            for i in waiting:
                pool = pool.allocate(i, prompts[i])
                reused += pool[i].num_reused
            waiting = []
        order, groups = groups_of(pool, lengths, chunk)
        metadata = build_metadata(groups, block_size=model.block_size, context_chunk_tokens=64)
        new_ids = [t for i, group in zip(order, groups, strict=True) for t in _new_tokens(pool, i, group)]
        used_blocks = max(used_blocks, pool.num_blocks - pool.num_free)
        for i, group, token in zip(order, groups, next_tokens(model, new_ids, metadata), strict=True):
            pool = pool.mark_computed(i, group.query_lens[0])
            if pool[i].num_new:
                continue
            pool, _ = pool.append(i, [token])
            progress.update()
            if len(pool[i].token_ids) == lengths[i] + num_new_tokens:
                done[i] = list(pool[i].token_ids[lengths[i] :])
                pool = pool.free(i)
    progress.close()
    numbers = {
        "seconds": time.perf_counter() - started,
        "reused": reused,
        "blocks": used_blocks,
    }
    return [done[i] for i in range(len(prompts))], numbers


def _new_tokens(pool: BlockPool, seq: int, group: SequenceGroup) -> tuple[int, ...]:
    first = pool[seq].num_computed
    return pool[seq].token_ids[first : first + group.query_lens[0]]


def generate_alone(torso: Any, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
    """What transformers generates greedily, one prompt at a time."""
    from transformers import GenerationConfig

    # A plain argmax for a fixed number of tokens, whatever the checkpoint would add (an end token, penalties).
    torso.generation_config = GenerationConfig()
    plain = GenerationConfig(max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0)
    outputs = []
    for prompt in tqdm(prompts, unit="prompt", desc="transformers", file=sys.stderr):
        ids = torch.tensor([list(prompt)])
        out = torso.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def as_tokens(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Bytes for the random model; the checkpoint's own tokenizer where it has one."""
    if any(folder.glob("tokenizer*")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [tokenizer(text)["input_ids"] for text in texts]
    return [list(text.encode()) for text in texts]


def print_table(
    model: Model, prompts: Sequence[Sequence[int]], equal: list[int], total: int, numbers: dict[str, float]
) -> None:
    """Tokens, cache bytes and time."""
    dims, itemsize = model.weights[0].dims, model.caches[0].element_size()
    layers, slots = len(model.caches), int(numbers["blocks"]) * model.block_size
    latent = slots * layers * dims.latent_dim * itemsize
    full = slots * layers * dims.num_heads * (dims.qk_head_dim + dims.v_head_dim) * itemsize
    generated = len(prompts) * total
    rows = [
        ("prompts (tokens)", ", ".join(str(len(p)) for p in prompts)),
        ("prefix tokens reused", f"{int(numbers['reused'])}"),
        ("tokens equal to transformers", f"{sum(equal)} of {generated}"),
        ("latent cache in use", f"{latent / 2**20:.2f} MiB ({int(numbers['blocks'])} blocks of {model.block_size})"),
        ("full KV cache for the same", f"{full / 2**20:.2f} MiB ({full / latent:.1f} times)"),
        ("time per generated token", f"{1e3 * numbers['seconds'] / generated:.2f} ms, prefill included"),
        ("kernels", model.kernels.name),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number >= 1, got {number}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every token equals transformers'."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of a DeepSeek-V2/V3 checkpoint; a random one is made without it"
    )
    parser.add_argument("--new-tokens", type=positive, default=48)
    parser.add_argument("--chunk", type=positive, default=80, help="new prompt tokens per step and prompt")
    parser.add_argument("--block-size", type=positive, default=16)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made, torch.inference_mode():
        folder = args.checkpoint or Path(made)
        if args.checkpoint is None:
            write_checkpoint(folder)
        prompts = as_tokens(folder, PROMPTS)
        num_blocks = sum(-(-(len(p) + args.new_tokens) // args.block_size) for p in prompts)
        model = load_model(folder, num_blocks=num_blocks, block_size=args.block_size)
        tokens, numbers = serve(model, prompts, num_new_tokens=args.new_tokens, chunk=args.chunk)
        expected = generate_alone(model.torso, prompts, args.new_tokens)
    equal = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(tokens, expected, strict=True)]
    print_table(model, prompts, equal, args.new_tokens, numbers)
    return 0 if sum(equal) == len(prompts) * args.new_tokens else 1


if __name__ == "__main__":
    sys.exit(main())
