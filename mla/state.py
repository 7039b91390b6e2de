"""Buffers of fixed address for decoding under graph capture: beside the cache, the one thing that changes in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from mla._checks import as_items, check_instance, check_int, usable_device
from mla.errors import MetadataError
from mla.metadata.advance import check_page_numbers, paged_kv_tensors, step_tensors
from mla.metadata.records import DecodeMetadata, MLAMetadata, PagedKV

__all__ = ["DecodeGraphState"]


@attrs.frozen(kw_only=True)
class _Batch:
    """What the host knows of the loaded batch."""

    size: int
    rows: int
    tokens: int
    columns: int
    query_len: int
    seq_len: int
    steps_left: int


_NOTHING = _Batch(size=0, rows=0, tokens=0, columns=0, query_len=0, seq_len=0, steps_left=0)


class _Pages:
    """Buffers of one page size."""

    def __init__(self, page_size: int, max_num_seqs: int, max_seq_len: int, device: torch.device) -> None:
        self.page_size = page_size
        self.indptr = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.indices = torch.zeros(max_num_seqs * -(-max_seq_len // page_size), dtype=torch.int32, device=device)
        self.last_page_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)


class DecodeGraphState:
    """Every tensor of a decode record, allocated once for the largest batch, refilled before each replay.

    A graph remembers addresses: capture it over `metadata_for`, then `load_` each step's record (or `advance_` the loaded one)
    and replay. Rows and tokens that a batch does not use follow the public padding rule: length 0, slot -1, position 0,
    cumulative arrays repeat their last value. So a capture's warm-up, which runs on empty rows, leaves the cache as it is.

    Parameters
    ----------
    max_num_seqs : int
        Decoding sequences of the largest batch.
    max_seq_len : int
        Longest sequence, new tokens included.
    block_size : int
        Tokens per block of the cache.
    num_blocks : int
        Blocks of the cache: records over the buffers need so many, and a batch with a larger block id is refused.
    query_len : int
        New tokens per sequence at most.
    page_sizes : sequence of int
        One page list each, as ``build_metadata(..., page_sizes=...)`` adds them.
    capture_sizes : sequence of int
        Batch sizes that graphs are captured for, in addition to `max_num_seqs`; the buffers hold the largest of all.
    device : torch.device or str
        Where the buffers live.

    Raises
    ------
    MetadataError
        A number below 1, or a page size that does not divide the block size.

    Examples
    --------
    >>> from mla.metadata import build_metadata, decode_group
    >>> state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=16, num_blocks=32)
    >>> with state.capture():
    ...     captured = state.metadata_for(4)
    >>> record = state.load_(build_metadata([decode_group(17, [3, 9])], block_size=16))
    >>> captured.decode.seq_lens.tolist(), captured.slot_mapping.tolist(), state.max_num_decodes, state.steps_left
    ([17, 0, 0, 0], [144, -1, -1, -1], 4, 15)
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_seq_len: int,
        block_size: int,
        num_blocks: int,
        query_len: int = 1,
        page_sizes: Sequence[int] = (),
        capture_sizes: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_seq_len", max_seq_len),
            ("block_size", block_size),
            ("num_blocks", num_blocks),
            ("query_len", query_len),
        ):
            check_int(name, value, low=1, error=MetadataError)
        sizes = [
            check_int("capture_sizes", n, low=1, error=MetadataError)
            for n in as_items("capture_sizes", capture_sizes, MetadataError)
        ]
        pages = as_items("page_sizes", page_sizes, MetadataError)
        for size in pages:
            check_int("page_sizes", size, low=1, error=MetadataError)
            if block_size % size:
                raise MetadataError(f"page_sizes: expected divisors of block_size {block_size}, got {size}")
            check_page_numbers(num_blocks, block_size // size)
        if len(set(pages)) != len(pages):
            raise MetadataError(f"page_sizes: expected every page size once, got {pages}")
        where = usable_device("device", device, MetadataError)
        self._max_seq_len, self._block_size, self._num_blocks, self._query_len = max_seq_len, block_size, num_blocks, query_len
        self._sizes = tuple(sorted({max_num_seqs, *sizes}))
        self._captured: tuple[int, ...] = ()
        self._capturing = False
        self._batch = _NOTHING
        rows = self._sizes[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=where)

        self._query_start_loc, self._seq_start_loc = zeros(rows + 1), zeros(rows + 1)
        self._seq_lens, self._context_lens = zeros(rows), zeros(rows)
        self._block_table = zeros(rows, -(-max_seq_len // block_size))
        self._slot_mapping = zeros(rows * query_len, dtype=torch.int64).fill_(-1)
        self._positions = zeros(rows * query_len, dtype=torch.int64)
        # A copy from the host into a part of the table's columns would go through a temporary on the device.
        self._staging = zeros(self._block_table.numel())
        self._pages = [_Pages(size, rows, max_seq_len, where) for size in pages]

    @property
    def max_num_decodes(self) -> int:
        """Rows of the buffers."""
        return self._sizes[-1]

    @property
    def steps_left(self) -> int:
        """Tokens that every loaded sequence can still take."""
        return self._batch.steps_left

    def _tensors(self) -> list[torch.Tensor]:
        """Every buffer that records show."""
        pages = [tensor for p in self._pages for tensor in (p.indptr, p.indices, p.last_page_lens)]
        return [
            self._query_start_loc,
            self._seq_start_loc,
            self._seq_lens,
            self._context_lens,
            self._block_table,
            self._slot_mapping,
            self._positions,
            *pages,
        ]

    @contextmanager
    def capture(self) -> Iterator[DecodeGraphState]:
        """Allow `metadata_for` inside: the buffers hold empty rows on entry, so that a warm-up writes to no cache.

        An exception inside leaves the state as it was before.

        Raises
        ------
        MetadataError
            A capture within a capture.

        Examples
        --------
        >>> state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=16, num_blocks=32)
        >>> with state.capture():  # on a GPU, capture one graph over each record
        ...     [state.metadata_for(size).num_decodes for size in (1, 4)]
        [1, 4]
        """
        if self._capturing:
            raise MetadataError("capture: expected no capture in progress, got one inside another")
        before = self._captured, self._batch, [tensor.clone() for tensor in self._tensors()]
        self._capturing = True
        self.clear_()
        try:
            yield self
        except BaseException:
            self._captured, self._batch, contents = before
            for tensor, content in zip(self._tensors(), contents, strict=True):
                tensor.copy_(content)
            raise
        else:
            self.clear_()
        finally:
            self._capturing = False

    def metadata_for(self, num_decodes: int) -> MLAMetadata:
        """A record over the buffers, to capture a graph with `num_decodes` sequences.

        Its host integers are the state's capacities.

        Raises
        ------
        MetadataError
            Outside of `capture`, or more sequences than the buffers hold.

        Examples
        --------
        >>> with DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=16, num_blocks=32).capture() as state:
        ...     decode = state.metadata_for(2).decode
        >>> decode.max_seq_len, decode.min_num_blocks, decode.over_buffers
        (64, 32, True)
        """
        if not self._capturing:
            raise MetadataError("metadata_for: expected a capture in progress, got a call outside of it")
        check_int("num_decodes", num_decodes, low=1, high=self.max_num_decodes, error=MetadataError)
        self._captured = tuple(sorted({*self._captured, num_decodes}))
        return self._record(num_decodes)

    def _record(self, size: int) -> MLAMetadata:
        # A new record every time: a plan serves the record that it was made of, and the numbers behind this one change.
        tokens = size * self._query_len
        slots, positions = self._slot_mapping[:tokens], self._positions[:tokens]
        paged = tuple(
            PagedKV(
                page_size=pages.page_size,
                paged_kv_indptr=pages.indptr[: size + 1],
                paged_kv_indices=pages.indices,
                paged_kv_last_page_lens=pages.last_page_lens[:size],
            )
            for pages in self._pages
        )
        decode = DecodeMetadata(
            query_start_loc=self._query_start_loc[: size + 1],
            seq_start_loc=self._seq_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            context_lens=self._context_lens[:size],
            slot_mapping=slots,
            positions=positions,
            block_size=self._block_size,
            max_query_len=self._query_len,
            max_seq_len=self._max_seq_len,
            min_num_blocks=self._num_blocks,
            paged_kv=paged,
            block_table=self._block_table[:size],
            over_buffers=True,
        )
        return MLAMetadata(slot_mapping=slots, positions=positions, block_size=self._block_size, decode=decode)

    def clear_(self) -> None:
        """Make every row empty.

        Examples
        --------
        >>> from mla import build_metadata, decode_group
        >>> state = DecodeGraphState(max_num_seqs=2, max_seq_len=64, block_size=16, num_blocks=32)
        >>> record = state.load_(build_metadata([decode_group(17, [3, 9])], block_size=16))
        >>> state.clear_()
        >>> record.decode.seq_lens.tolist(), record.slot_mapping.tolist()
        ([0, 0], [-1, -1])
        """
        for tensor in self._tensors():
            tensor.zero_()
        self._slot_mapping.fill_(-1)
        self._batch = _NOTHING

    def load_(self, metadata: MLAMetadata) -> MLAMetadata:
        """Copy a decode batch into the buffers, padded to the next captured size.

        Copies are partial and asynchronous, nothing is allocated on the device, and no value is read on the host.

        Parameters
        ----------
        metadata : MLAMetadata
            Decoding sequences only, on any device, with the state's page sizes.

        Returns
        -------
        MLAMetadata
            Over the buffers, with as many rows as the graph to replay.

        Raises
        ------
        MetadataError
            A batch that does not fit; nothing is written then.

        Examples
        --------
        >>> from mla import build_metadata, decode_group
        >>> state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=16, num_blocks=32, capture_sizes=[2])
        >>> state.load_(build_metadata([decode_group(17, [3, 9])], block_size=16)).decode.seq_lens.tolist()
        [17, 0]
        """
        decode, size = self._check_fits(metadata)
        last, rows, tokens = self._batch, decode.num_seqs, decode.num_tokens
        columns = min(decode.block_table.shape[1], self._block_table.shape[1])
        for buffer, source in ((self._query_start_loc, decode.query_start_loc), (self._seq_start_loc, decode.seq_start_loc)):
            _copy_starts_(buffer, source)
        for buffer, source in ((self._seq_lens, decode.seq_lens), (self._context_lens, decode.context_lens)):
            _copy_head_(buffer, source, last.rows, 0)
        _copy_head_(self._slot_mapping, decode.slot_mapping, last.tokens, -1)
        _copy_head_(self._positions, decode.positions, last.tokens, 0)
        self._copy_table_(decode.block_table[:, :columns])
        self._block_table[:rows, columns : max(last.columns, columns)].zero_()
        self._block_table[rows : max(last.rows, rows), : last.columns].zero_()
        for pages in self._pages:
            paged = decode.paged_kv_of(pages.page_size)
            _copy_starts_(pages.indptr, paged.paged_kv_indptr)
            _copy_head_(pages.last_page_lens, paged.paged_kv_last_page_lens, last.rows, 0)
            # What lies past the last indptr is unreachable and stays.
            count = min(paged.paged_kv_indices.shape[0], pages.indices.shape[0])
            pages.indices[:count].copy_(paged.paged_kv_indices[:count], non_blocking=True)
        self._batch = _Batch(
            size=size,
            rows=rows,
            tokens=tokens,
            columns=columns,
            query_len=decode.max_query_len,
            seq_len=decode.max_seq_len,
            steps_left=min(decode.steps_left, self._max_seq_len - decode.max_seq_len),
        )
        return self._record(size)

    def _copy_table_(self, source: torch.Tensor) -> None:
        rows, columns = source.shape
        if source.device != self._block_table.device:
            source = self._staging[: rows * columns].view(rows, columns).copy_(source, non_blocking=True)
        self._block_table[:rows, :columns].copy_(source, non_blocking=True)

    def _check_fits(self, metadata: MLAMetadata) -> tuple[DecodeMetadata, int]:
        """Refuse a batch that does not fit; its decode part and the number of rows that it is padded to."""
        check_instance("metadata", metadata, MLAMetadata, MetadataError)
        decode = metadata.decode
        if metadata.prefill is not None or decode is None:
            raise MetadataError(f"metadata: expected decoding sequences only, got {metadata.num_prefills} prompts")
        if decode.over_buffers:
            raise MetadataError("metadata: expected the record of one step, got a record over a state's buffers")
        if decode.seq_lens.is_meta and not self._seq_lens.is_meta:
            raise MetadataError("metadata: expected values, got a record on device meta")
        if decode.block_size != self._block_size:
            raise MetadataError(f"block_size: expected {self._block_size}, got {decode.block_size}")
        for name, value, limit in (
            ("max_query_len", decode.max_query_len, self._query_len),
            ("max_seq_len", decode.max_seq_len, self._max_seq_len),
            ("min_num_blocks", decode.min_num_blocks, self._num_blocks),
        ):
            if value > limit:
                raise MetadataError(f"{name}: expected at most {limit}, got {value}")
        sizes = self._captured or self._sizes
        size = next((n for n in sizes if n >= decode.num_seqs and n * self._query_len >= decode.num_tokens), None)
        if size is None:
            raise MetadataError(
                f"num_decodes: expected at most {sizes[-1]} sequences and {sizes[-1] * self._query_len} tokens, "
                f"got {decode.num_seqs} and {decode.num_tokens}"
            )
        for pages in self._pages:
            decode.paged_kv_of(pages.page_size)
        return decode, size

    def advance_(self) -> MLAMetadata:
        """One decoding step on the device: every new token is accepted and each sequence takes as many again.

        Positions, lengths, slots and page lists are computed from the buffers and written into them; the host reads nothing.

        Returns
        -------
        MLAMetadata
            Over the buffers.

        Raises
        ------
        MetadataError
            Nothing is loaded, or a sequence has no block for the next token; nothing is written then.

        Examples
        --------
        >>> from mla import build_metadata, decode_group
        >>> state = DecodeGraphState(max_num_seqs=2, max_seq_len=64, block_size=16, num_blocks=32)
        >>> record = state.load_(build_metadata([decode_group(17, [3, 9])], block_size=16))
        >>> state.advance_().slot_mapping.tolist(), state.steps_left
        ([145, -1], 14)
        """
        batch = self._batch
        if not batch.size:
            raise MetadataError("advance_: expected a loaded batch, got none")
        if batch.steps_left < batch.query_len:
            raise MetadataError(f"steps_left: expected at least {batch.query_len} for another step, got {batch.steps_left}")
        rows, tokens, seq_len = batch.rows, batch.tokens, batch.seq_len + batch.query_len
        starts, table = self._query_start_loc[: rows + 1], self._block_table[:rows]
        stepped = step_tensors(self._seq_lens[:rows], starts, table, num_tokens=tokens, block_size=self._block_size)
        self._seq_lens[:rows].copy_(stepped.seq_lens)
        self._context_lens[:rows].copy_(stepped.context_lens)
        _copy_starts_(self._seq_start_loc, stepped.seq_start_loc)
        self._slot_mapping[:tokens].copy_(stepped.slot_mapping)
        self._positions[:tokens].copy_(stepped.positions)
        for pages in self._pages:
            count = min(rows * -(-seq_len // pages.page_size), pages.indices.shape[0])
            indptr, indices, last = paged_kv_tensors(
                stepped.seq_lens, table, block_size=self._block_size, page_size=pages.page_size, num_pages=count
            )
            _copy_starts_(pages.indptr, indptr)
            pages.indices[:count].copy_(indices)
            pages.last_page_lens[:rows].copy_(last)
        self._batch = attrs.evolve(batch, seq_len=seq_len, steps_left=batch.steps_left - batch.query_len)
        return self._record(batch.size)


def _copy_head_(buffer: torch.Tensor, source: torch.Tensor, used: int, padding: int) -> None:
    """Copy `source` to the head of `buffer` and pad what an earlier, longer batch left behind it."""
    count = source.shape[0]
    buffer[:count].copy_(source, non_blocking=True)
    buffer[count : max(used, count)].fill_(padding)


def _copy_starts_(buffer: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a cumulative array; its last value is repeated to the end of the buffer."""
    count = source.shape[0]
    buffer[:count].copy_(source, non_blocking=True)
    buffer[count:].copy_(buffer[count - 1 : count].expand(buffer.shape[0] - count))
