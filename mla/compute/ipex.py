"""The kernels of intel-extension-for-pytorch (IPEX) 2.8, adapted to the contracts of `mla.compute.kernels`: "CPU_MLA_IPEX".

Importing this module imports nothing of IPEX: making the set, or calling one of its kernels, does, and **importing IPEX changes
the process**: 27 of aten's operators (`matmul`, `cat`, `index_select`, `sum`, `mean`, `layer_norm` ...) get other kernels, for
every user of torch in it, and with them last bits change, also those of "CPU_MLA". `load_ipex` says what else happens.
IPEX needs torch 2.8 and a CPU with AVX2; its last release is 2.8.0, archived with a notice of known security issues.

Decoding takes IPEX's `decode_attention`, prefill its `flash_attention`. `functional_varlen_attention` is the call that vLLM's
backend made instead; nothing here uses it unless it is called by name.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from mla.compute import ipex_decode, ipex_load, ipex_prefill, operators
from mla.compute.contracts import Plan
from mla.compute.ipex_decode import IpexDecodePlan, plan_decode
from mla.compute.ipex_load import Installed, load_ipex
from mla.compute.kernels import KernelSet
from mla.metadata.records import DecodeMetadata

__all__ = [
    "IpexDecodePlan",
    "diagnostic",
    "functional_varlen_attention",
    "kernel_set_of",
    "load_ipex",
    "make_kernel_set",
    "paged_decode",
    "plan_decode",
    "varlen_attention",
]


def make_kernel_set(ipex: ModuleType | None = None) -> KernelSet:
    """The kernel set "CPU_MLA_IPEX" over the installed IPEX, which is imported for it.

    Parameters
    ----------
    ipex : module or None
        ``intel_extension_for_pytorch``; None imports it with `load_ipex`, which says what that changes.

    Returns
    -------
    KernelSet
        For bfloat16: IPEX's decode kernel has no float32, and scalar code only for float16.

    Raises
    ------
    KernelError
        No IPEX, another release than 2.8, another torch, no setuptools, a CPU without AVX2, an error inside IPEX, or an unknown
        signature.
    """
    return kernel_set_of(ipex_load.inspect_ipex(ipex))


def kernel_set_of(installed: Installed) -> KernelSet:
    """The kernel set over an IPEX whose signatures have been read.

    Parameters
    ----------
    installed : Installed
        From `mla.compute.ipex_load.inspect_ipex`.

    Raises
    ------
    KernelError
        Something else, whose functions are none.
    """
    slow = "" if ipex_load.has_avx512_bf16() else "; this CPU has no AVX512_BF16, so IPEX decodes in slow scalar code"
    kernels = KernelSet(
        name="CPU_MLA_IPEX",
        device_types=("cpu",),
        dtypes=(torch.bfloat16,),
        paged_decode=functools.partial(ipex_decode.paged_decode_by, installed),
        varlen_attention=functools.partial(ipex_prefill.varlen_attention_by, installed),
        make_plan=plan_decode,
        plan_type=IpexDecodePlan,
        check_cache=ipex_decode.check_cache,
        remark=(
            f"intel-extension-for-pytorch {installed.release or 'of unknown release'}, any head count, block size and width; "
            f"a sequence's bits do not depend on its batch, but in prefill on the number of threads beyond 16{slow}"
        ),
    )
    return operators.as_operators(kernels)


def paged_decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over the paged latent cache by IPEX; `mla.compute.PagedDecode` says what it means.

    Imports IPEX, and reads its signatures at every call; the kernels of a set from `make_kernel_set` have done so once.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, latent_dim)
        bfloat16, of any head count.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        bfloat16, contiguous, of any block size, at most 2**31 numbers.
    metadata : DecodeMetadata
        Where the rows lie; every slot in use is checked against the cache, for IPEX does not survive a wrong one.
    kv_lora_rank : int
        Columns of a value; multiples of 16 are fast.
    softmax_scale : float
        Factor on q.k.
    plan : IpexDecodePlan or None
        From `plan_decode` of this metadata; None makes it here.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, kv_lora_rank)
        bfloat16; 0 for rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        float32; -inf for rows without keys.

    Raises
    ------
    KernelError, CacheError
        Naming the argument, or what is wrong with the installed IPEX.

    References
    ----------
    IPEX 2.8, ``csrc/cpu/aten/kernels/DecodeKrnl.cpp``; Dao et al., "Flash-Decoding" (merging splits of the keys by their
    log-sum-exp).
    """
    installed = ipex_load.inspect_ipex()
    return ipex_decode.paged_decode_by(
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
    """Attention over ragged batches by IPEX's `flash_attention`; `mla.compute.VarlenAttention` says what it means.

    Imports IPEX. Every sequence is a call of its own. Where it has more keys than queries and `causal` is set, the last keys
    are attended causally and those before them in full, and the two are merged by LSE: IPEX aligns its mask with the first key.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        float32, bfloat16 or float16.
    k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
        With any strides, an expanded view too.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        As narrow or wide as it likes; IPEX takes equal widths, so the narrower side is filled with zeros.
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
        float32; -inf for rows without keys.

    Raises
    ------
    KernelError
        Naming the argument, or what is wrong with the installed IPEX.

    References
    ----------
    IPEX 2.8, ``csrc/cpu/aten/kernels/FlashAttentionKrnl.cpp``.
    """
    return ipex_prefill.varlen_attention_by(
        ipex_load.inspect_ipex(),
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


def functional_varlen_attention(
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
) -> torch.Tensor:
    """The prefill call of vLLM's `CPU_MLA` backend, for parity with it: `ipex.llm.functional.varlen_attention`. No LSE.

    Imports IPEX. Its function fills all sequences up to the longest one and calls torch's scaled dot-product attention. It
    ignores `softmax_scale` and takes ``width ** -0.5``, so q is multiplied by what is missing, and rounded once more where that
    is not 1. Its parameters changed from release to release and are read first. Merging with a context needs an LSE, which
    `varlen_attention` has.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        float32, bfloat16 or float16.
    k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
        In the dtype of q.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        As narrow or wide as it likes; the narrower side is filled with zeros.
    query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative lengths, from 0; equal where `causal` is set.
    max_query_len, max_kv_len : int
        Longest row of each kind; not needed here, where the lengths themselves are read.
    causal : bool
        Whether a query sees only keys up to its own position.
    softmax_scale : float
        Factor on q.k.

    Returns
    -------
    torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of q; 0 for rows without keys.

    Raises
    ------
    KernelError
        Naming the argument (`causal` with unequal lengths too, where IPEX misplaces its mask), or what is wrong with the
        installed IPEX.

    References
    ----------
    vLLM 0.9, ``vllm/attention/backends/cpu_mla.py``; IPEX, ``llm/functional/fusions.py``.
    """
    return ipex_prefill.functional_varlen_attention_by(
        ipex_load.inspect_ipex(),
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


def diagnostic(ipex: ModuleType | None = None) -> str:
    """One line with the versions, the file of IPEX and what the CPU has, for bug reports.

    Raises
    ------
    KernelError
        As `make_kernel_set`.
    """
    return ipex_load.diagnostic(ipex_load.inspect_ipex(ipex))
