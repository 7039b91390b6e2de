"""The attention layer as a `torch.nn.Module` over the functions, with the parameter names of Hugging Face's DeepSeek models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from mla._checks import FLOATS, check_instance, check_int, describe, dtype_name, usable_device
from mla.compute.contracts import Plan
from mla.compute.kernels import KernelSet
from mla.compute.rope import RopeTable
from mla.compute.select import kernels_for
from mla.errors import KernelError, WeightsError
from mla.layer import mla_attention
from mla.metadata.dims import MLADims
from mla.metadata.records import MLAMetadata
from mla.weights import MLAWeights

__all__ = ["LayerParameters", "MLAAttention"]

PROJECTIONS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NORMS = ("q_a_layernorm", "kv_a_layernorm")
WITH_BIAS = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
FIELDS = (*PROJECTIONS, *NORMS, *[f"{name}_bias" for name in WITH_BIAS])


class LayerParameters(nn.Module):
    """A module that holds the parameters of one layer in submodules of Hugging Face's names.

    Parameters
    ----------
    dims : MLADims
        Dimensions.

    Examples
    --------
    >>> from mla import RopeSpec
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> layer = MLAAttention(dims, hidden_size=64)
    >>> isinstance(layer, LayerParameters), layer.weights.kv_b_proj is layer.kv_b_proj.weight, layer.weights is layer.weights
    (True, True, True)
    """

    def __init__(self, dims: MLADims) -> None:
        super().__init__()
        self.dims = dims
        self._record: MLAWeights | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name in (*PROJECTIONS, *NORMS):
            child = getattr(self, name, None)
            if child is None:
                continue
            found[name] = child.weight
            if name in WITH_BIAS and child.bias is not None:
                found[f"{name}_bias"] = child.bias
        return found

    @property
    def weights(self) -> MLAWeights:
        """The parameters as a record, not copied; the same record as long as they are the same tensors.

        Raises
        ------
        WeightsError
            Parameters that do not fit one another. In code that is compiled: parameters that were exchanged since the record
            was made, since records are made outside of it; read `weights` once before.
        """
        tensors = self._tensors()
        record = self._record
        if record is not None and all(getattr(record, name) is tensors.get(name) for name in FIELDS):
            return record
        if torch.compiler.is_dynamo_compiling():
            raise WeightsError("weights: expected the parameters of the last record, got others; read `weights` outside first")
        record = MLAWeights(dims=self.dims, **tensors)
        if not torch.compiler.is_compiling():  # torch.export refuses modules that change, torch 2.8 even in this
            self._record = record
        return record


class MLAAttention(LayerParameters):
    """One Multi-head Latent Attention layer: `mla.mla_attention` with its weights as parameters.

    Its parameters are named as those of Hugging Face's DeepSeek-V2 and V3 attention, so a state dict of theirs loads: `q_proj`,
    or `q_a_proj`, `q_a_layernorm` and `q_b_proj` as ``dims.q_lora_rank`` says; `kv_a_proj_with_mqa`, `kv_a_layernorm`,
    `kv_b_proj` and `o_proj`. The submodules hold parameters only: their own ``forward`` is never called.

    Parameters
    ----------
    dims : MLADims
        Dimensions and scale.
    hidden_size : int
        Width of the model.
    bias : bool
        Whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have one (``attention_bias`` in the configs).
    kernels : KernelSet or None
        What runs; None takes ``kernels_for`` of the device, anew when the module moves to another kind of device.
    device : torch.device or str or None
        Of the parameters; None takes torch's default.
    dtype : torch.dtype or None
        float64, float32, bfloat16 or float16; None takes torch's default.

    Raises
    ------
    WeightsError
        Arguments of another type, or a `hidden_size` below 1.
    KernelError
        No kernel set for the device; name one with `kernels`.

    Examples
    --------
    >>> from mla import MLADims, RopeSpec, build_metadata, prompt_group, rope_table
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> layer = MLAAttention(dims, hidden_size=64, kernels=kernels_for("cpu"))
    >>> metadata = build_metadata([prompt_group(5)], block_size=16)  # a prompt without blocks: nothing is cached
    >>> layer(torch.randn(5, 64), None, metadata, rope_table(dims.rope, 128)).shape
    torch.Size([5, 64])
    """

    def __init__(
        self,
        dims: MLADims,
        hidden_size: int,
        *,
        bias: bool = False,
        kernels: KernelSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_instance("dims", dims, MLADims, WeightsError)
        check_int("hidden_size", hidden_size, low=1, error=WeightsError)
        if not isinstance(bias, bool):
            raise WeightsError(f"bias: expected True or False, got {describe(bias)}")
        if kernels is not None:
            check_instance("kernels", kernels, KernelSet, WeightsError)
        if dtype is not None and dtype not in FLOATS:
            raise WeightsError(f"dtype: expected {' or '.join(map(dtype_name, FLOATS))}, got {dtype}")
        super().__init__(dims)
        where = None if device is None else usable_device("device", device, WeightsError)
        made: dict[str, Any] = {"device": where, "dtype": dtype}

        def project(name: str, width: int, rows: int) -> None:
            setattr(self, name, nn.Linear(width, rows, bias=bias and name in WITH_BIAS, **made))

        if dims.q_lora_rank is None:
            project("q_proj", hidden_size, dims.num_heads * dims.qk_head_dim)
        else:
            project("q_a_proj", hidden_size, dims.q_lora_rank)
            self.q_a_layernorm = nn.RMSNorm(dims.q_lora_rank, eps=dims.rms_norm_eps, **made)
            project("q_b_proj", dims.q_lora_rank, dims.num_heads * dims.qk_head_dim)
        project("kv_a_proj_with_mqa", hidden_size, dims.latent_dim)
        self.kv_a_layernorm = nn.RMSNorm(dims.kv_lora_rank, eps=dims.rms_norm_eps, **made)
        project("kv_b_proj", dims.kv_lora_rank, dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim))
        project("o_proj", dims.num_heads * dims.v_head_dim, hidden_size)
        self._given = kernels
        self._kernels = kernels
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        device = self.weights.device
        if self._given is None:
            # A module on the meta device gets its kernels when it is moved to a real one.
            self._kernels = None if device.type == "meta" else kernels_for(device, dims=self.dims, dtype=self.weights.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._choose_kernels()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Kernels of one's own are pickled if they can be; those that were chosen are chosen again.
        return self.__dict__ | {"_record": None, "_kernels": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._choose_kernels()

    @property
    def kernels(self) -> KernelSet:
        """What runs.

        Raises
        ------
        KernelError
            On the meta device, where none does.
        """
        if self._kernels is None:
            raise KernelError("kernels: expected a module on a device with kernels, got one on meta")
        return self._kernels

    def reset_parameters(self) -> None:
        """Draw new projections, as `torch.nn.Linear` does, and set the norms to 1.

        Examples
        --------
        >>> from mla import RopeSpec
        >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        ...                rope=RopeSpec(dim=8, interleaved=True))
        >>> layer = MLAAttention(dims, hidden_size=64, device="meta").to_empty(device="cpu")
        >>> layer.reset_parameters()
        >>> layer.kernels.name, bool((layer.kv_a_layernorm.weight == 1).all())
        ('CPU_MLA', True)
        """
        for child in self.children():
            if isinstance(child, (nn.Linear, nn.RMSNorm)):
                child.reset_parameters()

    def extra_repr(self) -> str:
        """Dimensions and kernels.

        Examples
        --------
        >>> from mla import RopeSpec
        >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        ...                rope=RopeSpec(dim=8, interleaved=True))
        >>> MLAAttention(dims, hidden_size=64, kernels=kernels_for("cpu")).extra_repr()
        'num_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_head_dim=16+8, v_head_dim=24, kernels=CPU_MLA'
        """
        dims = self.dims
        kernels = "none" if self._kernels is None else self._kernels.name
        return (
            f"num_heads={dims.num_heads}, kv_lora_rank={dims.kv_lora_rank}, q_lora_rank={dims.q_lora_rank}, "
            f"qk_head_dim={dims.qk_nope_head_dim}+{dims.qk_rope_head_dim}, v_head_dim={dims.v_head_dim}, kernels={kernels}"
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        latent_cache: torch.Tensor | None,
        metadata: MLAMetadata,
        table: RopeTable,
        plan: Plan | None = None,
        *,
        workspace: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Project, rotate, store, attend, project back: see `mla.mla_attention`.

        Prompts without context have gradients; decoding and prompts with context run under ``torch.no_grad()``.

        Parameters
        ----------
        hidden_states : torch.Tensor of shape (num_tokens, hidden_size)
            New tokens of the batch, prompts first, in the dtype of the parameters.
        latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim) or None
            Of this layer, written at ``metadata.slot_mapping``; None on a profile run.
        metadata : MLAMetadata
            Of this step; the same for all layers.
        table : RopeTable
            From ``rope_table(dims.rope, max_len)``.
        plan : Plan or None
            ``kernels.plan(metadata.decode)``, made once for all layers; None makes it here.
        workspace : torch.Tensor of shape (num_rows, latent_dim) or None
            For chunked context, see `mla.compute.prefill`; None allocates it.
        return_lse : bool
            Whether the log-sum-exp is returned too.

        Returns
        -------
        output : torch.Tensor of shape (num_tokens, hidden_size)
            In the dtype of `hidden_states`.
        lse : torch.Tensor of shape (num_tokens, num_heads)
            Only with `return_lse`.

        Raises
        ------
        KernelError, CacheError
            Arguments that do not fit each other or the kernel set; the cache is unchanged then.

        Examples
        --------
        >>> from mla import RopeSpec, build_metadata, decode_group, rope_table
        >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        ...                rope=RopeSpec(dim=8, interleaved=True))
        >>> layer, cache = MLAAttention(dims, hidden_size=64), torch.randn(8, 16, dims.latent_dim)
        >>> metadata = build_metadata([decode_group(17, [7, 2])], block_size=16)
        >>> with torch.no_grad():
        ...     out, lse = layer(torch.randn(1, 64), cache, metadata, rope_table(dims.rope, 128), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 64]), torch.Size([1, 4]))
        """
        out, lse = mla_attention(
            hidden_states, self.weights, latent_cache, metadata, table, self.kernels, plan=plan, workspace=workspace
        )
        return (out, lse) if return_lse else out
