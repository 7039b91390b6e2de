"""Writing, gathering, copying and swapping rows of the paged latent cache, in plain torch.

On the CPU slots and blocks are checked by value before anything is written. On other devices no value is read on the host:
slots outside the cache are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mla._checks import as_items, check_floating, check_tensor
from mla.cache.spec import check_latent_cache
from mla.errors import CacheError

__all__ = ["check_gather", "check_write", "copy_blocks_", "gather_latent_cache", "swap_blocks_", "write_latent_cache_"]

WORD = torch.complex128
"""The widest elements that torch has; they are only moved."""


def check_write(latent_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Refuse arguments of a cache write that do not fit each other; reads no value.

    Raises
    ------
    CacheError
        Naming the argument.
    """
    check_latent_cache("latent_cache", latent_cache)
    device = latent_cache.device
    bound = check_tensor("slot_mapping", slot_mapping, "(num_tokens,)", torch.int64, device=device, error=CacheError)
    check_tensor("kv_c", kv_c, "(num_tokens, kv_lora_rank)", device=device, bound=bound, error=CacheError)
    check_tensor("k_pe", k_pe, "(num_tokens, qk_rope_head_dim)", kv_c.dtype, device=device, bound=bound, error=CacheError)
    rank, latent_dim = kv_c.shape[1], latent_cache.shape[2]
    if rank + k_pe.shape[1] != latent_dim:
        raise CacheError(
            f"kv_c, k_pe: expected {latent_dim} columns together (latent_dim of the cache), got {rank} + {k_pe.shape[1]}"
        )
    check_floating("kv_c", kv_c, CacheError)


