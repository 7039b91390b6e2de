"""Checks of a record's values, on request: they read tensors, so they may synchronise with the device."""

from __future__ import annotations

import torch

from mla.errors import MetadataError
from mla.metadata.records import DecodeMetadata, MLAMetadata, PagedKV, PrefillMetadata

__all__ = ["validate_metadata_values"]


def validate_metadata_values(metadata: MLAMetadata, *, num_blocks: int | None = None) -> None:
    """Refuse a record whose numbers contradict one another or reach outside the cache.

    Parameters
    ----------
    metadata : MLAMetadata
        On any device; it is copied to the host.
    num_blocks : int or None
        Blocks of the cache; None leaves the upper bound of block ids to `min_num_blocks`.

    Raises
    ------
    MetadataError
        Naming the first field found wrong.
    """
    host = metadata.to("cpu")
    slots = host.slot_mapping
    if num_blocks is not None and host.min_num_blocks > num_blocks:
        raise MetadataError(f"min_num_blocks: expected at most {num_blocks} blocks in the cache, got {host.min_num_blocks}")
    _in_range("slot_mapping", slots, -1, host.min_num_blocks * host.block_size - 1)
    written = slots[slots >= 0]
    if written.unique().numel() != written.numel():
        values, counts = written.unique(return_counts=True)
        raise MetadataError(f"slot_mapping: expected every slot once, got slot {int(values[counts > 1][0])} twice")
    first = 0
    for part in (host.prefill, host.decode):
        if part is None:
            continue
        for name in ("slot_mapping", "positions"):
            if not torch.equal(getattr(part, name), getattr(host, name)[first : first + part.num_tokens]):
                raise MetadataError(f"{name}: expected the part's slice of the whole batch, got other values")
        first += part.num_tokens
        _check_part(part)


def _in_range(field: str, values: torch.Tensor, low: int, high: int) -> None:
    bad = values[(values < low) | (values > high)]
    if bad.numel():
        raise MetadataError(f"{field}: expected values in {low}..{high}, got {int(bad[0])}")


def _check_starts(field: str, starts: torch.Tensor, lens: torch.Tensor | None = None) -> torch.Tensor:
    steps = starts.diff()
    if int(starts[0]) != 0 or bool((steps < 0).any()):
        raise MetadataError(f"{field}: expected cumulative values from 0, never decreasing, got {starts.tolist()[:8]}")
    if lens is not None and not torch.equal(steps, lens):
        i = int((steps != lens).nonzero()[0])
        raise MetadataError(f"{field}: expected a step of {int(lens[i])} at sequence {i}, got {int(steps[i])}")
    return steps


def _check_part(part: PrefillMetadata | DecodeMetadata) -> None:
    query_lens = _check_starts("query_start_loc", part.query_start_loc)
    _in_range("context_lens", part.context_lens, 0, part.max_seq_len)
    _check_starts("seq_start_loc", part.seq_start_loc, part.seq_lens)
    if not torch.equal(part.context_lens + query_lens, part.seq_lens):
        i = int((part.context_lens + query_lens != part.seq_lens).nonzero()[0])
        raise MetadataError(
            f"seq_lens: expected context {int(part.context_lens[i])} + query {int(query_lens[i])} at sequence {i}, "
            f"got {int(part.seq_lens[i])}"
        )
    _in_range("seq_lens", part.seq_lens, 0, part.max_seq_len)
    _in_range("query lengths (query_start_loc)", query_lens, 0, part.max_query_len)
    num_real = int(part.query_start_loc[-1])
    if num_real > part.num_tokens:
        raise MetadataError(f"query_start_loc: expected at most {part.num_tokens} tokens, got {num_real}")
    if bool((part.slot_mapping[num_real:] != -1).any()):
        raise MetadataError(f"slot_mapping: expected -1 for the padding after token {num_real}, got other values")
    rows = torch.repeat_interleave(torch.arange(part.num_seqs), query_lens)
    offsets = torch.arange(num_real) - part.query_start_loc[:-1][rows]
    expected = part.context_lens[rows] + offsets
    if not torch.equal(part.positions[:num_real], expected.to(torch.int64)):
        raise MetadataError("positions: expected context_len, context_len + 1, ... for each sequence, got other values")
    if part.block_table is None:
        return
    _in_range("block_table", part.block_table, 0, max(part.min_num_blocks - 1, 0))
    capacity = part.block_table.shape[1] * part.block_size
    if part.max_seq_len > capacity and bool((part.seq_lens > capacity).any()):
        raise MetadataError(f"block_table: expected room for {int(part.seq_lens.max())} tokens, got {capacity}")
    slots = part.block_table[rows, expected // part.block_size].to(torch.int64) * part.block_size
    if not torch.equal(part.slot_mapping[:num_real], slots + expected % part.block_size):
        raise MetadataError("slot_mapping: expected block * block_size + offset of each position, got other values")
    for paged in part.paged_kv:
        _check_paged(paged, part)


def _check_paged(paged: PagedKV, part: PrefillMetadata | DecodeMetadata) -> None:
    used = -(-part.seq_lens // paged.page_size)
    _check_starts("paged_kv_indptr", paged.paged_kv_indptr, used)
    if int(paged.paged_kv_indptr[-1]) > paged.paged_kv_indices.numel():
        raise MetadataError(
            f"paged_kv_indices: expected {int(paged.paged_kv_indptr[-1])} pages, got {paged.paged_kv_indices.numel()}"
        )
    last = torch.where(part.seq_lens > 0, (part.seq_lens - 1) % paged.page_size + 1, 0)
    if not torch.equal(paged.paged_kv_last_page_lens, last.to(torch.int32)):
        raise MetadataError("paged_kv_last_page_lens: expected (seq_len - 1) % page_size + 1, got other values")
    in_use = paged.paged_kv_indices[: int(paged.paged_kv_indptr[-1])]
    _in_range("paged_kv_indices", in_use, 0, part.min_num_blocks * (part.block_size // paged.page_size) - 1)
