"""The paged latent cache: layout, reads and writes, and who holds which block."""

from mla.cache.blocks import BlockPool, SequenceBlocks
from mla.cache.paged import copy_blocks_, gather_latent_cache, swap_blocks_, write_latent_cache_
from mla.cache.spec import LatentCacheSpec, allocate_latent_cache

__all__ = [
    "BlockPool",
    "LatentCacheSpec",
    "SequenceBlocks",
    "allocate_latent_cache",
    "copy_blocks_",
    "gather_latent_cache",
    "swap_blocks_",
    "write_latent_cache_",
]
