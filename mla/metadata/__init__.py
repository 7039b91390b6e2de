"""From what a scheduler knows to immutable metadata records."""

from mla.metadata.advance import advance_step
from mla.metadata.build import build_metadata, context_workspace_tokens
from mla.metadata.dims import MLADims, RopeSpec, YarnSpec
from mla.metadata.groups import SequenceGroup, decode_group, prompt_group
from mla.metadata.records import ContextChunk, DecodeMetadata, MLAMetadata, PagedKV, PrefillMetadata
from mla.metadata.validate import validate_metadata_values

__all__ = [
    "ContextChunk",
    "DecodeMetadata",
    "MLADims",
    "MLAMetadata",
    "PagedKV",
    "PrefillMetadata",
    "RopeSpec",
    "SequenceGroup",
    "YarnSpec",
    "advance_step",
    "build_metadata",
    "context_workspace_tokens",
    "decode_group",
    "prompt_group",
    "validate_metadata_values",
]
