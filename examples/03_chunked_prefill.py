# %% [markdown]
# # Chunked prefill, and merging by log-sum-exp
#
# A prompt may have thousands of tokens in the cache already: an earlier part of a long prompt, or a shared prefix. Prefill
# expands latent rows to keys and values of every head, which takes $H (d_n + d_r + d_v)$ numbers a key. For a long context
# that does not fit, so it is done in pieces, and the pieces' results are merged exactly.

# %%
import torch
from figures import keep
from matplotlib import pyplot as plt

from mla import (
    LatentCacheSpec,
    MLADims,
    RopeSpec,
    allocate_latent_cache,
    build_metadata,
    kernels_for,
    prompt_group,
)
from mla.compute import expand_latent, merge_attn_states, prefill
from mla.compute.reference import latent_attention
from mla.plot import PALETTE, plot_context_chunks

# %% [markdown]
# ## Two sets of keys
#
# Let a query have scores $s_j$ over a set $A$ of keys. Attention over $A$ alone gives
#
# $$ o_A = \sum_{j \in A} e^{s_j - \ell_A} v_j , \qquad \ell_A = \ln \sum_{j \in A} e^{s_j} . $$
#
# $\ell_A$ is the log-sum-exp (LSE). For two disjoint sets,
#
# $$ \ell_{A \cup B} = \ln (e^{\ell_A} + e^{\ell_B}) , \qquad
#    o_{A \cup B} = e^{\ell_A - \ell_{A \cup B}} \, o_A + e^{\ell_B - \ell_{A \cup B}} \, o_B . $$
#
# The output of a part need not be kept with its keys: $(o, \ell)$ says all. An empty part has $\ell = -\infty$ and weighs
# nothing.

# %%
torch.manual_seed(0)
scores, values = 3 * torch.randn(100, dtype=torch.float64), torch.randn(100, 8, dtype=torch.float64)


