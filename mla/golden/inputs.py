"""Inputs of a golden case, all made of the integer hash.

Every cache row that no key lies in is NaN: whoever reads one shows it.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from mla.errors import GoldenError
from mla.golden.case import GoldenCase
from mla.golden.hashing import hash_tensor
from mla.metadata.build import build_metadata
from mla.metadata.records import DecodeMetadata, MLAMetadata, PrefillMetadata

__all__ = ["CaseInputs", "make_inputs", "make_metadata", "part_of"]


@attrs.frozen(kw_only=True, eq=False)
class CaseInputs:
    """Tensors and metadata of a case, on one device.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim) or (num_tokens, num_heads, qk_head_dim)
        Queries: folded into the latent space to decode, plain for prompts.
    kv_c : torch.Tensor of shape (num_tokens, kv_lora_rank)
        Latents of the new tokens.
    k_pe : torch.Tensor of shape (num_tokens, qk_rope_head_dim)
        Rotated key parts of the new tokens.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Holds the context; every other row is NaN, those of the new tokens included.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank) or None
        The up-projection; None to decode.
    metadata : MLAMetadata
        Of the step.
    """

    q: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    latent_cache: torch.Tensor
    kv_b_proj: torch.Tensor | None
    metadata: MLAMetadata

    def written_cache(self) -> torch.Tensor:
        """The cache as it must be once the new tokens are stored, made by plain indexing."""
        cache = self.latent_cache.clone()
        rows = cache.view(-1, cache.shape[2])
        for token, slot in enumerate(self.metadata.slot_mapping.tolist()):
            if slot >= 0:
                rows[slot] = torch.cat([self.kv_c[token], self.k_pe[token]])
        return cache

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> CaseInputs:
        """The same numbers elsewhere, or wider."""
        changed: dict[str, Any] = {}
        for field in attrs.fields(CaseInputs):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                changed[field.name] = value.to(device=device, dtype=dtype)
        if device is not None:
            changed["metadata"] = self.metadata.to(device)
        return attrs.evolve(self, **changed)


def part_of(metadata: MLAMetadata) -> PrefillMetadata | DecodeMetadata:
    """The one part that a golden case has.

    Raises
    ------
    GoldenError
        Metadata with both parts or with none.
    """
    if metadata.decode is None and metadata.prefill is not None:
        return metadata.prefill
    if metadata.prefill is None and metadata.decode is not None:
        return metadata.decode
    raise GoldenError("metadata: expected prompts or decoding sequences, got both")


def make_metadata(case: GoldenCase, *, page_size: int | None = None) -> MLAMetadata:
    """Metadata of a case on the CPU.

    Parameters
    ----------
    case : GoldenCase
        With blocks for its sequences.
    page_size : int or None
        A `PagedKV` that a kernel set needs.

    Raises
    ------
    MetadataError
        What the builder refuses.
    """
    return build_metadata(
        case.groups,
        block_size=case.block_size,
        context_chunk_tokens=case.context_chunk_tokens,
        pad_decodes_to=case.pad_decodes_to,
        page_sizes=() if page_size is None else (page_size,),
    )


def make_inputs(case: GoldenCase, *, page_size: int | None = None) -> CaseInputs:
    """Inputs of a case on the CPU, rounded to its dtype.

    Parameters
    ----------
    case : GoldenCase
        With or without blocks for its sequences.
    page_size : int or None
        A `PagedKV` that a kernel set needs in the metadata.

    Raises
    ------
    GoldenError, MetadataError
        What the metadata's builder refuses.
    """
    placed, dims, salts, gains = case.placed(), case.dims, case.salts, case.gains
    metadata = make_metadata(placed, page_size=page_size)
    part, num_tokens = part_of(metadata), metadata.num_tokens
    width = dims.latent_dim if case.kind == "decode" else dims.qk_head_dim
    cache = hash_tensor((placed.cache_blocks, case.block_size, dims.latent_dim), salts.latent_cache, gains.latent_cache)
    rows = cache.view(-1, dims.latent_dim)
    context = torch.zeros(len(rows), dtype=torch.bool)
    if part.block_table is not None:
        for table, length in zip(part.block_table, part.context_lens.tolist(), strict=True):
            positions = torch.arange(length)
            context[table[positions // case.block_size].long() * case.block_size + positions % case.block_size] = True
    rows[~context] = torch.nan
    kv_b_proj = None
    if case.kind != "decode":
        shape = (dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
        kv_b_proj = hash_tensor(shape, salts.kv_b_proj, gains.kv_b_proj).to(case.dtype)
    return CaseInputs(
        q=hash_tensor((num_tokens, dims.num_heads, width), salts.q, gains.q).to(case.dtype),
        kv_c=hash_tensor((num_tokens, dims.kv_lora_rank), salts.kv_c, gains.kv_c).to(case.dtype),
        k_pe=hash_tensor((num_tokens, dims.qk_rope_head_dim), salts.k_pe, gains.k_pe).to(case.dtype),
        latent_cache=cache.to(case.dtype),
        kv_b_proj=kv_b_proj,
        metadata=metadata,
    )
