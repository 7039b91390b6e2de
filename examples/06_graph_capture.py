# %% [markdown]
# # Graph capture
#
# A CUDA graph records a sequence of kernel launches once and replays it without the host. It replays addresses and launch
# sizes, not values: whatever changes between two decoding steps must lie in tensors that stay where they are.
# `DecodeGraphState` holds every tensor of a decode record so. The first part of this notebook looks at it on the CPU, the
# second captures a graph and needs an NVIDIA GPU.

# %%
import time

import torch
from figures import keep
from matplotlib import pyplot as plt

from mla import (
    BlockPool,
    DecodeGraphState,
    LatentCacheSpec,
    MLADims,
    RopeSpec,
    allocate_latent_cache,
    attend,
    build_metadata,
    decode_group,
    kernels_for,
)
from mla.plot import plot_block_table

BLOCK_SIZE, NUM_BLOCKS = 16, 64

# %% [markdown]
# ## Buffers
#
# The state has room for four sequences of up to 64 tokens. A batch of three is padded with an empty row: length 0, slot -1.
# Padding is ordinary work for every kernel: a row without keys gives 0 and writes nothing.

# %%
pool = BlockPool.empty(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
for name, length in (("a", 21), ("b", 34), ("c", 5)):
    pool = pool.allocate(name, range(1000 * length, 1000 * length + length), lookahead=8)
groups = [decode_group(len(pool[name].token_ids), pool[name].block_ids) for name in "abc"]
batch = build_metadata(groups, block_size=BLOCK_SIZE)

state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
with state.capture():
    captured = state.metadata_for(4)  # what a graph is captured with
assert captured.decode is not None
addresses = [captured.decode.seq_lens.data_ptr(), captured.decode.block_table.data_ptr(), captured.slot_mapping.data_ptr()]

state.load_(batch)
before = captured.decode.seq_lens.tolist()
print(captured.decode)
assert before == [21, 34, 5, 0]
assert captured.slot_mapping.tolist()[3] == -1

# %%
figure, axes = plt.subplots(2, 1, figsize=(8.5, 4.4), layout="constrained", sharex=True)
plot_block_table(captured.decode, ax=axes[0]).set_title("loaded", fontsize=10)
axes[0].set_xlabel("")
for _ in range(3):
    state.advance_()
plot_block_table(captured.decode, ax=axes[1]).set_title("three steps later, the same record", fontsize=10)
keep(figure, "06_buffers")

# %% [markdown]
# *Figure 1. One record over the state's buffers, before and after three steps of `advance_`, which runs on the device and reads
# nothing on the host. Row 3 is padding.*

# %%
assert captured.decode.seq_lens.tolist() == [24, 37, 8, 0]
assert addresses == [
    captured.decode.seq_lens.data_ptr(),
    captured.decode.block_table.data_ptr(),
    captured.slot_mapping.data_ptr(),
]
again = build_metadata(
    [decode_group(len(pool[name].token_ids) + 3, pool[name].block_ids) for name in "abc"],
    block_size=BLOCK_SIZE,
    pad_decodes_to=4,
)
assert again.decode is not None
assert torch.equal(again.slot_mapping, captured.slot_mapping)
assert torch.equal(again.positions, captured.positions)

# %% [markdown]
# ## A graph
#
# Capture one decoding step with empty rows, then replay it: `load_` fills the buffers, `advance_` inside of the graph moves
# them on.

# %%
reason = ""
if not torch.cuda.is_available():
    reason = "needs an NVIDIA GPU, and torch sees none"
elif torch.version.hip is not None:
    reason = "needs an NVIDIA GPU, and this torch is built for ROCm"
if reason:
    print(f"graph capture skipped: {reason}")


# %%
def capture_and_replay() -> None:
    """Replay three decoding steps; each must equal the step without a graph, bit for bit."""
    dims = MLADims(
        num_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeSpec(dim=64, interleaved=True),
    )
    dtype = torch.bfloat16
    kernels = kernels_for("cuda", dims=dims, dtype=dtype)
    spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=BLOCK_SIZE, dtype=dtype)
    cache = allocate_latent_cache(spec, NUM_BLOCKS, device="cuda")
    kv_b_proj = 0.02 * torch.randn(16 * 256, 512, dtype=dtype, device="cuda")
    q = torch.randn(4, 16, 192, dtype=dtype, device="cuda")
    kv_c, k_pe = (torch.randn(4, width, dtype=dtype, device="cuda") for width in (512, 64))
    state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), state.capture():
        metadata = state.metadata_for(4)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a warm-up compiles the kernels; rows are empty, so the cache stays as it is
            attend(q, kv_c, k_pe, cache, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out, lse = attend(q, kv_c, k_pe, cache, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels)
    assert not cache.any()

    plain = cache.clone()
    for extra in range(3):
        groups = [decode_group(len(pool[name].token_ids) + extra, pool[name].block_ids) for name in "abc"]
        batch = build_metadata(groups, block_size=BLOCK_SIZE, device="cuda", pad_decodes_to=4)
        if extra == 0:
            state.load_(batch)
        else:
            state.advance_()
        graph.replay()
        with torch.inference_mode():
            want = attend(q, kv_c, k_pe, plain, batch, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
    assert torch.equal(cache, plain)

    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    print(f"graph capture: three steps bit for bit, {1e4 * (time.perf_counter() - started):.0f} us a replay")


if not reason:
    capture_and_replay()
