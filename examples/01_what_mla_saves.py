# %% [markdown]
# # What MLA saves, and why absorption works
#
# Multi-head Latent Attention (MLA) stores one short row for each token instead of every head's keys and values. This notebook
# counts what that saves, shows the identity that lets decoding attend the short rows directly, and finds out when expanding
# them is cheaper after all.
#
# Letters: $H$ heads; $d_n$, $d_r$ columns of a query or key head without and with rotary embedding; $d_v$ columns of a value
# head; $r$ the rank of the latent. DeepSeek-V3 has $H = 128$, $d_n = 128$, $d_r = 64$, $d_v = 128$, $r = 512$.

# %%
import torch
from figures import keep
from matplotlib import pyplot as plt

from mla import (
    BlockPool,
    LatentCacheSpec,
    MLADims,
    RopeSpec,
    allocate_latent_cache,
    build_metadata,
    decode_group,
    kernels_for,
)
from mla.cache import write_latent_cache_
from mla.compute import absorb_query, decode, expand_latent, project_output, split_kv_b_proj
from mla.compute.reference import latent_attention
from mla.plot import PALETTE

v3 = MLADims(
    num_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=RopeSpec(dim=64, interleaved=True),
)
print(v3)

# %% [markdown]
# ## Numbers for each token
#
# A cache of full keys and values holds $H (d_n + d_r + d_v)$ numbers for each token and layer. Grouped-query attention shares
# them among the heads of a group; with $g$ groups of width 128 it holds $2 \cdot 128 g$. MLA holds $r + d_r$: the latent
# $c \in \mathbb{R}^{r}$ and one rotated key part $k^R \in \mathbb{R}^{d_r}$, both shared by all heads.

# %%
numbers = {
    "full keys and values": v3.num_heads * (v3.qk_head_dim + v3.v_head_dim),
    "grouped queries, 8 groups": 2 * 128 * 8,
    "one key and value head (MQA)": 2 * 128,
    "MLA": v3.latent_dim,
}
figure, ax = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
bars = ax.barh(list(numbers), list(numbers.values()), color=[PALETTE[4]] * 3 + [PALETTE[1]])
ax.bar_label(bars, [f"{n:,}" for n in numbers.values()], padding=4)
ax.set_xscale("log")
ax.set_xlim(100, 200_000)
ax.invert_yaxis()
ax.set_xlabel("cached numbers for each token and layer (logarithmic)")
keep(figure, "01_cached_numbers")

# %% [markdown]
# *Figure 1. DeepSeek-V3 caches 576 numbers for a token and layer, a 71st of what its 128 heads would need in full.*

# %%
assert numbers["MLA"] == 576
assert round(numbers["full keys and values"] / numbers["MLA"]) == 71

# %% [markdown]
# ## Absorption
#
# Head $h$ makes its key and value from the latent: $k_h = [\,W^{UK}_h c\,;\,k^R\,]$ with $W^{UK}_h \in \mathbb{R}^{d_n \times
# r}$, and $v_h = W^{UV}_h c$ with $W^{UV}_h \in \mathbb{R}^{d_v \times r}$. The score of a query $q_h =
# [\,q^N_h\,;\,q^R_h\,]$ is
#
# $$ q_h \cdot k_h = q^N_h \cdot (W^{UK}_h c) + q^R_h \cdot k^R = (W^{UK\,\top}_h q^N_h) \cdot c + q^R_h \cdot k^R . $$
#
# The matrix has moved from the keys, of which there are many, to the query, of which there is one. The right side is a dot
# product of width $r + d_r$ with the cached row itself. Values move the same way: attention weights $p_j$ sum to
#
# $$ \sum_j p_j \, W^{UV}_h c_j = W^{UV}_h \sum_j p_j c_j , $$
#
# so $W^{UV}_h$ is applied once, to the attended latent. The rotated part cannot be folded: its matrix depends on the distance
# of query and key, so it would be another one for every key. That is why $k^R$ is cached beside the latent, already rotated.

# %%
small = MLADims(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope=RopeSpec(dim=8, interleaved=True),
)
torch.manual_seed(0)
num_keys = 50
kv_b_proj = torch.randn(small.num_heads * (16 + 16), 32, dtype=torch.float64)
q = torch.randn(1, small.num_heads, small.qk_head_dim, dtype=torch.float64)
kv_c = torch.randn(num_keys, small.kv_lora_rank, dtype=torch.float64)
k_pe = torch.randn(num_keys, small.qk_rope_head_dim, dtype=torch.float64)

w_uk, w_uv = split_kv_b_proj(kv_b_proj, small)  # (4, 16, 32) and (4, 32, 16)
keys, values = expand_latent(kv_c, k_pe, kv_b_proj, small)  # (50, 4, 24) and (50, 4, 16)
rows = torch.cat([kv_c, k_pe], dim=1)  # (50, 40): what the cache holds
folded = absorb_query(q, kv_b_proj, small)  # (1, 4, 40)

