"""A drop-in for the attention of transformers' DeepSeek-V2 and V3 models: the same tokens, from a paged latent cache.

`replace_attention` swaps every attention layer of a loaded model, since what transformers calls an attention interface is given
keys and values of all heads, never latents. The weights are shared, not copied. The model and its
``generate`` then work as before, over a `Cache` of their own: pages of latent rows, one row a token and layer. Padding is
dropped before attention and takes no memory. Needs the package ``transformers`` 5.24 or newer (extra ``hf``).
"""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from mla._checks import check_instance, check_int, describe
from mla.cache.spec import LatentCacheSpec
from mla.compute.contracts import Plan
from mla.compute.kernels import KernelSet, explain
from mla.compute.rope import RopeTable, rope_table
from mla.compute.select import kernels_for
from mla.errors import CacheError, KernelError, MLAError, WeightsError
from mla.hf_cache import Mask, PagedLatents, latents_of, make_layers
from mla.layer import mla_attention
from mla.loading import dims_from_config
from mla.metadata.build import build_metadata
from mla.metadata.dims import MLADims
from mla.metadata.groups import SequenceGroup, decode_group, prompt_group
from mla.metadata.records import MLAMetadata
from mla.module import NORMS, PROJECTIONS, LayerParameters
from mla.weights import MLAWeights

__all__ = ["latent_cache", "replace_attention", "restore_attention"]

MOST_DECODE_TOKENS = 16
"""New tokens of a sequence that are still decoded; longer continuations run as prompts with context."""


def replace_attention(model: Any, *, kernels: KernelSet | None = None, block_size: int = 16) -> None:
    """Let a DeepSeek-V2 or V3 model of transformers attend through `mla.mla_attention` over a paged latent cache.

    The parameters stay the same objects under the same names, so that optimizers, `save_pretrained` and `model.to` work on. A
    cache is made at the first step, or beforehand by `latent_cache`; the empty `DynamicCache` that ``generate`` makes becomes
    one. Greedy search, sampling, beam search (beams share blocks) and assisted decoding work, in batches with any padding mask.
    Prompts without cached context have gradients. Masks are read on the host, once a step.

    Refused by name: attention weights as an output, masks of 4 dimensions, attention dropout while training, static, quantised
    and offloaded caches.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        DeepSeek-V2 or V3, with any head; all attention weights in one dtype on one device.
    kernels : KernelSet or None
        What runs; None takes ``kernels_for`` of the model's device, at every step.
    block_size : int
        Tokens per block of the caches that are made.

    Raises
    ------
    WeightsError
        Another model, one that is replaced already, or projections that are no plain `torch.nn.Linear`, such as quantised
        ones and adapters.
    MLAError
        No transformers.
    KernelError
        A kernel set that cannot run such a model.

    Examples
    --------
    >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    >>> config = DeepseekV3Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                           num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=2)
    >>> model = DeepseekV3ForCausalLM(config).eval()
    >>> tokens = torch.tensor([[5, 9, 2, 7]])
    >>> with torch.no_grad():
    ...     expected = model(tokens).logits
    ...     replace_attention(model)
    ...     torch.allclose(model(tokens).logits, expected, atol=1e-4)
    True
    """
    base, kind = _base_model(model)
    check_int("block_size", block_size, low=1, error=WeightsError)
    if kernels is not None:
        check_instance("kernels", kernels, KernelSet, WeightsError)
    dims = dims_from_config(base.config)
    originals = [layer.self_attn for layer in base.layers]
    for original in originals:
        if isinstance(original, _LatentAttention):
            raise WeightsError("model: expected transformers' own attention, got one that is replaced already")
        if type(original) is not kind:
            raise WeightsError(f"model: expected layers of {kind.__name__}, got {type(original).__name__}")
    replacements = [_LatentAttention(dims, original, i) for i, original in enumerate(originals)]
    runtime = _Runtime(dims, kernels, block_size)
    runtime.kernels_of(_same_weights(replacements))
    for layer, replacement in zip(base.layers, replacements, strict=True):
        layer.self_attn = replacement
    handle = base.register_forward_pre_hook(runtime.prepare, with_kwargs=True)
    replacements[0].attached = (runtime, handle)


