"""Multi-head Latent Attention on PyTorch, as plain functions.

Sequence groups become an immutable metadata record (`build_metadata`), which stateless functions consume (`mla_attention`, or
`attend` for models with their own projections) over a paged latent cache. The parts are `mla.metadata`, `mla.cache` and
`mla.compute`.
"""

from mla.cache import BlockPool, LatentCacheSpec, allocate_latent_cache
from mla.compute import KernelSet, RopeTable, explain, kernel_set, kernels_for, rope_table
from mla.errors import CacheError, DimsError, KernelError, MetadataError, MLAError, WeightsError
from mla.layer import attend, mla_attention
from mla.loading import dims_from_config, load_weights, weights_from_state_dict
from mla.metadata import (
    MLADims,
    MLAMetadata,
    RopeSpec,
    SequenceGroup,
    YarnSpec,
    build_metadata,
    decode_group,
    prompt_group,
    validate_metadata_values,
)
from mla.module import MLAAttention
from mla.pytrees import register_pytrees
from mla.state import DecodeGraphState
from mla.weights import MLAWeights

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "CacheError",
    "DecodeGraphState",
    "DimsError",
    "KernelError",
    "KernelSet",
    "LatentCacheSpec",
    "MLAAttention",
    "MLADims",
    "MLAError",
    "MLAMetadata",
    "MLAWeights",
    "MetadataError",
    "RopeSpec",
    "RopeTable",
    "SequenceGroup",
    "WeightsError",
    "YarnSpec",
    "allocate_latent_cache",
    "attend",
    "build_metadata",
    "decode_group",
    "dims_from_config",
    "explain",
    "kernel_set",
    "kernels_for",
    "load_weights",
    "mla_attention",
    "prompt_group",
    "register_pytrees",
    "rope_table",
    "validate_metadata_values",
    "weights_from_state_dict",
]
