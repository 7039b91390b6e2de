# %% [markdown]
# # Where the time goes
#
# A kernel moves bytes and computes. If it does $I$ operations for each byte of memory traffic, a machine with bandwidth $B$
# and matrix rate $P$ can do at most $\min(P, I B)$ operations a second: the roofline. This notebook measures $B$ and $P$ of
# the machine that it runs on and places decode and prefill under the roof.

# %%
import time
from collections.abc import Callable

import attrs
import torch
from figures import keep
from matplotlib import pyplot as plt

from mla import (
    LatentCacheSpec,
    MLADims,
    RopeSpec,
    allocate_latent_cache,
    build_metadata,
    decode_group,
    kernels_for,
)
from mla.plot import PALETTE, plot_decode_work

torch.manual_seed(0)
DTYPE = torch.float32


def seconds(work: Callable[[], object], budget: float = 0.6) -> float:
    """The shortest of as many runs as fit into `budget` seconds, at least three."""
    work()
    best, runs, started = float("inf"), 0, time.perf_counter()
    while runs < 3 or time.perf_counter() - started < budget:
        before = time.perf_counter()
        work()
        best, runs = min(best, time.perf_counter() - before), runs + 1
    return best


# %% [markdown]
# ## The machine
#
# Bandwidth from copying 128 MiB (every byte is read and written), the matrix rate from products of 1024 x 1024 matrices.

# %%
source = torch.ones(32 * 2**20)
target = torch.empty_like(source)
bandwidth = 2 * source.nbytes / seconds(lambda: target.copy_(source))
a, b = torch.randn(1024, 1024, dtype=DTYPE), torch.randn(1024, 1024, dtype=DTYPE)
rate = 2 * 1024**3 / seconds(lambda: a @ b)
ridge = rate / bandwidth
print(f"{torch.get_num_threads()} threads: {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s, equal at {ridge:.1f} FLOP/B")
assert bandwidth > 0
assert rate > 0

# %% [markdown]
# ## The work
#
# Decode of one token reads each cached row once, $L (r + d_r)$ numbers, for $2 L H (2 r + d_r)$ operations with $H$ heads:
# $H$ rises, so does the intensity. Prefill of $T$ tokens reads queries, keys and values of every head once and does about
# $T^2 H (d_n + d_r + d_v)$ operations (half of the square is masked).

# %%
dims = MLADims(
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=RopeSpec(dim=64, interleaved=True),
)
kernels = kernels_for("cpu", dims=dims, dtype=DTYPE)
BLOCK_SIZE = 16
NUM_KEYS = 4096


@attrs.frozen
class Point:
    """One kernel call: its operations, its least traffic in bytes, and how long it took."""

    name: str
    operations: float
    traffic: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.operations / self.traffic

    @property
    def achieved(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds


def decode_point(num_heads: int) -> Point:
    """One new token over `NUM_KEYS` cached rows."""
    num_blocks = NUM_KEYS // BLOCK_SIZE
    spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=BLOCK_SIZE, dtype=DTYPE)
    cache = allocate_latent_cache(spec, num_blocks).normal_()
    metadata = build_metadata([decode_group(NUM_KEYS, torch.randperm(num_blocks).tolist())], block_size=BLOCK_SIZE).decode
    assert metadata is not None
    plan = kernels.plan(metadata)
    q = torch.randn(1, num_heads, dims.latent_dim, dtype=DTYPE)

    def work() -> None:
        kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=dims.softmax_scale, plan=plan)

    operations = 2 * NUM_KEYS * num_heads * (dims.latent_dim + dims.kv_lora_rank)
    return Point(f"decode, {num_heads} heads", operations, NUM_KEYS * dims.latent_dim * DTYPE.itemsize, seconds(work))


