# %% [markdown]
# # Decode split over two ranks
#
# Tensor parallelism splits heads. In MLA all heads attend the same latent rows, so every rank would hold the whole cache.
# Splitting by keys instead gives each rank a part of the rows: rank $i$ attends its part for all heads and gets $(o_i,
# \ell_i)$; merging by log-sum-exp makes the whole of the parts,
#
# $$ \ell = \ln \sum_i e^{\ell_i}, \qquad o = \sum_i e^{\ell_i - \ell} \, o_i . $$
#
# What travels is one latent row and one number for each token and head, whatever the length. $W^{UV}$ is applied after merging.

# %%
import inspect
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import two_ranks
from figures import keep
from matplotlib import pyplot as plt

from mla import build_metadata, decode_group
from mla.compute import project_output
from mla.compute.reference import latent_attention
from mla.plot import PALETTE

# %% [markdown]
# A rank runs this; `two_ranks.py` beside the notebook has the rest.

# %%
print(inspect.getsource(two_ranks.decode_on_rank))

# %% [markdown]
# ## Inputs
#
# Four sequences, the shortest of which has all its keys on rank 0: rank 1 contributes $\ell = -\infty$ for it, which weighs
# nothing.

# %%
torch.manual_seed(0)
dims, lengths = two_ranks.DIMS, [700, 1, 64, 333]
q = torch.randn(len(lengths), dims.num_heads, dims.qk_head_dim)
rows = [torch.randn(n, dims.latent_dim) for n in lengths]
kv_b_proj = torch.randn(dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank) / 8
shares = [[len(two_ranks.keys_of(rank, 2, n)) for n in lengths] for rank in range(2)]
print("keys of each rank:", shares)
assert [a + b for a, b in zip(*shares, strict=True)] == lengths
assert shares[1][1] == 0

# %% [markdown]
# ## Two processes
#
# They meet at a port of this machine and talk through gloo.


# %%
def run_ranks(world_size: int) -> list[dict[str, torch.Tensor]]:
    """What each of so many processes computes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"q": q, "rows": rows, "kv_b_proj": kv_b_proj}, folder / "inputs.pt")
        program = [sys.executable, str(two_ranks.__file__)]
        ranks = [
            subprocess.Popen(  # noqa: S603
                [*program, str(rank), str(world_size), str(port), name], stderr=subprocess.PIPE, text=True
            )
            for rank in range(world_size)
        ]
        try:
            errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for rank, error in zip(ranks, errors, strict=True):
            assert rank.returncode == 0, error
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]


first, second = run_ranks(2)

# %% [markdown]
# Both ranks have the same bits, and a second run has them too.

# %%
again = run_ranks(2)
for result in (second, *again):
    assert torch.equal(result["out"], first["out"])
    assert torch.equal(result["lse"], first["lse"])

# %% [markdown]
# One rank with all keys agrees to rounding, and so does the float64 reference.

# %%
alone_out, alone_lse = two_ranks.attend_keys(q, rows, kv_b_proj)
alone_out = project_output(alone_out, kv_b_proj, dims)
assert torch.allclose(first["out"], alone_out, rtol=1e-4, atol=1e-5)
assert torch.allclose(first["lse"], alone_lse, rtol=1e-5, atol=1e-5)

counts = [-(-n // two_ranks.BLOCK_SIZE) for n in lengths]
cache = torch.zeros(sum(counts), two_ranks.BLOCK_SIZE, dims.latent_dim)
tables, begin = [], 0
for one, count in zip(rows, counts, strict=True):
    tables.append(list(range(begin, begin + count)))
    cache[begin : begin + count].view(-1, dims.latent_dim)[: len(one)] = one
    begin += count
metadata = build_metadata(
    [decode_group(n, table) for n, table in zip(lengths, tables, strict=True)], block_size=two_ranks.BLOCK_SIZE
)
assert metadata.decode is not None
exact_out, exact_lse = latent_attention(q, cache, metadata.decode, kv_b_proj=kv_b_proj, dims=dims)
error = (first["out"] - exact_out).abs().max().item()
assert error < 1e-5
assert torch.allclose(first["lse"].double(), exact_lse, rtol=1e-6, atol=2e-6)
print(f"largest difference from float64: {error:.1e} with two ranks, {(alone_out - exact_out).abs().max().item():.1e} with one")

# %% [markdown]
# ## What each rank weighs
#
# $e^{\ell_i - \ell}$ is the share of the attention that falls on a rank's keys.

# %%
parts = [
    two_ranks.attend_keys(q, [one[list(two_ranks.keys_of(rank, 2, len(one)))] for one in rows], kv_b_proj)[1]
    for rank in range(2)
]
weights = [(part - first["lse"]).exp().mean(dim=1) for part in parts]
assert torch.allclose(weights[0] + weights[1], torch.ones(len(lengths)), atol=1e-5)
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharey=True)
names = [f"{n} key{'s' if n > 1 else ''}" for n in lengths]
for ax, values, title in (
    (axes[0], [[n / total for n, total in zip(share, lengths, strict=True)] for share in shares], "share of the keys"),
    (axes[1], [w.tolist() for w in weights], "share of the attention (mean over heads)"),
):
    ax.barh(names, values[0], color=PALETTE[0], label="rank 0")
    ax.barh(names, values[1], left=values[0], color=PALETTE[1], label="rank 1")
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.25, 0.5, 0.75], ["0%", "25%", "50%", "75%"])
    ax.set_title(title, fontsize=10)
axes[0].invert_yaxis()
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
keep(figure, "08_shares")

# %% [markdown]
# *Figure 1. How keys and attention fall on the ranks. The new token is the last key, on the last rank that holds any.*