def restore_attention(model: Any) -> None:
    """Undo `replace_attention`: the layers that were there before, with the parameters as they are now.

    Raises
    ------
    WeightsError
        A model without replaced attention.

    Examples
    --------
    >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    >>> config = DeepseekV3Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                           num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=2)
    >>> model = DeepseekV3ForCausalLM(config).eval()
    >>> before = model.model.layers[0].self_attn
    >>> replace_attention(model)
    >>> restore_attention(model)
    >>> model.model.layers[0].self_attn is before
    True
    """
    base, _ = _base_model(model)
    layers = _replaced(base)
    _, handle = layers[0].attached
    handle.remove()
    for layer, replacement in zip(base.layers, layers, strict=True):
        layer.self_attn = replacement.original[0].train(replacement.training)


def latent_cache(model: Any, *, num_blocks: int | None = None) -> Any:
    """A cache to pass as ``cache=`` to a model after `replace_attention`, or to its ``generate``.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        After `replace_attention`.
    num_blocks : int or None
        Blocks of each layer, allocated now and never more; None lets the cache grow as it is needed.

    Returns
    -------
    transformers.Cache
        Its layers have the rows as ``layer.latent_cache``, shape (num_blocks, block_size, latent_dim), and the blocks of all
        sequences as ``layer.latents`` (`mla.hf_cache.PagedLatents`).

    Raises
    ------
    WeightsError
        A model without replaced attention.
    CacheError
        `num_blocks` below 1.

    Examples
    --------
    >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    >>> config = DeepseekV3Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                           num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=2)
    >>> model = DeepseekV3ForCausalLM(config).eval()
    >>> replace_attention(model)
    >>> cache = latent_cache(model, num_blocks=8)
    >>> with torch.no_grad():
    ...     out = model(torch.tensor([[5, 9, 2, 7]]), cache=cache)
    >>> cache.layers[0].latent_cache.shape, cache.layers[0].latents.num_used_blocks
    (torch.Size([8, 16, 576]), 1)
    """
    base, _ = _base_model(model)
    from transformers import Cache

    layers = _replaced(base)
    weights = _same_weights(layers)
    spec = layers[0].attached[0].spec(weights.dtype)
    return Cache(layers=make_layers(PagedLatents(spec, len(layers), num_blocks=num_blocks, device=weights.device)))


def _base_model(model: Any) -> tuple[Any, type]:
    """The model below the head, and the class of its attention."""
    try:
        from transformers import PreTrainedModel
    except ImportError as reason:
        raise MLAError("transformers: expected an installed package (pip install 'mla[hf]'), got none") from reason
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    base = model.base_model if isinstance(model, PreTrainedModel) else None
    for model_class, attention_class in (
        (v2.DeepseekV2Model, v2.DeepseekV2Attention),
        (v3.DeepseekV3Model, v3.DeepseekV3Attention),
    ):
        if isinstance(base, model_class):
            if "cache" not in inspect.signature(model_class.forward).parameters:
                raise WeightsError("transformers: expected version 5.24 or newer, whose models take `cache`, got an older one")
            return base, attention_class
    raise WeightsError(f"model: expected a DeepSeek-V2 or DeepSeek-V3 model of transformers, got {describe(model)}")


def _replaced(base: Any) -> list[_LatentAttention]:
    layers = [layer.self_attn for layer in base.layers]
    if not all(isinstance(layer, _LatentAttention) for layer in layers):
        raise WeightsError("model: expected a model after `replace_attention`, got one with transformers' own attention")
    return layers


def _same_weights(layers: list[_LatentAttention]) -> MLAWeights:
    """The weights of the first layer, which all others agree with in dtype and device."""
    first = layers[0].weights
    for i, layer in enumerate(layers):
        if (layer.weights.dtype, layer.weights.device) != (first.dtype, first.device):
            raise WeightsError(
                f"model: expected {first.dtype} on {first.device} in all attention layers, "
                f"got {layer.weights.dtype} on {layer.weights.device} in layer {i}"
            )
    return first


@attrs.frozen(kw_only=True, eq=False)
class _Step:
    """What all layers of one forward pass share."""

    metadata: MLAMetadata
    plan: Plan | None
    table: RopeTable
    kernels: KernelSet
    tokens: torch.Tensor | None  # rows of the padded batch in the record's order; None where it is all of them in order
    latents: PagedLatents | None
    mask: Mask