def prefill_point(num_tokens: int) -> Point:
    """A prompt without context."""
    q, k = (torch.randn(num_tokens, 16, dims.qk_head_dim, dtype=DTYPE) for _ in range(2))
    v = torch.randn(num_tokens, 16, dims.v_head_dim, dtype=DTYPE)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)

    def work() -> None:
        kernels.varlen_attention(
            q,
            k,
            v,
            query_start_loc=starts,
            kv_start_loc=starts,
            max_query_len=num_tokens,
            max_kv_len=num_tokens,
            causal=True,
            softmax_scale=dims.softmax_scale,
        )

    pairs = num_tokens * (num_tokens + 1) / 2
    operations = 2 * pairs * 16 * (dims.qk_head_dim + dims.v_head_dim)
    return Point(f"prefill, {num_tokens} tokens", operations, q.nbytes + k.nbytes + 2 * v.nbytes, seconds(work))


with torch.inference_mode():
    points = [decode_point(heads) for heads in (1, 4, 16, 64, 128)] + [prefill_point(n) for n in (64, 256, 1024)]

print(f"{'':<22}{'FLOP/B':>8}{'ms':>9}{'GFLOP/s':>9}{'of the roof':>13}")
for point in points:
    roof = min(rate, point.intensity * bandwidth)
    print(
        f"{point.name:<22}{point.intensity:>8.1f}{1e3 * point.seconds:>9.2f}{point.achieved / 1e9:>9.1f}"
        f"{point.achieved / roof:>13.0%}"
    )

# %%
figure, ax = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
low, high = 0.2, max(p.intensity for p in points) * 3
x = [low, ridge, high]
ax.loglog(x, [min(rate, i * bandwidth) / 1e9 for i in x], color="#222222", label="roof of this machine")
for kind, colour, marker in (("decode", PALETTE[0], "o"), ("prefill", PALETTE[1], "s")):
    chosen = [p for p in points if p.name.startswith(kind)]
    ax.loglog(
        [p.intensity for p in chosen], [p.achieved / 1e9 for p in chosen], marker, linestyle="--", color=colour, label=kind
    )
    for p in chosen:
        text = p.name.split(", ")[1]
        shift, side = ((-5, 5), "right") if kind == "decode" else ((5, -11), "left")
        at = (p.intensity, p.achieved / 1e9)
        ax.annotate(text, at, xytext=shift, ha=side, textcoords="offset points", fontsize=8)
ax.axvline(ridge, color="#222222", linewidth=0.6, linestyle=":")
ax.set_xlim(low, high)
ax.set_xlabel("operations for each byte of traffic (FLOP/B)")
ax.set_ylabel("GFLOP/s")
ax.legend(frameon=False)
keep(figure, "09_roofline")

# %% [markdown]
# *Figure 1. Left of the dotted line memory is the limit, right of it arithmetic. Decode with few heads lies left of it, where
# more heads cost little: the rows are read once for all of them (and this kernel multiplies 16 rows at least). That is what
# sharing one latent among all heads buys. Full keys and values would stay at half an operation a byte with any number of
# heads.*

# %%
decodes = points[:5]
assert [round(p.intensity, 3) for p in decodes] == [round(h * 2 * 1088 / (576 * 4), 3) for h in (1, 4, 16, 64, 128)]
assert decodes[2].seconds < 16 * decodes[0].seconds  # sixteen heads cost less than sixteen times one
assert all(p.seconds > 0 for p in points)

# %% [markdown]
# ## How a batch is cut
#
# Sequences of a decode batch have different lengths. The CPU kernels cut each one into pieces whose length is a function of
# its own length only, so that its bits do not depend on its neighbours, and multiply pieces of equal length together,
# whichever sequence they belong to. The plan is made once a step and serves every layer.

# %%
lengths = [40, 300, 700, 900, 1500, 2100, 2100, 2600]
groups = [decode_group(n, range(200 * i, 200 * i + -(-n // BLOCK_SIZE))) for i, n in enumerate(lengths)]
batch = build_metadata(groups, block_size=BLOCK_SIZE).decode
assert batch is not None
plan = kernels.plan(batch)
ax = plot_decode_work(plan)
keep(ax, "09_work")

# %% [markdown]
# *Figure 2. The pieces of a batch of eight sequences. Pieces with the same number are one batched product.*

# %%
longest = max(bar.get_x() + bar.get_width() for container in ax.containers for bar in container)
assert longest == max(lengths)
