"""Attention over the latent cache: what exists once for all devices, and the kernels of each."""

from mla.compute.absorb import absorb_query, expand_latent, project_output, split_kv_b_proj
from mla.compute.attention import decode, prefill, prefill_workspace_bytes
from mla.compute.contracts import GatherLatentCache, PagedDecode, VarlenAttention, WriteLatentCache
from mla.compute.kernels import KernelSet, explain
from mla.compute.merge import merge_attn_states
from mla.compute.operators import as_operators
from mla.compute.products import head_linear, linear
from mla.compute.rope import RopeTable, apply_rope, rope_table
from mla.compute.select import kernel_set, kernels_for

__all__ = [
    "GatherLatentCache",
    "KernelSet",
    "PagedDecode",
    "RopeTable",
    "VarlenAttention",
    "WriteLatentCache",
    "absorb_query",
    "apply_rope",
    "as_operators",
    "decode",
    "expand_latent",
    "explain",
    "head_linear",
    "kernel_set",
    "kernels_for",
    "linear",
    "merge_attn_states",
    "prefill",
    "prefill_workspace_bytes",
    "project_output",
    "rope_table",
    "split_kv_b_proj",
]