class _LatentAttention(LayerParameters):
    """Attention of one layer, over the very submodules of the module that it replaces."""

    attached: Any = None  # of the first layer: the runtime and its hook

    def __init__(self, dims: MLADims, original: nn.Module, layer_idx: int) -> None:
        super().__init__(dims)
        for name, child in original.named_children():  # in their order, which is that of an optimizer's state
            if name in PROJECTIONS and type(child) is not nn.Linear:
                raise WeightsError(f"layers.{layer_idx}.{name}: expected torch.nn.Linear, got {type(child).__name__}")
            if name in PROJECTIONS or name in NORMS:
                setattr(self, name, child)
        self.original = (original,)  # in a tuple, where torch does not see it: parameters are named once
        self.layer_idx = layer_idx
        self.dropout = float(getattr(original, "attention_dropout", 0.0))
        self.train(original.training)

    def forward(self, hidden_states: torch.Tensor, *_: Any, mla_step: _Step | None = None, **__: Any) -> Any:
        if mla_step is None:
            raise KernelError("mla_step: expected a call through the model, got a call of a single layer")
        if self.training and self.dropout:
            raise KernelError(f"attention_dropout: expected 0 while training, got {self.dropout}")
        step, flat = mla_step, hidden_states.flatten(0, 1)
        out, _lse = mla_attention(
            flat if step.tokens is None else flat[step.tokens],
            self.weights,
            None if step.latents is None else step.latents.caches[self.layer_idx],
            step.metadata,
            step.table,
            step.kernels,
            plan=step.plan,
        )
        if step.tokens is not None:
            out = torch.zeros_like(flat).index_copy(0, step.tokens, out)
        if step.latents is not None and self.layer_idx == len(step.latents.caches) - 1:
            step.latents.commit_(step.mask)
        return out.view_as(hidden_states), None


