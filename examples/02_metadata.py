# %% [markdown]
# # Metadata, step by step
#
# Kernels need to know where each token's row lies in the cache and which rows it may see. A scheduler knows lengths and block
# ids. `build_metadata` turns the one into the other; this notebook does so by hand beside it, for a batch that is small enough
# to draw.

# %%
import numpy as np
from figures import keep
from matplotlib import pyplot as plt

from mla import BlockPool, build_metadata, decode_group, prompt_group, validate_metadata_values
from mla.plot import plot_block_pool, plot_block_table

BLOCK_SIZE = 4

# %% [markdown]
# ## Blocks
#
# The cache is one tensor of shape `(num_blocks, block_size, latent_dim)`. Blocks are handed out by a `BlockPool`, an
# immutable value: every operation returns a new pool. Full blocks are found again by their tokens, so that a prompt with a
# known beginning shares them.

# %%
pool = BlockPool.empty(num_blocks=24, block_size=BLOCK_SIZE)
pool = pool.allocate("ann", range(13)).mark_computed("ann")  # 13 tokens in 4 blocks, all of them in the cache
pool = pool.allocate("old", range(50, 62)).mark_computed("old").free("old")  # gone, but its full blocks can be found again
pool = pool.allocate("bob", [*range(8), 90, 91, 92, 93, 94, 95])  # its first 8 tokens are ann's
pool = pool.allocate("cat", range(70, 77))
pool

# %%
ax = plot_block_pool(pool, columns=12)
keep(ax, "02_pool")

# %% [markdown]
# *Figure 1. The pool. Two blocks are held by ann and bob together; the blocks of a sequence that was freed are kept until
# somebody needs them.*

# %%
assert pool["bob"].num_reused == 8
assert pool["bob"].block_ids[:2] == pool["ann"].block_ids[:2]

# %% [markdown]
# ## A batch
#
# ann decodes one token. bob's 6 unknown tokens and all 7 of cat are to be computed. Prompts come first. A record at the end of
# a cell shows as tables; `print` writes the same tables into a terminal.

# %%
pool, copies = pool.append("ann", [13])
metadata = build_metadata(
    [
        prompt_group(pool["bob"].num_new, pool["bob"].block_ids, context_len=pool["bob"].num_computed),
        prompt_group(pool["cat"].num_new, pool["cat"].block_ids),
        decode_group(len(pool["ann"].token_ids), pool["ann"].block_ids),
    ],
    block_size=BLOCK_SIZE,
    page_sizes=(1,),
)
validate_metadata_values(metadata)
assert not copies  # ann's last block is hers alone, nothing has to be copied before it is written
assert metadata.prefill is not None
assert metadata.decode is not None
metadata

# %%
ax = plot_block_table(metadata)
keep(ax, "02_block_table")

# %% [markdown]
# *Figure 2. The block table: the k-th cell of a row is the block that holds positions 4k .. 4k + 3. bob's context lies in ann's
# blocks.*
#
# ## Slots
#
# The row of position $p$ of a sequence lies in slot $b \cdot \text{block\_size} + p \bmod \text{block\_size}$ of the cache,
# where $b$ is entry $\lfloor p / \text{block\_size} \rfloor$ of its block table. `slot_mapping` holds that for every new
# token.


# %%
def slot(block_ids: tuple[int, ...], position: int) -> int:
    """Where a position of a sequence lies in the flat cache."""
    return block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


new = [("bob", range(8, 14)), ("cat", range(7)), ("ann", range(13, 14))]
by_hand = [slot(pool[name].block_ids, position) for name, positions in new for position in positions]
assert metadata.slot_mapping.tolist() == by_hand
assert metadata.positions.tolist() == [position for _, positions in new for position in positions]

# %% [markdown]
# ## Cumulative lengths
#
# Sequences lie one after the other, without padding. `query_start_loc[i] : query_start_loc[i + 1]` are the rows of sequence
# $i$. A token sees its context and the new tokens up to itself: new token $j$ of a sequence sees `seq_len - query_len + j +
# 1` keys.

# %%
prefill = metadata.prefill
query_lens, context_lens = np.array([6, 7]), np.array([8, 0])
assert prefill.query_start_loc.tolist() == [0, *np.cumsum(query_lens)]
assert prefill.seq_lens.tolist() == list(query_lens + context_lens)
assert prefill.max_query_len == 7
assert prefill.min_num_blocks == 1 + max(pool["bob"].block_ids + pool["cat"].block_ids)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=False)
for ax, name, query_len, context_len in zip(axes, ("bob", "cat"), query_lens, context_lens, strict=True):
    visible = np.arange(context_len + query_len)[None] <= context_len + np.arange(query_len)[:, None]
    ax.imshow(visible, cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
    ax.set_xticks(np.arange(visible.shape[1] + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(query_len + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="white")
    ax.tick_params(which="minor", length=0)
    if context_len:
        ax.axvline(context_len - 0.5, color="#222222")
    ax.set_title(f"{name}: {context_len} cached, {query_len} new", fontsize=10)
    ax.set_xlabel("key")
    ax.set_ylabel("new token")
    assert visible.sum(axis=1).tolist() == [int(context_len) + j + 1 for j in range(query_len)]
keep(figure, "02_visible_keys")

# %% [markdown]
# *Figure 3. What each new token sees. Left of the line is bob's context, which every new token sees in full.*
#
# ## Pages
#
# Some kernels want the table as a list: the pages in use of all sequences end to end, cumulative counts, and how full each
# last page is. `page_sizes=(1,)` has added it with pages of one token, as AITER takes it.

# %%
paged = metadata.decode.paged_kv_of(1)
assert paged.paged_kv_indices.tolist() == [slot(pool["ann"].block_ids, position) for position in range(14)]
assert paged.paged_kv_indptr.tolist() == [0, 14]
paged
