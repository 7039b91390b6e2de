"""Decoding by IPEX: every new token is a row with its own list of cache rows, and rows of one length share a call."""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import torch

from mla._checks import check_instance, check_positive_float, check_tensor
from mla.cache.spec import check_latent_cache
from mla.compute.contracts import Plan
from mla.compute.ipex_load import Installed
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = ["IpexDecodePlan", "RowGroup", "check_cache", "num_splits", "paged_decode_by", "plan_decode"]

SPLIT_TOKENS: Final = 512
"""Keys of a split: enough to be worth a task of its own, few enough to give every thread one."""

MAX_SPLITS: Final = 64

MAX_LOGIT_BYTES: Final = 2**26
"""Rows of one length go through the kernel in groups whose partial outputs take no more."""

MAX_CACHE_NUMBERS: Final = 2**31
"""The kernel counts the numbers of the cache in 32 bits; beyond, it reads outside and ends the process."""

CPU: Final = torch.device("cpu")


@attrs.frozen(kw_only=True, eq=False)
class RowGroup:
    """New tokens that see equally many keys.

    Parameters
    ----------
    length : int
        Keys that each of them sees, at least 1.
    tokens : torch.Tensor of shape (num_rows,), int64
        Which tokens they are.
    slots : torch.Tensor of shape (num_rows, length), int32
        Slots of the keys of each.
    """

    length: int
    tokens: torch.Tensor
    slots: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class IpexDecodePlan:
    """The rows of one step by their lengths; made by `plan_decode`.

    Parameters
    ----------
    metadata : DecodeMetadata
        What it was made of.
    num_blocks : int
        Largest block in use plus 1: a cache with fewer blocks is refused.
    groups : tuple of RowGroup
        By ascending length; tokens that see no key are in none.
    """

    metadata: DecodeMetadata
    num_blocks: int
    groups: tuple[RowGroup, ...]


