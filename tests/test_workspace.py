"""`prefill_workspace_bytes` is what chunked context takes, whatever the length of the context."""

from __future__ import annotations

import attrs
import pytest
import torch
from allocations import Allocations
from batches import small_dims

from mla import build_metadata, kernel_set, prompt_group
from mla.compute import cpu_prefill, prefill, prefill_workspace_bytes

QUERY_LEN, CHUNK = 96, 512
DIMS = small_dims(4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)


def bare_attention(q, k, v, *, query_start_loc, kv_start_loc, max_query_len, max_kv_len, causal, softmax_scale):
    """A kernel that takes nothing but its results."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[:2], dtype=lse_dtype)


BARE = attrs.evolve(kernel_set("CPU_MLA"), varlen_attention=bare_attention)


def peak(context_len, dtype, kernels=BARE):
    num_blocks = -(-(context_len + QUERY_LEN) // 64)
    groups = [prompt_group(QUERY_LEN, range(num_blocks), context_len=context_len)]
    metadata = build_metadata(groups, block_size=64, context_chunk_tokens=CHUNK).prefill
    inputs = (
        torch.ones(QUERY_LEN, DIMS.num_heads, DIMS.qk_head_dim, dtype=dtype),
        torch.ones(QUERY_LEN, DIMS.kv_lora_rank, dtype=dtype),
        torch.ones(QUERY_LEN, DIMS.qk_rope_head_dim, dtype=dtype),
        torch.zeros(num_blocks, 64, DIMS.latent_dim, dtype=dtype),
    )
    up = torch.ones(DIMS.num_heads * (DIMS.qk_nope_head_dim + DIMS.v_head_dim), DIMS.kv_lora_rank, dtype=dtype)
    with torch.no_grad(), Allocations() as seen:
        prefill(*inputs, metadata, kv_b_proj=up, dims=DIMS, kernels=kernels)
    return seen.peak


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_what_the_formula_says(dtype):
    promised = prefill_workspace_bytes(DIMS, num_query_tokens=QUERY_LEN, context_chunk_tokens=CHUNK, dtype=dtype)
    peaks = [peak(context_len, dtype) for context_len in (CHUNK, 4 * CHUNK, 16 * CHUNK)]
    assert peaks[0] <= peaks[1] == peaks[2]
    assert 0.75 * promised < peaks[2] <= 1.1 * promised


@pytest.mark.usefixtures("no_kept_scratch")
@pytest.mark.parametrize(
    ("dtype", "fused"),
    [(torch.float64, False), (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=str,
)
def test_the_kernel_counts_what_it_takes_inside(dtype, fused, monkeypatch):
    monkeypatch.setattr(cpu_prefill, "is_fast", lambda *_: fused)
    kernels = kernel_set("CPU_MLA")
    counts = {"num_query_tokens": QUERY_LEN, "context_chunk_tokens": CHUNK, "dtype": dtype}
    promised = prefill_workspace_bytes(DIMS, **counts, kernels=kernels)
    assert promised > prefill_workspace_bytes(DIMS, **counts)
    peaks = [peak(context_len, dtype, kernels) for context_len in (CHUNK, 4 * CHUNK, 16 * CHUNK)]
    assert peaks[0] <= peaks[1] == peaks[2]
    assert 0.6 * promised < peaks[2] <= 1.1 * promised
