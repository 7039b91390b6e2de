# %% [markdown]
# # Writing your own kernel
#
# A device is a `KernelSet`: a record of functions whose contracts are Protocols in `mla.compute.kernels`. Bring one function,
# keep the others, and everything above (chunking, merging, absorption, the layer, serving) runs on it. This notebook writes a
# decode kernel, tests it against the float64 reference, and lets the test catch three mistakes that are often made.

# %%
from itertools import pairwise

import attrs
import torch
from figures import keep
from matplotlib import pyplot as plt

from mla import (
    KernelError,
    KernelSet,
    LatentCacheSpec,
    MLADims,
    RopeSpec,
    allocate_latent_cache,
    attend,
    build_metadata,
    decode_group,
    explain,
    golden,
    kernel_set,
)
from mla.compute import reference
from mla.compute.contracts import PagedDecode, Plan
from mla.metadata import DecodeMetadata
from mla.plot import PALETTE

# %% [markdown]
# ## The contract
#
# `paged_decode(q, latent_cache, metadata, *, kv_lora_rank, softmax_scale, plan)`, with `q` of shape
# `(num_tokens, num_heads, latent_dim)`, returns `out` of shape `(num_tokens, num_heads, kv_lora_rank)` and `lse` of shape
# `(num_tokens, num_heads)`:
#
# * token $i$ of a sequence with `query_len` new tokens sees `seq_len - query_len + i + 1` keys;
# * a key is a whole row of the cache, its value the first `kv_lora_rank` columns;
# * `lse` is a natural logarithm; a row that sees no key gives `out = 0` and `lse = -inf`;
# * memory that no valid index reaches may hold NaN.
#
# This kernel keeps a running maximum, sum and output over the blocks of a sequence (online softmax).


