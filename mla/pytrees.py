"""Records as pytree nodes of torch, so that `torch.export` and ``torch.utils._pytree.tree_map`` see the tensors in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from mla.cache.spec import LatentCacheSpec
from mla.compute.rope import RopeTable
from mla.metadata.dims import MLADims, RopeSpec, YarnSpec
from mla.metadata.records import ContextChunk, DecodeMetadata, MLAMetadata, PagedKV, PrefillMetadata
from mla.weights import MLAWeights

__all__ = ["register_pytrees"]

RECORDS = (PagedKV, ContextChunk, PrefillMetadata, DecodeMetadata, MLAMetadata, RopeTable, MLAWeights)
SPECS = (YarnSpec, RopeSpec, MLADims, LatentCacheSpec)
CONSTANTS = {"over_buffers", "is_profile_run", "interleaved", "dims"}
CARRIED = {"multi_modal_placeholder_maps"}
_SPEC_OF_NAME = {kind.__name__: kind for kind in SPECS}


@attrs.frozen(kw_only=True)
class _Context:
    """What a record holds beside its leaves."""

    constants: tuple[Any, ...]
    carried: tuple[Any, ...] = attrs.field(default=(), eq=False)  # no kernel reads it, and its length is the batch's


def register_pytrees() -> None:
    """Make records pytree nodes of torch; idempotent, and called by nothing but you.

    Leaves are the tensors and the integers of `PagedKV`, `ContextChunk`, `PrefillMetadata`, `DecodeMetadata`, `MLAMetadata`,
    `RopeTable` and `MLAWeights`, nested records and tuples included, so that `torch.export` can make lengths, batch and cache
    sizes dynamic. Flags, `MLADims`, `RopeSpec`, `YarnSpec` and `LatentCacheSpec` have no leaves: they are constants, of which
    another value is another structure. Records are put together again as they are, without a check, since a tree may hold
    other things than tensors. A saved program keeps no `multi_modal_placeholder_maps`.

    Call it before `torch.export.export`, and in every process before `torch.export.load`: a program that was saved names the
    records. The operators in it are registered by ``import mla``; those of a `KernelSet` of your own by
    `mla.compute.as_operators`. Saved programs hold their example inputs, so ``torch.load(..., weights_only=True)`` may read
    records from here on; that runs no code of theirs.

    Examples
    --------
    >>> from mla import build_metadata, decode_group
    >>> register_pytrees()
    >>> metadata = build_metadata([decode_group(5, [1])], block_size=16)
    >>> doubled = pytree.tree_map_only(torch.Tensor, lambda x: 2 * x, metadata)
    >>> metadata.decode.seq_lens.tolist(), doubled.decode.seq_lens.tolist()
    ([5], [10])
    """
    torch.serialization.add_safe_globals([*RECORDS, *SPECS])
    for kind in RECORDS:
        _register(kind, leaves=[name for name in _fields(kind) if name not in CONSTANTS | CARRIED])
    for spec in SPECS:
        _register(spec, leaves=[])


def _fields(kind: type) -> list[str]:
    return [field.name for field in attrs.fields(kind)]


def _register(kind: type, *, leaves: list[str]) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    constants = [name for name in _fields(kind) if name not in leaves and name not in CARRIED]
    carried = [name for name in _fields(kind) if name in CARRIED]

    def flatten(record: Any) -> tuple[list[Any], _Context]:
        parts = [tuple(getattr(record, name) for name in names) for names in (leaves, constants, carried)]
        return list(parts[0]), _Context(constants=parts[1], carried=parts[2])

    def flatten_with_keys(record: Any) -> tuple[list[tuple[Any, Any]], _Context]:
        values, context = flatten(record)
        return [(pytree.GetAttrKey(name), value) for name, value in zip(leaves, values, strict=True)], context

    def unflatten(values: Iterable[Any], context: _Context) -> Any:
        record: Any = object.__new__(kind)
        for names, parts in ((leaves, tuple(values)), (constants, context.constants), (carried, context.carried)):
            for name, value in zip(names, parts, strict=True):
                object.__setattr__(record, name, value)
        return record

    def dump(context: _Context) -> list[Any]:
        return [_as_json(value) for value in context.constants]

    def load(values: list[Any]) -> _Context:
        return _Context(constants=tuple(map(_from_json, values)), carried=((),) * len(carried))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"mla.{kind.__name__}",
        to_dumpable_context=dump,
        from_dumpable_context=load,
        flatten_with_keys_fn=flatten_with_keys,
    )


def _as_json(value: Any) -> Any:
    if type(value) in SPECS:
        return {"kind": type(value).__name__, **{name: _as_json(getattr(value, name)) for name in _fields(type(value))}}
    return str(value) if isinstance(value, torch.dtype) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        kind = _SPEC_OF_NAME[value["kind"]]
        return kind(**{name: _from_json(part) for name, part in value.items() if name != "kind"})
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value