def check_gather(latent_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse arguments of a gather that do not fit each other; reads no value.

    Raises
    ------
    CacheError
        Naming the argument.
    """
    check_latent_cache("latent_cache", latent_cache)
    device, bound = latent_cache.device, {"latent_dim": latent_cache.shape[2]}
    check_tensor("slots", slots, "(num_kv_tokens,)", torch.int64, device=device, error=CacheError)
    check_tensor("out", out, "(num_rows, latent_dim)", device=device, bound=bound, error=CacheError)
    check_floating("out", out, CacheError)
    if out.shape[0] < slots.shape[0]:
        raise CacheError(f"out: expected at least {slots.shape[0]} rows, got {out.shape[0]}")


def write_latent_cache_(latent_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store the latent rows of new tokens.

    Parameters
    ----------
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Written in place, in its own dtype (float64, float32, bfloat16 or float16).
    kv_c : torch.Tensor of shape (num_tokens, kv_lora_rank)
        Normed latents; stored detached, rounded to the cache's dtype.
    k_pe : torch.Tensor of shape (num_tokens, qk_rope_head_dim)
        Rotated key parts.
    slot_mapping : torch.Tensor of shape (num_tokens,), int64
        ``block * block_size + offset`` of each token; -1 writes nothing.

    Raises
    ------
    CacheError
        Shapes, dtypes or devices that do not fit; on the CPU also a slot outside the cache or one given twice. Nothing is
        written then.

    Examples
    --------
    >>> latent_cache = torch.zeros(3, 2, 3)  # 3 blocks of 2 tokens, kv_lora_rank 2 and one rope column
    >>> kv_c, k_pe = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0]])
    >>> write_latent_cache_(latent_cache, kv_c, k_pe, torch.tensor([5, -1]))  # the second token is not stored
    >>> latent_cache[2].tolist()
    [[0.0, 0.0, 0.0], [1.0, 2.0, 5.0]]
    >>> write_latent_cache_(latent_cache, kv_c, k_pe, torch.tensor([5, 6]))
    Traceback (most recent call last):
        ...
    mla.errors.CacheError: slot_mapping: expected slots in -1..5, got 6
    """
    check_write(latent_cache, kv_c, k_pe, slot_mapping)
    device, latent_dim = latent_cache.device, latent_cache.shape[2]
    rows = latent_cache.view(-1, latent_dim)
    with torch.no_grad():
        if device.type == "cpu":
            keep = _writable(slot_mapping, len(rows))
            if keep is not None:
                slot_mapping, kv_c, k_pe = (x.index_select(0, keep) for x in (slot_mapping, kv_c, k_pe))
            parts = [x.to(rows.dtype).contiguous() for x in (kv_c, k_pe)]
            rows, *parts = _as_words(rows, *parts)
            split = parts[0].shape[1]
            rows[:, :split].index_put_((slot_mapping,), parts[0])
            rows[:, split:].index_put_((slot_mapping,), parts[1])
        else:
            _write_unchecked_(rows, torch.cat([kv_c, k_pe], dim=1).to(rows.dtype), slot_mapping)


def _writable(slots: torch.Tensor, num_slots: int) -> torch.Tensor | None:
    """Indices of the rows to write, None for all; slots are checked by value."""
    if not slots.numel():
        return None
    ordered = np.sort(slots.numpy())
    low, high = int(ordered[0]), int(ordered[-1])
    if low < -1 or high >= num_slots:
        raise CacheError(f"slot_mapping: expected slots in -1..{num_slots - 1}, got {low if low < -1 else high}")
    twice = ordered[1:] == ordered[:-1]
    if low < 0:
        twice &= ordered[1:] >= 0
    if twice.any():
        raise CacheError(f"slot_mapping: expected every slot once, got slot {int(ordered[1:][twice][0])} twice")
    return (slots >= 0).nonzero().flatten() if low < 0 else None


def _as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous matrices as matrices of 16 bytes an element if all can be seen so: scattering copies element by element."""
    if torch.compiler.is_compiling():  # cannot trace addresses
        return tensors
    if any(x.shape[1] * x.itemsize % WORD.itemsize or x.data_ptr() % WORD.itemsize or not x.numel() for x in tensors):
        return tensors
    return tuple(x.view(WORD) for x in tensors)


def _write_unchecked_(rows: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Scatter without reading a value on the host: a skipped row repeats the write of the first row that counts."""
    if not slots.numel() or not len(rows):
        return
    writable = (slots >= 0) & (slots < len(rows))
    first = writable.to(torch.int32).argmax()
    source = torch.where(writable, torch.arange(len(slots), device=slots.device), first)
    # With no row to write, row 0 gets its own value back. Indexing with `first` would read it on the host.
    some = writable.any()
    target = torch.where(some, slots[source], 0)
    rows.index_put_((target,), torch.where(some, values[source], rows[:1]))


def gather_latent_cache(latent_cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Copy cache rows into a workspace.

    Parameters
    ----------
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        The cache.
    slots : torch.Tensor of shape (num_kv_tokens,), int64
        Rows to copy; all inside the cache.
    out : torch.Tensor of shape (num_rows, latent_dim)
        Workspace of at least `num_kv_tokens` rows, in the dtype that the products run in.

    Returns
    -------
    torch.Tensor of shape (num_kv_tokens, latent_dim)
        The filled head of `out`.

    Raises
    ------
    CacheError
        Shapes, dtypes or devices that do not fit, a workspace that is too small; on the CPU also a slot outside the cache.

    Examples
    --------
    >>> latent_cache = torch.arange(12.0).view(3, 2, 2)
    >>> workspace = torch.empty(8, 2)
    >>> gather_latent_cache(latent_cache, torch.tensor([4, 0]), out=workspace).tolist()
    [[8.0, 9.0], [0.0, 1.0]]
    """
    check_gather(latent_cache, slots, out)
    device, num_rows = latent_cache.device, slots.shape[0]
    num_slots = latent_cache.shape[0] * latent_cache.shape[1]
    if device.type == "cpu" and num_rows:
        low, high = (int(x) for x in slots.aminmax())
        if low < 0 or high >= num_slots:
            raise CacheError(f"slots: expected slots in 0..{num_slots - 1}, got {low if low < 0 else high}")
    target = out[:num_rows]
    rows = latent_cache.view(num_slots, -1)
    if out.dtype == latent_cache.dtype and target.is_contiguous():
        torch.index_select(rows, 0, slots, out=target)
    else:
        target.copy_(rows.index_select(0, slots))
    return target


def _check_pairs(src_to_dst: torch.Tensor, num_src: int, num_dst: int) -> torch.Tensor:
    """The (source, destination) pairs on the host, checked by value."""
    check_tensor("src_to_dst", src_to_dst, "(num_pairs, 2)", (torch.int64, torch.int32), error=CacheError)
    if src_to_dst.is_meta:
        raise CacheError("src_to_dst: expected values, got a tensor on device meta")
    pairs = src_to_dst.to("cpu", torch.int64)
    for column, name, size in ((0, "source", num_src), (1, "destination", num_dst)):
        bad = pairs[(pairs[:, column] < 0) | (pairs[:, column] >= size), column]
        if bad.numel():
            raise CacheError(f"src_to_dst: expected {name} blocks in 0..{size - 1}, got {int(bad[0])}")
    if pairs[:, 1].unique().numel() != len(pairs):
        raise CacheError(f"src_to_dst: expected every destination once, got {pairs[:, 1].tolist()[:16]}")
    return pairs


def copy_blocks_(latent_caches: Sequence[torch.Tensor], src_to_dst: torch.Tensor) -> None:
    """Copy blocks within each layer's cache; all sources are read before any destination is written.

    Parameters
    ----------
    latent_caches : sequence of torch.Tensor of shape (num_blocks, block_size, latent_dim)
        One per layer, of equal shape; written in place.
    src_to_dst : torch.Tensor of shape (num_pairs, 2), int64 or int32
        Source and destination blocks. Host integers are best: the values are checked.

    Raises
    ------
    CacheError
        Blocks outside a cache or a destination given twice; nothing is written then.

    Examples
    --------
    >>> layers = [torch.arange(6.0).view(3, 2, 1), torch.arange(6.0, 12.0).view(3, 2, 1)]
    >>> copy_blocks_(layers, torch.tensor([[0, 2], [2, 1]]))
    >>> [latent_cache.flatten().tolist() for latent_cache in layers]
    [[0.0, 1.0, 4.0, 5.0, 0.0, 1.0], [6.0, 7.0, 10.0, 11.0, 6.0, 7.0]]
    """
    caches = as_items("latent_caches", latent_caches, CacheError)
    if not caches:
        raise CacheError("latent_caches: expected at least one cache, got none")
    seen: dict[tuple[torch.device, int], int] = {}
    for i, cache in enumerate(caches):
        check_latent_cache(f"latent_caches[{i}]", cache)
        if cache.shape != caches[0].shape:
            raise CacheError(f"latent_caches[{i}]: expected shape {tuple(caches[0].shape)}, got {tuple(cache.shape)}")
        first = seen.setdefault((cache.device, cache.data_ptr()), i)
        if first != i and cache.numel():
            raise CacheError(f"latent_caches[{i}]: expected a cache of its own, got latent_caches[{first}] again")
    pairs = _check_pairs(src_to_dst, caches[0].shape[0], caches[0].shape[0])
    with torch.no_grad():
        for cache in caches:
            src, dst = pairs.to(cache.device).unbind(1)
            cache.index_copy_(0, dst, cache.index_select(0, src))


def swap_blocks_(src_cache: torch.Tensor, dst_cache: torch.Tensor, src_to_dst: torch.Tensor) -> None:
    """Copy blocks from one cache to another, which may live on another device.

    Parameters
    ----------
    src_cache, dst_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Equal block size, latent width and dtype; `dst_cache` is written in place.
    src_to_dst : torch.Tensor of shape (num_pairs, 2), int64 or int32
        Source and destination blocks. Host integers are best: the values are checked.

    Raises
    ------
    CacheError
        Caches that differ in layout, blocks outside them, or a destination given twice; nothing is written then.

    Examples
    --------
    >>> latent_cache, swapped_out = torch.arange(6.0).view(3, 2, 1), torch.zeros(8, 2, 1)
    >>> swap_blocks_(latent_cache, swapped_out, torch.tensor([[1, 7]]))
    >>> swapped_out[7].flatten().tolist()
    [2.0, 3.0]
    """
    check_latent_cache("src_cache", src_cache)
    check_latent_cache("dst_cache", dst_cache)
    if src_cache.shape[1:] != dst_cache.shape[1:] or src_cache.dtype != dst_cache.dtype:
        raise CacheError(
            f"dst_cache: expected blocks of {tuple(src_cache.shape[1:])} {src_cache.dtype}, "
            f"got {tuple(dst_cache.shape[1:])} {dst_cache.dtype}"
        )
    pairs = _check_pairs(src_to_dst, src_cache.shape[0], dst_cache.shape[0])
    with torch.no_grad():
        blocks = src_cache.index_select(0, pairs[:, 0].to(src_cache.device))
        dst_cache.index_copy_(0, pairs[:, 1].to(dst_cache.device), blocks.to(dst_cache.device))
