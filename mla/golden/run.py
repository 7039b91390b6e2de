"""Running one golden case: through a kernel set, and through the float64 specification."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import torch

from mla.compute import reference
from mla.compute.attention import prefill
from mla.compute.kernels import KernelSet
from mla.errors import GoldenError
from mla.golden.case import GoldenCase
from mla.golden.compare import INT_OF_SIZE, place
from mla.golden.diff import diff
from mla.golden.inputs import CaseInputs, part_of
from mla.metadata.records import DecodeMetadata, PrefillMetadata

__all__ = ["Outcome", "reference_of", "run_case"]


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """What a kernel set made of a case.

    Parameters
    ----------
    out, lse
        As the kernels return them, unchecked.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        As it was once the new tokens were stored, before the attention ran.
    changed : tuple of str
        One line for each input that a function changed and must not.
    """

    out: Any
    lse: Any
    latent_cache: torch.Tensor
    changed: tuple[str, ...]


def run_case(case: GoldenCase, inputs: CaseInputs, kernels: KernelSet) -> Outcome:
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
    Outcome
        Results, with the inputs that were changed.

    Raises
    ------
    MLAError
        What the kernels refuse, or a kernel that returns no pair.
    """
    metadata = copy.deepcopy(inputs.metadata)
    part, dims = part_of(metadata), case.dims
    q, kv_c, k_pe, cache = (x.clone() for x in (inputs.q, inputs.kv_c, inputs.k_pe, inputs.latent_cache))
    with torch.no_grad():
        kernels.check_cache(cache)
        kernels.write_latent_cache_(cache, kv_c, k_pe, metadata.slot_mapping)
        stored = cache.clone()
        changed = _changed("write_latent_cache_", ("kv_c", inputs.kv_c, kv_c), ("k_pe", inputs.k_pe, k_pe))
        kv_c, k_pe = inputs.kv_c.clone(), inputs.k_pe.clone()
        if isinstance(part, DecodeMetadata):
            function = "paged_decode"
            out, lse = _pair(function, kernels.paged_decode)(
                q,
                cache,
                part,
                kv_lora_rank=dims.kv_lora_rank,
                softmax_scale=dims.softmax_scale,
                plan=kernels.plan(part),
            )
        else:
            function = "varlen_attention or gather_latent_cache"
            weight = _weight(inputs).clone()
            paired = attrs.evolve(kernels, varlen_attention=_pair("varlen_attention", kernels.varlen_attention))
            out, lse = prefill(q, kv_c, k_pe, cache, part, kv_b_proj=weight, dims=dims, kernels=paired)
            changed += _changed(function, ("kv_b_proj", _weight(inputs), weight))
    changed += _changed(
        function, ("q", inputs.q, q), ("kv_c", inputs.kv_c, kv_c), ("k_pe", inputs.k_pe, k_pe), ("latent_cache", stored, cache)
    )
    lines = diff(inputs.metadata, metadata)
    changed += [f"metadata: expected the input to be left as it was, got a change by a kernel: {line}" for line in lines]
    return Outcome(out=out, lse=lse, latent_cache=stored, changed=tuple(changed))


def _pair(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose result is refused unless it is a pair."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, (tuple, list)) and len(result) == 2:
            return result
        got = f"{type(result).__name__} of {len(result)}" if isinstance(result, (tuple, list)) else type(result).__name__
        raise GoldenError(f"{name}: expected (out, lse), got {got}")

    return checked


def _changed(function: str, *inputs: tuple[str, torch.Tensor, torch.Tensor]) -> list[str]:
    """Inputs, each by its name, before and after, whose bits a function changed."""
    found = []
    for name, before, after in inputs:
        if before.shape != after.shape or before.dtype != after.dtype:
            found.append(f"{name}: expected the input to be left as it was, got another shape or dtype from {function}")
            continue
        kind = INT_OF_SIZE[before.dtype.itemsize]
        wrong = (before.contiguous().view(kind) != after.contiguous().view(kind)).flatten().nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            found.append(
                f"{name}: expected the input to be left as it was, got {len(wrong)} of {before.numel()} values changed by "
                f"{function}, first at {place(first, before.shape)}: expected {float(before.flatten()[first]):.8g}, got "
                f"{float(after.flatten()[first]):.8g}"
            )
    return found


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
