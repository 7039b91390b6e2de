"""Decode on NVIDIA GPUs: which kernels a call takes, and what it must not be given.

`decode_route` is the whole choice, made from what a batch cannot change: `mla.compute.triton_hopper` on Hopper for latent rows
of 512 + 64 numbers in a 16-bit dtype, `mla.compute.triton_portable` for all else. Nothing is read on the host, so a call can be
captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import math

import attrs
import torch

from mla._checks import check_instance, check_int, check_positive_float, check_tensor, dtype_name
from mla.cache.spec import check_latent_cache
from mla.compute import triton_hopper, triton_portable
from mla.compute.contracts import Plan
from mla.compute.triton_hopper import KV_LORA_RANK, LATENT_DIM, HopperPlan
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = [
    "DTYPES",
    "DecodeRoute",
    "decode_route",
    "make_balanced_plan",
    "make_plan",
    "paged_decode",
    "paged_decode_balanced",
    "paged_decode_portable",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@attrs.frozen(kw_only=True)
class DecodeRoute:
    """Which kernels a call takes, and why.

    Parameters
    ----------
    name : str
        ``"hopper"`` or ``"portable"``.
    reason : str
        The end of a sentence.
    """

    name: str
    reason: str


@functools.cache
def decode_route(
    dtype: torch.dtype, cache_dtype: torch.dtype, kv_lora_rank: int, latent_dim: int, device: torch.device
) -> DecodeRoute:
    """The kernels for tensors of this kind; nothing else decides. Rows of a sequence decide between Hopper's two.

    Parameters
    ----------
    dtype, cache_dtype : torch.dtype
        Of q and of the cache.
    kv_lora_rank, latent_dim : int
        Columns of a value and of a row.
    device : torch.device
        Where they lie.
    """
    portable = functools.partial(DecodeRoute, name="portable")
    if device.type != "cuda" or torch.version.hip is not None:
        return portable(reason=f"{device.type} is not an NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return portable(reason=f"compute capability {major}.{minor} is not Hopper's 9.0")
    if (kv_lora_rank, latent_dim) != (KV_LORA_RANK, LATENT_DIM):
        return portable(
            reason=f"the kernels for Hopper take {KV_LORA_RANK} of {LATENT_DIM} columns, not {kv_lora_rank} of {latent_dim}"
        )
    if dtype.itemsize != 2 or cache_dtype != dtype:
        return portable(
            reason="the kernels for Hopper take q and the cache in one 16-bit dtype, "
            f"not {dtype_name(dtype)} and {dtype_name(cache_dtype)}"
        )
    return DecodeRoute(name="hopper", reason="compute capability 9.0, 16-bit rows of 512 + 64 columns")


def _check_decode(
    q: torch.Tensor, latent_cache: torch.Tensor, metadata: DecodeMetadata, *, kv_lora_rank: int, softmax_scale: float
) -> None:
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    check_tensor("q", q, "(num_tokens, num_heads, latent_dim)", DTYPES, error=KernelError)
    check_latent_cache("latent_cache", latent_cache)
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    num_blocks, block_size, latent_dim = latent_cache.shape
    if latent_cache.dtype not in DTYPES:
        raise KernelError(f"latent_cache: expected bfloat16 or float16 or float32, got {latent_cache.dtype}")
    if q.shape[2] != latent_dim:
        raise KernelError(f"q: expected latent_dim {latent_dim} as in the cache, got {q.shape[2]}")
    check_int("kv_lora_rank", kv_lora_rank, low=1, high=latent_dim, error=KernelError)
    for name, x in (("latent_cache", latent_cache), ("metadata", metadata.seq_lens)):
        if x.device != q.device:
            raise KernelError(f"{name}: expected device {q.device} as of q, got {x.device}")
    if num_blocks < metadata.min_num_blocks:
        raise KernelError(f"latent_cache: expected at least {metadata.min_num_blocks} blocks, got {num_blocks}")
    if block_size != metadata.block_size:
        raise KernelError(f"latent_cache: expected blocks of {metadata.block_size} tokens, got {block_size}")
    if q.shape[0] < metadata.num_tokens:
        raise KernelError(f"q: expected at least {metadata.num_tokens} tokens, got {q.shape[0]}")


def _is_sound(q: torch.Tensor, latent_cache: torch.Tensor, metadata: DecodeMetadata, kv_lora_rank: int) -> bool:
    """Whether a call is of the usual kind, for which `_check_decode` has no objection; it finds the words for all others."""
    if type(metadata) is not DecodeMetadata or not isinstance(q, torch.Tensor) or not isinstance(latent_cache, torch.Tensor):
        return False
    if q.dim() != 3 or latent_cache.dim() != 3 or q.dtype not in DTYPES or q.dtype != latent_cache.dtype:
        return False
    num_tokens, _, width = q.shape
    num_blocks, block_size, latent_dim = latent_cache.shape
    return (
        q.layout is latent_cache.layout is torch.strided
        and q.device == latent_cache.device == metadata.seq_lens.device
        and latent_cache.is_contiguous()
        and kv_lora_rank <= latent_dim == width
        and block_size == metadata.block_size
        and num_blocks >= metadata.min_num_blocks
        and num_tokens >= metadata.num_tokens
    )


def _paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None,
    *,
    balanced: bool,
    portable: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    is_usual = type(kv_lora_rank) is int and type(softmax_scale) is float and kv_lora_rank > 0 and 0 < softmax_scale < math.inf
    if not (is_usual and _is_sound(q, latent_cache, metadata, kv_lora_rank)):
        _check_decode(q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale)
    if plan is not None:
        _check_plan(plan, metadata, balanced=balanced)
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return _launch(q, latent_cache, metadata, kv_lora_rank, softmax_scale, plan, balanced=balanced, portable=portable)
    return _launch(q, latent_cache, metadata, kv_lora_rank, softmax_scale, plan, balanced=balanced, portable=portable)


def _launch(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None,
    *,
    balanced: bool,
    portable: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, latent_dim = q.shape
    # Sizes one by one: torch takes twice as long to read them out of a tuple.
    out = q.new_empty(num_tokens, num_heads, kv_lora_rank)
    lse = q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if num_tokens == 0 or num_heads == 0:
        return out, lse
    if metadata.num_seqs == 0 or metadata.max_seq_len == 0 or metadata.max_query_len == 0 or latent_cache.shape[0] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if portable or decode_route(q.dtype, latent_cache.dtype, kv_lora_rank, latent_dim, q.device).name == "portable":
        triton_portable.attend(q, latent_cache, metadata, out, lse, softmax_scale=softmax_scale)
        return out, lse
    if latent_cache.data_ptr() % 16 != 0:
        raise KernelError("latent_cache: expected memory that begins at a multiple of 16 bytes, got a view that does not")
    if not q.is_contiguous() or q.data_ptr() % 16 != 0:
        q = q.clone(memory_format=torch.contiguous_format)
    own = plan if isinstance(plan, HopperPlan) else HopperPlan(metadata=metadata, balanced=balanced)
    triton_hopper.attend(q, latent_cache, out, lse, softmax_scale=softmax_scale, plan=own)
    return out, lse


def _check_plan(plan: Plan, metadata: DecodeMetadata, *, balanced: bool) -> None:
    """Refuse a plan of another set, of another record, or out of a graph."""
    if not isinstance(plan, HopperPlan) or plan.balanced != balanced:
        raise KernelError(f"plan: expected what this kernel set's plan() returns, got {type(plan).__name__} of another set")
    if plan.metadata is not metadata:
        raise KernelError("plan: expected the plan of this record, got that of another one")
    if plan.captured and not torch.cuda.is_current_stream_capturing():
        raise KernelError("plan: expected a plan made outside of graph capture, got one that is part of a graph")


def make_plan(metadata: DecodeMetadata) -> HopperPlan:
    """The work plan of a step, for all its layers; the device makes it at the first layer's call.

    Parameters
    ----------
    metadata : DecodeMetadata
        Of the step. Made while a CUDA graph is captured, the plan is part of that graph and made anew at every replay.

    Raises
    ------
    KernelError
        Something else.
    """
    return _make_plan(metadata, balanced=False)


def make_balanced_plan(metadata: DecodeMetadata) -> HopperPlan:
    """The same for "TRITON_MLA_BALANCED".

    Raises
    ------
    KernelError
        Something else.
    """
    return _make_plan(metadata, balanced=True)


def _make_plan(metadata: DecodeMetadata, *, balanced: bool) -> HopperPlan:
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    on_gpu = metadata.seq_lens.device.type == "cuda"
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    return HopperPlan(metadata=metadata, balanced=balanced, captured=captured)


def paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over the paged latent cache by Triton; `mla.compute.PagedDecode` says what it means.

    A sequence has the same bits alone and in any batch, eager and replayed, with any padding, placement of blocks and block
    size.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        bfloat16, float16, or float32 (slow: a check of the others); copied unless contiguous.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Contiguous, of any block size, in any of these dtypes; products run in the dtype of q.
    metadata : DecodeMetadata
        Where the rows lie.
    kv_lora_rank : int
        Columns of a value.
    softmax_scale : float
        Factor on q.k.
    plan : HopperPlan or None
        Of `make_plan`, or None to make it here.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
        In the dtype of q; 0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float32, natural logarithm; -inf for rows without keys.

    Raises
    ------
    KernelError, CacheError
        Naming the argument, or that there is no Triton.
    """
    return _paged_decode(q, latent_cache, metadata, kv_lora_rank, softmax_scale, plan, balanced=False, portable=False)


def paged_decode_balanced(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` with the work of a batch shared out in equal parts: faster, repeatable, but bits depend on the batch.

    Where `decode_route` takes the portable kernel, bits are kept here too.

    Raises
    ------
    KernelError, CacheError
        As `paged_decode`.
    """
    return _paged_decode(q, latent_cache, metadata, kv_lora_rank, softmax_scale, plan, balanced=True, portable=False)


def paged_decode_portable(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` by the portable kernel, whatever the GPU; a plan is accepted and not needed.

    Raises
    ------
    KernelError, CacheError
        As `paged_decode`.
    """
    return _paged_decode(q, latent_cache, metadata, kv_lora_rank, softmax_scale, plan, balanced=False, portable=True)
