"""Immutable metadata of one step: where each token's row lies in the cache and what it may see.

Records check shape, dtype and device when they are made and never read a value; `mla.metadata.validate_metadata_values`
reads values on request. Nothing downstream writes to a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs
import torch

from mla._checks import check_instance, check_int, check_record, check_tensor, describe, named_fields, tensor
from mla.errors import MetadataError
from mla.metadata.show import Shown

__all__ = ["ContextChunk", "DecodeMetadata", "MLAMetadata", "PagedKV", "PrefillMetadata"]


def _map_tensors(record: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(record, torch.Tensor):
        return function(record)
    if isinstance(record, tuple):
        return tuple(_map_tensors(item, function) for item in record)
    if isinstance(record, _Record):
        changed = {f.name: _map_tensors(getattr(record, f.name), function) for f in attrs.fields(type(record)) if f.init}
        return type(record)(**changed)
    return record


@attrs.frozen(kw_only=True, eq=False)
class _Record(Shown):
    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same record with every tensor on `device`."""
        moved: Self = _map_tensors(self, lambda t: t.to(device, non_blocking=non_blocking))
        return moved

    def pin_memory(self) -> Self:
        """The same record with every tensor in page-locked host memory."""
        pinned: Self = _map_tensors(self, lambda t: t.pin_memory())
        return pinned

    def _check_counts(self, *names: str) -> None:
        for name in names:
            check_int(name, getattr(self, name), low=0, error=MetadataError)


@named_fields(MetadataError)
@attrs.frozen(kw_only=True, eq=False)
class PagedKV(_Record):
    """The block table in CSR form at a page size of its own, as AITER and FlashInfer take it.

    Parameters
    ----------
    page_size : int
        Tokens per page; the cache is seen as pages of this size.
    paged_kv_indptr : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative number of pages in use, from 0; padded sequences repeat the last value.
    paged_kv_indices : torch.Tensor of shape (num_pages,), int32
        Page numbers, sequence after sequence, cut at ``ceil(seq_len / page_size)``.
    paged_kv_last_page_lens : torch.Tensor of shape (num_seqs,), int32
        Tokens in the last page of each sequence, 0 for an empty one.

    Raises
    ------
    MetadataError
        A wrong shape, dtype or device, or a page size below 1.

    Examples
    --------
    >>> from mla import build_metadata, decode_group
    >>> build_metadata([decode_group(5, [7, 2])], block_size=4, page_sizes=[2]).decode.paged_kv_of(2).paged_kv_indices.tolist()
    [14, 15, 4]
    """

    page_size: int
    paged_kv_indptr: torch.Tensor = attrs.field(metadata=tensor("(num_seqs + 1,)", torch.int32))
    paged_kv_indices: torch.Tensor = attrs.field(metadata=tensor("(num_pages,)", torch.int32))
    paged_kv_last_page_lens: torch.Tensor = attrs.field(metadata=tensor("(num_seqs,)", torch.int32))

    def __attrs_post_init__(self) -> None:
        check_int("page_size", self.page_size, low=1, error=MetadataError)
        check_record(self, MetadataError)


@named_fields(MetadataError)
@attrs.frozen(kw_only=True, eq=False)
class ContextChunk(_Record):
    """One pass over the context: pieces of consecutive prompts that are gathered and attended together.

    A prompt without a piece in this pass keeps a row with no keys.

    Parameters
    ----------
    first_seq, num_seqs : int
        The prompts of this pass are ``first_seq .. first_seq + num_seqs`` of the prefill part.
    first_token, num_query_tokens : int
        Their new tokens are ``first_token .. first_token + num_query_tokens`` of the prefill part.
    query_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative new tokens of these prompts, from 0.
    kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative keys of the pieces, from 0.
    starts : torch.Tensor of shape (num_seqs,), int32
        Position in its sequence of each piece's first key.
    slots : torch.Tensor of shape (num_kv_tokens,), int64
        Cache slot of each key, piece after piece.
    max_query_len, max_kv_len : int
        Longest row of each kind.

    Raises
    ------
    MetadataError
        A wrong shape, dtype or device, or a negative count.

    Examples
    --------
    >>> from mla import build_metadata, prompt_group
    >>> metadata = build_metadata([prompt_group(2, [5, 0, 3], context_len=7)], block_size=4, context_chunk_tokens=4)
    >>> [(chunk.num_kv_tokens, chunk.slots.tolist()) for chunk in metadata.prefill.context_chunks]
    [(4, [20, 21, 22, 23]), (3, [0, 1, 2])]
    """

    first_seq: int
    num_seqs: int
    first_token: int
    num_query_tokens: int
    query_start_loc: torch.Tensor = attrs.field(metadata=tensor("(num_seqs + 1,)", torch.int32))
    kv_start_loc: torch.Tensor = attrs.field(metadata=tensor("(num_seqs + 1,)", torch.int32))
    starts: torch.Tensor = attrs.field(metadata=tensor("(num_seqs,)", torch.int32))
    slots: torch.Tensor = attrs.field(metadata=tensor("(num_kv_tokens,)", torch.int64))
    max_query_len: int
    max_kv_len: int

    def __attrs_post_init__(self) -> None:
        self._check_counts("first_seq", "num_seqs", "first_token", "num_query_tokens", "max_query_len", "max_kv_len")
        check_record(self, MetadataError, num_seqs=self.num_seqs)

    @property
    def num_kv_tokens(self) -> int:
        """Keys gathered in this pass."""
        return self.slots.shape[0]


