"""Running one golden case: through a kernel set, and through the float64 specification."""

from __future__ import annotations

from typing import Any

import torch

from mla.compute import reference
from mla.compute.attention import prefill
from mla.compute.kernels import KernelSet
from mla.errors import GoldenError
from mla.golden.case import GoldenCase
from mla.golden.inputs import CaseInputs, part_of
from mla.metadata.records import DecodeMetadata, PrefillMetadata

__all__ = ["reference_of", "run_case"]


def run_case(case: GoldenCase, inputs: CaseInputs, kernels: KernelSet) -> tuple[Any, Any, torch.Tensor]:
    """What a kernel set makes of a case.

    The new tokens are stored by its `write_latent_cache_`; then its `paged_decode` runs, or `mla.compute.prefill` over it.

    Parameters
    ----------
    case : GoldenCase
        Dimensions and kind.
    inputs : CaseInputs
        On the device and in the dtype to run in; they are not changed.
    kernels : KernelSet
        What runs.

    Returns
    -------
    out, lse
        As the kernels return them, unchecked.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        After the new tokens were stored.

    Raises
    ------
    MLAError
        What the kernels refuse.
    """
    part, dims = part_of(inputs.metadata), case.dims
    q, kv_c, k_pe, cache = (x.clone() for x in (inputs.q, inputs.kv_c, inputs.k_pe, inputs.latent_cache))
    with torch.no_grad():
        kernels.check_cache(cache)
        kernels.write_latent_cache_(cache, kv_c, k_pe, inputs.metadata.slot_mapping)
        if isinstance(part, DecodeMetadata):
            out, lse = kernels.paged_decode(
                q,
                cache,
                part,
                kv_lora_rank=dims.kv_lora_rank,
                softmax_scale=dims.softmax_scale,
                plan=kernels.plan(part),
            )
        else:
            weight = _weight(inputs)
            out, lse = prefill(q, kv_c, k_pe, cache, part, kv_b_proj=weight, dims=dims, kernels=kernels)
    return out, lse, cache


def _weight(inputs: CaseInputs) -> torch.Tensor:
    if inputs.kv_b_proj is None:
        raise GoldenError("kv_b_proj: expected an up-projection for prompts, got None")
    return inputs.kv_b_proj


def reference_of(case: GoldenCase, inputs: CaseInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 specification on a case.

    Parameters
    ----------
    case : GoldenCase
        Dimensions and kind.
    inputs : CaseInputs
        On the CPU, in the dtype of the case.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, width), float64
        Latent to decode, else values.
    lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithm.

    Raises
    ------
    GoldenError
        Prompts without an up-projection.
    """
    wide, dims = inputs.to(dtype=torch.float64), case.dims
    part, cache = part_of(wide.metadata), wide.written_cache()
    if isinstance(part, PrefillMetadata):
        return reference.latent_attention(wide.q, cache, part, kv_b_proj=_weight(wide), dims=dims)
    return reference.paged_decode(wide.q, cache, part, kv_lora_rank=dims.kv_lora_rank, softmax_scale=dims.softmax_scale)
