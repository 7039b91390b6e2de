"""Weights and dimensions from Hugging Face checkpoints of the DeepSeek-V2/V3 family."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mla._checks import FLOATS, check_int, check_tensor, describe, dtype_name, usable_device
from mla.errors import WeightsError
from mla.metadata.dims import MLADims, RopeSpec, YarnSpec
from mla.weights import MLAWeights

__all__ = ["dequantize_block_fp8", "dims_from_config", "load_weights", "weights_from_state_dict"]

FP8_BLOCK = 128
# transformers and DeepSeek's own code build the norms inside attention with this epsilon, whatever the config says.
ATTENTION_NORM_EPS = 1e-6
_INTERLEAVED_ALWAYS = ("deepseek_v2",)


def dims_from_config(config: Mapping[str, Any] | Any) -> MLADims:
    """Dimensions from a model config (``config.json`` as a dict, or a transformers config object).

    Parameters
    ----------
    config : mapping or object with ``to_dict``
        Of a DeepSeek-V2, DeepSeek-V3 or Kimi-K2 model. RoPE numbers may stand in ``rope_parameters`` or in ``rope_scaling`` and
        ``rope_theta``. With only one of ``mscale`` and ``mscale_all_dim`` the factor on cos and sin is DeepSeek's own.

    Raises
    ------
    WeightsError
        A missing entry or an unknown kind of RoPE scaling.
    DimsError
        Numbers that cannot be.

    Examples
    --------
    >>> config = {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    ...           "v_head_dim": 128, "q_lora_rank": 1536}
    >>> dims = dims_from_config(config)
    >>> dims.latent_dim, dims.rope
    (576, RopeSpec(dim=64, interleaved=True, theta=10000.0, yarn=None))
    """
    if isinstance(config, Mapping):
        values: Mapping[str, Any] = config
    elif callable(getattr(config, "to_dict", None)):
        values = config.to_dict()
    else:
        raise WeightsError(f"config: expected a mapping or a config of transformers, got {describe(config)}")

    def need(name: str) -> Any:
        if values.get(name) is None:
            raise WeightsError(f"config: expected an entry {name}, got {', '.join(sorted(map(str, values)))}")
        return values[name]

    interleaved = values.get("rope_interleave")
    if interleaved is None:
        interleaved = True
    if not isinstance(interleaved, bool):
        raise WeightsError(f"rope_interleave: expected true or false, got {interleaved!r}")
    rope_dim = need("qk_rope_head_dim")
    return MLADims(
        num_heads=need("num_attention_heads"),
        kv_lora_rank=need("kv_lora_rank"),
        qk_nope_head_dim=need("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=need("v_head_dim"),
        q_lora_rank=values.get("q_lora_rank"),
        rms_norm_eps=ATTENTION_NORM_EPS,
        rope=_rope_from_config(values, rope_dim, interleaved=interleaved or values.get("model_type") in _INTERLEAVED_ALWAYS),
    )


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WeightsError(f"{name}: expected a number, got {value!r}")
    return float(value)


def _rope_from_config(values: Mapping[str, Any], dim: int, *, interleaved: bool) -> RopeSpec:
    scaling: dict[str, Any] = {"rope_theta": 10000.0 if values.get("rope_theta") is None else values["rope_theta"]}
    for name in ("rope_scaling", "rope_parameters"):
        found = values.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise WeightsError(f"{name}: expected a mapping or null, got {found!r}")
        scaling |= {key: value for key, value in (found or {}).items() if value is not None or "type" in key}
    theta = _number(scaling, "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSpec(dim=dim, interleaved=interleaved, theta=theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise WeightsError(f"rope_type: expected default or yarn, got {kind!r}")
    for name in ("factor", "original_max_position_embeddings"):
        if name not in scaling:
            raise WeightsError(f"rope_parameters: expected an entry {name} for yarn, got {', '.join(sorted(scaling))}")
    if scaling.get("truncate", True) is not True:
        raise WeightsError(f"truncate: expected true, got {scaling['truncate']!r}")
    if "attention_factor" in scaling:
        raise WeightsError(f"attention_factor: expected mscale and mscale_all_dim instead, got {scaling['attention_factor']!r}")
    length = _number(scaling, "original_max_position_embeddings")
    if not length.is_integer():
        raise WeightsError(f"original_max_position_embeddings: expected a whole number, got {length!r}")
    options = {
        name: _number(scaling, name) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if name in scaling
    }
    yarn = YarnSpec(factor=_number(scaling, "factor"), original_max_position_embeddings=int(length), **options)
    return RopeSpec(dim=dim, interleaved=interleaved, theta=theta, yarn=yarn)


def dequantize_block_fp8(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Weights of DeepSeek-V3's fp8 checkpoints: each 128 x 128 block times its scale, exactly, in float32.

    Parameters
    ----------
    weight : torch.Tensor of shape (out_features, in_features), float8_e4m3fn
        Quantised weight; the last blocks may be ragged.
    scale_inv : torch.Tensor of shape (row_blocks, column_blocks), float32
        ``ceil(out_features / 128)`` by ``ceil(in_features / 128)`` factors.

    Returns
    -------
    torch.Tensor of shape (out_features, in_features), float32
        The weight.

    Raises
    ------
    WeightsError
        Another dtype, or scales for another block size.

    References
    ----------
    DeepSeek-V3, ``inference/kernel.py``, ``weight_dequant``.
    """
    check_tensor("weight", weight, "(out_features, in_features)", torch.float8_e4m3fn, error=WeightsError)
    blocks = tuple(-(-n // FP8_BLOCK) for n in weight.shape)
    check_tensor(
        "scale_inv",
        scale_inv,
        "(row_blocks, column_blocks)",
        torch.float32,
        device=weight.device,
        bound={"row_blocks": blocks[0], "column_blocks": blocks[1]},
        error=WeightsError,
    )
    scales = scale_inv.repeat_interleave(FP8_BLOCK, 0)[: weight.shape[0]]
    return weight.to(torch.float32) * scales.repeat_interleave(FP8_BLOCK, 1)[:, : weight.shape[1]]


_NAMES = {
    "q_proj": "q_proj.weight",
    "q_a_proj": "q_a_proj.weight",
    "q_a_layernorm": "q_a_layernorm.weight",
    "q_b_proj": "q_b_proj.weight",
    "kv_a_proj_with_mqa": "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm": "kv_a_layernorm.weight",
    "kv_b_proj": "kv_b_proj.weight",
    "o_proj": "o_proj.weight",
    "q_a_proj_bias": "q_a_proj.bias",
    "kv_a_proj_with_mqa_bias": "kv_a_proj_with_mqa.bias",
    "o_proj_bias": "o_proj.bias",
}
_IGNORED = ("rotary_emb.inv_freq",)
_OPTIONAL = ("q_a_proj_bias", "kv_a_proj_with_mqa_bias", "o_proj_bias")


def _wanted(dims: MLADims) -> dict[str, str]:
    """Checkpoint names of the weights of a layer, by field."""
    left_out = ("q_a_proj", "q_a_layernorm", "q_b_proj", "q_a_proj_bias") if dims.q_lora_rank is None else ("q_proj",)
    return {field: name for field, name in _NAMES.items() if field not in left_out}


def layer_prefix(layer: int) -> str:
    """Where a checkpoint keeps the attention of a layer."""
    return f"model.layers.{layer}.self_attn."


def weights_from_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    dims: MLADims,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MLAWeights:
    """One layer's weights from a state dict; fp8 weights are dequantised exactly.

    Parameters
    ----------
    state_dict : mapping of str to torch.Tensor
        Of a model or of an attention module. An fp8 weight ``X.weight`` comes with ``X.weight_scale_inv``.
    dims : MLADims
        From `dims_from_config`.
    prefix : str
        What precedes ``kv_b_proj.weight`` in the names, such as ``"model.layers.3.self_attn."``.
    dtype : torch.dtype or None
        Of the result; None takes the widest that occurs (float32 where a weight is fp8).
    device : torch.device or str or None
        Of the result; None keeps the checkpoint's.

    Raises
    ------
    WeightsError
        Missing or unexpected tensors below the prefix, or wrong shapes.

    Examples
    --------
    >>> from mla import MLAAttention
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> state = {f"attn.{name}": weight for name, weight in MLAAttention(dims, hidden_size=64).state_dict().items()}
    >>> weights_from_state_dict(state, dims, prefix="attn.", dtype=torch.bfloat16).kv_b_proj.dtype
    torch.bfloat16
    >>> del state["attn.o_proj.weight"]
    >>> weights_from_state_dict(state, dims, prefix="attn.")
    Traceback (most recent call last):
        ...
    mla.errors.WeightsError: attn.o_proj.weight: expected a tensor in the state dict, got none
    """
    if dtype is not None and dtype not in FLOATS:
        raise WeightsError(f"dtype: expected {' or '.join(map(dtype_name, FLOATS))}, got {dtype}")
    where = None if device is None else usable_device("device", device, WeightsError)
    found: dict[str, torch.Tensor] = {}
    used = set()
    for field, name in _wanted(dims).items():
        weight = state_dict.get(prefix + name)
        if weight is None:
            if field in _OPTIONAL:
                continue
            raise WeightsError(f"{prefix + name}: expected a tensor in the state dict, got none")
        used.add(prefix + name)
        scale_name = f"{prefix + name}_scale_inv"
        if isinstance(weight, torch.Tensor) and weight.dtype == torch.float8_e4m3fn:
            if scale_name not in state_dict:
                raise WeightsError(f"{scale_name}: expected the scales of an fp8 weight, got none")
            used.add(scale_name)
            weight = dequantize_block_fp8(weight, state_dict[scale_name])
        if not isinstance(weight, torch.Tensor):
            raise WeightsError(f"{prefix + name}: expected a tensor, got {describe(weight)}")
        if weight.dtype not in FLOATS:
            allowed = " or ".join(map(dtype_name, FLOATS))
            raise WeightsError(f"{prefix + name}: expected {allowed} or float8_e4m3fn, got {weight.dtype}")
        found[field] = weight.detach()
    extra = [name for name in state_dict if name.startswith(prefix) and name not in used and not name.endswith(_IGNORED)]
    if extra:
        raise WeightsError(f"state_dict: expected only MLA weights below {prefix!r}, got {', '.join(sorted(extra)[:8])}")
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, [weight.dtype for weight in found.values()])
    return MLAWeights(dims=dims, **{field: weight.to(device=where, dtype=dtype) for field, weight in found.items()})


def load_weights(
    folder: str | Path, layer: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> MLAWeights:
    """One layer's weights from a checkpoint folder (``config.json`` and safetensors files), reading only what it needs.

    Needs the package ``safetensors`` (extra ``hf``).

    Parameters
    ----------
    folder : str or pathlib.Path
        As written by ``save_pretrained`` or downloaded.
    layer : int
        Index of the layer.
    dtype, device
        As in `weights_from_state_dict`.

    Raises
    ------
    WeightsError
        Missing files or tensors, or wrong shapes.

    Examples
    --------
    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> from mla import MLAAttention
    >>> config = {"num_attention_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    >>> state = MLAAttention(dims_from_config(config), hidden_size=64).state_dict()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text(json.dumps(config))
    ...     save_file({layer_prefix(3) + name: x for name, x in state.items()}, Path(folder, "model.safetensors"))
    ...     load_weights(folder, layer=3).kv_b_proj.shape
    torch.Size([160, 32])
    """
    check_int("layer", layer, low=0, error=WeightsError)
    root = Path(folder)
    dims = dims_from_config(_read_json(root / "config.json"))
    prefix = layer_prefix(layer)
    index = root / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        files = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(files, Mapping):
            raise WeightsError(f"folder: expected a weight_map in {index.name}, got a file without weight_map")
    else:
        single = "model.safetensors"
        if not (root / single).is_file():
            raise WeightsError(f"folder: expected model.safetensors or {index.name} in {root}, got neither")
        files = dict.fromkeys(_tensor_names(root / single), single)
    names = [name for name in files if name.startswith(prefix)]
    if not names:
        raise WeightsError(f"layer: expected a layer of the checkpoint, got {layer}: no tensor named {prefix}*")
    state: dict[str, torch.Tensor] = {}
    for file in sorted({files[name] for name in names}):
        wanted = [name for name in names if files[name] == file]
        missing = sorted(set(wanted) - set(_tensor_names(root / file)))
        if missing:
            raise WeightsError(f"folder: expected the tensors of {index.name} in {file}, got none named {', '.join(missing)}")
        state.update(_read_tensors(root / file, wanted))
    return weights_from_state_dict(state, dims, prefix=prefix, dtype=dtype, device=device)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise WeightsError(f"folder: expected a file {path.name} in {path.parent}, got none named {path.name}")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise WeightsError(f"folder: expected a safetensors file, got {path.name}: {error}") from error


def _tensor_names(path: Path) -> list[str]:
    with _open(path) as tensors:
        return list(tensors.keys())


def _read_tensors(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    with _open(path) as tensors:
        return {name: tensors.get_tensor(name) for name in names}


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise WeightsError(f"folder: expected a file {path.name} in {path.parent}, got none")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"folder: expected JSON, got {path.name}: {error}") from error
