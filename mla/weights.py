"""The attention weights of one layer, and splitting them by heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from mla._checks import check_floating, check_instance, check_int, check_record, named_fields, tensor
from mla.errors import WeightsError
from mla.metadata.dims import MLADims

__all__ = ["MLAWeights"]


def _weight(shape: str, *, optional: bool = False) -> Any:
    metadata: dict[str, Any] = {**tensor(shape, None), "optional": optional}
    return attrs.field(default=None, metadata=metadata) if optional else attrs.field(metadata=metadata)


@named_fields(WeightsError)
@attrs.frozen(kw_only=True, eq=False)
class MLAWeights:
    """Weights of one attention layer, named and laid out as in Hugging Face checkpoints (``out_features, in_features``).

    Either `q_proj` is given, or `q_a_proj`, `q_a_layernorm` and `q_b_proj` are, as `dims.q_lora_rank` says.

    Parameters
    ----------
    dims : MLADims
        Dimensions; `num_heads` counts the heads held here.
    kv_a_proj_with_mqa : torch.Tensor of shape (latent_dim, hidden_size)
        Down-projection to the latent and the shared rope key.
    kv_a_layernorm : torch.Tensor of shape (kv_lora_rank,)
        Norm of the latent.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        Up-projection; per head the key rows, then the value rows.
    o_proj : torch.Tensor of shape (hidden_size, num_heads * v_head_dim)
        Output projection.
    q_proj : torch.Tensor of shape (num_heads * qk_head_dim, hidden_size)
        Query projection, where `q_lora_rank` is None.
    q_a_proj : torch.Tensor of shape (q_lora_rank, hidden_size)
        Query down-projection.
    q_a_layernorm : torch.Tensor of shape (q_lora_rank,)
        Norm of the compressed query.
    q_b_proj : torch.Tensor of shape (num_heads * qk_head_dim, q_lora_rank)
        Query up-projection.
    q_a_proj_bias : torch.Tensor of shape (q_lora_rank,)
        Optional.
    kv_a_proj_with_mqa_bias : torch.Tensor of shape (latent_dim,)
        Optional.
    o_proj_bias : torch.Tensor of shape (hidden_size,)
        Optional; after `shard` only rank 0 has it.

    Raises
    ------
    WeightsError
        Missing or superfluous weights; a wrong shape; weights of several dtypes or devices.

    Examples
    --------
    >>> from mla.metadata import RopeSpec
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> weights = MLAWeights(dims=dims, q_proj=torch.randn(96, 64), kv_a_proj_with_mqa=torch.randn(40, 64),
    ...                      kv_a_layernorm=torch.ones(32), kv_b_proj=torch.randn(160, 32), o_proj=torch.randn(64, 96))
    >>> weights.hidden_size, weights.dtype, weights.device
    (64, torch.float32, device(type='cpu'))
    """

    dims: MLADims
    kv_a_proj_with_mqa: torch.Tensor = _weight("(latent_dim, hidden_size)")
    kv_a_layernorm: torch.Tensor = _weight("(kv_lora_rank,)")
    kv_b_proj: torch.Tensor = _weight("(num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)")
    o_proj: torch.Tensor = _weight("(hidden_size, num_heads * v_head_dim)")
    q_proj: torch.Tensor | None = _weight("(num_heads * qk_head_dim, hidden_size)", optional=True)
    q_a_proj: torch.Tensor | None = _weight("(q_lora_rank, hidden_size)", optional=True)
    q_a_layernorm: torch.Tensor | None = _weight("(q_lora_rank,)", optional=True)
    q_b_proj: torch.Tensor | None = _weight("(num_heads * qk_head_dim, q_lora_rank)", optional=True)
    q_a_proj_bias: torch.Tensor | None = _weight("(q_lora_rank,)", optional=True)
    kv_a_proj_with_mqa_bias: torch.Tensor | None = _weight("(latent_dim,)", optional=True)
    o_proj_bias: torch.Tensor | None = _weight("(hidden_size,)", optional=True)

    def __attrs_post_init__(self) -> None:
        check_instance("dims", self.dims, MLADims, WeightsError)
        compressed = self.dims.q_lora_rank is not None
        for name, wanted in (
            ("q_proj", not compressed),
            ("q_a_proj", compressed),
            ("q_a_layernorm", compressed),
            ("q_b_proj", compressed),
        ):
            if (getattr(self, name) is not None) != wanted:
                state = "a tensor" if wanted else "None"
                raise WeightsError(
                    f"{name}: expected {state} with q_lora_rank {self.dims.q_lora_rank}, got {'None' if wanted else 'a tensor'}"
                )
        if self.q_a_proj_bias is not None and not compressed:
            raise WeightsError("q_a_proj_bias: expected None with q_lora_rank None, got a tensor")
        sizes = {
            name: getattr(self.dims, name)
            for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "latent_dim")
        }
        if self.dims.q_lora_rank is not None:
            sizes["q_lora_rank"] = self.dims.q_lora_rank
        check_record(self, WeightsError, **sizes)
        check_floating("kv_b_proj", self.kv_b_proj, WeightsError)
        for name, value in self._tensors().items():
            if value.dtype != self.kv_b_proj.dtype:
                raise WeightsError(f"{name}: expected {self.kv_b_proj.dtype} as kv_b_proj has, got {value.dtype}")

    @property
    def dtype(self) -> torch.dtype:
        """Of every weight."""
        return self.kv_b_proj.dtype

    @property
    def device(self) -> torch.device:
        """Of every weight."""
        return self.kv_b_proj.device

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.o_proj.shape[0]

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in attrs.fields(type(self)) if field.name != "dims"}
        return {name: value for name, value in values.items() if value is not None}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MLAWeights:
        """The same weights on another device or in another dtype; None keeps what is.

        Examples
        --------
        >>> from mla import MLAAttention, RopeSpec
        >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        ...                rope=RopeSpec(dim=8, interleaved=True))
        >>> weights = MLAAttention(dims, hidden_size=64, device="cpu").weights.to(dtype=torch.bfloat16)
        >>> weights.dtype, weights.o_proj.dtype, weights.device.type
        (torch.bfloat16, torch.bfloat16, 'cpu')
        """
        return self._map(lambda weight: weight.to(device=device, dtype=dtype))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MLAWeights:
        changed: dict[str, Any] = {name: function(value) for name, value in self._tensors().items()}
        return attrs.evolve(self, **changed)

    def shard(self, rank: int, world_size: int) -> MLAWeights:
        """The heads of one tensor-parallel rank; the outputs of all ranks add up to the whole layer's.

        Parameters
        ----------
        rank : int
            In ``0 .. world_size - 1``.
        world_size : int
            Divides the number of heads.

        Returns
        -------
        MLAWeights
            Views of these weights where the layout allows. Only rank 0 keeps the output bias, which must be added once.

        Raises
        ------
        WeightsError
            A rank out of range, or heads that cannot be split evenly.

        Examples
        --------
        >>> from mla import MLAAttention, RopeSpec
        >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        ...                rope=RopeSpec(dim=8, interleaved=True))
        >>> part = MLAAttention(dims, hidden_size=64).weights.shard(1, 2)
        >>> part.dims.num_heads, part.kv_b_proj.shape, part.o_proj.shape
        (2, torch.Size([80, 32]), torch.Size([64, 48]))
        """
        check_int("world_size", world_size, low=1, error=WeightsError)
        check_int("rank", rank, low=0, high=world_size - 1, error=WeightsError)
        if self.dims.num_heads % world_size:
            raise WeightsError(f"world_size: expected a divisor of {self.dims.num_heads} heads, got {world_size}")
        heads = self.dims.num_heads // world_size

        def rows(weight: torch.Tensor) -> torch.Tensor:
            part: torch.Tensor = weight.unflatten(0, (world_size, -1))[rank]
            return part

        q_name = "q_proj" if self.dims.q_lora_rank is None else "q_b_proj"
        return attrs.evolve(
            self,
            dims=attrs.evolve(self.dims, num_heads=heads),
            kv_b_proj=rows(self.kv_b_proj),
            o_proj=self.o_proj.unflatten(1, (world_size, -1))[:, rank],
            o_proj_bias=self.o_proj_bias if rank == 0 else None,
            **{q_name: rows(getattr(self, q_name))},
        )
