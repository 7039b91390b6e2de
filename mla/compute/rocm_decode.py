"""Decoding by AITER: every new token is a row with its own list of keys, and every row has the same number of splits."""

from __future__ import annotations

from typing import Final

import attrs
import torch

from mla._checks import check_instance, check_positive_float, check_tensor
from mla.cache.spec import check_latent_cache
from mla.compute.contracts import Plan
from mla.compute.rocm_load import Installed
from mla.compute.rocm_table import KV_LORA_RANK, LATENT_DIM, NUM_KV_SPLITS, PAGE_SIZE, kernel_for
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = [
    "AiterDecodePlan",
    "SplitWeights",
    "merge_splits",
    "paged_decode_by",
    "plan_decode",
    "visible_keys",
    "weigh_splits",
]

MAX_CACHE_BYTES: Final = 2**32
"""Some of the kernels address the cache with 32-bit offsets and return near-zero output beyond, without an error."""

MAX_SPLIT_BYTES: Final = 2**31
"""Rows are decoded in groups whose partial outputs take no more: a bounded workspace, and offsets that fit everywhere."""


@attrs.frozen(kw_only=True, eq=False)
class AiterDecodePlan:
    """Each new token as a row with a list of cache rows of its own; made by `plan_decode`.

    Parameters
    ----------
    metadata : DecodeMetadata
        What it was made of.
    is_empty : torch.Tensor of shape (num_tokens,), bool
        Rows that see no key; they are run on one key and their result is thrown away.
    lengths : torch.Tensor of shape (num_tokens,), int32
        Keys of each row, 1 for an empty one.
    kv_indptr : torch.Tensor of shape (num_tokens + 1,), int32
        Cumulative `lengths`, from 0.
    kv_indices : torch.Tensor of shape (num_indices,), int32
        Slots of the cache, row after row; 0 behind the last one and for empty rows.
    """

    metadata: DecodeMetadata
    is_empty: torch.Tensor
    lengths: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor


def visible_keys(
    query_start_loc: torch.Tensor, kv_lens: torch.Tensor, num_tokens: int, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each token and the keys that it sees, 0 for tokens behind the last sequence; needs a sequence."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    seqs = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True).clamp_(max=kv_lens.shape[0] - 1)
    seen = kv_lens[seqs]
    if causal:
        seen = seen - (query_start_loc[1:][seqs] - 1 - tokens)
    return seqs, seen.masked_fill(tokens >= query_start_loc[-1], 0).clamp_(min=0)


def plan_decode(metadata: DecodeMetadata) -> AiterDecodePlan:
    """The rows of one step, derived on the device without waiting for it; every layer uses the same.

    AITER's lists are contiguous (row i ends where row i + 1 begins), so the tokens of a sequence cannot share one: the list of
    a sequence with n new tokens is written n times, each cut where its token stops to see.

    Parameters
    ----------
    metadata : DecodeMetadata
        With a `PagedKV` of page size 1.

    Returns
    -------
    AiterDecodePlan
        On the device of the metadata.

    Raises
    ------
    KernelError
        More indices than int32 counts.
    MetadataError
        No `PagedKV` of page size 1.
    """
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    paged = metadata.paged_kv_of(PAGE_SIZE)
    pages, num_tokens, device = paged.paged_kv_indices, metadata.num_tokens, metadata.seq_lens.device
    # Known on the host: every token sees at most its sequence's list, and an empty row one key.
    num_indices = min(pages.shape[0] * metadata.max_query_len, num_tokens * metadata.max_seq_len) + num_tokens
    if num_indices >= 2**31:
        raise KernelError(f"metadata: expected fewer than 2**31 keys over all new tokens, got up to {num_indices}")
    if metadata.num_seqs == 0 or num_tokens == 0 or pages.shape[0] == 0:
        lengths = torch.ones(num_tokens, dtype=torch.int32, device=device)
        return AiterDecodePlan(
            metadata=metadata,
            is_empty=torch.ones(num_tokens, dtype=torch.bool, device=device),
            lengths=lengths,
            kv_indptr=torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
            kv_indices=torch.zeros_like(lengths),
        )
    seqs, seen = visible_keys(metadata.query_start_loc, metadata.seq_lens, num_tokens, causal=True)
    is_empty, lengths = seen == 0, seen.clamp(min=1)
    ends = lengths.cumsum(0, dtype=torch.int32)
    kv_indptr = torch.cat([ends.new_zeros(1), ends])
    places = torch.arange(num_indices, dtype=torch.int32, device=device)
    rows = torch.searchsorted(ends, places, right=True)
    is_behind = rows >= num_tokens
    rows.clamp_(max=num_tokens - 1)
    source = paged.paged_kv_indptr[seqs[rows]] + places - kv_indptr[rows]
    kv_indices = pages[source.clamp_(0, pages.shape[0] - 1)].masked_fill(is_behind | is_empty[rows], 0)
    return AiterDecodePlan(metadata=metadata, is_empty=is_empty, lengths=lengths, kv_indptr=kv_indptr, kv_indices=kv_indices)


@attrs.frozen(kw_only=True, eq=False)
class SplitWeights:
    """What each split of a row's keys counts for; made by `weigh_splits`.

    Parameters
    ----------
    is_written : torch.Tensor of shape (num_rows, num_splits), bool
        Splits that a key fell into; the others may hold anything.
    weights : torch.Tensor of shape (num_rows, num_splits, num_heads)
        ``exp(lse - largest)``, 0 for the others.
    total : torch.Tensor of shape (num_rows, num_heads)
        Their sum.
    lse : torch.Tensor of shape (num_rows, num_heads)
        Of all splits together.
    """

    is_written: torch.Tensor
    weights: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor


def weigh_splits(lse: torch.Tensor, lengths: torch.Tensor, split_tokens: int) -> SplitWeights:
    """Weights of the splits of each row; AITER cuts ``max(split_tokens, ceil(length / num_splits))`` keys for each.

    Parameters
    ----------
    lse : torch.Tensor of shape (num_rows, num_splits, num_heads)
        Natural logarithms.
    lengths : torch.Tensor of shape (num_rows,), int32
        Keys of each row, at least 1.
    split_tokens : int
        Keys of a split, at least.
    """
    num_splits = lse.shape[1]
    size = torch.div(lengths + (num_splits - 1), num_splits, rounding_mode="floor").clamp_(min=split_tokens)
    starts = torch.arange(num_splits, dtype=torch.int32, device=lse.device)[None, :] * size[:, None]
    is_written = starts < lengths[:, None]
    lse = lse.masked_fill(~is_written[:, :, None], -torch.inf)
    largest = lse.amax(dim=1)
    weights = (lse - largest[:, None]).exp()
    # A loop and not a sum over the dimension: how torch splits a sum on a GPU depends on the number of rows.
    total = weights[:, 0]
    for i in range(1, num_splits):
        total = total + weights[:, i]
    return SplitWeights(is_written=is_written, weights=weights, total=total, lse=largest + total.log())


def merge_splits(out: torch.Tensor, splits: SplitWeights) -> torch.Tensor:
    """The output of each row from those of its splits, joined in ascending order.

    Parameters
    ----------
    out : torch.Tensor of shape (num_rows, num_splits, num_heads, kv_lora_rank)
        Normalised.
    splits : SplitWeights
        Of the same rows.
    """
    merged = out[:, 0] * splits.weights[:, 0, :, None]
    for i in range(1, out.shape[1]):
        # Masked, not multiplied by 0: memory that nobody wrote may hold NaN.
        part = out[:, i].masked_fill(~splits.is_written[:, i, None, None], 0)
        merged = merged + part * splits.weights[:, i, :, None]
    return merged / splits.total[..., None]


def check_cache(latent_cache: torch.Tensor) -> None:
    """Refuse a cache that AITER's decode kernels cannot read.

    Raises
    ------
    KernelError
        Another dtype than bfloat16, or more bytes than AITER's offsets reach.
    """
    if latent_cache.dtype != torch.bfloat16:
        raise KernelError(f"latent_cache: expected bfloat16 (AITER takes no mixed types here), got {latent_cache.dtype}")
    size = latent_cache.numel() * latent_cache.itemsize
    if size > MAX_CACHE_BYTES:
        rows = MAX_CACHE_BYTES // (latent_cache.shape[2] * latent_cache.itemsize)
        raise KernelError(
            f"latent_cache: expected at most {MAX_CACHE_BYTES} bytes ({rows} tokens), where AITER's offsets end, got {size}"
        )


def _check_decode(
    q: torch.Tensor, latent_cache: torch.Tensor, metadata: DecodeMetadata, *, kv_lora_rank: int, softmax_scale: float
) -> None:
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    check_tensor("q", q, "(num_tokens, num_heads, latent_dim)", torch.bfloat16, error=KernelError)
    check_latent_cache("latent_cache", latent_cache)
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    num_blocks, block_size, latent_dim = latent_cache.shape
    check_cache(latent_cache)
    if q.shape[2] != latent_dim:
        raise KernelError(f"q: expected latent_dim {latent_dim} as in the cache, got {q.shape[2]}")
    if (kv_lora_rank, latent_dim) != (KV_LORA_RANK, LATENT_DIM):
        got = (kv_lora_rank, latent_dim)
        raise KernelError(f"kv_lora_rank, latent_dim: expected {(KV_LORA_RANK, LATENT_DIM)} for AITER's kernels, got {got}")
    for name, x in (("latent_cache", latent_cache), ("metadata", metadata.seq_lens)):
        if x.device != q.device:
            raise KernelError(f"{name}: expected device {q.device} as of q, got {x.device}")
    if num_blocks < metadata.min_num_blocks:
        raise KernelError(f"latent_cache: expected at least {metadata.min_num_blocks} blocks, got {num_blocks}")
    if block_size != metadata.block_size:
        raise KernelError(f"latent_cache: expected blocks of {metadata.block_size} tokens, got {block_size}")
    if q.shape[0] < metadata.num_tokens:
        raise KernelError(f"q: expected at least {metadata.num_tokens} tokens, got {q.shape[0]}")


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
    """`mla.compute.rocm.paged_decode` by an AITER whose signatures have been read.

    Raises
    ------
    KernelError, CacheError, MetadataError
        Naming the argument, or what AITER returned.
    """
    _check_decode(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)
    num_heads, num_tokens = q.shape[1], metadata.num_tokens
    kernel = kernel_for(num_heads, release=installed.release, arch=installed.arch)
    made = plan_decode(metadata) if plan is None else plan
    if not isinstance(made, AiterDecodePlan) or made.metadata is not metadata:
        raise KernelError("plan: expected plan_decode(metadata) of this very metadata, got another plan")
    out = q.new_zeros(q.shape[0], num_heads, kv_lora_rank)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if metadata.max_seq_len == 0 or num_tokens == 0 or latent_cache.shape[0] == 0:
        return out, lse
    rows = q[:num_tokens].contiguous()
    if kernel.num_heads > num_heads:
        # A head of zeros attends evenly and meets no other head, so slicing it off is exact.
        rows = q.new_zeros(num_tokens, kernel.num_heads, q.shape[2])
        rows[:, :num_heads] = q[:num_tokens]
    pages = latent_cache.view(-1, PAGE_SIZE, 1, latent_cache.shape[2])
    step = max(1, MAX_SPLIT_BYTES // (NUM_KV_SPLITS * kernel.num_heads * kv_lora_rank * 4))
    decode_part = _decode_stage_1 if installed.lse == "stage 1" else _decode_fwd
    for first in range(0, num_tokens, step):
        here = slice(first, min(first + step, num_tokens))
        part, part_lse = decode_part(
            installed, rows[here], pages, made, first, split_tokens=kernel.split_tokens, scale=softmax_scale
        )
        empty = made.is_empty[here, None]
        out[here] = part[:, :num_heads].masked_fill(empty[..., None], 0)
        lse[here] = part_lse[:, :num_heads].masked_fill(empty, -torch.inf)
    return out, lse


def _decode_fwd(
    installed: Installed,
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: AiterDecodePlan,
    first: int,
    *,
    split_tokens: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from `first` on by `mla_decode_fwd`: output, and LSE from itself or from the splits that it returns."""
    num_rows, num_heads = q.shape[:2]
    qo_indptr = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
    lengths = plan.lengths[first : first + num_rows]
    # On one of its paths AITER swaps the storage of `o`: it gets a tensor that nobody else holds.
    o = q.new_empty(num_rows, num_heads, KV_LORA_RANK)
    options = {
        "sm_scale": scale, "logit_cap": 0.0, "num_kv_splits": NUM_KV_SPLITS, "num_kv_splits_indptr": qo_indptr * NUM_KV_SPLITS,
        "page_size": PAGE_SIZE, "nhead_kv": 1, "return_lse": True,
    }  # fmt: skip
    _, lse = installed.mla_decode_fwd(
        q,
        pages,
        o,
        qo_indptr,
        plan.kv_indptr[first : first + num_rows + 1],
        plan.kv_indices,
        torch.ones_like(lengths),
        1,
        **{name: value for name, value in options.items() if name in installed.decode_parameters},
    )
    splits = installed.lse == "returned splits"
    shape = (num_rows, NUM_KV_SPLITS, num_heads, 1) if splits else (num_rows, num_heads)
    if not isinstance(lse, torch.Tensor) or lse.shape != shape:
        got = tuple(lse.shape) if isinstance(lse, torch.Tensor) else lse
        raise KernelError(f"mla_decode_fwd: expected an LSE of shape {shape} from amd-aiter {installed.release}, got {got}")
    return o, weigh_splits(lse.squeeze(3), lengths, split_tokens).lse if splits else lse


def _decode_stage_1(
    installed: Installed,
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: AiterDecodePlan,
    first: int,
    *,
    split_tokens: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from `first` on by the first stage of `mla_decode_fwd`, its splits merged here."""
    num_rows, num_heads = q.shape[:2]
    qo_indptr = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
    lengths = plan.lengths[first : first + num_rows]
    parts = q.new_empty(num_rows, NUM_KV_SPLITS, num_heads, KV_LORA_RANK, dtype=torch.float32)
    parts_lse = q.new_empty(num_rows, NUM_KV_SPLITS, num_heads, 1, dtype=torch.float32)
    values: dict[str, object] = {
        "Q": q, "KV": pages, "qo_indptr": qo_indptr, "kv_indptr": plan.kv_indptr[first : first + num_rows + 1],
        "kv_page_indices": plan.kv_indices, "kv_last_page_lens": torch.ones_like(lengths),
        "num_kv_splits_indptr": qo_indptr * NUM_KV_SPLITS, "max_seqlen_q": 1, "page_size": PAGE_SIZE, "nhead_kv": 1,
        "softmax_scale": scale, "splitData": parts, "splitLse": parts_lse,
        "output": q.new_empty(num_rows, num_heads, KV_LORA_RANK),
    }  # fmt: skip
    # By position in the installed order, as AITER itself does: the compiled function has other names in some releases.
    # What stands behind `output` keeps its default; what stands before it and is not given is None.
    names = installed.stage_1_parameters
    installed.stage_1(*(values.get(name) for name in names[: names.index("output") + 1]))
    splits = weigh_splits(parts_lse.squeeze(3), lengths, split_tokens)
    return merge_splits(parts, splits).to(q.dtype), splits.lse