def num_splits(length: int) -> int:
    """Into how many parts the keys of a row are cut: a function of their number alone, which keeps a row's bits still.

    IPEX cuts ``ceil(length / num_splits)`` keys for each, and no part may be empty: with one head its result were NaN.
    """
    return min(-(-length // SPLIT_TOKENS), MAX_SPLITS)


def plan_decode(metadata: DecodeMetadata) -> IpexDecodePlan:
    """The rows of one step, for all layers; every index that IPEX will follow is checked here.

    Parameters
    ----------
    metadata : DecodeMetadata
        Of the step, on the CPU.

    Returns
    -------
    IpexDecodePlan
        Immutable; holds four bytes for each key that each new token sees.

    Raises
    ------
    KernelError
        Metadata on another device, lengths that cannot be, a block table too narrow for them, or a block that cannot be.
    """
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    if metadata.seq_lens.device != CPU:
        raise KernelError(f"metadata: expected device cpu, got {metadata.seq_lens.device}")
    block_size, table = metadata.block_size, metadata.block_table
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    rows: dict[int, list[tuple[int, int]]] = {}
    for seq, (first, last, length) in enumerate(zip(starts, starts[1:], seq_lens, strict=False)):
        if not 0 <= first <= last <= metadata.num_tokens:
            raise KernelError(f"query_start_loc: expected ascending values in 0..{metadata.num_tokens}, got {starts}")
        if last > first and -(-length // block_size) > table.shape[1]:
            needed = -(-length // block_size)
            raise KernelError(f"block_table: expected at least {needed} columns for {length} keys, got {table.shape[1]}")
        for token in range(first, last):
            seen = length - (last - 1 - token)
            if seen > 0:
                rows.setdefault(seen, []).append((token, seq))
    blocks_of_seq = table.numpy().astype(np.int64)
    offsets = np.arange(block_size)
    groups, num_blocks, past = [], 0, MAX_CACHE_NUMBERS // block_size
    for length, members in sorted(rows.items()):
        tokens, seqs = np.array(members).T
        blocks = blocks_of_seq[seqs, : -(-length // block_size)]
        low, high = int(blocks.min()), int(blocks.max())
        if low < 0 or high >= past:
            raise KernelError(f"block_table: expected blocks in 0..{past - 1}, got {low if low < 0 else high}")
        num_blocks = max(num_blocks, high + 1)
        slots = (blocks[:, :, None] * block_size + offsets).reshape(len(members), -1)[:, :length]
        groups.append(
            RowGroup(length=length, tokens=torch.from_numpy(tokens.copy()), slots=torch.from_numpy(slots.astype(np.int32)))
        )
    return IpexDecodePlan(metadata=metadata, num_blocks=num_blocks, groups=tuple(groups))


def check_cache(latent_cache: torch.Tensor) -> None:
    """Refuse a cache that IPEX's decode kernel cannot read.

    Raises
    ------
    KernelError
        Another dtype than bfloat16, or more numbers than IPEX counts.
    """
    if latent_cache.dtype != torch.bfloat16:
        raise KernelError(f"latent_cache: expected bfloat16 (IPEX takes no mixed types), got {latent_cache.dtype}")
    if latent_cache.numel() > MAX_CACHE_NUMBERS:
        rows = MAX_CACHE_NUMBERS // latent_cache.shape[2]
        raise KernelError(
            f"latent_cache: expected at most {MAX_CACHE_NUMBERS} numbers ({rows} tokens), where IPEX's indices end, "
            f"got {latent_cache.numel()}"
        )


def _check_decode(
    q: torch.Tensor, latent_cache: torch.Tensor, metadata: DecodeMetadata, *, kv_lora_rank: int, softmax_scale: float
) -> None:
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    check_tensor("q", q, "(num_tokens, num_heads, latent_dim)", torch.bfloat16, device=CPU, error=KernelError)
    check_latent_cache("latent_cache", latent_cache)
    check_cache(latent_cache)
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    num_blocks, block_size, latent_dim = latent_cache.shape
    if latent_cache.device != CPU:
        raise KernelError(f"latent_cache: expected device cpu, got {latent_cache.device}")
    if q.shape[2] != latent_dim:
        raise KernelError(f"q: expected latent_dim {latent_dim} as in the cache, got {q.shape[2]}")
    if not 1 <= kv_lora_rank <= latent_dim:
        raise KernelError(f"kv_lora_rank: expected 1 to latent_dim = {latent_dim}, got {kv_lora_rank}")
    if num_blocks < metadata.min_num_blocks:
        raise KernelError(f"latent_cache: expected at least {metadata.min_num_blocks} blocks, got {num_blocks}")
    if block_size != metadata.block_size:
        raise KernelError(f"latent_cache: expected block size {metadata.block_size} as in metadata, got {block_size}")
    if q.shape[0] < metadata.num_tokens:
        raise KernelError(f"q: expected at least {metadata.num_tokens} tokens, got {q.shape[0]}")


def _made_of(plan: Plan | None, metadata: DecodeMetadata) -> IpexDecodePlan:
    if plan is None:
        return plan_decode(metadata)
    if not isinstance(plan, IpexDecodePlan) or plan.metadata is not metadata:
        raise KernelError("plan: expected plan_decode(metadata) of this very metadata, got another plan")
    return plan


def paged_decode_by(
    installed: Installed,
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla.compute.ipex.paged_decode` by an IPEX whose signatures have been read.

    Raises
    ------
    KernelError, CacheError
        Naming the argument.
    """
    _check_decode(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)
    made = _made_of(plan, metadata)
    if made.num_blocks > latent_cache.shape[0]:
        raise KernelError(f"block_table: expected blocks in 0..{latent_cache.shape[0] - 1}, got {made.num_blocks - 1}")
    num_heads = q.shape[1]
    out = q.new_zeros(q.shape[0], num_heads, kv_lora_rank)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if num_heads == 0:
        return out, lse
    rows_of_cache = latent_cache.view(-1, 1, 1, latent_cache.shape[2])
    for group in made.groups:
        splits = num_splits(group.length)
        step = max(1, MAX_LOGIT_BYTES // (splits * num_heads * (kv_lora_rank + 1) * 4))
        for tokens, slots in zip(group.tokens.split(step), group.slots.split(step), strict=True):
            part = q.new_empty(len(tokens), num_heads, kv_lora_rank)
            # Of each split: its output, and its LSE in the last column.
            logits = q.new_empty(len(tokens), num_heads, splits, kv_lora_rank + 1, dtype=torch.float32)
            installed.decode_attention(
                q.index_select(0, tokens), part, rows_of_cache, slots, logits, softmax_scale, 0.0, group.length
            )
            out.index_copy_(0, tokens, part)
            lse.index_copy_(0, tokens, _join(logits[..., kv_lora_rank]))
    return out, lse


def _join(lse: torch.Tensor) -> torch.Tensor:
    """LSE over all splits; a loop, because the order in which torch adds a dimension up depends on the other ones."""
    largest = lse.amax(dim=2)
    weights = (lse - largest[..., None]).exp_()
    total = weights[..., 0].clone()
    for i in range(1, lse.shape[2]):
        total += weights[..., i]
    return largest + total.log_()