# %%
def my_paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block after block, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], kv_lora_rank)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    block_size, starts = latent_cache.shape[1], metadata.query_start_loc.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        queries = q[first:last].to(wide) * softmax_scale  # (query_len, num_heads, latent_dim)
        high = queries.new_full(queries.shape[:2], -torch.inf)
        total, mixed = torch.zeros_like(high), queries.new_zeros(*queries.shape[:2], kv_lora_rank)
        last_seen = seq_len - (last - first) + torch.arange(last - first)
        for begin in range(0, seq_len, block_size):
            end = min(begin + block_size, seq_len)
            rows = latent_cache[int(metadata.block_table[seq, begin // block_size]), : end - begin].to(wide)
            scores = torch.einsum("thc,lc->thl", queries, rows)
            hidden = torch.arange(begin, end) > last_seen[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            higher = torch.maximum(high, scores.amax(-1))
            weights = (scores - higher[..., None]).exp()
            shrink = (high - higher).exp()
            total = total * shrink + weights.sum(-1)
            mixed = mixed * shrink[..., None] + torch.einsum("thl,lc->thc", weights, rows[:, :kv_lora_rank])
            high = higher
        out[first:last] = (mixed / total[..., None]).to(q.dtype)
        lse[first:last] = high + total.log()
    return out, lse


def no_plan(metadata: DecodeMetadata) -> Plan | None:
    """Nothing is derived from the metadata beforehand."""


def with_decode(name: str, paged_decode: PagedDecode) -> KernelSet:
    """Plain torch with another decode kernel."""
    return attrs.evolve(
        kernel_set("TORCH"),
        name=name,
        paged_decode=paged_decode,
        make_plan=no_plan,
        plan_type=object,
        remark="a notebook's own",
    )


mine = with_decode("MINE", my_paged_decode)
print(explain(mine, dtype=torch.float32))

# %% [markdown]
# ## A test
#
# Odd lengths, blocks in disorder, several new tokens, a padded row, and NaN in every slot that belongs to nobody. What comes
# out is compared with `mla.compute.reference`, which loops over sequences in float64 and absorbs nothing.

# %%
dims = MLADims(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    rope=RopeSpec(dim=8, interleaved=True),
)
BLOCK_SIZE = 8
LENGTHS = [(1, 1), (7, 1), (8, 1), (9, 2), (17, 3), (64, 1), (129, 1), (200, 4)]  # (tokens, new ones)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@attrs.frozen
class Errors:
    """The largest differences from the reference: of each sequence's output and LSE."""

    out: tuple[float, ...]
    lse: tuple[float, ...]


def errors_of(kernels: KernelSet, dtype: torch.dtype) -> Errors:
    """Run a batch on a kernel set and compare it with the reference, sequence by sequence."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_blocks = 80
    order = torch.randperm(num_blocks, generator=generator).tolist()
    groups = []
    for seq_len, query_len in LENGTHS:
        count = -(-seq_len // BLOCK_SIZE)
        groups.append(decode_group(seq_len, order[:count], query_len=query_len))
        order = order[count:]
    metadata = build_metadata(groups, block_size=BLOCK_SIZE, pad_decodes_to=len(LENGTHS) + 1)
    part = metadata.decode
    assert part is not None
    spec = LatentCacheSpec(kv_lora_rank=32, qk_rope_head_dim=8, block_size=BLOCK_SIZE, dtype=dtype)
    cache = allocate_latent_cache(spec, num_blocks).fill_(torch.nan)
    for group in groups:
        assert group.block_ids is not None
        for i, block in enumerate(group.block_ids[0]):
            used = min(BLOCK_SIZE, group.context_lens[0] + group.query_lens[0] - i * BLOCK_SIZE)
            cache[block, :used] = random(used, dims.latent_dim)
    q, kv_b_proj = random(metadata.num_tokens, 4, dims.qk_head_dim), random(4 * 32, 32) / 6
    rows = cache.view(-1, dims.latent_dim)[metadata.slot_mapping.clamp(min=0)]
    out, lse = attend(q, rows[:, :32], rows[:, 32:], cache, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels)
    want_out, want_lse = reference.latent_attention(q, cache, part, kv_b_proj=kv_b_proj, dims=dims)
    empty = part.query_start_loc[-1]
    if not (bool((out[empty:] == 0).all()) and bool((lse[empty:] == -torch.inf).all())):
        raise KernelError("out: expected 0 and lse -inf for padded rows, got something else")
    edges = part.query_start_loc.tolist()
    spans = [slice(a, b) for a, b in pairwise(edges) if b > a]
    out_errors = [(out[s] - want_out[s]).abs().max().item() for s in spans]
    return Errors(tuple(out_errors), tuple((lse[s] - want_lse[s]).abs().max().item() for s in spans))


def passes(kernels: KernelSet, dtype: torch.dtype) -> bool:
    """Whether every difference is within the tolerance; NaN is not."""
    errors = errors_of(kernels, dtype)
    return all(error <= TOLERANCE[dtype] for error in errors.out + errors.lse)


for dtype in TOLERANCE:
    assert passes(mine, dtype), dtype
    assert passes(kernel_set("CPU_MLA"), dtype), dtype

# %% [markdown]
# ## Mistakes
#
# A test is worth what it catches. Three kernels that look right at a glance: one scales by the width of a cache row instead
# of a query head, one returns its LSE in base 2, one forgets the newest key.


# %%
def wrong_scale(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales by the latent width."""
    return my_paged_decode(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=q.shape[2] ** -0.5)


def base_two(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output is right, the LSE a binary logarithm: merging with it goes wrong."""
    out, lse = my_paged_decode(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)
    return out, lse / torch.tensor(2.0).log()


def dropped_key(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sees one key too few."""
    shorter = attrs.evolve(metadata, seq_lens=(metadata.seq_lens - 1).clamp(min=1))
    return my_paged_decode(q, latent_cache, shorter, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)


mistakes = {"scale of the latent width": wrong_scale, "LSE in base 2": base_two, "newest key dropped": dropped_key}
for name, kernel in mistakes.items():
    assert not passes(with_decode(name, kernel), torch.float32), name

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained", sharey=True)
lengths = [seq_len for seq_len, _ in LENGTHS]
shown = {"mine, float32": errors_of(mine, torch.float32), "mine, bfloat16": errors_of(mine, torch.bfloat16)}
shown |= {name: errors_of(with_decode(name, kernel), torch.float32) for name, kernel in mistakes.items()}
for (name, errors), colour, marker in zip(shown.items(), PALETTE, "osv^D", strict=False):
    for ax, values in zip(axes, (errors.out, errors.lse), strict=True):
        ax.plot(lengths, [max(v, 1e-9) for v in values], marker=marker, color=colour, label=name, linewidth=1)
for ax, title in zip(axes, ("output", "log-sum-exp"), strict=True):
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.axhline(TOLERANCE[torch.float32], color="#222222", linewidth=0.8, linestyle="--")
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("tokens of the sequence")
axes[0].set_ylabel("largest difference\nfrom float64")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
keep(figure, "07_errors")

# %% [markdown]
# *Figure 1. Differences from the reference, by sequence. The dashed line is the tolerance for float32. With the LSE in base 2
# the output is right (its markers cover those of the right kernel) and only the right half shows the mistake, which is why
# both are compared. The newest key weighs less the longer the sequence is, which is why short sequences are in the test.*

# %% [markdown]
# ## Golden bundles
#
# The package comes with recorded cases: inputs from an integer hash, expected outputs, tolerances by dtype. Checking a set of
# kernels against them is one line, and the same line with the pytest fixture `golden` in a test of your own. Where a result is
# wrong, the report says what it looks like.

# %%
report = golden.check(mine)
print(report)
assert report.passed
for name, kernel in mistakes.items():
    wrong = golden.check(with_decode(name, kernel), only="decode_f32_*")
    assert not wrong.passed, name
    print(wrong)
