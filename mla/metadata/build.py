"""From sequence groups to metadata: pure functions on host integers, then one move to the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mla._checks import as_items, check_choice, check_int, usable_device
from mla.errors import MetadataError
from mla.metadata.batch import Batch, read_groups, refuse_shared_slots, refuse_wide_slots
from mla.metadata.groups import SequenceGroup
from mla.metadata.indexing import (
    Piece,
    cut_at_equal_shares,
    cut_at_fixed_positions,
    page_list,
    ragged_arange,
    start_locs,
    table_slots,
)
from mla.metadata.packing import HostBuffer, Ticket
from mla.metadata.records import ContextChunk, DecodeMetadata, MLAMetadata, PagedKV, PrefillMetadata

__all__ = ["DEFAULT_CONTEXT_CHUNK_TOKENS", "build_metadata", "context_workspace_tokens"]

DEFAULT_CONTEXT_CHUNK_TOKENS = 4096
_POLICIES = ("fixed_positions", "equal_shares")


def context_workspace_tokens(*, max_model_len: int, max_num_seqs: int, block_size: int, limit: int = 131072) -> int:
    """Tokens that vLLM gives the workspace of chunked context: room for long prompts, never below a block a sequence.

    ``min(max(8 * max_model_len, 4 * max_num_seqs * block_size), limit)``.

    Raises
    ------
    MetadataError
        `limit` is below one block for each of `max_num_seqs` sequences.

    References
    ----------
    vLLM 0.9, ``MLACommonMetadataBuilder``.

    Examples
    --------
    >>> context_workspace_tokens(max_model_len=8192, max_num_seqs=256, block_size=16)
    65536
    """
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("block_size", block_size),
        ("limit", limit),
    ):
        check_int(name, value, low=1, error=MetadataError)
    tokens = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), limit)
    if tokens < max_num_seqs * block_size:
        raise MetadataError(
            f"limit: expected at least {max_num_seqs * block_size} (max_num_seqs {max_num_seqs} times block_size "
            f"{block_size}), got {limit}"
        )
    return tokens


def build_metadata(
    groups: Iterable[SequenceGroup],
    *,
    block_size: int,
    device: torch.device | str = "cpu",
    page_sizes: Sequence[int] = (),
    context_chunk_tokens: int = DEFAULT_CONTEXT_CHUNK_TOKENS,
    context_workspace_tokens: int | None = None,
    chunk_policy: str = "fixed_positions",
    pad_decodes_to: int | None = None,
    max_blocks_per_seq: int | None = None,
) -> MLAMetadata:
    """Metadata of one step from the scheduler's sequence groups.

    A pure function: the same groups give the same record. Prompts come before decoding sequences.

    Parameters
    ----------
    groups : iterable of SequenceGroup
        Prompts first. Groups without `block_ids` make a profile run: prompts only, nothing cached.
    block_size : int
        Tokens per block of the cache; any number.
    device : torch.device or str
        Where the record's tensors live; one copy moves them all.
    page_sizes : sequence of int
        One `PagedKV` is added for each; every page size divides `block_size`.
    context_chunk_tokens : int
        A prompt's context is cut at multiples of this many positions.
    context_workspace_tokens : int or None
        Context tokens gathered in one pass, at least `context_chunk_tokens`, which is also the default. Never changes bits.
    chunk_policy : str
        ``"fixed_positions"``, or ``"equal_shares"``: vLLM's rule, by which the prompts share the workspace equally. Under
        the latter `context_chunk_tokens` is not used and the bits of a prompt's output depend on its batch mates.
    pad_decodes_to : int or None
        Rows of the decode part: empty sequences are added up to this number, each with as many token rows (slot -1) as the
        longest decoding sequence has.
    max_blocks_per_seq : int or None
        Longest row of a block table; blocks beyond it are dropped if they are look-ahead and refused if needed.

    Returns
    -------
    MLAMetadata
        Immutable record.

    Raises
    ------
    MetadataError
        Groups that are empty, out of order, without enough blocks, with a sliding window, or that write one slot twice; a
        workspace or share too small; a page size that does not divide `block_size`.

    Examples
    --------
    >>> from mla.metadata import decode_group, prompt_group
    >>> metadata = build_metadata([prompt_group(3, [5]), decode_group(5, [7, 2])], block_size=4)
    >>> metadata.slot_mapping.tolist()
    [20, 21, 22, 8]
    """
    sizes = _check_numbers(block_size, page_sizes, context_chunk_tokens, max_blocks_per_seq)
    target = usable_device("device", device, MetadataError)
    check_choice("chunk_policy", chunk_policy, _POLICIES, MetadataError)
    if context_workspace_tokens is None:
        context_workspace_tokens = context_chunk_tokens
    least = 1 if chunk_policy == "equal_shares" else context_chunk_tokens
    check_int("context_workspace_tokens", context_workspace_tokens, low=least, error=MetadataError)
    group_list = as_items("groups", groups, MetadataError)
    batch = read_groups(group_list, block_size, max_blocks_per_seq)
    split, total = batch.num_prefills, len(batch.query_lens)
    num_decodes = total - split
    if pad_decodes_to is not None:
        check_int("pad_decodes_to", pad_decodes_to, low=max(num_decodes, 1), high=2**31 - 1, error=MetadataError)
        if batch.table is None:
            raise MetadataError(f"pad_decodes_to: expected None on a profile run, got {pad_decodes_to}")
    rows = num_decodes if pad_decodes_to is None else pad_decodes_to
    longest = int(batch.query_lens[split:].max(initial=0)) if num_decodes else 1
    pad_tokens = (rows - num_decodes) * longest

    positions = ragged_arange(batch.query_lens, batch.context_lens)
    if batch.table is None:
        slots = np.full(len(positions), -1, np.int64)
    else:
        refuse_wide_slots(batch.table, block_size)
        slots = table_slots(batch.table, batch.query_lens, batch.context_lens, block_size)
        refuse_shared_slots(slots, batch, batch.table, block_size)
    buffer = HostBuffer()
    slot_ticket = buffer.add(np.concatenate([slots, np.full(pad_tokens, -1, np.int64)]))
    position_ticket = buffer.add(np.concatenate([positions, np.zeros(pad_tokens, np.int64)]))

    prefill_draft = decode_draft = None
    if split:
        prompts = batch.rows(0, split)
        prefill_draft = _Draft(buffer, prompts, split, block_size, sizes)
        passes = _cut_context(prompts, block_size, context_chunk_tokens, context_workspace_tokens, chunk_policy)
        chunk_drafts = [_ChunkDraft(buffer, prompts, pieces, block_size) for pieces in passes]
    if rows:
        decode_draft = _Draft(buffer, batch.rows(split, total), rows, block_size, sizes)

    buffer.move(target)
    slot_mapping, token_positions = buffer.take(slot_ticket), buffer.take(position_ticket)
    num_prompt_tokens = int(batch.query_lens[:split].sum())
    prefill = decode = None
    if prefill_draft is not None:
        fields = prefill_draft.fields(slot_mapping[:num_prompt_tokens], token_positions[:num_prompt_tokens])
        prefill = PrefillMetadata(**fields, context_chunks=tuple(draft.record() for draft in chunk_drafts))
    if decode_draft is not None:
        fields = decode_draft.fields(slot_mapping[num_prompt_tokens:], token_positions[num_prompt_tokens:])
        decode = DecodeMetadata(**fields)
    return MLAMetadata(
        slot_mapping=slot_mapping,
        positions=token_positions,
        block_size=block_size,
        prefill=prefill,
        decode=decode,
        is_profile_run=batch.table is None,
        multi_modal_placeholder_maps=tuple(group.multi_modal_placeholder_map for group in group_list),
    )


def _check_numbers(
    block_size: int, page_sizes: Sequence[int], context_chunk_tokens: int, max_blocks_per_seq: int | None
) -> list[int]:
    """Refuse numbers that no batch could use; returns the page sizes."""
    check_int("block_size", block_size, low=1, error=MetadataError)
    check_int("context_chunk_tokens", context_chunk_tokens, low=1, error=MetadataError)
    if max_blocks_per_seq is not None:
        check_int("max_blocks_per_seq", max_blocks_per_seq, low=1, error=MetadataError)
    sizes = as_items("page_sizes", page_sizes, MetadataError)
    for i, size in enumerate(sizes):
        check_int(f"page_sizes[{i}]", size, low=1, error=MetadataError)
        if block_size % size:
            raise MetadataError(f"page_sizes: expected divisors of block_size {block_size}, got {size}")
    return sizes


def _cut_context(prompts: Batch, block_size: int, chunk_tokens: int, workspace_tokens: int, policy: str) -> list[list[Piece]]:
    if prompts.table is None:
        return []
    if policy == "equal_shares":
        return cut_at_equal_shares(prompts.context_lens, workspace_tokens, block_size)
    return cut_at_fixed_positions(prompts.context_lens, chunk_tokens, workspace_tokens)


class _Draft:
    """One part of the batch: its arrays are in the buffer, its tensors exist once the buffer has moved."""

    def __init__(self, buffer: HostBuffer, part: Batch, rows: int, block_size: int, page_sizes: list[int]) -> None:
        self._buffer = buffer
        self._numbers = {
            "block_size": block_size,
            "max_query_len": int(part.query_lens.max(initial=0)),
            "max_seq_len": int(part.seq_lens.max(initial=0)),
            "min_num_blocks": 0 if part.table is None else int(part.table.flat.max(initial=-1)) + 1,
        }
        query_lens, context_lens, seq_lens = (
            np.concatenate([a, np.zeros(rows - len(a), np.int64)]) for a in (part.query_lens, part.context_lens, part.seq_lens)
        )
        self._tickets = {
            "query_start_loc": buffer.add(start_locs("query_lens", query_lens)),
            "seq_start_loc": buffer.add(start_locs("seq_lens", seq_lens)),
            "seq_lens": buffer.add(seq_lens.astype(np.int32)),
            "context_lens": buffer.add(context_lens.astype(np.int32)),
        }
        self._pages: list[tuple[int, list[Ticket]]] = []
        if part.table is None:
            return
        self._tickets["block_table"] = buffer.add(part.table.dense(rows))
        self._numbers["steps_left"] = int((part.room - part.seq_lens)[part.seq_lens > 0].min(initial=2**31 - 1))
        for size in page_sizes:
            counts, pages, last = page_list(part.table, part.seq_lens, block_size=block_size, page_size=size)
            padding = np.zeros(rows - len(counts), np.int64)
            indptr = start_locs("paged_kv_indptr", np.concatenate([counts, padding]))
            last_lens = np.concatenate([last, padding]).astype(np.int32)
            self._pages.append((size, [buffer.add(a) for a in (indptr, pages, last_lens)]))

    def fields(self, slot_mapping: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        take = self._buffer.take
        paged = tuple(
            PagedKV(
                page_size=size,
                paged_kv_indptr=take(tickets[0]),
                paged_kv_indices=take(tickets[1]),
                paged_kv_last_page_lens=take(tickets[2]),
            )
            for size, tickets in self._pages
        )
        tensors = {name: take(ticket) for name, ticket in self._tickets.items()}
        return {**self._numbers, **tensors, "slot_mapping": slot_mapping, "positions": positions, "paged_kv": paged}


class _ChunkDraft:
    """One pass over the context, from the first to the last prompt that has a piece in it."""

    def __init__(self, buffer: HostBuffer, prompts: Batch, pieces: list[Piece], block_size: int) -> None:
        first, last = pieces[0].seq, pieces[-1].seq + 1
        kv_lens, starts = np.zeros(last - first, np.int64), np.zeros(last - first, np.int64)
        for piece in pieces:
            kv_lens[piece.seq - first], starts[piece.seq - first] = piece.num_tokens, piece.start
        query_lens = prompts.query_lens[first:last]
        if prompts.table is None:
            raise MetadataError("block_ids: expected blocks for prompts with context, got None")
        self._buffer = buffer
        self._numbers: dict[str, Any] = {
            "first_seq": first,
            "num_seqs": last - first,
            "first_token": int(prompts.query_lens[:first].sum()),
            "num_query_tokens": int(query_lens.sum()),
            "max_query_len": int(query_lens.max()),
            "max_kv_len": int(kv_lens.max()),
        }
        self._tickets = {
            "query_start_loc": buffer.add(start_locs("query_lens", query_lens)),
            "kv_start_loc": buffer.add(start_locs("context_lens", kv_lens)),
            "starts": buffer.add(starts.astype(np.int32)),
            "slots": buffer.add(table_slots(prompts.table.rows(first, last), kv_lens, starts, block_size)),
        }

    def record(self) -> ContextChunk:
        """The record, once the buffer has moved."""
        tensors: dict[str, Any] = {name: self._buffer.take(ticket) for name, ticket in self._tickets.items()}
        return ContextChunk(**self._numbers, **tensors)
