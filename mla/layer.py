"""The whole attention layer as a function, and the smaller one for models that have their own projections."""

from __future__ import annotations

import torch

from mla._checks import check_instance, check_positive_float, check_tensor
from mla.compute.attention import check_attention_inputs, check_workspace, decode, prefill
from mla.compute.contracts import Plan
from mla.compute.kernels import KernelSet
from mla.compute.products import linear
from mla.compute.rope import RopeTable, apply_rope
from mla.errors import KernelError
from mla.metadata.dims import MLADims
from mla.metadata.records import MLAMetadata
from mla.weights import MLAWeights

__all__ = ["attend", "mla_attention", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Computed in float32, or in float64 for float64 input, and returned in the dtype of `x`.

    Parameters
    ----------
    x : torch.Tensor of shape (num_tokens, width)
        Tokens.
    weight : torch.Tensor of shape (width,)
        In the dtype of `x`.
    eps : float
        Added to the mean square.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
    """
    bound = check_tensor("x", x, "(num_tokens, width)", error=KernelError)
    check_positive_float("eps", eps, KernelError)
    check_tensor("weight", weight, "(width,)", x.dtype, bound=bound, device=x.device, error=KernelError)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def attend(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    latent_cache: torch.Tensor | None,
    metadata: MLAMetadata,
    *,
    kv_b_proj: torch.Tensor,
    dims: MLADims,
    kernels: KernelSet,
    plan: Plan | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the new tokens and attend, for models that project queries and latents themselves.

    Everything is checked before the cache is written.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Queries; the last `qk_rope_head_dim` columns are rotated already.
    kv_c_normed : torch.Tensor of shape (num_tokens, kv_lora_rank)
        Latents after their norm.
    k_pe : torch.Tensor of shape (num_tokens, qk_rope_head_dim)
        Rotated key parts, in the style of `q`.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim) or None
        Written at ``metadata.slot_mapping``; None on a profile run.
    metadata : MLAMetadata
        Of this step.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions and scale.
    kernels : KernelSet
        What runs, for instance ``kernels_for("cpu")``.
    plan : Plan or None
        ``kernels.plan(metadata.decode)``, made once for all layers; None makes it here.
    workspace : torch.Tensor of shape (num_rows, latent_dim) or None
        For chunked context, see `mla.compute.prefill`; None allocates it.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of q; 0 for padded tokens.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        Natural logarithm; -inf for padded tokens.

    Raises
    ------
    KernelError, CacheError
        Arguments that do not fit each other or the kernel set; the cache is unchanged then.

    Examples
    --------
    A prompt of 5 tokens, then one new token of a sequence of 17.

    >>> from mla import RopeSpec, build_metadata, decode_group, kernels_for, prompt_group
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> metadata = build_metadata([prompt_group(5, [7]), decode_group(17, [3, 2])], block_size=16)
    >>> q, kv_c, k_pe, kv_b_proj = (torch.randn(shape) for shape in ((6, 4, 24), (6, 32), (6, 8), (160, 32)))
    >>> cache = torch.zeros(8, 16, dims.latent_dim)
    >>> out, lse = attend(q, kv_c, k_pe, cache, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels_for("cpu"))
    >>> out.shape, lse.shape, torch.equal(cache[7, :5, :32], kv_c[:5])
    (torch.Size([6, 4, 24]), torch.Size([6, 4]), True)
    """
    check_instance("metadata", metadata, MLAMetadata, KernelError)
    check_instance("dims", dims, MLADims, KernelError)
    check_instance("kernels", kernels, KernelSet, KernelError)
    names = ("num_heads", "qk_head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "latent_dim")
    sizes = {"num_tokens": metadata.num_tokens} | {name: getattr(dims, name) for name in names}
    check_tensor("q", q, "(num_tokens, num_heads, qk_head_dim)", kernels.dtypes, bound=dict(sizes), error=KernelError)
    for name, value, shape in (
        ("q", q, "(num_tokens, num_heads, qk_head_dim)"),
        ("kv_c_normed", kv_c_normed, "(num_tokens, kv_lora_rank)"),
        ("k_pe", k_pe, "(num_tokens, qk_rope_head_dim)"),
        ("kv_b_proj", kv_b_proj, "(num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)"),
    ):
        device = metadata.positions.device
        check_tensor(name, value, shape, q.dtype, bound=dict(sizes), device=device, error=KernelError)
    reads_cache = metadata.decode is not None or (metadata.prefill is not None and len(metadata.prefill.context_chunks) > 0)
    kernels.check_gradients(reads_cache=reads_cache, q=q, kv_c_normed=kv_c_normed, k_pe=k_pe, kv_b_proj=kv_b_proj)
    split = metadata.num_prefill_tokens
    for part, rows in ((metadata.prefill, q[:split]), (metadata.decode, q[split:])):
        if part is not None:
            check_attention_inputs(rows, latent_cache, part, dims, kernels)
    if metadata.prefill is not None:
        workspace = check_workspace(workspace, metadata.prefill, q, dims)
    if plan is not None:
        kernels.check_plan(plan, metadata.decode)
    if latent_cache is None and not metadata.is_profile_run:
        raise KernelError("latent_cache: expected a cache to write the new tokens to, got None")
    if metadata.decode is not None and plan is None:
        plan = kernels.plan(metadata.decode)

    if latent_cache is not None and not metadata.is_profile_run:
        kernels.write_latent_cache_(latent_cache, kv_c_normed, k_pe, metadata.slot_mapping)
    parts = []
    if metadata.prefill is not None:
        parts.append(
            prefill(
                q[:split],
                kv_c_normed[:split],
                k_pe[:split],
                latent_cache,
                metadata.prefill,
                kv_b_proj=kv_b_proj,
                dims=dims,
                kernels=kernels,
                workspace=workspace,
            )
        )
    if metadata.decode is not None and latent_cache is not None:
        parts.append(
            decode(q[split:], latent_cache, metadata.decode, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels, plan=plan)
        )
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def mla_attention(
    hidden_states: torch.Tensor,
    weights: MLAWeights,
    latent_cache: torch.Tensor | None,
    metadata: MLAMetadata,
    rope_table: RopeTable,
    kernels: KernelSet,
    *,
    plan: Plan | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One Multi-head Latent Attention layer over a paged latent cache: project, rotate, store, attend, project back.

    Parameters
    ----------
    hidden_states : torch.Tensor of shape (num_tokens, hidden_size)
        New tokens of the batch, prompts first, in the dtype of the weights.
    weights : MLAWeights
        Of this layer.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim) or None
        Of this layer, written at ``metadata.slot_mapping``; None on a profile run.
    metadata : MLAMetadata
        Of this step; the same for all layers.
    rope_table : RopeTable
        From ``rope_table(weights.dims.rope, max_len)``.
    kernels : KernelSet
        What runs, for instance ``kernels_for("cpu")``.
    plan : Plan or None
        ``kernels.plan(metadata.decode)``, made once for all layers; None makes it here.
    workspace : torch.Tensor of shape (num_rows, latent_dim) or None
        For chunked context, see `mla.compute.prefill`; None allocates it.

    Returns
    -------
    output : torch.Tensor of shape (num_tokens, hidden_size)
        In the dtype of `hidden_states`.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        Natural logarithm of each head's sum of exponentials.

    Raises
    ------
    KernelError, CacheError
        Arguments that do not fit each other or the kernel set; the cache is unchanged then.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", section 2.1 and appendix C.

    Examples
    --------
    >>> import mla
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=mla.RopeSpec(dim=8, interleaved=True))
    >>> weights, table = mla.MLAAttention(dims, hidden_size=64).requires_grad_(False).weights, mla.rope_table(dims.rope, 128)
    >>> metadata = mla.build_metadata([mla.prompt_group(5, [7])], block_size=16)
    >>> cache = torch.zeros(8, 16, dims.latent_dim)
    >>> out, lse = mla_attention(torch.randn(5, 64), weights, cache, metadata, table, mla.kernels_for("cpu"))
    >>> out.shape, lse.shape, int(cache.any(dim=2).sum())
    (torch.Size([5, 64]), torch.Size([5, 4]), 5)
    """
    check_instance("weights", weights, MLAWeights, KernelError)
    check_instance("metadata", metadata, MLAMetadata, KernelError)
    check_instance("rope_table", rope_table, RopeTable, KernelError)
    device = metadata.positions.device
    for name, where in (("weights", weights.device), ("rope_table", rope_table.cos.device)):
        if where != device:
            raise KernelError(f"{name}: expected device {device} as the metadata, got {where}")
    dims = weights.dims
    check_tensor(
        "hidden_states",
        hidden_states,
        "(num_tokens, hidden_size)",
        weights.dtype,
        bound={"num_tokens": metadata.num_tokens, "hidden_size": weights.hidden_size},
        device=metadata.positions.device,
        error=KernelError,
    )
    if (rope_table.interleaved, 2 * rope_table.cos.shape[1]) != (dims.rope.interleaved, dims.rope.dim):
        raise KernelError(
            f"rope_table: expected interleaved={dims.rope.interleaved} and dim {dims.rope.dim}, "
            f"got interleaved={rope_table.interleaved} and dim {2 * rope_table.cos.shape[1]}"
        )
    q = _project_query(hidden_states, weights).unflatten(1, (dims.num_heads, dims.qk_head_dim))
    latent = linear(hidden_states, weights.kv_a_proj_with_mqa, weights.kv_a_proj_with_mqa_bias)
    kv_c, k_pe = latent.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1)
    q_nope, q_pe = q.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=2)
    out, lse = attend(
        torch.cat([q_nope, apply_rope(q_pe, metadata.positions, rope_table)], dim=2),
        rms_norm(kv_c, weights.kv_a_layernorm, dims.rms_norm_eps),
        apply_rope(k_pe, metadata.positions, rope_table),
        latent_cache,
        metadata,
        kv_b_proj=weights.kv_b_proj,
        dims=dims,
        kernels=kernels,
        plan=plan,
        workspace=workspace,
    )
    return linear(out.flatten(1), weights.o_proj, weights.o_proj_bias), lse


def _project_query(hidden_states: torch.Tensor, weights: MLAWeights) -> torch.Tensor:
    if weights.q_proj is not None:
        return linear(hidden_states, weights.q_proj)
    if weights.q_a_proj is None or weights.q_a_layernorm is None or weights.q_b_proj is None:
        raise KernelError("weights: expected q_proj, or q_a_proj, q_a_layernorm and q_b_proj, got neither")
    compressed = linear(hidden_states, weights.q_a_proj, weights.q_a_proj_bias)
    return linear(rms_norm(compressed, weights.q_a_layernorm, weights.dims.rms_norm_eps), weights.q_b_proj)
