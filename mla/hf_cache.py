"""A paged latent cache that grows with its sequences, and how it stands in a `Cache` of transformers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mla._checks import check_instance, check_int, describe, usable_device
from mla.cache.paged import copy_blocks_
from mla.cache.spec import LatentCacheSpec
from mla.errors import CacheError

__all__ = ["PagedLatents", "latents_of", "make_layers"]

Mask = npt.NDArray[np.bool_]
GROWTH = 1.25
"""Blocks of a cache that grows, over those that it held before."""


class PagedLatents:
    """The latent rows of a batch: one cache tensor a layer, and the blocks of each sequence.

    A column is a position of the padded batch, as transformers counts them; only columns whose mask is 1 have a row in the
    cache. Sequences may share blocks, as beams do: a block that is shared is copied before it is written.

    Parameters
    ----------
    spec : LatentCacheSpec
        Widths, block size and dtype.
    num_layers : int
        Layers of the model.
    num_blocks : int or None
        Blocks of each layer, allocated now and never more; None lets the cache grow by a quarter at a time.
    device : torch.device or str
        Where the rows are kept.

    Raises
    ------
    CacheError
        A number below 1, or no such device.

    Examples
    --------
    >>> spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=4, dtype=torch.bfloat16)
    >>> latents = PagedLatents(spec, num_layers=2)
    >>> tables = latents.reserve_([6])
    >>> latents.commit_(np.ones((1, 6), np.bool_))
    >>> latents.select_([0, 0])  # two beams, which share what they have
    >>> latents.num_used_blocks, latents.reserve_([1, 1]), latents.num_used_blocks
    (2, [(0, 2), (0, 1)], 3)
    """

    def __init__(
        self, spec: LatentCacheSpec, num_layers: int, *, num_blocks: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        check_instance("spec", spec, LatentCacheSpec, CacheError)
        check_int("num_layers", num_layers, low=1, error=CacheError)
        if num_blocks is not None:
            check_int("num_blocks", num_blocks, low=1, error=CacheError)
        where = usable_device("device", device, CacheError)
        self.spec = spec
        self.may_grow = num_blocks is None
        shape = spec.shape(num_blocks or 0)
        with torch.inference_mode(mode=False):  # rows made there may be written outside
            self.caches = [torch.zeros(shape, dtype=spec.dtype, device=where) for _ in range(num_layers)]
        self.reset_()

    def reset_(self) -> None:
        """Forget every sequence; the memory stays."""
        self.tables: list[list[int]] = []
        self.mask: Mask = np.zeros((0, 0), np.bool_)
        self._refs: Counter[int] = Counter()
        self._free = list(range(self.num_blocks))[::-1]

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer."""
        return self.caches[0].shape[0]

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a sequence holds; one that several share counts once."""
        return self.num_blocks - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch; 0 before the first step."""
        return len(self.mask)

    @property
    def num_columns(self) -> int:
        """Columns so far, padding included."""
        return int(self.mask.shape[1])

    @property
    def seq_lens(self) -> list[int]:
        """Cached rows of each sequence."""
        lens: list[int] = self.mask.sum(1).tolist()
        return lens

    def reserve_(self, query_lens: Sequence[int]) -> list[tuple[int, ...]]:
        """Give every sequence the blocks of its new tokens, none of them shared; the blocks of each.

        Raises
        ------
        CacheError
            Another number of sequences than before, or no block left in a cache that does not grow; nothing is changed then.
        """
        if not self.num_seqs:
            self.reset_()  # of what a step left that failed
            self.tables = [[] for _ in query_lens]
        if len(query_lens) != len(self.tables):
            raise CacheError(f"cache: expected {len(self.tables)} sequences, got {len(query_lens)}")
        size = self.spec.block_size
        lens = self.seq_lens or [0] * len(query_lens)
        ends = [-(-(past + new) // size) for past, new in zip(lens, query_lens, strict=True)]
        refs = self._refs.copy()
        shared: list[tuple[int, int]] = []  # a sequence and which of its blocks is to be written though others hold it too
        for seq, (table, past, end) in enumerate(zip(self.tables, lens, ends, strict=True)):
            for i in range(past // size, min(end, len(table)) if query_lens[seq] else 0):
                if refs[table[i]] > 1:
                    refs[table[i]] -= 1
                    shared.append((seq, i))
        self._make_room(len(shared) + sum(max(0, end - len(table)) for table, end in zip(self.tables, ends, strict=True)))
        copies = []
        for seq, i in shared:
            block = self._take()
            if i * size < lens[seq]:
                copies.append((self.tables[seq][i], block))
            self._refs[self.tables[seq][i]] -= 1
            self.tables[seq][i] = block
        for table, end in zip(self.tables, ends, strict=True):
            table += [self._take() for _ in range(end - len(table))]
        if copies:
            copy_blocks_(self.caches, torch.tensor(copies))
        return [tuple(table) for table in self.tables]

    def _take(self) -> int:
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def _make_room(self, count: int) -> None:
        missing = count - len(self._free)
        if missing <= 0:
            return
        if not self.may_grow:
            raise CacheError(f"num_blocks: expected {self.num_blocks + missing} blocks for this step, got {self.num_blocks}")
        before = self.num_blocks
        blocks = max(before + missing, int(GROWTH * before))
        for i, cache in enumerate(self.caches):  # one layer after the other, so that only one is held twice
            with torch.inference_mode(mode=False):
                grown = cache.new_zeros(self.spec.shape(blocks))
                grown[:before].copy_(cache)
            self.caches[i] = grown
        self._free = [*range(before, blocks)][::-1] + self._free

    def commit_(self, mask: Mask) -> None:
        """The batch as it is after a step: all columns so far, new ones included."""
        self.mask = mask

    def select_(self, seqs: Sequence[int]) -> None:
        """Go on with these sequences, in this order; one that is named twice shares its blocks.

        Raises
        ------
        CacheError
            A sequence that does not exist.
        """
        for seq in seqs:
            check_int("seqs", seq, low=0, high=self.num_seqs - 1, error=CacheError)
        self._hold([list(self.tables[seq]) for seq in seqs], self.mask[list(seqs)])

    def crop_(self, num_columns: int) -> None:
        """Forget the last columns.

        Raises
        ------
        CacheError
            More columns than there are.
        """
        check_int("num_columns", num_columns, low=0, high=self.num_columns, error=CacheError)
        mask = self.mask[:, : self.num_columns - num_columns]
        counts = -(-mask.sum(1) // self.spec.block_size)
        self._hold([table[:count] for table, count in zip(self.tables, counts.tolist(), strict=True)], mask)

    def _hold(self, tables: list[list[int]], mask: Mask) -> None:
        self.tables, self.mask = tables, mask
        self._refs = Counter(block for table in tables for block in table)
        self._free = [block for block in range(self.num_blocks) if not self._refs[block]][::-1]


class _LatentLayer:
    """One layer of a `Cache` of transformers over `PagedLatents`, which the layers share: the first speaks for all."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    keys = values = None  # never made: attention reads the latent rows

    def __init__(self, latents: PagedLatents, layer_idx: int) -> None:
        self.latents = latents
        self.layer_idx = layer_idx

    def __repr__(self) -> str:
        return f"LatentLayer({self.latents.num_seqs} sequences, {self.latents.num_used_blocks} blocks)"

    @property
    def latent_cache(self) -> torch.Tensor:
        """Rows of this layer, shape (num_blocks, block_size, latent_dim)."""
        return self.latents.caches[self.layer_idx]

    @property
    def is_initialized(self) -> bool:
        return self.latents.num_seqs > 0

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        self.update(*states)

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise CacheError("cache: expected a model after `replace_attention`, got one with transformers' own attention")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.latents.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.latents.num_columns

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise CacheError("cache: expected a cache that stays on its device, got offloading")

    prefetch = offload

    def reset(self) -> None:
        if self.layer_idx == 0:
            self.latents.reset_()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise CacheError(f"tokens_to_remove: expected the negative of a number of tokens, got {tokens_to_remove}")
        if self.layer_idx == 0:
            self.latents.crop_(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.layer_idx == 0:
            self.latents.select_(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.layer_idx == 0:
            self.latents.select_([seq for seq in range(self.latents.num_seqs) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.layer_idx == 0:
            self.latents.select_(torch.arange(self.latents.num_seqs)[indices.cpu()].tolist())


@functools.cache
def _layer_class() -> type:
    from transformers.cache_utils import CacheLayerMixin

    return type("LatentLayer", (_LatentLayer, CacheLayerMixin), {"__doc__": _LatentLayer.__doc__})


def make_layers(latents: PagedLatents) -> list[Any]:
    """Layers over `latents` for ``transformers.Cache(layers=...)``."""
    return [_layer_class()(latents, i) for i in range(len(latents.caches))]


def latents_of(cache: Any, spec: LatentCacheSpec, num_layers: int, device: torch.device) -> PagedLatents:
    """The latent rows in a cache of transformers; an empty `DynamicCache`, as `generate` makes it, is given its layers first.

    Raises
    ------
    CacheError
        A cache of another kind or of another model, or one that holds keys and values.
    """
    from transformers import Cache, DynamicCache

    if not isinstance(cache, Cache):
        raise CacheError(f"cache: expected a Cache of transformers, got {describe(cache)}")
    if cache.layers and isinstance(cache.layers[0], _LatentLayer):
        latents = cache.layers[0].latents
        if (latents.spec, len(latents.caches), latents.caches[0].device) != (spec, num_layers, device):
            raise CacheError(
                f"cache: expected {num_layers} layers of {spec} on {device}, "
                f"got {len(latents.caches)} of {latents.spec} on {latents.caches[0].device}"
            )
        return latents
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        state = "offloading " if cache.offloading else ""
        raise CacheError(
            f"cache: expected None, an empty DynamicCache or `latent_cache(model)`, "
            f"got a {state}{type(cache).__name__} of {cache.get_seq_length()} tokens"
        )
    latents = PagedLatents(spec, num_layers, device=device)
    cache.layers[:] = make_layers(latents)
    cache.layer_class_to_replicate = None
    return latents
