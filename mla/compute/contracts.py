"""What a kernel set provides: the contracts of its four kernels, and of a plan."""

from __future__ import annotations

from typing import Protocol

import torch

from mla.metadata.records import DecodeMetadata

__all__ = ["GatherLatentCache", "PagedDecode", "Plan", "VarlenAttention", "WriteLatentCache"]


class PagedDecode(Protocol):
    """Attention of new tokens over the paged latent cache: every head attends the same rows (MQA).

    Token i of a sequence with `query_len` new tokens sees ``seq_len - query_len + i + 1`` keys. The value of a key is the
    first `kv_lora_rank` columns of its row. A row that sees no key gives ``out = 0`` and ``lse = -inf``; rows of q beyond
    ``query_start_loc[-1]`` are such rows. Memory that no valid index reaches may hold NaN.

    Examples
    --------
    >>> from mla import build_metadata, decode_group, kernel_set
    >>> metadata = build_metadata([decode_group(3, [1])], block_size=4).decode
    >>> q, cache = torch.ones(2, 8, 6), torch.ones(2, 4, 6)
    >>> out, lse = kernel_set("CPU_MLA").paged_decode(q, cache, metadata, kv_lora_rank=5, softmax_scale=0.5)
    >>> out[:, 0].tolist(), lse.shape, lse[1, 0].item()
    ([[1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]], torch.Size([2, 8]), -inf)
    """

    def __call__(
        self,
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        metadata: DecodeMetadata,
        *,
        kv_lora_rank: int,
        softmax_scale: float,
        plan: Plan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the kernel.

        Parameters
        ----------
        q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
            Queries, folded into the latent space.
        latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
            The cache; it already holds the new tokens.
        metadata : DecodeMetadata
            Where the rows lie.
        kv_lora_rank : int
            Columns of a value.
        softmax_scale : float
            Factor on q.k.
        plan : Plan or None
            What `KernelSet.plan` made of this metadata; None makes it here.

        Returns
        -------
        out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
            In the dtype of q.
        lse : torch.Tensor of shape (num_tokens, num_heads)
            Natural logarithm of the sum of exponentials; float64 for float64 inputs and float32 otherwise.
        """


class VarlenAttention(Protocol):
    """Attention over ragged batches of queries and keys, multi-head, values possibly narrower than keys.

    Causal aligns the last query with the last key of each sequence. A row that sees no key gives ``out = 0`` and
    ``lse = -inf``.

    Examples
    --------
    >>> from mla import kernel_set
    >>> q, k, v = torch.ones(2, 1, 6), torch.ones(5, 1, 6), torch.eye(5)[:, None]
    >>> starts, kv_starts = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    >>> lengths = dict(query_start_loc=starts, kv_start_loc=kv_starts, max_query_len=2, max_kv_len=5)
    >>> out, lse = kernel_set("CPU_MLA").varlen_attention(q, k, v, **lengths, causal=True, softmax_scale=1.0)
    >>> (out[:, 0] > 0).tolist()  # the first of two new tokens does not see the last key
    [[True, True, True, True, False], [True, True, True, True, True]]
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        query_start_loc: torch.Tensor,
        kv_start_loc: torch.Tensor,
        max_query_len: int,
        max_kv_len: int,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the kernel.

        Parameters
        ----------
        q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
            Queries.
        k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
            Keys.
        v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
            Values.
        query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
            Cumulative lengths, from 0.
        max_query_len, max_kv_len : int
            Longest row of each kind.
        causal : bool
            Whether a query sees only keys up to its own position.
        softmax_scale : float
            Factor on q.k.

        Returns
        -------
        out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
            In the dtype of q.
        lse : torch.Tensor of shape (num_tokens, num_heads)
            Natural logarithm; float64 for float64 inputs and float32 otherwise.
        """


class WriteLatentCache(Protocol):
    """`mla.cache.write_latent_cache_` or a device's own.

    Examples
    --------
    >>> from mla import kernel_set
    >>> cache, slots = torch.zeros(1, 4, 3), torch.tensor([2, -1])
    >>> kernel_set("CPU_MLA").write_latent_cache_(cache, torch.ones(2, 2), torch.ones(2, 1), slots)
    >>> cache[0, :, 0].tolist()
    [0.0, 0.0, 1.0, 0.0]
    """

    def __call__(self, latent_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the rows of new tokens; slot -1 writes nothing."""


class GatherLatentCache(Protocol):
    """`mla.cache.gather_latent_cache` or a device's own.

    Examples
    --------
    >>> from mla import kernel_set
    >>> cache = torch.arange(8.0).view(2, 2, 2)
    >>> kernel_set("CPU_MLA").gather_latent_cache(cache, torch.tensor([3, 0]), out=torch.empty(5, 2)).tolist()
    [[6.0, 7.0], [0.0, 1.0]]
    """

    def __call__(self, latent_cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Copy the rows at `slots` to the head of `out` and return it."""


class Plan(Protocol):
    """What a kernel set derives from the metadata of one step: made once, used by every layer."""

    @property
    def metadata(self) -> DecodeMetadata:
        """The very record that it was made of; it serves no other."""
