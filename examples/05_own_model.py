# %% [markdown]
# # MLA in your own model
#
# A small transformer with two MLA layers learns to repeat what it has read, then serves token by token from the latent cache.
# The same function runs in both: `mla_attention`. In training it gets prompts without a cache, and gradients reach every
# weight; in serving it gets metadata with blocks.

# %%
import time

import torch
from figures import keep
from matplotlib import pyplot as plt
from torch import nn

from mla import (
    BlockPool,
    LatentCacheSpec,
    MLADims,
    MLAMetadata,
    MLAWeights,
    RopeSpec,
    allocate_latent_cache,
    build_metadata,
    decode_group,
    kernels_for,
    mla_attention,
    prompt_group,
    rope_table,
)
from mla.plot import PALETTE

VOCABULARY, SEPARATOR, LENGTH, WIDTH = 12, 0, 8, 64
dims = MLADims(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    rope=RopeSpec(dim=16, interleaved=True),
)
rope, kernels = rope_table(dims.rope, 64), kernels_for("cpu", dims=dims, dtype=torch.float32)

# %% [markdown]
# ## The model
#
# The attention module owns its parameters and makes the record `MLAWeights` of them. Caches are passed in, one for each
# layer, or `None`.


# %%
class Attention(nn.Module):
    """Multi-head Latent Attention with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)

        self.q_proj = matrix(dims.num_heads * dims.qk_head_dim, WIDTH)
        self.kv_a_proj_with_mqa = matrix(dims.latent_dim, WIDTH)
        self.kv_a_layernorm = nn.Parameter(torch.ones(dims.kv_lora_rank))
        self.kv_b_proj = matrix(dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
        self.o_proj = matrix(WIDTH, dims.num_heads * dims.v_head_dim)

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None, metadata: MLAMetadata) -> torch.Tensor:
        """Attention of the new tokens, shape (num_tokens, WIDTH)."""
        weights = MLAWeights(dims=dims, **dict(self.named_parameters()))
        return mla_attention(x, weights, cache, metadata, rope, kernels)[0]


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None, metadata: MLAMetadata) -> torch.Tensor:
        """Shape (num_tokens, WIDTH) in and out."""
        x = x + self.attention(self.norms[0](x), cache, metadata)
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class Model(nn.Module):
    """Embedding, two blocks, and the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, token_ids: torch.Tensor, caches: list[torch.Tensor] | None, metadata: MLAMetadata) -> torch.Tensor:
        """Logits, shape (num_tokens, VOCABULARY)."""
        x = self.embedding(token_ids)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i], metadata)
        logits: torch.Tensor = self.head(x)
        return logits


# %% [markdown]
# ## Training
#
# A sample is eight random tokens, a separator, and the eight tokens again. Sequences lie end to end, `(num_tokens,)` token
# ids; the metadata says where each begins. Without block ids it is a profile run: nothing is cached.


# %%
def samples(count: int) -> torch.Tensor:
    """Token ids, shape (count, 2 * LENGTH + 1)."""
    words = torch.randint(1, VOCABULARY, (count, LENGTH))
    return torch.cat([words, torch.full((count, 1), SEPARATOR), words], dim=1)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
BATCH, NUM_STEPS = 16, 100
training = build_metadata([prompt_group(2 * LENGTH) for _ in range(BATCH)], block_size=16)
assert training.is_profile_run
losses = []
started = time.perf_counter()
for step in range(NUM_STEPS):
    tokens = samples(BATCH)
    logits = model(tokens[:, :-1].flatten(), None, training).unflatten(0, (BATCH, 2 * LENGTH))
    loss = nn.functional.cross_entropy(logits[:, LENGTH:].flatten(0, 1), tokens[:, LENGTH + 1 :].flatten())
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    optimizer.step()
    losses.append(loss.item())
print(f"{NUM_STEPS} steps in {time.perf_counter() - started:.1f} s, loss {losses[0]:.2f} -> {losses[-1]:.4f}")