def attention_over(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (1, 1, 8) and LSE (1, 1) of one query over some of the keys."""
    lse = scores[part].logsumexp(0)
    return ((scores[part] - lse).exp() @ values[part]).view(1, 1, 8), lse.view(1, 1)


whole_out, whole_lse = attention_over(slice(None))
out, lse = merge_attn_states(*attention_over(slice(0, 30)), *attention_over(slice(30, 100)))
assert torch.allclose(out, whole_out, rtol=1e-12)
assert torch.allclose(lse, whole_lse, rtol=1e-14)

# %% [markdown]
# ## The plan of a batch
#
# Three prompts with 40, 3 and 22 tokens in the cache. Contexts are cut at multiples of `context_chunk_tokens` of the
# sequence's own positions, so that a cut never depends on the neighbours; the workspace decides how many pieces are gathered
# in one pass.

# %%
dims = MLADims(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope=RopeSpec(dim=8, interleaved=True),
)
lengths = [(6, 40), (9, 3), (4, 22)]  # (new, cached)
groups = [prompt_group(n, list(range(12 * i, 12 * i + 12)), context_len=c) for i, (n, c) in enumerate(lengths)]
metadata = build_metadata(groups, block_size=4, context_chunk_tokens=16, context_workspace_tokens=32)
part = metadata.prefill
assert part is not None
ax = plot_context_chunks(part)
keep(ax, "03_passes")

# %% [markdown]
# *Figure 1. The passes over the context. At most 32 cached tokens are expanded at a time; the new tokens of all prompts are
# attended causally before.*

# %%
assert max(chunk.num_kv_tokens for chunk in part.context_chunks) <= 32
assert sum(chunk.num_kv_tokens for chunk in part.context_chunks) == 40 + 3 + 22
print(part)

# %% [markdown]
# ## Prefill by hand
#
# What `mla.compute.prefill` does, with nothing hidden: causal attention over the new tokens, then each pass over the context,
# in which every new token sees every key, merged one after the other.

# %%
cache = allocate_latent_cache(LatentCacheSpec(kv_lora_rank=32, qk_rope_head_dim=8, block_size=4, dtype=torch.float64), 36)
cache.normal_()
kernels = kernels_for("cpu")
kv_b_proj = torch.randn(dims.num_heads * 32, 32, dtype=torch.float64) / 4
q = torch.randn(metadata.num_tokens, dims.num_heads, dims.qk_head_dim, dtype=torch.float64)
rows = cache.view(-1, dims.latent_dim)
new_rows = rows[metadata.slot_mapping]

keys, values = expand_latent(new_rows[:, :32], new_rows[:, 32:], kv_b_proj, dims)
out, lse = kernels.varlen_attention(
    q,
    keys,
    values,
    query_start_loc=part.query_start_loc,
    kv_start_loc=part.query_start_loc,
    max_query_len=part.max_query_len,
    max_kv_len=part.max_query_len,
    causal=True,
    softmax_scale=dims.softmax_scale,
)
lse_of_part = [("new tokens", lse.clone())]
for number, chunk in enumerate(part.context_chunks):
    gathered = rows[chunk.slots]
    keys, values = expand_latent(gathered[:, :32], gathered[:, 32:], kv_b_proj, dims)
    tokens = slice(chunk.first_token, chunk.first_token + chunk.num_query_tokens)
    chunk_out, chunk_lse = kernels.varlen_attention(
        q[tokens],
        keys,
        values,
        query_start_loc=chunk.query_start_loc,
        kv_start_loc=chunk.kv_start_loc,
        max_query_len=chunk.max_query_len,
        max_kv_len=chunk.max_kv_len,
        causal=False,
        softmax_scale=dims.softmax_scale,
    )
    padded = torch.full_like(lse, -torch.inf)
    padded[tokens] = chunk_lse
    lse_of_part.append((f"pass {number}", padded))
    out[tokens], lse[tokens] = merge_attn_states(out[tokens], lse[tokens], chunk_out, chunk_lse)

# %% [markdown]
# The same as the function, and as the float64 reference, which attends all keys at once.

# %%
same_out, same_lse = prefill(
    q, new_rows[:, :32], new_rows[:, 32:], cache, part, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels
)
whole_out, whole_lse = latent_attention(q, cache, part, kv_b_proj=kv_b_proj, dims=dims)
assert torch.allclose(out, same_out, rtol=1e-12)
assert torch.allclose(out, whole_out, rtol=1e-10)
assert torch.allclose(lse, whole_lse, rtol=1e-12)

# %% [markdown]
# ## What each part weighs
#
# $e^{\ell_A - \ell}$ is the share of a query's attention that falls on the keys of part $A$. The shares add up to 1.

# %%
shares = torch.stack([(part_lse - whole_lse).exp()[:, 0] for _, part_lse in lse_of_part])
assert torch.allclose(shares.sum(0), torch.ones(metadata.num_tokens, dtype=torch.float64))
figure, ax = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
below = torch.zeros(metadata.num_tokens, dtype=torch.float64)
for (name, _), share, colour in zip(lse_of_part, shares, ("#BBBBBB", *PALETTE), strict=False):
    ax.bar(range(metadata.num_tokens), share.tolist(), bottom=below.tolist(), color=colour, edgecolor="white", label=name)
    below += share
for edge in part.query_start_loc[1:-1].tolist():
    ax.axvline(edge - 0.5, color="#222222", linewidth=0.8)
ax.set_xlim(-0.5, metadata.num_tokens - 0.5)
ax.set_xticks(range(0, metadata.num_tokens, 2))
ax.set_xlabel("new token (lines part the prompts)")
ax.set_ylabel("share of head 0's attention")
ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
keep(figure, "03_shares")

# %% [markdown]
# *Figure 2. The attention of one head, by part. The prompt in the middle has 3 cached tokens, so most of its attention stays
# with its new tokens; the first has 40, in three passes.*
#
# ## Bits
#
# Because cuts depend on a sequence's own positions only and parts are merged in order, another workspace gives the same bits.

# %%
other = build_metadata(groups, block_size=4, context_chunk_tokens=16, context_workspace_tokens=64).prefill
assert other is not None
assert len(other.context_chunks) < len(part.context_chunks)
bits = prefill(q, new_rows[:, :32], new_rows[:, 32:], cache, other, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels)
assert torch.equal(bits[0], same_out)
assert torch.equal(bits[1], same_lse)
