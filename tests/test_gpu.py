"""Plain torch on a GPU: the set TORCH, the moves between devices, and writes that read nothing on the host.

Run by hand on a machine with a GPU: ``pytest -m gpu``.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from batches import Row, make_batch
from compare import LSE_ABS, OUT_REL, assert_close

from mla import attend, build_metadata, decode_group, kernel_set, prompt_group, validate_metadata_values
from mla.cache import copy_blocks_, gather_latent_cache, swap_blocks_, write_latent_cache_
from mla.compute import reference
from mla.state import DecodeGraphState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]

ROWS = (
    Row(query_len=5, context_len=37),
    Row(query_len=70, context_len=0),
    Row(query_len=3, context_len=16),
    Row(query_len=1, context_len=300, is_prompt=False),
    Row(query_len=3, context_len=20, is_prompt=False),
    Row(query_len=1, context_len=0, is_prompt=False),
)


def on_gpu(batch):
    moved = {f.name: getattr(batch, f.name) for f in attrs.fields(type(batch)) if f.name != "dims"}
    return attrs.evolve(batch, **{name: value.to("cuda") for name, value in moved.items()})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("TORCH", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *(("TRITON_MLA", dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_a_set_meets_the_reference(name, dtype, block_size):
    batch = make_batch(ROWS, block_size=block_size, dtype=dtype, seed=3, context_chunk_tokens=16, pad_decodes_to=5)
    gpu = on_gpu(batch)
    kernels = kernel_set(name)
    with torch.inference_mode():
        out, lse = attend(
            gpu.q, gpu.kv_c, gpu.k_pe, gpu.latent_cache, gpu.metadata, kv_b_proj=gpu.kv_b_proj, dims=gpu.dims, kernels=kernels
        )
        cache = gpu.latent_cache.cpu()
        split = batch.metadata.num_prefill_tokens
        for part, rows in ((batch.metadata.prefill, slice(0, split)), (batch.metadata.decode, slice(split, None))):
            expected, expected_lse = reference.latent_attention(
                batch.q[rows], cache, part, kv_b_proj=batch.kv_b_proj, dims=batch.dims
            )
            # Absorption rounds the folded query and the attended latent once more than the kernels' own tolerance allows for.
            assert_close(out[rows].cpu(), expected, rel=2 * OUT_REL[dtype])
            assert_close(lse[rows].cpu(), expected_lse, abs=2 * LSE_ABS[dtype])


def test_metadata_moves_to_the_gpu_in_one_piece():
    groups = [prompt_group(7, [3, 1], context_len=9), decode_group(20, [7, 0], query_len=2)]
    here = build_metadata(groups, block_size=16, page_sizes=(1, 4), context_chunk_tokens=4)
    there = build_metadata(groups, block_size=16, page_sizes=(1, 4), context_chunk_tokens=4, device="cuda")
    validate_metadata_values(there)
    for name in ("slot_mapping", "positions"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
    assert there.slot_mapping.untyped_storage().data_ptr() == there.decode.block_table.untyped_storage().data_ptr()


def test_cache_operations_on_and_between_devices():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 12, generator=generator)
    slots = torch.tensor([5, -1, 0, 31, 999, -7])
    gpu = torch.full((8, 4, 12), torch.nan, device="cuda")
    write_latent_cache_(gpu, rows[:, :8].cuda(), rows[:, 8:].cuda(), slots.cuda())
    expected = torch.full((8, 4, 12), torch.nan)
    expected.view(-1, 12)[[5, 0, 31]] = rows[[0, 2, 3]]
    assert torch.equal(gpu.cpu().nan_to_num(7), expected.nan_to_num(7))
    out = gather_latent_cache(gpu, torch.tensor([31, 0], device="cuda"), out=torch.empty(3, 12, device="cuda"))
    assert torch.equal(out.cpu(), rows[[3, 2]])
    copy_blocks_([gpu], torch.tensor([[0, 2], [1, 3]]))
    assert torch.equal(gpu[2:4].cpu().nan_to_num(7), expected[:2].nan_to_num(7))
    host = torch.zeros(2, 4, 12)
    swap_blocks_(gpu, host, torch.tensor([[7, 1]]))
    assert torch.equal(host[1].nan_to_num(7), expected[7].nan_to_num(7))


def test_writes_and_moves_read_nothing_on_the_host():
    cache = torch.zeros(8, 4, 12, device="cuda")
    rows = torch.randn(6, 12, device="cuda")
    slots = torch.tensor([5, -1, 0, 31, 999, -7], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_latent_cache_(cache, rows[:, :8], rows[:, 8:], slots)
        gather_latent_cache(cache, slots.clamp(0, 31), out=torch.empty(6, 12, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool((cache.view(-1, 12)[31] == rows[3]).all())


def decode_batch(seq_lens, tables, **options):
    groups = [decode_group(n, table) for n, table in zip(seq_lens, tables, strict=True)]
    return build_metadata(groups, block_size=16, page_sizes=(1, 16), **options)


def assert_same_record(record, expected):
    for name in ("slot_mapping", "positions"):
        assert torch.equal(getattr(record, name).cpu(), getattr(expected, name))
    for name in ("query_start_loc", "seq_start_loc", "seq_lens", "context_lens"):
        assert torch.equal(getattr(record.decode, name).cpu(), getattr(expected.decode, name))
    for size in (1, 16):
        got, want = record.decode.paged_kv_of(size), expected.decode.paged_kv_of(size)
        used = int(want.paged_kv_indptr[-1])
        assert torch.equal(got.paged_kv_indptr.cpu(), want.paged_kv_indptr)
        assert torch.equal(got.paged_kv_indices[:used].cpu(), want.paged_kv_indices[:used])
        assert torch.equal(got.paged_kv_last_page_lens.cpu(), want.paged_kv_last_page_lens)


def test_the_state_loads_steps_and_replays_without_the_host():
    state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=16, num_blocks=32, page_sizes=(1, 16), device="cuda")
    with state.capture():
        captured = state.metadata_for(4)
    tables = ([3, 9, 4], [7, 1], [30, 2, 8])
    batch = decode_batch([15, 16, 31], tables).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.load_(batch)
        state.advance_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_record(captured, decode_batch([16, 17, 32], tables, pad_decodes_to=4))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        state.advance_()  # warm-up outside of the graph
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.advance_()
    for _ in range(3):
        graph.replay()
    assert_same_record(captured, decode_batch([20, 21, 36], tables, pad_decodes_to=4))
