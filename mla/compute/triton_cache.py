"""Cache writes and gathers in Triton: one kernel each, conversion included, and nothing is read on the host."""

from __future__ import annotations

import torch

from mla.cache.paged import check_gather, check_write
from mla.compute.triton_launch import OPTIONS

__all__ = ["gather_latent_cache", "write_latent_cache_"]

ROWS = 4
"""Rows of one program: its four warps take 512 numbers each of a DeepSeek-V3 row."""


def _tile(width: int) -> int:
    """The power of two that holds `width` columns."""
    return 1 << max(width - 1, 0).bit_length()


def write_latent_cache_(latent_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store the latent rows of new tokens: `mla.cache.write_latent_cache_` in one kernel.

    Parameters
    ----------
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Written in place, in its own dtype (float64, float32, bfloat16 or float16).
    kv_c : torch.Tensor of shape (num_tokens, kv_lora_rank)
        Normed latents of any strides; stored detached, rounded to the cache's dtype.
    k_pe : torch.Tensor of shape (num_tokens, qk_rope_head_dim)
        Rotated key parts.
    slot_mapping : torch.Tensor of shape (num_tokens,), int64
        ``block * block_size + offset`` of each token; -1 and slots outside the cache write nothing. Of a slot given twice, one
        of the rows is stored.

    Raises
    ------
    CacheError
        Shapes, dtypes or devices that do not fit. Nothing is written then.
    """
    check_write(latent_cache, kv_c, k_pe, slot_mapping)
    (num_tokens, rank), rope = kv_c.shape, k_pe.shape[1]
    if not num_tokens or not latent_cache.numel():
        return
    import triton

    from mla.compute.triton_cache_kernels import write_kernel  # noqa: PLC0415

    # Detached: a kernel that is given a tensor with gradients must not seem to be part of their graph.
    with torch.no_grad(), torch.cuda.device_of(latent_cache):
        write_kernel[(triton.cdiv(num_tokens, ROWS),)](
            latent_cache, kv_c.detach(), k_pe.detach(), slot_mapping, num_tokens, latent_cache.shape[0] * latent_cache.shape[1],
            *kv_c.stride(), *k_pe.stride(), slot_mapping.stride(0),
            RANK=rank, ROPE=rope, WIDTH_C=_tile(rank), WIDTH_R=_tile(rope), ROWS=ROWS, num_warps=4, **OPTIONS,
        )  # fmt: skip


def gather_latent_cache(latent_cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Copy cache rows into a workspace: `mla.cache.gather_latent_cache` in one kernel.

    Parameters
    ----------
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        The cache.
    slots : torch.Tensor of shape (num_kv_tokens,), int64
        Rows to copy; all inside the cache. The row of a slot that is not becomes NaN.
    out : torch.Tensor of shape (num_rows, latent_dim)
        Workspace of at least `num_kv_tokens` rows and any strides, in the dtype that the products run in.

    Returns
    -------
    torch.Tensor of shape (num_kv_tokens, latent_dim)
        The filled head of `out`.

    Raises
    ------
    CacheError
        Shapes, dtypes or devices that do not fit, a workspace that is too small.
    """
    check_gather(latent_cache, slots, out)
    num_rows, latent_dim = slots.shape[0], latent_cache.shape[2]
    target = out[:num_rows]
    if not target.numel():
        return target
    import triton

    from mla.compute.triton_cache_kernels import gather_kernel  # noqa: PLC0415

    first = 1 << (latent_dim.bit_length() - 1)  # 576 is 512 + 64
    with torch.no_grad(), torch.cuda.device_of(latent_cache):
        gather_kernel[(triton.cdiv(num_rows, ROWS),)](
            latent_cache, slots, target, num_rows, latent_cache.shape[0] * latent_cache.shape[1], slots.stride(0),
            *target.stride(), SIZE_A=first, SIZE_B=latent_dim - first, WIDTH_A=first, WIDTH_B=_tile(latent_dim - first),
            ROWS=ROWS, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return target
