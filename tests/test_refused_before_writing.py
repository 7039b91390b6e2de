"""`attend` refuses before the cache is written, whatever the kernel set would say later."""

from __future__ import annotations

import attrs
import pytest
import torch
from batches import Row, make_batch

from mla import (
    BlockPool,
    CacheError,
    KernelError,
    LatentCacheSpec,
    MetadataError,
    allocate_latent_cache,
    attend,
    build_metadata,
    decode_group,
    kernel_set,
    rope_table,
)
from mla.state import DecodeGraphState

ROWS = (Row(query_len=3, context_len=5), Row(query_len=1, context_len=6, is_prompt=False))


def run(batch, kernels, **changes):
    arguments = {"kv_b_proj": batch.kv_b_proj, "dims": batch.dims, "kernels": kernels, **changes}
    return attend(batch.q, batch.kv_c, batch.k_pe, batch.latent_cache, batch.metadata, **arguments)


def refused(match, batch, kernels, **changes):
    before = batch.latent_cache.clone()
    with pytest.raises(KernelError, match=match):
        run(batch, kernels, **changes)
    assert torch.equal(before.view(torch.uint8), batch.latent_cache.view(torch.uint8))


def test_a_cache_that_the_set_cannot_read():
    def check_cache(latent_cache):
        raise KernelError(f"latent_cache: expected another dtype, got {latent_cache.dtype}")

    batch = make_batch(ROWS, block_size=4, dtype=torch.float32, seed=1)
    refused("latent_cache: expected another dtype", batch, attrs.evolve(kernel_set("CPU_MLA"), check_cache=check_cache))


def test_the_plan_of_another_set():
    @attrs.frozen
    class OtherPlan:
        metadata: object

    batch = make_batch(ROWS, block_size=4, dtype=torch.float32, seed=1)
    refused("plan: expected what CPU_MLA", batch, kernel_set("CPU_MLA"), plan=OtherPlan(batch.metadata.decode))


@pytest.mark.parametrize("block", [-1, 100])
def test_a_table_that_leaves_the_cache(block):
    batch = make_batch(ROWS, block_size=4, dtype=torch.float32, seed=1)
    table = torch.full_like(batch.metadata.decode.block_table, block)
    metadata = attrs.evolve(batch.metadata, decode=attrs.evolve(batch.metadata.decode, block_table=table))
    refused(f"block_table: expected blocks in .*, got {block}", attrs.evolve(batch, metadata=metadata), kernel_set("CPU_MLA"))


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:]], ids=["context", "decode"])
def test_gradients_through_cached_rows(rows):
    batch = make_batch(rows, block_size=4, dtype=torch.float64, seed=1)
    batch.kv_c.requires_grad_()
    refused("kv_c_normed: expected no gradients through cached rows", batch, kernel_set("REFERENCE"))
    with torch.no_grad():
        run(batch, kernel_set("REFERENCE"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="names a device that is absent")
def test_a_device_that_this_torch_cannot_use():
    spec = LatentCacheSpec(kv_lora_rank=8, qk_rope_head_dim=4, block_size=4, dtype=torch.float32)
    dims = make_batch(ROWS, block_size=4, dtype=torch.float32, seed=1).dims
    absent = "device: expected a device that this torch can use, got cuda"
    with pytest.raises(CacheError, match=absent):
        allocate_latent_cache(spec, 1, device="cuda")
    with pytest.raises(KernelError, match=absent):
        rope_table(dims.rope, 8, "cuda")
    with pytest.raises(MetadataError, match=absent):
        build_metadata([decode_group(3, [1])], block_size=4, device="cuda")
    with pytest.raises(MetadataError, match=absent):
        DecodeGraphState(max_num_seqs=1, max_seq_len=4, block_size=4, num_blocks=1, device="cuda")


def test_an_idle_row_does_not_end_the_steps_of_others():
    idle = decode_group(0, [], query_len=0)
    assert build_metadata([decode_group(3, [1, 2]), idle], block_size=4).decode.steps_left == 5


def test_a_name_that_cannot_be_a_key():
    with pytest.raises(CacheError, match="seq_id: expected a hashable name"):
        BlockPool.empty(num_blocks=1, block_size=1).allocate(([],), [1])
