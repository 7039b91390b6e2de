"""One decoding step further, computed from the tensors of a record where they are: no value is read on the host."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from mla._checks import check_instance
from mla.errors import MetadataError
from mla.metadata.records import DecodeMetadata, MLAMetadata, PagedKV, PrefillMetadata

__all__ = ["StepTensors", "advance_step", "check_page_numbers", "paged_kv_tensors", "step_tensors"]


@attrs.frozen(kw_only=True, eq=False)
class StepTensors:
    """Every field of a decode record that depends on the lengths.

    Parameters
    ----------
    seq_lens, context_lens : torch.Tensor of shape (num_seqs,), int32
        As in `DecodeMetadata`.
    seq_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        As in `DecodeMetadata`.
    slot_mapping, positions : torch.Tensor of shape (num_tokens,), int64
        As in `DecodeMetadata`.
    """

    seq_lens: torch.Tensor
    context_lens: torch.Tensor
    seq_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor


def _cumulative(lens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _row_of(starts: torch.Tensor, num_items: int) -> torch.Tensor:
    """Row of each of `num_items` items laid out by cumulative `starts`; items past the end get some row."""
    items = torch.arange(num_items, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:], items, right=True).clamp_(max=max(starts.shape[0] - 2, 0))


def step_tensors(
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    num_tokens: int,
    block_size: int,
) -> StepTensors:
    """Lengths, positions and slots of rows whose context is `context_lens` and whose new tokens lie at `query_start_loc`.

    Rows without new tokens are empty, whatever their context; tokens past ``query_start_loc[-1]`` are padding (position 0,
    slot -1).

    Parameters
    ----------
    context_lens : torch.Tensor of shape (num_seqs,), int32
        Tokens in the cache before the step.
    query_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative new tokens, from 0.
    block_table : torch.Tensor of shape (num_seqs, max_blocks_per_seq), int32
        With blocks for the new tokens.
    num_tokens : int
        Token rows, padding included.
    block_size : int
        Tokens per block.

    Returns
    -------
    StepTensors
        New tensors on the device of the inputs.
    """
    query_lens = query_start_loc.diff()
    context = context_lens.masked_fill(query_lens == 0, 0)
    seq_lens = context + query_lens
    token = torch.arange(num_tokens, device=context.device)
    if not context.shape[0]:
        positions = torch.zeros_like(token)
        slots = torch.full_like(token, -1)
    else:
        row = _row_of(query_start_loc, num_tokens)
        real = token < query_start_loc[-1]
        positions = torch.where(real, context[row] + token - query_start_loc[row], 0)
        column = (positions // block_size).clamp_(max=max(block_table.shape[1] - 1, 0))
        slots = torch.where(real, block_table[row, column].long() * block_size + positions % block_size, -1)
    return StepTensors(
        seq_lens=seq_lens,
        context_lens=context,
        seq_start_loc=_cumulative(seq_lens),
        slot_mapping=slots,
        positions=positions,
    )


def paged_kv_tensors(
    seq_lens: torch.Tensor, block_table: torch.Tensor, *, block_size: int, page_size: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page list of these lengths: indptr, indices and last-page lengths of a `PagedKV`.

    Parameters
    ----------
    seq_lens : torch.Tensor of shape (num_seqs,), int32
        Keys of each sequence.
    block_table : torch.Tensor of shape (num_seqs, max_blocks_per_seq), int32
        Their blocks.
    block_size, page_size : int
        Tokens per block and per page.
    num_pages : int
        Length of the list; what lies past the pages in use is 0 and unreachable.

    Returns
    -------
    paged_kv_indptr : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative pages.
    paged_kv_indices : torch.Tensor of shape (num_pages,), int32
        Page numbers.
    paged_kv_last_page_lens : torch.Tensor of shape (num_seqs,), int32
        Tokens in the last pages.
    """
    ratio = block_size // page_size
    indptr = _cumulative((seq_lens + page_size - 1) // page_size)
    last = torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0).to(torch.int32)
    if not block_table.numel():
        return indptr, seq_lens.new_zeros(num_pages), last
    row = _row_of(indptr, num_pages)
    item = torch.arange(num_pages, device=seq_lens.device, dtype=torch.int32)
    page = item - indptr[row]
    column = (page // ratio).clamp_(0, block_table.shape[1] - 1)
    indices = torch.where(item < indptr[-1], block_table[row, column] * ratio + page % ratio, 0)
    return indptr, indices.to(torch.int32), last


def check_page_numbers(num_blocks: int, pages_per_block: int) -> None:
    """Refuse blocks whose page numbers do not fit int32.

    Raises
    ------
    MetadataError
        With the largest page number.
    """
    last = num_blocks * pages_per_block - 1
    if last > torch.iinfo(torch.int32).max:
        raise MetadataError(f"page_sizes: expected page numbers of at most {torch.iinfo(torch.int32).max}, got {last}")


def advance_step(metadata: MLAMetadata, *, turn_prefills_into_decodes: bool = False) -> MLAMetadata:
    """The record of the next decoding step, every new token of this step being accepted.

    Each sequence takes as many new tokens as it had; every derived field follows (lengths, cumulative starts, positions, slots,
    page lists). Padded rows stay empty. Computed on the record's device without reading a value on the host.

    Parameters
    ----------
    metadata : MLAMetadata
        With blocks for the next tokens (look-ahead), as ``steps_left`` says.
    turn_prefills_into_decodes : bool
        Prompts become decoding sequences with one new token each, ahead of those that decode already. Without it a batch
        with prompts is refused.

    Returns
    -------
    MLAMetadata
        With a decode part only. Page lists may be longer than the pages in use.

    Raises
    ------
    MetadataError
        A profile run, prompts that are not to be turned, or too few blocks.

    References
    ----------
    vLLM 0.9, ``advance_step`` of its attention metadata, which leaves some derived fields behind; here all follow.

    Examples
    --------
    >>> from mla import build_metadata, decode_group, prompt_group
    >>> metadata = build_metadata([prompt_group(3, [5]), decode_group(5, [7, 2])], block_size=4)
    >>> advanced = advance_step(metadata, turn_prefills_into_decodes=True)
    >>> advanced.decode.seq_lens.tolist(), advanced.slot_mapping.tolist(), advanced.decode.steps_left
    ([4, 6], [23, 9], 0)
    """
    check_instance("metadata", metadata, MLAMetadata, MetadataError)
    if metadata.is_profile_run:
        raise MetadataError("metadata: expected sequences with blocks, got a profile run")
    if metadata.prefill is not None and not turn_prefills_into_decodes:
        raise MetadataError(
            f"metadata: expected decoding sequences only unless turn_prefills_into_decodes, got {metadata.num_prefills} prompts"
        )
    parts = [part for part in (metadata.prefill, metadata.decode) if part is not None]
    for part in parts:
        needed = _new_tokens(part)
        if part.steps_left < needed:
            raise MetadataError(f"steps_left: expected at least {needed} for another step, got {part.steps_left}")
    query_lens = torch.cat([_next_query_lens(part) for part in parts])
    query_start_loc = _cumulative(query_lens)
    block_table = _joined_tables(parts)
    num_tokens = sum(part.num_seqs if isinstance(part, PrefillMetadata) else part.num_tokens for part in parts)
    stepped = step_tensors(
        torch.cat([part.seq_lens for part in parts]),
        query_start_loc,
        block_table,
        num_tokens=num_tokens,
        block_size=metadata.block_size,
    )
    decode = DecodeMetadata(
        query_start_loc=query_start_loc,
        seq_start_loc=stepped.seq_start_loc,
        seq_lens=stepped.seq_lens,
        context_lens=stepped.context_lens,
        slot_mapping=stepped.slot_mapping,
        positions=stepped.positions,
        block_size=metadata.block_size,
        max_query_len=max(_new_tokens(part) for part in parts),
        max_seq_len=max(part.max_seq_len + _new_tokens(part) for part in parts),
        min_num_blocks=metadata.min_num_blocks,
        paged_kv=_next_pages(parts, stepped.seq_lens, block_table),
        block_table=block_table,
        steps_left=min(part.steps_left - _new_tokens(part) for part in parts),
    )
    return MLAMetadata(
        slot_mapping=decode.slot_mapping,
        positions=decode.positions,
        block_size=metadata.block_size,
        decode=decode,
        multi_modal_placeholder_maps=metadata.multi_modal_placeholder_maps,
    )


def _new_tokens(part: PrefillMetadata | DecodeMetadata) -> int:
    """New tokens of the longest row in the next step."""
    return 1 if isinstance(part, PrefillMetadata) else part.max_query_len


def _next_query_lens(part: PrefillMetadata | DecodeMetadata) -> torch.Tensor:
    if isinstance(part, PrefillMetadata):
        return (part.seq_lens > 0).to(torch.int32)
    return part.query_start_loc.diff()


def _joined_tables(parts: list[PrefillMetadata | DecodeMetadata]) -> torch.Tensor:
    tables = [part.block_table for part in parts if part.block_table is not None]
    if len(tables) == 1:
        return tables[0]
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])


def _next_pages(
    parts: list[PrefillMetadata | DecodeMetadata], seq_lens: torch.Tensor, block_table: torch.Tensor
) -> tuple[PagedKV, ...]:
    """Page lists of every page size, with room for what each row can have grown by."""
    sizes: Mapping[int, None] = dict.fromkeys(paged.page_size for part in parts for paged in part.paged_kv)
    block_size = parts[0].block_size
    out = []
    for size in sizes:
        check_page_numbers(max(part.min_num_blocks for part in parts), block_size // size)
        room = 0
        for part in parts:
            grown = part.paged_kv_of(size).paged_kv_indices.shape[0] + part.num_seqs * -(-_new_tokens(part) // size)
            room += min(grown, part.num_seqs * -(-(part.max_seq_len + _new_tokens(part)) // size))
        indptr, indices, last = paged_kv_tensors(seq_lens, block_table, block_size=block_size, page_size=size, num_pages=room)
        out.append(PagedKV(page_size=size, paged_kv_indptr=indptr, paged_kv_indices=indices, paged_kv_last_page_lens=last))
    return tuple(out)
