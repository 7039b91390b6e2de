"""Checks of a record's values, on request: they read tensors, so they may synchronise with the device."""

from __future__ import annotations

import torch

from mla._checks import check_instance
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

    Examples
    --------
    >>> from mla import build_metadata, decode_group
    >>> metadata = build_metadata([decode_group(17, [3, 9])], block_size=16)
    >>> validate_metadata_values(metadata, num_blocks=10)
    >>> validate_metadata_values(metadata, num_blocks=9)
    Traceback (most recent call last):
        ...
    mla.errors.MetadataError: min_num_blocks: expected at most 9 blocks in the cache, got 10
    """
    check_instance("metadata", metadata, MLAMetadata, MetadataError)
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
            _same(f"{name}", getattr(part, name), getattr(host, name)[first : first + part.num_tokens], "as in the whole batch")
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
    padding = torch.full_like(part.slot_mapping[num_real:], -1)
    _same("slot_mapping", part.slot_mapping[num_real:], padding, f"for padding after token {num_real}")
    rows = torch.repeat_interleave(torch.arange(part.num_seqs), query_lens)
    offsets = torch.arange(num_real) - part.query_start_loc[:-1][rows]
    expected = part.context_lens[rows] + offsets
    _same("positions", part.positions[:num_real], expected.to(torch.int64), "counting from the context's end")
    if part.block_table is None:
        return
    _in_range("block_table", part.block_table, 0, max(part.min_num_blocks - 1, 0))
    capacity = part.block_table.shape[1] * part.block_size
    if part.max_seq_len > capacity and bool((part.seq_lens > capacity).any()):
        raise MetadataError(f"block_table: expected room for {int(part.seq_lens.max())} tokens, got {capacity}")
    slots = _table_slots(part.block_table, rows, expected, part.block_size)
    _same("slot_mapping", part.slot_mapping[:num_real], slots, "block * block_size + offset")
    for paged in part.paged_kv:
        _check_paged(paged, part, part.block_table)
    if isinstance(part, PrefillMetadata):
        _check_chunks(part, part.block_table)
    live = part.seq_lens[part.seq_lens > 0]
    if live.numel():
        # An upper bound: the table does not say which of a row's zeros are padding.
        room = int((capacity - live).min())
        if part.steps_left > room:
            raise MetadataError(f"steps_left: expected at most {room}, got {part.steps_left}")


def _table_slots(table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    return table[rows, positions // page_size].to(torch.int64) * page_size + positions % page_size


def _check_chunks(part: PrefillMetadata, table: torch.Tensor) -> None:
    """Every pass agrees with the part and its table, and together they cover every context once."""
    next_position = torch.zeros_like(part.context_lens)
    for chunk in part.context_chunks:
        rows = slice(chunk.first_seq, chunk.first_seq + chunk.num_seqs)
        starts = part.query_start_loc[chunk.first_seq : chunk.first_seq + chunk.num_seqs + 1] - chunk.first_token
        _same("query_start_loc", chunk.query_start_loc, starts, "of the prompts of the chunk")
        if int(starts[0]) != 0 or int(starts[-1]) != chunk.num_query_tokens:
            raise MetadataError(
                f"first_token, num_query_tokens: expected the tokens of prompts {chunk.first_seq} to "
                f"{chunk.first_seq + chunk.num_seqs}, got {chunk.first_token} and {chunk.num_query_tokens}"
            )
        kv_lens = _check_starts("kv_start_loc", chunk.kv_start_loc)
        if int(chunk.kv_start_loc[-1]) != chunk.num_kv_tokens:
            raise MetadataError(f"kv_start_loc: expected {chunk.num_kv_tokens} keys, got {int(chunk.kv_start_loc[-1])}")
        for name, lens in (("max_kv_len", kv_lens), ("max_query_len", starts.diff())):
            longest = max(lens.tolist(), default=0)
            if getattr(chunk, name) < longest:
                raise MetadataError(f"{name}: expected at least {longest}, got {getattr(chunk, name)}")
        used = kv_lens > 0
        _same("starts", chunk.starts[used], next_position[rows][used], "where the pass before ended")
        seqs = torch.repeat_interleave(torch.arange(chunk.num_seqs), kv_lens)
        positions = chunk.starts[seqs] + torch.arange(len(seqs)) - chunk.kv_start_loc[:-1][seqs]
        _in_range("starts", positions, 0, table.shape[1] * part.block_size - 1)
        _same("slots", chunk.slots, _table_slots(table, seqs + chunk.first_seq, positions, part.block_size), "of the context")
        next_position[rows] += kv_lens
    missing = (next_position != part.context_lens).nonzero().flatten()
    if missing.numel():
        i = int(missing[0])
        raise MetadataError(
            f"context_chunks: expected pieces of {int(part.context_lens[i])} context tokens of prompt {i}, "
            f"got {int(next_position[i])}"
        )


def _same(field: str, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Refuse the first entry that differs."""
    if got.shape != expected.shape:
        raise MetadataError(f"{field}: expected {expected.numel()} entries {what}, got {got.numel()}")
    wrong = (got != expected).nonzero().flatten()
    if wrong.numel():
        i = int(wrong[0])
        raise MetadataError(f"{field}: expected {int(expected[i])} at {i} ({what}), got {int(got[i])}")


def _check_paged(paged: PagedKV, part: PrefillMetadata | DecodeMetadata, table: torch.Tensor) -> None:
    if part.block_size % paged.page_size:
        raise MetadataError(f"page_size: expected a divisor of block_size {part.block_size}, got {paged.page_size}")
    used = -(-part.seq_lens // paged.page_size)
    _check_starts("paged_kv_indptr", paged.paged_kv_indptr, used)
    if int(paged.paged_kv_indptr[-1]) > paged.paged_kv_indices.numel():
        raise MetadataError(
            f"paged_kv_indices: expected {int(paged.paged_kv_indptr[-1])} pages, got {paged.paged_kv_indices.numel()}"
        )
    last = torch.where(part.seq_lens > 0, (part.seq_lens - 1) % paged.page_size + 1, 0)
    _same("paged_kv_last_page_lens", paged.paged_kv_last_page_lens, last.to(torch.int32), "(seq_len - 1) % page_size + 1")
    rows = torch.repeat_interleave(torch.arange(part.num_seqs), used)
    pages = torch.arange(len(rows)) - paged.paged_kv_indptr[:-1][rows]
    in_use = paged.paged_kv_indices[: len(rows)].to(torch.int64)
    _same(
        "paged_kv_indices", in_use, _table_slots(table, rows, pages, part.block_size // paged.page_size), "of the block table"
    )
