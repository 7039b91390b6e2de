"""The paged latent cache: its shape, its bytes, and making one."""

from __future__ import annotations

import attrs
import torch

from mla._checks import FLOATS, check_instance, check_int, describe, dtype_name, named_fields, usable_device
from mla.errors import CacheError

__all__ = ["CACHE_DTYPES", "LatentCacheSpec", "allocate_latent_cache", "check_latent_cache"]

CACHE_DTYPES = FLOATS


@named_fields(CacheError)
@attrs.frozen(kw_only=True)
class LatentCacheSpec:
    """Layout of one layer's cache: one row per token, the normed latent ``kv_c`` and then the rotated ``k_pe``.

    Parameters
    ----------
    kv_lora_rank : int
        Width of ``kv_c``.
    qk_rope_head_dim : int
        Width of ``k_pe``.
    block_size : int
        Tokens per block; any number.
    dtype : torch.dtype
        float64, float32, bfloat16 or float16.

    Raises
    ------
    CacheError
        A dimension below 1, or another dtype.

    Examples
    --------
    >>> spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=16, dtype=torch.bfloat16)
    >>> spec.latent_dim, spec.shape(10), spec.bytes_per_block
    (576, (10, 16, 576), 18432)
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    block_size: int
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_rope_head_dim", "block_size"):
            check_int(name, getattr(self, name), low=1, error=CacheError)
        if self.dtype not in CACHE_DTYPES:
            raise CacheError(f"dtype: expected {', '.join(map(dtype_name, CACHE_DTYPES))}, got {self.dtype!r}")

    @property
    def latent_dim(self) -> int:
        """Columns of a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_size * self.latent_dim * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, int, int]:
        """``(num_blocks, block_size, latent_dim)``.

        Raises
        ------
        CacheError
            `num_blocks` is not an int >= 0.

        Examples
        --------
        >>> LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=16, dtype=torch.bfloat16).shape(1000)
        (1000, 16, 576)
        """
        return (check_int("num_blocks", num_blocks, low=0, error=CacheError), self.block_size, self.latent_dim)

    def blocks_that_fit(self, num_bytes: int, *, num_layers: int = 1) -> int:
        """Blocks per layer within a budget for all layers.

        Raises
        ------
        CacheError
            A negative budget or no layers.

        Examples
        --------
        >>> spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=16, dtype=torch.bfloat16)
        >>> spec.blocks_that_fit(2**30, num_layers=61)  # of 61 * 18432 bytes each
        954
        """
        check_int("num_bytes", num_bytes, low=0, error=CacheError)
        check_int("num_layers", num_layers, low=1, error=CacheError)
        return num_bytes // (self.bytes_per_block * num_layers)


def allocate_latent_cache(spec: LatentCacheSpec, num_blocks: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """A cache of zeros, shape (num_blocks, block_size, latent_dim).

    Raises
    ------
    CacheError
        `num_blocks` is not an int >= 0, or no such device.

    Examples
    --------
    >>> spec = LatentCacheSpec(kv_lora_rank=32, qk_rope_head_dim=8, block_size=4, dtype=torch.bfloat16)
    >>> latent_cache = allocate_latent_cache(spec, 10)
    >>> latent_cache.shape, latent_cache.dtype
    (torch.Size([10, 4, 40]), torch.bfloat16)
    """
    check_instance("spec", spec, LatentCacheSpec, CacheError)
    return torch.zeros(spec.shape(num_blocks), dtype=spec.dtype, device=usable_device("device", device, CacheError))


def check_latent_cache(field: str, latent_cache: object) -> torch.Tensor:
    """Refuse anything but a contiguous (num_blocks, block_size, latent_dim) tensor of a cache dtype.

    Raises
    ------
    CacheError
        Naming `field`.
    """
    if not isinstance(latent_cache, torch.Tensor):
        raise CacheError(f"{field}: expected a torch.Tensor, got {describe(latent_cache)}")
    if latent_cache.dim() != 3:
        raise CacheError(f"{field}: expected shape (num_blocks, block_size, latent_dim), got {tuple(latent_cache.shape)}")
    if latent_cache.dtype not in CACHE_DTYPES:
        raise CacheError(f"{field}: expected {', '.join(map(dtype_name, CACHE_DTYPES))}, got {latent_cache.dtype}")
    if not latent_cache.is_contiguous():
        raise CacheError(f"{field}: expected a contiguous cache, got strides {latent_cache.stride()}")
    return latent_cache
