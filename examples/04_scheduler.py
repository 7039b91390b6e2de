# %% [markdown]
# # A scheduler in forty lines
#
# An engine decides at every step which sequences run, how many new tokens of each, and which blocks they get. With a pool
# that is a value, that is a function from one pool to the next. This one admits requests while there are blocks, prefills
# long prompts in parts beside decoding sequences, shares known beginnings, and takes back the blocks of the youngest sequence
# when there are none left.

# %%
import inspect
from contextlib import suppress
from itertools import pairwise

import attrs
import torch
from figures import keep
from matplotlib import pyplot as plt

from mla import (
    BlockPool,
    CacheError,
    LatentCacheSpec,
    MLADims,
    MLAMetadata,
    MLAWeights,
    RopeSpec,
    SequenceGroup,
    allocate_latent_cache,
    build_metadata,
    decode_group,
    kernels_for,
    mla_attention,
    prompt_group,
    rope_table,
)
from mla.plot import PALETTE, plot_block_pool

# %% [markdown]
# ## A model
#
# One random attention layer between an embedding and its transpose. It says nothing of sense, but the next token depends on all
# tokens before it, so a mistake of the scheduler shows.

# %%
torch.manual_seed(0)
VOCABULARY, WIDTH, BLOCK_SIZE, NUM_BLOCKS = 64, 32, 4, 20
dims = MLADims(
    num_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    rope=RopeSpec(dim=8, interleaved=True),
)
weights = MLAWeights(
    dims=dims,
    q_proj=torch.randn(4 * 16, WIDTH) / 3,
    kv_a_proj_with_mqa=torch.randn(dims.latent_dim, WIDTH) / 3,
    kv_a_layernorm=torch.ones(16),
    kv_b_proj=torch.randn(4 * 16, 16) / 2,
    o_proj=torch.randn(WIDTH, 4 * 8) / 2,
)
embedding = torch.randn(VOCABULARY, WIDTH)
rope, kernels = rope_table(dims.rope, 256), kernels_for("cpu", dims=dims, dtype=torch.float32)
spec = LatentCacheSpec(kv_lora_rank=16, qk_rope_head_dim=8, block_size=BLOCK_SIZE, dtype=torch.float32)


def next_tokens(cache: torch.Tensor, token_ids: list[int], metadata: MLAMetadata) -> list[int]:
    """The likeliest token after the last new token of each sequence."""
    attended, _ = mla_attention(embedding[token_ids], weights, cache, metadata, rope, kernels)
    ends = []
    for part, first in ((metadata.prefill, 0), (metadata.decode, metadata.num_prefill_tokens)):
        if part is not None:
            ends.append(part.query_start_loc[1:].long() - 1 + first)
    tokens: list[int] = (attended[torch.cat(ends)] @ embedding.T).argmax(1).tolist()
    return tokens


# %% [markdown]
# ## The scheduler
#
# `schedule` admits one request a step, so that the next finds what the first has computed. It returns the pool, the waiting
# requests and what runs: pairs of a name and a number of new tokens, prompts first. A sequence with one token to compute
# decodes.


# %%
@attrs.frozen
class Request:
    """A prompt, and how many tokens are wanted after it."""

    name: str
    prompt: tuple[int, ...]
    num_wanted: int


Waiting = tuple[tuple[str, tuple[int, ...]], ...]  # names and all their tokens so far: a sequence that was put back goes on


def schedule(pool: BlockPool, waiting: Waiting, budget: int) -> tuple[BlockPool, Waiting, list[tuple[str, int]]]:
    """What runs next: new tokens of each sequence, `budget` in all."""
    if waiting:
        with suppress(CacheError):  # no room yet
            pool, waiting = pool.allocate(*waiting[0], lookahead=1), waiting[1:]
    live = [str(name) for name in pool.sequences]
    decoding = [name for name in live if pool[name].num_new == 1]
    running = []
    left = budget - len(decoding)
    for name in live:
        count = min(pool[name].num_new, left)
        if name not in decoding and count > 0:
            running.append((name, count))
            left -= count
    return pool, waiting, running + [(name, 1) for name in decoding]


def append(pool: BlockPool, waiting: Waiting, name: str, token: int) -> tuple[BlockPool, Waiting]:
    """Add a token to a sequence; where no block is left, the youngest sequence gives up its own and waits in front."""
    while name in pool.sequences:
        try:
            pool, copies = pool.append(name, [token], lookahead=1)
        except CacheError:
            youngest = str(list(pool.sequences)[-1])
            tokens = pool[youngest].token_ids + ((token,) if youngest == name else ())
            waiting = ((youngest, tokens), *waiting)
            pool = pool.free(youngest)
        else:
            assert not copies  # nothing is forked here
            break
    return pool, waiting


lines = [line for function in (schedule, append) for line in inspect.getsource(function).splitlines() if line]
assert len(lines) <= 40

# %% [markdown]
# ## Serving