scores_expanded = torch.einsum("thd,lhd->thl", q, keys)
scores_absorbed = torch.einsum("thc,lc->thl", folded, rows)
assert torch.allclose(scores_expanded, scores_absorbed, rtol=1e-12)

weights = (scores_absorbed * small.softmax_scale).softmax(dim=-1)
out_expanded = torch.einsum("thl,lhd->thd", weights, values)
out_absorbed = project_output(torch.einsum("thl,lc->thc", weights, kv_c), kv_b_proj, small)
assert torch.allclose(out_expanded, out_absorbed, rtol=1e-10)

# %% [markdown]
# The functions of the package do the same over a paged cache, and the float64 reference, which absorbs nothing, agrees.

# %%
pool = BlockPool.empty(num_blocks=8, block_size=16).allocate("a", range(num_keys))
cache = allocate_latent_cache(LatentCacheSpec(kv_lora_rank=32, qk_rope_head_dim=8, block_size=16, dtype=torch.float64), 8)
metadata = build_metadata([decode_group(num_keys, pool["a"].block_ids)], block_size=16)
assert metadata.decode is not None
write_latent_cache_(cache, kv_c, k_pe, torch.arange(num_keys))  # the pool gave blocks 0, 1, 2, 3
out, lse = decode(q, cache, metadata.decode, kv_b_proj=kv_b_proj, dims=small, kernels=kernels_for("cpu"))
expected_out, expected_lse = latent_attention(q, cache, metadata.decode, kv_b_proj=kv_b_proj, dims=small)
assert torch.allclose(out, expected_out, rtol=1e-10)
assert torch.allclose(out, out_absorbed, rtol=1e-10)
assert torch.allclose(lse, expected_lse, rtol=1e-12)

# %% [markdown]
# ## When to expand
#
# With $T$ new tokens over $L$ keys, expanding costs $2 L H r (d_n + d_v)$ operations once and then $2 T L H (d_n + d_r +
# d_v)$ for attention. Absorbing costs $2 T H r (d_n + d_v)$ and then $2 T L H (2 r + d_r)$: rows are wider than heads. They
# are equal at
#
# $$ T = \frac{r (d_n + d_v) L}{r (d_n + d_v) + L (2 r - d_n - d_v)} . $$


# %%
def flops(dims: MLADims, num_tokens: float, num_keys: float) -> tuple[float, float]:
    """Operations of expanding and of absorbing, per head."""
    up = 2 * dims.kv_lora_rank * (dims.qk_nope_head_dim + dims.v_head_dim)
    expanded = num_keys * up + 2 * num_tokens * num_keys * (dims.qk_head_dim + dims.v_head_dim)
    absorbed = num_tokens * up + 2 * num_tokens * num_keys * (dims.latent_dim + dims.kv_lora_rank)
    return expanded, absorbed


def equal_at(dims: MLADims, num_keys: float) -> float:
    """New tokens for which both cost the same."""
    heads = dims.qk_nope_head_dim + dims.v_head_dim
    up = dims.kv_lora_rank * heads
    return up * num_keys / (up + num_keys * (2 * dims.kv_lora_rank - heads))


length = 4096
tokens = [2**i for i in range(13)]
costs = [flops(v3, t, length) for t in tokens]
crossing = equal_at(v3, length)
figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
ax.loglog(
    tokens,
    [e / t / 1e9 for (e, _), t in zip(costs, tokens, strict=True)],
    "o-",
    color=PALETTE[0],
    label="expand keys and values",
)
ax.loglog(
    tokens,
    [a / t / 1e9 for (_, a), t in zip(costs, tokens, strict=True)],
    "s--",
    color=PALETTE[1],
    label="absorb into the query",
)
ax.axvline(crossing, color="#222222", linewidth=0.8)
ax.annotate(f"equal at {crossing:.0f} new tokens", (crossing, 0.1), xytext=(6, 0), textcoords="offset points")
ax.set_xscale("log", base=2)
ax.set_xlabel("new tokens of the sequence")
ax.set_ylabel("GFLOP for each new token\nand head")
ax.legend(frameon=False)
keep(figure, "01_when_to_expand")

# %% [markdown]
# *Figure 2. DeepSeek-V3 over 4096 keys. Decoding has a handful of new tokens and absorbs; a prompt has hundreds and expands.
# `mla.compute.decode` and `mla.compute.prefill` are these two.*

# %%
assert round(crossing) == 164
at_crossing = flops(v3, crossing, length)
assert abs(at_crossing[0] / at_crossing[1] - 1) < 1e-12
assert costs[0][1] < costs[0][0] / 100  # one new token: absorbing is over a hundred times cheaper
assert costs[-1][0] < costs[-1][1] / 2  # a prompt: expanding is over twice as cheap
print(f"with one new token absorbing takes {costs[0][0] / costs[0][1]:.0f} times fewer operations")