def _check_tuple(field: str, values: object, kind: type) -> None:
    # A list could be changed later, and `to` would not see into it.
    if not isinstance(values, tuple):
        raise MetadataError(f"{field}: expected a tuple of {kind.__name__}, got {describe(values)}")
    for i, value in enumerate(values):
        check_instance(f"{field}[{i}]", value, kind, MetadataError)


@attrs.frozen(kw_only=True, eq=False)
class _Part(_Record):
    query_start_loc: torch.Tensor = attrs.field(metadata=tensor("(num_seqs + 1,)", torch.int32))
    seq_start_loc: torch.Tensor = attrs.field(metadata=tensor("(num_seqs + 1,)", torch.int32))
    seq_lens: torch.Tensor = attrs.field(metadata=tensor("(num_seqs,)", torch.int32))
    context_lens: torch.Tensor = attrs.field(metadata=tensor("(num_seqs,)", torch.int32))
    slot_mapping: torch.Tensor = attrs.field(metadata=tensor("(num_tokens,)", torch.int64))
    positions: torch.Tensor = attrs.field(metadata=tensor("(num_tokens,)", torch.int64))
    block_size: int
    max_query_len: int
    max_seq_len: int
    min_num_blocks: int
    paged_kv: tuple[PagedKV, ...] = ()
    steps_left: int = 0

    def _check_part(self) -> None:
        check_int("block_size", self.block_size, low=1, error=MetadataError)
        self._check_counts("max_query_len", "max_seq_len", "min_num_blocks", "steps_left")
        bound = check_record(self, MetadataError)
        _check_tuple("paged_kv", self.paged_kv, PagedKV)
        sizes = [paged.page_size for paged in self.paged_kv]
        if len(set(sizes)) != len(sizes):
            raise MetadataError(f"paged_kv: expected one entry per page size, got page sizes {sizes}")
        device = self.seq_lens.device
        for paged in self.paged_kv:
            field, lens = f"paged_kv_last_page_lens (page_size {paged.page_size})", paged.paged_kv_last_page_lens
            check_tensor(field, lens, "(num_seqs,)", device=device, bound=bound, error=MetadataError)

    @property
    def num_seqs(self) -> int:
        """Rows of the block table, padded ones included."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """New tokens, padded ones included."""
        return self.slot_mapping.shape[0]

    def paged_kv_of(self, page_size: int) -> PagedKV:
        """The `PagedKV` of this page size.

        Raises
        ------
        MetadataError
            It was not asked for when the metadata was built.
        """
        for paged in self.paged_kv:
            if paged.page_size == page_size:
                return paged
        have = [paged.page_size for paged in self.paged_kv]
        raise MetadataError(f"paged_kv: expected page size {page_size}, got {have}; build with page_sizes=({page_size},)")


@named_fields(MetadataError)
@attrs.frozen(kw_only=True, eq=False)
class PrefillMetadata(_Part):
    """The prompts of a batch.

    Parameters
    ----------
    query_start_loc, seq_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative new tokens and cumulative sequence lengths (context and new tokens), from 0.
    seq_lens : torch.Tensor of shape (num_seqs,), int32
        Context plus new tokens.
    context_lens : torch.Tensor of shape (num_seqs,), int32
        Tokens already in the cache.
    slot_mapping : torch.Tensor of shape (num_tokens,), int64
        Cache slot of each new token, ``block * block_size + offset``; -1 is not written.
    positions : torch.Tensor of shape (num_tokens,), int64
        Position of each new token in its sequence, from 0.
    block_size : int
        Tokens per block of the cache.
    max_query_len, max_seq_len : int
        Longest row of each kind.
    min_num_blocks : int
        Largest block id plus 1: the cache holds at least so many blocks.
    paged_kv : tuple of PagedKV
        The table at the page sizes that were asked for.
    block_table : torch.Tensor of shape (num_seqs, max_blocks_per_seq), int32
        Blocks of each sequence, 0-padded; None on a profile run.
    steps_left : int
        Tokens that every prompt can still take in the blocks given, once it decodes.
    context_chunks : tuple of ContextChunk
        The passes over the context, in order; empty where no prompt has context.

    Raises
    ------
    MetadataError
        A wrong shape, dtype or device, or a negative count.

    Examples
    --------
    >>> from mla import build_metadata, prompt_group
    >>> prefill = build_metadata([prompt_group(2, [5, 0, 3], context_len=7), prompt_group(1, [9])], block_size=4).prefill
    >>> prefill.num_seqs, prefill.num_tokens, prefill.positions.tolist(), prefill.max_context_chunk_tokens
    (2, 3, [7, 8, 0], 7)
    """

    block_table: torch.Tensor | None = attrs.field(
        default=None, metadata={**tensor("(num_seqs, max_blocks_per_seq)", torch.int32), "optional": True}
    )
    context_chunks: tuple[ContextChunk, ...] = ()

    def __attrs_post_init__(self) -> None:
        self._check_part()
        _check_tuple("context_chunks", self.context_chunks, ContextChunk)
        if self.block_table is None and (self.context_chunks or self.paged_kv):
            raise MetadataError("block_table: expected a table for context_chunks and paged_kv, got None")
        for i, chunk in enumerate(self.context_chunks):
            if chunk.slots.device != self.seq_lens.device:
                raise MetadataError(f"context_chunks[{i}]: expected device {self.seq_lens.device}, got {chunk.slots.device}")
            past_seqs, past_tokens = chunk.first_seq + chunk.num_seqs, chunk.first_token + chunk.num_query_tokens
            if past_seqs > self.num_seqs or past_tokens > self.num_tokens:
                limits = f"{self.num_seqs} prompts and {self.num_tokens} tokens"
                raise MetadataError(f"context_chunks: expected chunk {i} within {limits}, got {past_seqs} and {past_tokens}")

    @property
    def max_context_chunk_tokens(self) -> int:
        """Rows that a workspace must hold: the largest pass."""
        return max([0, *[chunk.num_kv_tokens for chunk in self.context_chunks]])  # `default=` cannot be compiled


@named_fields(MetadataError)
@attrs.frozen(kw_only=True, eq=False)
class DecodeMetadata(_Part):
    """The decoding sequences of a batch, each with one or more new tokens.

    Parameters
    ----------
    query_start_loc, seq_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative new tokens and cumulative sequence lengths, from 0; padded sequences repeat the last value.
    seq_lens : torch.Tensor of shape (num_seqs,), int32
        Keys of each sequence, the new tokens included; 0 for a padded one.
    context_lens : torch.Tensor of shape (num_seqs,), int32
        Tokens that were in the cache before this step.
    slot_mapping : torch.Tensor of shape (num_tokens,), int64
        Cache slot of each new token; -1 is not written.
    positions : torch.Tensor of shape (num_tokens,), int64
        Position of each new token in its sequence, from 0; 0 for a padded one.
    block_size : int
        Tokens per block of the cache.
    max_query_len, max_seq_len : int
        Longest row of each kind.
    min_num_blocks : int
        Largest block id plus 1: the cache holds at least so many blocks.
    paged_kv : tuple of PagedKV
        The table at the page sizes that were asked for.
    block_table : torch.Tensor of shape (num_seqs, max_blocks_per_seq), int32
        Blocks of each sequence, look-ahead included, 0-padded.
    steps_left : int
        Tokens that every real sequence can still take in the blocks given.
    over_buffers : bool
        True for a record over the buffers of a `DecodeGraphState`: its numbers change when the state does, so no plan is made
        of it, and its host integers are the state's capacities.

    Raises
    ------
    MetadataError
        A wrong shape, dtype or device, or a negative count.

    Examples
    --------
    >>> from mla import build_metadata, decode_group
    >>> decode = build_metadata([decode_group(5, [7, 2])], block_size=4, pad_decodes_to=2).decode
    >>> decode.num_seqs, decode.num_tokens, decode.seq_lens.tolist(), decode.slot_mapping.tolist(), decode.steps_left
    (2, 2, [5, 0], [8, -1], 3)
    """

    block_table: torch.Tensor = attrs.field(metadata=tensor("(num_seqs, max_blocks_per_seq)", torch.int32))
    over_buffers: bool = False

    def __attrs_post_init__(self) -> None:
        self._check_part()


@named_fields(MetadataError)
@attrs.frozen(kw_only=True, eq=False)
class MLAMetadata(_Record):
    """Metadata of one step: the prompts come first, then the decoding sequences.

    Parameters
    ----------
    slot_mapping : torch.Tensor of shape (num_tokens,), int64
        Cache slot of each new token of the batch; -1 is not written.
    positions : torch.Tensor of shape (num_tokens,), int64
        Position of each new token in its sequence.
    block_size : int
        Tokens per block of the cache.
    prefill : PrefillMetadata or None
        The first ``num_prefill_tokens`` tokens.
    decode : DecodeMetadata or None
        The remaining ``num_decode_tokens`` tokens.
    is_profile_run : bool
        True where the sequences have no blocks: nothing is read from or written to a cache.
    multi_modal_placeholder_maps : tuple of (mapping or None)
        As passed with each sequence group, in their order.

    Raises
    ------
    MetadataError
        Parts that do not add up to the whole.

    Examples
    --------
    >>> from mla import build_metadata, decode_group, prompt_group
    >>> md = build_metadata([prompt_group(3, [5]), decode_group(5, [7, 2])], block_size=4)
    >>> md.num_prefills, md.num_prefill_tokens, md.num_decodes, md.num_decode_tokens, md.num_tokens, md.min_num_blocks
    (1, 3, 1, 1, 4, 8)
    """

    slot_mapping: torch.Tensor = attrs.field(metadata=tensor("(num_tokens,)", torch.int64))
    positions: torch.Tensor = attrs.field(metadata=tensor("(num_tokens,)", torch.int64))
    block_size: int
    prefill: PrefillMetadata | None = None
    decode: DecodeMetadata | None = None
    is_profile_run: bool = False
    multi_modal_placeholder_maps: tuple[Mapping[str, Any] | None, ...] = ()

    def __attrs_post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1, error=MetadataError)
        total = check_record(self, MetadataError)["num_tokens"]
        if self.prefill is None and self.decode is None:
            raise MetadataError("prefill, decode: expected at least one part, got None for both")
        for name, part, kind in (("prefill", self.prefill, PrefillMetadata), ("decode", self.decode, DecodeMetadata)):
            if part is None:
                continue
            check_instance(name, part, kind, MetadataError)
            if part.block_size != self.block_size:
                raise MetadataError(f"{name}.block_size: expected {self.block_size}, got {part.block_size}")
            if part.seq_lens.device != self.positions.device:
                raise MetadataError(f"{name}: expected device {self.positions.device}, got {part.seq_lens.device}")
        with_blocks = self.decode is not None or (self.prefill is not None and self.prefill.block_table is not None)
        if self.is_profile_run and with_blocks:
            raise MetadataError("is_profile_run: expected False for sequences with blocks, got True")
        prompts, decodes = self.num_prefill_tokens, self.num_decode_tokens
        if prompts + decodes != total:
            raise MetadataError(f"slot_mapping: expected {prompts} prefill + {decodes} decode tokens, got {total}")

    @property
    def num_prefills(self) -> int:
        """Prompts in the batch."""
        return 0 if self.prefill is None else self.prefill.num_seqs

    @property
    def num_prefill_tokens(self) -> int:
        """New tokens of the prompts."""
        return 0 if self.prefill is None else self.prefill.num_tokens

    @property
    def num_decodes(self) -> int:
        """Decoding sequences, padded ones included."""
        return 0 if self.decode is None else self.decode.num_seqs

    @property
    def num_decode_tokens(self) -> int:
        """New tokens of the decoding sequences, padded ones included."""
        return 0 if self.decode is None else self.decode.num_tokens

    @property
    def num_tokens(self) -> int:
        """New tokens of the batch, padded ones included."""
        return self.slot_mapping.shape[0]

    @property
    def min_num_blocks(self) -> int:
        """Blocks that the cache must hold."""
        return max((part.min_num_blocks for part in (self.prefill, self.decode) if part is not None), default=0)