# %%
figure, ax = plt.subplots(figsize=(7.5, 3), layout="constrained")
ax.semilogy(losses, color=PALETTE[0])
ax.axhline(torch.tensor(VOCABULARY - 1.0).log().item(), color="#222222", linewidth=0.8, linestyle="--", label="guessing")
ax.set_xlabel("step")
ax.set_ylabel("cross-entropy of the\nrepeated tokens")
ax.legend(frameon=False)
keep(figure, "05_loss")

# %% [markdown]
# *Figure 1. The loss falls at once when attention has learned where to look.*
#
# ## Serving
#
# Four prompts of eight tokens and the separator. Each step runs the new tokens only; everything before lies in the caches, one
# latent row a token and layer.

# %%
model.eval()
prompts = samples(4)[:, : LENGTH + 1]
BLOCK_SIZE, NUM_BLOCKS = 4, 32
spec = LatentCacheSpec(
    kv_lora_rank=dims.kv_lora_rank, qk_rope_head_dim=dims.qk_rope_head_dim, block_size=BLOCK_SIZE, dtype=torch.float32
)
caches = [allocate_latent_cache(spec, NUM_BLOCKS) for _ in model.blocks]
pool = BlockPool.empty(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
for i, prompt in enumerate(prompts.tolist()):
    pool = pool.allocate(i, prompt)

with torch.inference_mode():
    groups = [prompt_group(pool[i].num_new, pool[i].block_ids, context_len=pool[i].num_computed) for i in range(4)]
    metadata = build_metadata(groups, block_size=BLOCK_SIZE)
    assert metadata.prefill is not None
    logits = model(prompts.flatten(), caches, metadata)[metadata.prefill.query_start_loc[1:].long() - 1]
    served = [logits]
    for _ in range(LENGTH - 1):
        chosen = served[-1].argmax(1)
        for i, token in enumerate(chosen.tolist()):
            pool, copies = pool.mark_computed(i).append(i, [token])
            assert not copies
        metadata = build_metadata(
            [decode_group(len(pool[i].token_ids), pool[i].block_ids) for i in range(4)], block_size=BLOCK_SIZE
        )
        served.append(model(chosen, caches, metadata))
tokens_served = torch.stack([logits.argmax(1) for logits in served], dim=1)  # (4, LENGTH)

# %% [markdown]
# The same without a cache, the whole sequence anew at every step: the same tokens, and logits that agree to rounding. And the
# model has learned its task.

# %%
with torch.inference_mode():
    sequences, whole = prompts, []
    for _ in range(LENGTH):
        metadata = build_metadata([prompt_group(sequences.shape[1]) for _ in range(4)], block_size=BLOCK_SIZE)
        logits = model(sequences.flatten(), None, metadata).unflatten(0, sequences.shape)[:, -1]
        whole.append(logits)
        sequences = torch.cat([sequences, logits.argmax(1, keepdim=True)], dim=1)
assert torch.equal(sequences[:, LENGTH + 1 :], tokens_served)
difference = max((a - b).abs().max().item() for a, b in zip(served, whole, strict=True))
assert difference < 1e-3
correct = (tokens_served == prompts[:, :LENGTH]).float().mean().item()
assert correct > 0.9
assert losses[-1] < 0.2
print(f"logits differ by {difference:.1e} at most; {correct:.0%} of the tokens are repeated rightly")

# %%
figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained", sharey=True)
for i, ax in enumerate(axes):
    image = ax.imshow(torch.stack([x[i].softmax(0) for x in served]).numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ax.plot(prompts[i, :LENGTH].tolist(), range(LENGTH), "x", color=PALETTE[5], label="what it read")
    ax.set_title(f"prompt {i}", fontsize=10)
    ax.set_xlabel("token")
axes[0].set_ylabel("decoding step")
figure.colorbar(image, ax=axes, label="probability")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", frameon=False)
keep(figure, "05_served")

# %% [markdown]
# *Figure 2. The probabilities of the next token, served from the latent cache, and the tokens that were to be repeated.*