# %%
@attrs.frozen
class Step:
    """What one step did."""

    prompt_tokens: int
    decode_tokens: int
    blocks: int
    waiting: int


def group_of(pool: BlockPool, name: str, count: int) -> SequenceGroup:
    """The sequence's part of the batch."""
    sequence = pool[name]
    if sequence.num_new == 1:
        return decode_group(len(sequence.token_ids), sequence.block_ids)
    return prompt_group(count, sequence.block_ids, context_len=sequence.num_computed)


def serve(
    requests: list[Request], num_blocks: int, budget: int
) -> tuple[dict[str, tuple[int, ...]], list[Step], list[BlockPool]]:
    """Run until every request has its tokens."""
    pool, cache = BlockPool.empty(num_blocks=num_blocks, block_size=BLOCK_SIZE), allocate_latent_cache(spec, num_blocks)
    waiting: Waiting = tuple((request.name, request.prompt) for request in requests)
    wanted = {request.name: len(request.prompt) + request.num_wanted for request in requests}
    done: dict[str, tuple[int, ...]] = {}
    steps: list[Step] = []
    pools: list[BlockPool] = []
    while len(done) < len(requests):
        pool, waiting, running = schedule(pool, waiting, budget)
        groups = [group_of(pool, name, count) for name, count in running]
        metadata = build_metadata(groups, block_size=BLOCK_SIZE, context_chunk_tokens=16)
        token_ids = [t for name, n in running for t in pool[name].token_ids[pool[name].num_computed :][:n]]
        predicted = next_tokens(cache, token_ids, metadata)
        steps.append(Step(metadata.num_prefill_tokens, metadata.num_decode_tokens, num_blocks - pool.num_free, len(waiting)))
        pools.append(pool)
        for name, count in running:
            pool = pool.mark_computed(name, count)
        for (name, _), token in zip(running, predicted, strict=True):
            if name not in pool.sequences or pool[name].num_new:
                continue  # put back by a neighbour, or a prompt that is not through yet
            if len(pool[name].token_ids) + 1 == wanted[name]:
                done[name] = (*pool[name].token_ids, token)
                pool = pool.free(name)
            else:
                pool, waiting = append(pool, waiting, name, token)
    return done, steps, pools


shared = tuple(range(12))
requests = [
    Request("a", (*shared, 20, 21), 12),
    Request("b", (*shared, *range(30, 53)), 10),
    Request("c", (40, 41, 42), 20),
    Request("d", (*shared, 60), 14),
    Request("e", tuple(range(50, 20, -1)), 8),
    Request("f", (7, 7, 7, 7, 7), 16),
]
done, steps, pools = serve(requests, NUM_BLOCKS, budget=16)

# %% [markdown]
# Served alone, in a cache with room for everything, each request gets the same tokens: what ran beside it, which blocks it got,
# how its prompt was cut and how often it was put back changes nothing.

# %%
for request in requests:
    alone = serve([request], 64, budget=1000)[0]
    assert alone[request.name] == done[request.name], request.name
    assert len(done[request.name]) == len(request.prompt) + request.num_wanted

# %%
figure, axes = plt.subplots(2, 1, figsize=(8.5, 4.6), layout="constrained", sharex=True)
x = range(len(steps))
axes[0].bar(x, [s.prompt_tokens for s in steps], color=PALETTE[0], label="prompt tokens")
axes[0].bar(
    x, [s.decode_tokens for s in steps], bottom=[s.prompt_tokens for s in steps], color=PALETTE[1], label="decoded tokens"
)
axes[0].axhline(16, color="#222222", linewidth=0.8, linestyle="--", label="budget")
axes[0].set_yticks(range(0, 17, 4))
axes[0].set_ylabel("new tokens")
axes[1].step(x, [s.blocks for s in steps], where="mid", color=PALETTE[2], label="blocks held")
axes[1].step(x, [s.waiting for s in steps], where="mid", color=PALETTE[5], linestyle="--", label="requests waiting")
axes[1].axhline(NUM_BLOCKS, color="#222222", linewidth=0.8, linestyle=":", label="blocks of the cache")
axes[1].set_xlabel("step")
for ax in axes:
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
keep(figure, "04_steps")

# %% [markdown]
# *Figure 1. Every step fills its budget with parts of prompts as long as there are any. The number of waiting requests rises
# again where a sequence was put back.*

# %%
assert all(step.prompt_tokens + step.decode_tokens <= 16 for step in steps)
assert all(step.blocks <= NUM_BLOCKS for step in steps)
assert any(b.waiting > a.waiting for a, b in pairwise(steps))  # somebody was put back
assert any(step.prompt_tokens and step.decode_tokens for step in steps)

# %%
fullest = max(pools, key=lambda pool: pool.num_blocks - pool.num_free)
print(fullest)
ax = plot_block_pool(fullest, columns=12)
keep(ax, "04_pool")

# %% [markdown]
# *Figure 2. The cache at its fullest. The first blocks are the beginning that several requests share.*

# %%
assert any(holders > 1 for holders in fullest.holders)
