"""Folding the key up-projection into the query and the value up-projection into the output.

With ``k_nope = W_UK kv_c`` the score ``q_nope . k_nope`` equals ``(q_nope W_UK) . kv_c``, so decode attends the cached rows
themselves; ``W_UV`` is applied once to the attended latent.

References
----------
DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.2.
"""

from __future__ import annotations

import torch

from mla._checks import check_instance, check_tensor
from mla.compute.products import head_linear, linear, write_head_linear
from mla.errors import KernelError
from mla.metadata.dims import MLADims

__all__ = ["absorb_query", "expand_latent", "project_output", "split_kv_b_proj"]

_KV_B_SHAPE = "(num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)"


def _sizes(dims: MLADims) -> dict[str, int]:
    check_instance("dims", dims, MLADims, KernelError)
    names = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim", "latent_dim")
    return {name: getattr(dims, name) for name in names}


def _check_weight(kv_b_proj: torch.Tensor, x: torch.Tensor, dims: MLADims) -> None:
    check_tensor("kv_b_proj", kv_b_proj, _KV_B_SHAPE, x.dtype, device=x.device, bound=_sizes(dims), error=KernelError)


def split_kv_b_proj(kv_b_proj: torch.Tensor, dims: MLADims) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK and W_UV of every head, as views of the one weight.

    Parameters
    ----------
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection as checkpoints hold it: per head the key rows, then the value rows.
    dims : MLADims
        Dimensions.

    Returns
    -------
    w_uk : torch.Tensor of shape (num_heads, qk_nope_head_dim, kv_lora_rank)
        ``k_nope[h] = w_uk[h] @ kv_c``.
    w_uv : torch.Tensor of shape (num_heads, kv_lora_rank, v_head_dim)
        ``v[h] = kv_c @ w_uv[h]``.

    Raises
    ------
    KernelError
        A weight of another shape.

    Examples
    --------
    >>> from mla.metadata import RopeSpec
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> w_uk, w_uv = split_kv_b_proj(torch.randn(4 * (16 + 24), 32), dims)
    >>> w_uk.shape, w_uv.shape
    (torch.Size([4, 16, 32]), torch.Size([4, 32, 24]))
    """
    check_tensor("kv_b_proj", kv_b_proj, _KV_B_SHAPE, bound=_sizes(dims), error=KernelError)
    per_head = kv_b_proj.view(dims.num_heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank)
    return per_head[:, : dims.qk_nope_head_dim], per_head[:, dims.qk_nope_head_dim :].transpose(1, 2)


def absorb_query(q: torch.Tensor, kv_b_proj: torch.Tensor, dims: MLADims) -> torch.Tensor:
    """Queries against cache rows instead of keys: ``[q_nope W_UK ; q_pe]``.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Rotated queries.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions.

    Returns
    -------
    torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        In the dtype of `q`.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.

    Examples
    --------
    The score of a query and a key is that of the folded query and the key's cache row.

    >>> from mla.metadata import RopeSpec
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> shapes = (3, 4, 24), (5, 32), (5, 8), (160, 32)
    >>> q, kv_c, k_pe, kv_b_proj = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    >>> folded, (k, _) = absorb_query(q, kv_b_proj, dims), expand_latent(kv_c, k_pe, kv_b_proj, dims)
    >>> folded.shape
    torch.Size([3, 4, 40])
    >>> torch.allclose(folded @ torch.cat([kv_c, k_pe], dim=1).T, torch.einsum("qhd,khd->qhk", q, k))
    True
    """
    check_tensor("q", q, "(num_tokens, num_heads, qk_head_dim)", bound=_sizes(dims), error=KernelError)
    _check_weight(kv_b_proj, q, dims)
    w_uk, _ = split_kv_b_proj(kv_b_proj, dims)
    q_nope, q_pe = q.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
    traced = torch.compiler.is_compiling() or (torch.is_grad_enabled() and (q.requires_grad or kv_b_proj.requires_grad))
    if q.device.type != "cpu" or traced:
        return torch.cat([head_linear(q_nope, w_uk), q_pe], dim=-1)
    out = q.new_empty(q.shape[0], dims.num_heads, dims.latent_dim)
    latent, rope = out.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
    write_head_linear(q_nope, w_uk, latent)
    rope.copy_(q_pe)
    return out


def project_output(out: torch.Tensor, kv_b_proj: torch.Tensor, dims: MLADims) -> torch.Tensor:
    """Attended latents to value heads, ``out W_UV``.

    Parameters
    ----------
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
        From `paged_decode`.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions.

    Returns
    -------
    torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of `out`.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.

    Examples
    --------
    What attends one latent alone becomes the value of that latent.

    >>> from mla.metadata import RopeSpec
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> kv_c, k_pe, kv_b_proj = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 32), (5, 8), (160, 32)))
    >>> values = project_output(kv_c[:, None].expand(-1, 4, -1), kv_b_proj, dims)
    >>> values.shape, torch.allclose(values, expand_latent(kv_c, k_pe, kv_b_proj, dims)[1])
    (torch.Size([5, 4, 24]), True)
    """
    check_tensor("out", out, "(num_tokens, num_heads, kv_lora_rank)", bound=_sizes(dims), error=KernelError)
    _check_weight(kv_b_proj, out, dims)
    _, w_uv = split_kv_b_proj(kv_b_proj, dims)
    return head_linear(out, w_uv)


def expand_latent(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_b_proj: torch.Tensor, dims: MLADims
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of latent rows, as prefill attends them.

    Parameters
    ----------
    kv_c : torch.Tensor of shape (num_tokens, kv_lora_rank)
        Normed latents.
    k_pe : torch.Tensor of shape (num_tokens, qk_rope_head_dim)
        Rotated key parts, shared by all heads.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions.

    Returns
    -------
    k : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        ``[W_UK kv_c ; k_pe]``.
    v : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        ``W_UV kv_c``; a view.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.

    Examples
    --------
    >>> from mla.metadata import RopeSpec
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> k_pe = torch.randn(5, 8)
    >>> k, v = expand_latent(torch.randn(5, 32), k_pe, torch.randn(160, 32), dims)
    >>> k.shape, v.shape, torch.equal(k[:, 3, 16:], k_pe)
    (torch.Size([5, 4, 24]), torch.Size([5, 4, 24]), True)
    """
    bound = check_tensor("kv_c", kv_c, "(num_tokens, kv_lora_rank)", bound=_sizes(dims), error=KernelError)
    check_tensor("k_pe", k_pe, "(num_tokens, qk_rope_head_dim)", kv_c.dtype, bound=bound, error=KernelError)
    _check_weight(kv_b_proj, kv_c, dims)
    expanded = linear(kv_c, kv_b_proj).unflatten(1, (dims.num_heads, dims.qk_nope_head_dim + dims.v_head_dim))
    k_nope, v = expanded.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, dims.num_heads, -1)], dim=-1)
    return k, v
