"""The kernels of the CPU in plain torch: checks and entry points. They run on every device that torch runs on.

What decode multiplies together is in `mla.compute.cpu_plan`, with the rule that keeps bits still, its products are in
`mla.compute.cpu_decode`; prefill is in `mla.compute.cpu_prefill`. float16 is computed in float32 and rounded at the end,
because most CPUs have no fast float16 product.
"""

from __future__ import annotations

import functools

import torch

from mla._checks import check_floating, check_positive_float
from mla.compute import cpu_decode, cpu_plan, cpu_prefill
from mla.compute.cpu_plan import DecodePlan
from mla.compute.cpu_prefill import varlen_bytes
from mla.compute.cpu_stack import borrow_workspace, return_workspace
from mla.errors import KernelError
from mla.metadata.records import DecodeMetadata

__all__ = ["DecodePlan", "paged_decode", "plan_decode", "varlen_attention", "varlen_bytes"]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_rank(name: str, x: torch.Tensor, shape: str) -> None:
    if x.dim() != 3:
        raise KernelError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")


def plan_decode(metadata: DecodeMetadata, block_size: int) -> DecodePlan:
    """What `paged_decode` derives from the metadata alone: make it once a step when many layers share the metadata.

    Reads the metadata's values, which synchronises on a device other than the CPU.

    Parameters
    ----------
    metadata : DecodeMetadata
        Of the step.
    block_size : int
        Tokens per block of the cache, at least 1.

    Returns
    -------
    DecodePlan
        Immutable, on the device of the metadata.

    Raises
    ------
    KernelError
        A block size below 1, or a block table too narrow for the longest sequence.
    """
    if block_size < 1:
        raise KernelError(f"block_size: expected at least 1, got {block_size}")
    longest = int(metadata.seq_lens.max()) if metadata.seq_lens.shape[0] else 0
    needed = -(-longest // block_size)
    if metadata.block_table.shape[1] < needed:
        got = metadata.block_table.shape[1]
        raise KernelError(f"block_table: expected at least {needed} columns for {longest} keys, got {got}")
    return cpu_plan.make_plan(metadata, block_size)


def _check_plan(plan: object, metadata: DecodeMetadata, block_size: int) -> DecodePlan:
    if not isinstance(plan, DecodePlan):
        raise KernelError(f"plan: expected a DecodePlan, got {type(plan).__name__}")
    if plan.metadata is not metadata:
        raise KernelError("plan: expected the plan of this metadata, got the plan of another record")
    if plan.block_size != block_size:
        raise KernelError(f"plan: expected block_size {block_size} as of the cache, got {plan.block_size}")
    return plan


def paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: object | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over the paged latent cache; `mla.compute.PagedDecode` says what it means.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        float64, float32, bfloat16 or float16, whose dtype the products have (float32 for float16).
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Contiguous; rows of another dtype are converted after they have been gathered.
    metadata : DecodeMetadata
        Where the rows lie.
    kv_lora_rank : int
        Columns of a value.
    softmax_scale : float
        Factor on q.k.
    plan : DecodePlan or None
        From `plan_decode` of this metadata; None makes it here.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
        In the dtype of q; 0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float64 for float64 and float32 otherwise; -inf for rows without keys.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit each other, a cache that is too small or not contiguous, or a plan of
        another metadata.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", section 2.1.2 (absorption into the latent space); Dao et al., "Flash-Decoding" (merging
    pieces of keys by their log-sum-exp).
    """
    _check_rank("q", q, "(num_tokens, num_heads, latent_dim)")
    _check_rank("latent_cache", latent_cache, "(num_blocks, block_size, latent_dim)")
    check_floating("q", q, KernelError)
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    num_blocks, block_size, latent_dim = latent_cache.shape
    if q.shape[2] != latent_dim:
        raise KernelError(f"q: expected latent_dim {latent_dim} as in the cache, got {q.shape[2]}")
    if not 1 <= kv_lora_rank <= latent_dim:
        raise KernelError(f"kv_lora_rank: expected 1 to latent_dim = {latent_dim}, got {kv_lora_rank}")
    if latent_cache.device != q.device:
        raise KernelError(f"latent_cache: expected device {q.device} as of q, got {latent_cache.device}")
    if num_blocks < metadata.min_num_blocks:
        raise KernelError(f"latent_cache: expected at least {metadata.min_num_blocks} blocks, got {num_blocks}")
    if block_size != metadata.block_size:
        raise KernelError(f"latent_cache: expected block size {metadata.block_size} as in metadata, got {block_size}")
    if not latent_cache.is_contiguous():
        raise KernelError(f"latent_cache: expected a contiguous tensor, got strides {latent_cache.stride()}")
    made = plan_decode(metadata, block_size) if plan is None else _check_plan(plan, metadata, block_size)
    if q.shape[0] < made.num_tokens:
        raise KernelError(f"q: expected at least {made.num_tokens} tokens, got {q.shape[0]}")

    units = latent_cache.view(-1, made.unit * latent_dim)
    rows = q.to(_compute_dtype(q.dtype)).contiguous()
    groups = made.groups if q.shape[1] else ()
    workspace = borrow_workspace(q.device)
    run = functools.partial(
        cpu_decode.run_group, q=rows, units=units, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale, workspace=workspace
    )
    if len(groups) == 1 and groups[0].is_whole and q.shape[0] == made.num_tokens:
        out, lse = run(groups[0])
        out = out.to(q.dtype)
    else:
        out = q.new_zeros(q.shape[0], q.shape[1], kv_lora_rank)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=_wide(q.dtype))
        for group in groups:
            part, part_lse = run(group)
            out.index_copy_(0, group.tokens, part.to(q.dtype))
            lse.index_copy_(0, group.tokens, part_lse)
    return_workspace(workspace)
    return out, lse


def _check_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: tuple[torch.Tensor, torch.Tensor]) -> None:
    _check_rank("q", q, "(num_tokens, num_heads, qk_head_dim)")
    _check_rank("k", k, "(num_kv_tokens, num_heads, qk_head_dim)")
    _check_rank("v", v, "(num_kv_tokens, num_heads, v_head_dim)")
    check_floating("q", q, KernelError)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise KernelError(f"{name}: expected {q.dtype} as q, got {x.dtype}")
        if x.device != q.device:
            raise KernelError(f"{name}: expected device {q.device} as of q, got {x.device}")
        if x.shape[1] != q.shape[1]:
            raise KernelError(f"{name}: expected {q.shape[1]} heads as q, got {x.shape[1]}")
    if k.shape[2] != q.shape[2]:
        raise KernelError(f"k: expected qk_head_dim {q.shape[2]} as q, got {k.shape[2]}")
    if v.shape[0] != k.shape[0]:
        raise KernelError(f"v: expected {k.shape[0]} rows as k, got {v.shape[0]}")
    if starts[0].shape != starts[1].shape or starts[0].dim() != 1 or starts[0].shape[0] == 0:
        shapes = " and ".join(str(tuple(x.shape)) for x in starts)
        raise KernelError(f"query_start_loc, kv_start_loc: expected one shape (num_seqs + 1,), got {shapes}")


def varlen_attention(
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
    """Attention over ragged batches; `mla.compute.VarlenAttention` says what it means.

    Reads the cumulative lengths, which synchronises on a device other than the CPU.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        float64, float32, bfloat16 or float16, whose dtype the products have (float32 for float16).
    k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
        With any strides, an expanded view too.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        As narrow or wide as it likes.
    query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative lengths, from 0.
    max_query_len, max_kv_len : int
        Longest row of each kind; not needed here, where the lengths themselves are read.
    causal : bool
        The last query is aligned with the last key of each sequence.
    softmax_scale : float
        Factor on q.k.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of q; 0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float64 for float64 and float32 otherwise; -inf for rows without keys.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit each other, or lengths beyond the tensors.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", section 2.1, equations 1 to 8.
    """
    _check_varlen(q, k, v, (query_start_loc, kv_start_loc))
    check_positive_float("softmax_scale", softmax_scale, KernelError)
    starts, kv_starts = query_start_loc.tolist(), kv_start_loc.tolist()
    for name, end, x in (("query_start_loc", starts[-1], q), ("kv_start_loc", kv_starts[-1], k)):
        if end > x.shape[0]:
            raise KernelError(f"{name}: expected at most {x.shape[0]} rows, got {end}")
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=_wide(q.dtype))
    dtype = _compute_dtype(q.dtype)
    workspace = borrow_workspace(q.device)
    for first, last, begin, end in zip(starts, starts[1:], kv_starts, kv_starts[1:], strict=False):
        if first == last or begin == end or q.shape[1] == 0:
            cpu_prefill.clear_rows(out[first:last], lse[first:last])
            continue
        cpu_prefill.attend_sequence(
            q[first:last], k[begin:end], v[begin:end], out[first:last], lse[first:last],
            dtype=dtype, causal=causal, softmax_scale=softmax_scale, workspace=workspace,
        )  # fmt: skip
    for rest in (slice(starts[0]), slice(starts[-1], None)):
        cpu_prefill.clear_rows(out[rest], lse[rest])
    return_workspace(workspace)
    return out, lse