class _Runtime:
    """What a replaced model keeps between steps: its dimensions and, made as they are needed, tables of cos and sin."""

    def __init__(self, dims: MLADims, kernels: KernelSet | None, block_size: int) -> None:
        self.dims = dims
        self.kernels = kernels
        self.block_size = block_size
        self.table: RopeTable | None = None

    def spec(self, dtype: torch.dtype) -> LatentCacheSpec:
        return LatentCacheSpec(
            kv_lora_rank=self.dims.kv_lora_rank,
            qk_rope_head_dim=self.dims.qk_rope_head_dim,
            block_size=self.block_size,
            dtype=dtype,
        )

    def kernels_of(self, weights: MLAWeights) -> KernelSet:
        if self.kernels is None:
            return kernels_for(weights.device, dims=self.dims, dtype=weights.dtype)
        sentence = explain(self.kernels, dims=self.dims, dtype=weights.dtype)
        if not sentence.startswith(f"{self.kernels.name} runs"):
            raise KernelError(sentence.removeprefix(f"{self.kernels.name} does not run: "))
        return self.kernels

    def table_for(self, num_positions: int, weights: MLAWeights) -> RopeTable:
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        table = self.table
        if table is None or (table.cos.dtype, table.cos.device) != (dtype, weights.device) or table.max_len < num_positions:
            length = max(2048, 1 << (num_positions - 1).bit_length())
            self.table = table = rope_table(self.dims.rope, length, weights.device, dtype=dtype)
        return table

    def prepare(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the model's forward: everything that the layers share, from masks, positions and the cache."""
        from transformers import Cache

        names = list(inspect.signature(type(base).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("past_key_values") is not None:  # the name before 5.24
            given["cache"] = given.pop("past_key_values")
        if given.get("output_attentions") or getattr(base.config, "output_attentions", False):
            raise KernelError("output_attentions: expected False, for no attention weights are made, got True")
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if tokens is None or tokens.dim() < 2:
            return args, kwargs  # the model's own error says what is missing
        layers = _replaced(base)
        weights = _same_weights(layers)
        cache, wanted = given.get("cache"), given.get("use_cache")
        checkpointed = getattr(base, "gradient_checkpointing", False) and base.training and torch.is_grad_enabled()
        if checkpointed:  # as in transformers: its layers would be run twice over one cache
            cache = None
        elif cache is None and (getattr(base.config, "use_cache", False) if wanted is None else wanted):
            cache = Cache(layers=make_layers(PagedLatents(self.spec(weights.dtype), len(layers), device=weights.device)))
        latents = None if cache is None else latents_of(cache, self.spec(weights.dtype), len(layers), weights.device)
        mask = _whole_mask(given.get("attention_mask"), tokens.shape[:2], latents)
        step = self._step(mask, given.get("position_ids"), tokens.shape[1], latents, weights)
        given |= {"cache": cache, "mla_step": step}
        # A mask of 4 dimensions is passed on as it is, and nobody reads this one: no (length, length) mask is made.
        given["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens.device)
        return (), given

    def _step(
        self, mask: Mask, position_ids: torch.Tensor | None, num_columns: int, latents: PagedLatents | None, weights: MLAWeights
    ) -> _Step:
        past_columns = mask.shape[1] - num_columns
        new, past_lens = mask[:, past_columns:], mask[:, :past_columns].sum(1).tolist()
        query_lens = new.sum(1).tolist()
        if not any(query_lens):
            raise KernelError("attention_mask: expected at least one new token, got none")
        tables = [None] * len(query_lens) if latents is None else latents.reserve_(query_lens)
        groups: list[tuple[int, SequenceGroup]] = []
        for seq, (past, count, table) in enumerate(zip(past_lens, query_lens, tables, strict=True)):
            if count and table is not None and past and count <= MOST_DECODE_TOKENS:
                groups.append((seq, decode_group(past + count, table, query_len=count, seq_id=seq)))
            elif count:
                groups.append((seq, prompt_group(count, table, context_len=past, seq_id=seq)))
        groups.sort(key=lambda group: not group[1].is_prompt)
        columns = [np.flatnonzero(new[seq]) for seq, _ in groups]
        order = np.concatenate([seq * num_columns + found for (seq, _), found in zip(groups, columns, strict=True)])
        kernels = self.kernels_of(weights)
        metadata = build_metadata(
            [group for _, group in groups],
            block_size=self.block_size,
            device=weights.device,
            page_sizes=() if kernels.page_size is None else (kernels.page_size,),
        )
        if position_ids is None:
            positions = past_columns + order % num_columns  # as transformers counts where no positions are given
        else:
            if position_ids.shape not in ((1, num_columns), tuple(new.shape)):
                raise KernelError(f"position_ids: expected shape {tuple(new.shape)}, got {tuple(position_ids.shape)}")
            positions = position_ids.expand(new.shape).cpu().numpy().reshape(-1)[order]
        if positions.min() < 0:
            raise KernelError(f"position_ids: expected positions >= 0, got {positions.min()}")
        on_device = torch.from_numpy(positions.astype(np.int64)).to(weights.device)
        in_order = len(order) == new.size and bool((order[1:] > order[:-1]).all())
        return _Step(
            metadata=attrs.evolve(metadata, positions=on_device),
            plan=None if metadata.decode is None else kernels.plan(metadata.decode),
            table=self.table_for(int(positions.max()) + 1, weights),
            kernels=kernels,
            tokens=None if in_order else torch.from_numpy(order).to(weights.device),
            latents=latents,
            mask=mask,
        )


def _whole_mask(attention_mask: Any, shape: tuple[int, int], latents: PagedLatents | None) -> Mask:
    """Which columns hold a token, cached ones and new ones, checked against the cache."""
    num_seqs, num_columns = shape
    past = np.zeros((num_seqs, 0), np.bool_) if latents is None or not latents.num_seqs else latents.mask
    if past.shape[0] != num_seqs:
        raise CacheError(f"cache: expected {past.shape[0]} sequences, got {num_seqs}")
    wanted = (num_seqs, past.shape[1] + num_columns)
    if attention_mask is None:
        attention_mask = torch.ones(wanted, dtype=torch.bool)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != wanted:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else describe(attention_mask)
        raise KernelError(f"attention_mask: expected shape {wanted}, got {got}")
    mask: Mask = attention_mask.detach().cpu().bool().numpy()
    if (mask[:, : past.shape[1]] != past).any():
        raise KernelError("attention_mask: expected the cached tokens as they were masked before, got others")
    return mask
