"""What a scheduler says about a batch, in plain Python: no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from mla._checks import check_instance, check_int, named_fields
from mla.errors import MetadataError

__all__ = ["BlockIds", "SequenceGroup", "decode_group", "prompt_group"]

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


# Converters do not know their field: what is no sequence stays as it is, for `SequenceGroup` to refuse by name.
def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values) if isinstance(values, Iterable) else values


def _optional_ints(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return tuple(values) if isinstance(values, Iterable) else values


def _optional_tables(tables: Iterable[BlockIds] | None) -> tuple[BlockIds, ...] | None:
    return tuple(tables) if isinstance(tables, Iterable) else tables


@named_fields(MetadataError)
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
        Fields that are no sequences or of different lengths, or no sequence at all.

    Examples
    --------
    >>> from mla import build_metadata
    >>> group = SequenceGroup(is_prompt=False, query_lens=[1, 1], context_lens=[16, 16], block_ids=[[7, 2], [7, 5]])
    >>> metadata = build_metadata([group], block_size=16)  # two samples of one prompt, which share its block 7
    >>> metadata.slot_mapping.tolist(), metadata.decode.seq_lens.tolist()
    ([32, 80], [17, 17])
    """

    is_prompt: bool
    query_lens: tuple[int, ...] = attrs.field(converter=_ints)
    context_lens: tuple[int, ...] = attrs.field(converter=_ints)
    block_ids: tuple[BlockIds, ...] | None = attrs.field(default=None, converter=_optional_tables)
    seq_lens: tuple[int, ...] | None = attrs.field(default=None, converter=_optional_ints)
    seq_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_optional_ints)
    prefix_cache_hit: bool = False
    multi_modal_placeholder_map: Mapping[str, Any] | None = None
    sliding_window: int | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.is_prompt, bool):
            raise MetadataError(f"is_prompt: expected True or False, got {self.is_prompt!r}")
        check_instance("query_lens", self.query_lens, tuple, MetadataError)
        check_instance("context_lens", self.context_lens, tuple, MetadataError)
        for name in ("context_lens", "block_ids", "seq_lens", "seq_ids"):
            value = getattr(self, name)
            if value is not None:
                check_instance(name, value, tuple, MetadataError)
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

    Raises
    ------
    MetadataError
        A length that is not an int >= 0.

    Examples
    --------
    >>> prompt_group(5, [7, 2], context_len=16).is_prompt
    True
    """
    check_int("query_len", query_len, low=0, error=MetadataError)
    check_int("context_len", context_len, low=0, error=MetadataError)
    return SequenceGroup(
        is_prompt=True,
        query_lens=(query_len,),
        context_lens=(context_len,),
        block_ids=None if block_ids is None else (block_ids,),
        seq_ids=None if seq_id is None else (seq_id,),
    )


def decode_group(seq_len: int, block_ids: BlockIds, *, query_len: int = 1, seq_id: int | None = None) -> SequenceGroup:
    """One decoding sequence of `seq_len` tokens, the last `query_len` of which are new.

    Raises
    ------
    MetadataError
        A length that is not an int >= 0, or more new tokens than tokens.

    Examples
    --------
    >>> decode_group(17, [7, 2]).context_lens
    (16,)
    """
    check_int("seq_len", seq_len, low=0, error=MetadataError)
    check_int("query_len", query_len, low=0, high=seq_len, error=MetadataError)
    return SequenceGroup(
        is_prompt=False,
        query_lens=(query_len,),
        context_lens=(seq_len - query_len,),
        block_ids=(block_ids,),
        seq_ids=None if seq_id is None else (seq_id,),
    )
