"""The kernels of AMD's AITER, adapted to the contracts of `mla.compute.kernels`: the set "ROCM_AITER_MLA".

Nothing of AITER is imported until `load_aiter` or `make_kernel_set` is called. AITER's arguments changed from release to
release, so its signatures are read once, when a set is made, and everything after the stable positions goes by keyword.

Every new token is a row of its own with its own list of cache rows, cut where the token stops to see, and the keys of every row
are cut into the same number of splits: its bits depend on nothing but the row. The lists come from the metadata's `PagedKV` of
page size 1, whatever the block size of the cache is. `mla.compute.rocm_table` says what each release can do.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from mla.compute import rocm_decode, rocm_load, rocm_prefill
from mla.compute.contracts import Plan
from mla.compute.kernels import KernelSet
from mla.compute.operators import as_operators
from mla.compute.rocm_decode import AiterDecodePlan, plan_decode
from mla.compute.rocm_load import Installed, is_aiter_mla_enabled, load_aiter
from mla.compute.rocm_table import (
    CAPABILITIES,
    LSE_WORDS,
    NUM_KV_SPLITS,
    PAGE_SIZE,
    check_decode,
    check_prefill_head_dims,
    explain_decode,
    head_kernels,
)
from mla.errors import KernelError
from mla.metadata.dims import MLADims
from mla.metadata.records import DecodeMetadata

__all__ = [
    "CAPABILITIES",
    "AiterDecodePlan",
    "diagnostic",
    "explain_decode",
    "is_aiter_mla_enabled",
    "load_aiter",
    "make_kernel_set",
    "paged_decode",
    "plan_decode",
    "varlen_attention",
]


def _objection(installed: Installed, dims: MLADims) -> str | None:
    try:
        check_decode(
            dims.num_heads,
            dtype=torch.bfloat16,
            release=installed.release,
            arch=installed.arch,
            kv_lora_rank=dims.kv_lora_rank,
            latent_dim=dims.latent_dim,
        )
        check_prefill_head_dims(dims.qk_head_dim, dims.v_head_dim)
    except KernelError as error:
        return str(error)
    return None


def make_kernel_set(
    aiter: ModuleType | None = None,  # noqa: A002  (the name of the package)
    *,
    arch: str | None = None,
) -> KernelSet:
    """The kernel set "ROCM_AITER_MLA" over an installed AITER.

    Parameters
    ----------
    aiter : module or None
        AMD's package; None imports it with `load_aiter`.
    arch : str or None
        Accelerator, such as ``"gfx942"``; None asks torch. Where torch does not know either, only the head counts that all
        accelerators have are used.

    Returns
    -------
    KernelSet
        For bfloat16: AITER's decode kernels take nothing else, and rounding float16 queries to it would lose three bits.

    Raises
    ------
    KernelError
        No AITER, another package of that name, a broken one, an unknown signature (with the version), or an accelerator or
        release without kernels.
    """
    installed = rocm_load.inspect_aiter(aiter, arch=arch)
    heads = ", ".join(str(kernel.num_heads) for kernel in head_kernels(installed.release, installed.arch))
    kernels = KernelSet(
        name="ROCM_AITER_MLA",
        device_types=("cuda",),
        dtypes=(torch.bfloat16,),
        paged_decode=functools.partial(rocm_decode.paged_decode_by, installed),
        varlen_attention=functools.partial(rocm_prefill.varlen_attention_by, installed),
        make_plan=plan_decode,
        plan_type=AiterDecodePlan,
        check_cache=rocm_decode.check_cache,
        page_size=PAGE_SIZE,
        objection=functools.partial(_objection, installed),
        remark=(
            f"amd-aiter {installed.release or 'of unknown release'} on {installed.arch or 'an unknown accelerator'}, heads "
            f"filled up with zeros to {heads}, every new token a row of its own, {NUM_KV_SPLITS} fixed splits, "
            f"{LSE_WORDS[installed.lse]}"
        ),
    )
    return as_operators(kernels)


def paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over the paged latent cache by AITER; `mla.compute.PagedDecode` says what it means.

    Reads AITER's signatures at every call; the kernels of a set from `make_kernel_set` have done so once.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        bfloat16, of up to 128 heads.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        bfloat16, contiguous, of any block size, at most 2**32 bytes.
    metadata : DecodeMetadata
        With a `PagedKV` of page size 1.
    kv_lora_rank : int
        512; `latent_dim` is 576.
    softmax_scale : float
        Factor on q.k.
    plan : AiterDecodePlan or None
        From `plan_decode` of this metadata; None makes it here.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
        bfloat16; 0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float32; -inf for rows without keys.

    Raises
    ------
    KernelError, CacheError, MetadataError
        Naming the argument, or what is wrong with the installed AITER.

    References
    ----------
    AITER, ``aiter/mla.py``; Dao et al., "Flash-Decoding" (merging splits of the keys by their log-sum-exp).
    """
    installed = rocm_load.inspect_aiter(None, arch=None)
    return rocm_decode.paged_decode_by(
        installed, q, latent_cache, metadata, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale, plan=plan
    )


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
    """Attention over ragged batches by AITER; `mla.compute.VarlenAttention` says what it means.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        bfloat16, `qk_head_dim` 192.
    k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
        bfloat16.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        bfloat16, `v_head_dim` 128.
    query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative lengths, from 0.
    max_query_len, max_kv_len : int
        Longest row of each kind.
    causal : bool
        The last query is aligned with the last key of each sequence.
    softmax_scale : float
        Factor on q.k.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        bfloat16; 0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float32; -inf for rows without keys.

    Raises
    ------
    KernelError
        Naming the argument, or what is wrong with the installed AITER.

    References
    ----------
    AITER, ``aiter/ops/mha.py``.
    """
    return rocm_prefill.varlen_attention_by(
        rocm_load.inspect_aiter(None, arch=None),
        q,
        k,
        v,
        query_start_loc=query_start_loc,
        kv_start_loc=kv_start_loc,
        max_query_len=max_query_len,
        max_kv_len=max_kv_len,
        causal=causal,
        softmax_scale=softmax_scale,
    )


def diagnostic(aiter: ModuleType | None = None, *, arch: str | None = None) -> str:  # noqa: A002
    """One line with the versions, the accelerator and the file of the installed AITER, for bug reports.

    Raises
    ------
    KernelError
        As `make_kernel_set`.
    """
    return rocm_load.diagnostic(rocm_load.inspect_aiter(aiter, arch=arch))
