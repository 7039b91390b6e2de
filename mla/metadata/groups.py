"""What a scheduler says about a batch, in plain Python: no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from mla._checks import check_int
from mla.errors import MetadataError

__all__ = ["BlockIds", "SequenceGroup", "decode_group", "prompt_group"]

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def _tuple_of_ints(values: Iterable[int] | int) -> tuple[int, ...]:
    return (values,) if isinstance(values, int) else tuple(values)


def _tuple_of_tables(tables: Iterable[BlockIds] | None) -> tuple[BlockIds, ...] | None:
    return None if tables is None else tuple(tables)


@attrs.frozen(kw_only=True, eq=False)
class SequenceGroup:
    """Sequences that a scheduler treats alike: one prompt, or one or more samples of it that are being decoded.

    Parameters
    ----------
    is_prompt : bool
        True for prefill, False for decode.
    query_lens : sequence of int
        New tokens of each sequence in this step.
    context_lens : sequence of int
        Tokens of each sequence that are in the cache already.
    block_ids : sequence of (sequence of int or numpy.ndarray) or None
        Physical blocks of each sequence in order; may go beyond the sequence's end (look-ahead). None on a profile run.
    seq_lens : sequence of int or None
        Context plus new tokens. Given, it must agree; None derives it.
    seq_ids : sequence of int or None
        Names of the sequences for error messages; None counts from 0 over the batch.
    prefix_cache_hit : bool
        Whether the context came from a prefix cache. A context is a context here, so this changes nothing but needs blocks.
    multi_modal_placeholder_map : mapping or None
        Passed through to the record.
    sliding_window : int or None
        Refused by the builder unless None.

    Raises
    ------
    MetadataError
        Lists of different lengths.
    """

    is_prompt: bool
    query_lens: tuple[int, ...] = attrs.field(converter=_tuple_of_ints)
    context_lens: tuple[int, ...] = attrs.field(converter=_tuple_of_ints)
    block_ids: tuple[BlockIds, ...] | None = attrs.field(default=None, converter=_tuple_of_tables)
    seq_lens: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple_of_ints))
    seq_ids: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple_of_ints))
    prefix_cache_hit: bool = False
    multi_modal_placeholder_map: Mapping[str, Any] | None = None
    sliding_window: int | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.is_prompt, bool):
            raise MetadataError(f"is_prompt: expected True or False, got {self.is_prompt!r}")
        for name in ("context_lens", "block_ids", "seq_lens", "seq_ids"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.query_lens):
                raise MetadataError(
                    f"{name}: expected {len(self.query_lens)} entries, one per entry of query_lens, got {len(value)}"
                )
        if not self.query_lens:
            raise MetadataError("query_lens: expected at least one sequence in a group, got none")


def prompt_group(
    query_len: int, block_ids: BlockIds | None = None, *, context_len: int = 0, seq_id: int | None = None
) -> SequenceGroup:
    """One prompt: `query_len` new tokens after `context_len` cached ones.

    Examples
    --------
    >>> prompt_group(5, [7, 2], context_len=16).is_prompt
    True
    """
    check_int("query_len", query_len, low=0, error=MetadataError)
    return SequenceGroup(
        is_prompt=True,
        query_lens=(query_len,),
        context_lens=(context_len,),
        block_ids=None if block_ids is None else (block_ids,),
        seq_ids=None if seq_id is None else (seq_id,),
    )


def decode_group(seq_len: int, block_ids: BlockIds, *, query_len: int = 1, seq_id: int | None = None) -> SequenceGroup:
    """One decoding sequence of `seq_len` tokens, the last `query_len` of which are new.

    Examples
    --------
    >>> decode_group(17, [7, 2]).context_lens
    (16,)
    """
    check_int("seq_len", seq_len, low=0, error=MetadataError)
    check_int("query_len", query_len, low=0, error=MetadataError)
    return SequenceGroup(
        is_prompt=False,
        query_lens=(query_len,),
        context_lens=(seq_len - query_len,),
        block_ids=(block_ids,),
        seq_ids=None if seq_id is None else (seq_id,),
    )
