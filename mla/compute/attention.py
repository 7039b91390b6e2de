"""Prefill and decode over any `KernelSet`: chunked context, merging and absorption exist once, here."""

from __future__ import annotations

import torch

from mla._checks import check_instance, check_int, check_tensor, dtype_name
from mla.cache.spec import check_latent_cache
from mla.compute.absorb import absorb_query, expand_latent, project_output
from mla.compute.contracts import Plan
from mla.compute.kernels import KernelSet
from mla.compute.merge import merge_into_
from mla.errors import KernelError
from mla.metadata.dims import MLADims
from mla.metadata.records import DecodeMetadata, PrefillMetadata

__all__ = ["check_attention_inputs", "check_workspace", "decode", "prefill", "prefill_workspace_bytes"]


def check_attention_inputs(
    q: torch.Tensor,
    latent_cache: torch.Tensor | None,
    metadata: PrefillMetadata | DecodeMetadata,
    dims: MLADims,
    kernels: KernelSet,
) -> None:
    """Refuse what `prefill` or `decode` could not run, without reading a value.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Rotated queries.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim) or None
        None only where nothing is read: a profile run.
    metadata : PrefillMetadata or DecodeMetadata
        The part that q belongs to.
    dims : MLADims
        Dimensions.
    kernels : KernelSet
        Device, dtype, page size and dimensions are checked against it.

    Raises
    ------
    KernelError, CacheError
        Naming the argument.
    """
    check_instance("kernels", kernels, KernelSet, KernelError)
    check_instance("dims", dims, MLADims, KernelError)
    if isinstance(q, torch.Tensor) and q.dtype not in kernels.dtypes:
        raise KernelError(f"q: expected {' or '.join(map(dtype_name, kernels.dtypes))}, got {q.dtype}")
    bound = {"num_tokens": metadata.num_tokens, "num_heads": dims.num_heads, "qk_head_dim": dims.qk_head_dim}
    check_tensor(
        "q",
        q,
        "(num_tokens, num_heads, qk_head_dim)",
        kernels.dtypes,
        device=metadata.seq_lens.device,
        bound=bound,
        error=KernelError,
    )
    if kernels.device_types and q.device.type not in kernels.device_types:
        raise KernelError(f"q: expected device {' or '.join(kernels.device_types)} for {kernels.name}, got {q.device}")
    reads_cache = isinstance(metadata, DecodeMetadata) or len(metadata.context_chunks) > 0
    kernels.check_gradients(reads_cache=reads_cache, q=q, latent_cache=latent_cache if reads_cache else None)
    reason = kernels.objection(dims)
    if reason is not None:
        raise KernelError(reason)
    if latent_cache is None:
        if reads_cache:
            raise KernelError("latent_cache: expected a cache to read from, got None")
        return
    check_latent_cache("latent_cache", latent_cache)
    kernels.check_cache(latent_cache)
    num_blocks, block_size, latent_dim = latent_cache.shape
    if latent_cache.device != q.device:
        raise KernelError(f"latent_cache: expected device {q.device}, got {latent_cache.device}")
    if (block_size, latent_dim) != (metadata.block_size, dims.latent_dim):
        raise KernelError(
            f"latent_cache: expected blocks of ({metadata.block_size}, {dims.latent_dim}), got ({block_size}, {latent_dim})"
        )
    if num_blocks < metadata.min_num_blocks:
        raise KernelError(f"latent_cache: expected at least {metadata.min_num_blocks} blocks, got {num_blocks}")
    wanted = kernels.page_size
    if isinstance(metadata, DecodeMetadata) and wanted is not None:
        have = [paged.page_size for paged in metadata.paged_kv]
        if wanted not in have:
            raise KernelError(
                f"metadata: expected paged_kv of page size {wanted} for {kernels.name}, got {have}; "
                f"build it with build_metadata(..., page_sizes=({wanted},))"
            )


def prefill_workspace_bytes(
    dims: MLADims,
    *,
    num_query_tokens: int,
    context_chunk_tokens: int,
    dtype: torch.dtype,
    kernels: KernelSet | None = None,
) -> int:
    """Bytes that chunked context takes beyond inputs and outputs, whatever the length of the context.

    The gathered rows, the keys and values made of them or of the new tokens, the output of a pass, and the wide output with
    its LSE that the passes are merged into. Off the CPU, where merging is not cut into blocks of rows, its temporaries come on
    top.

    Parameters
    ----------
    dims : MLADims
        Dimensions.
    num_query_tokens : int
        New tokens of the prompts.
    context_chunk_tokens : int
        Context tokens gathered in one pass.
    dtype : torch.dtype
        Of the queries.
    kernels : KernelSet or None
        Given, what its attention takes inside is counted too, as far as the set says.

    Raises
    ------
    KernelError
        A negative count.

    Examples
    --------
    In MiB, for two lengths of a chunk:

    >>> from mla.metadata import RopeSpec
    >>> dims = MLADims(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ...                rope=RopeSpec(dim=64, interleaved=True))
    >>> options = {"num_query_tokens": 2048, "dtype": torch.bfloat16}
    >>> [prefill_workspace_bytes(dims, context_chunk_tokens=n, **options) >> 20 for n in (4096, 8192)]
    [646, 1099]
    """
    for name, value in (("num_query_tokens", num_query_tokens), ("context_chunk_tokens", context_chunk_tokens)):
        check_int(name, value, low=0, error=KernelError)
    wide = 8 if dtype == torch.float64 else 4
    expanded = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim + dims.qk_head_dim)
    keys = max(context_chunk_tokens * (dims.latent_dim + expanded), num_query_tokens * expanded) * dtype.itemsize
    per_query = dims.num_heads * (dims.v_head_dim * (wide + dtype.itemsize) + 2 * wide)
    inside = 0
    if kernels is not None:
        check_instance("kernels", kernels, KernelSet, KernelError)
        inside = kernels.varlen_bytes(dims, num_query_tokens, max(context_chunk_tokens, num_query_tokens), dtype)
    return keys + num_query_tokens * per_query + inside


def prefill(
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    latent_cache: torch.Tensor | None,
    metadata: PrefillMetadata,
    *,
    kv_b_proj: torch.Tensor,
    dims: MLADims,
    kernels: KernelSet,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the prompts: causal over the new tokens, then one pass per context chunk, merged by LSE.

    Keys and values are made from the latents (not absorbed), which is the cheaper form for many new tokens.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Rotated queries of the prompts.
    kv_c : torch.Tensor of shape (num_tokens, kv_lora_rank)
        Normed latents of the new tokens. They are attended as the cache stores them: rounded to its dtype if that is narrower.
    k_pe : torch.Tensor of shape (num_tokens, qk_rope_head_dim)
        Rotated key parts of the new tokens.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim) or None
        Holds the context; None on a profile run.
    metadata : PrefillMetadata
        Where the rows lie.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions and scale.
    kernels : KernelSet
        What runs.
    workspace : torch.Tensor of shape (num_rows, latent_dim) or None
        Holds the rows of one pass, in the dtype of q, ``metadata.max_context_chunk_tokens`` rows at least; None allocates it.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of q.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        Natural logarithm; float64 for float64 inputs and float32 otherwise.

    Raises
    ------
    KernelError, CacheError
        Arguments that do not fit each other or the kernel set.

    Examples
    --------
    The first token of a prompt sees itself alone, so its output is its value.

    >>> from mla import RopeSpec, build_metadata, kernels_for, prompt_group
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> metadata = build_metadata([prompt_group(5)], block_size=16).prefill  # without context no cache is read
    >>> q, kv_c, k_pe, kv_b_proj = (torch.randn(shape) for shape in ((5, 4, 24), (5, 32), (5, 8), (160, 32)))
    >>> out, lse = prefill(q, kv_c, k_pe, None, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels_for("cpu"))
    >>> out.shape, lse.shape
    (torch.Size([5, 4, 24]), torch.Size([5, 4]))
    >>> torch.allclose(out[0], expand_latent(kv_c, k_pe, kv_b_proj, dims)[1][0], rtol=1e-3, atol=1e-3)
    True
    """
    check_instance("metadata", metadata, PrefillMetadata, KernelError)
    check_attention_inputs(q, latent_cache, metadata, dims, kernels)
    bound = {"num_tokens": metadata.num_tokens, "kv_lora_rank": dims.kv_lora_rank, "qk_rope_head_dim": dims.qk_rope_head_dim}
    check_tensor("kv_c", kv_c, "(num_tokens, kv_lora_rank)", q.dtype, device=q.device, bound=bound, error=KernelError)
    check_tensor("k_pe", k_pe, "(num_tokens, qk_rope_head_dim)", q.dtype, device=q.device, bound=bound, error=KernelError)
    reads_cache = len(metadata.context_chunks) > 0
    kernels.check_gradients(reads_cache=reads_cache, kv_c=kv_c, k_pe=k_pe, kv_b_proj=kv_b_proj)
    rows = check_workspace(workspace, metadata, q, dims)

    if latent_cache is not None and latent_cache.dtype != q.dtype:
        kv_c, k_pe = (x.to(latent_cache.dtype).to(q.dtype) for x in (kv_c, k_pe))
    k, v = expand_latent(kv_c, k_pe, kv_b_proj, dims)
    out, lse = kernels.varlen_attention(
        q,
        k,
        v,
        query_start_loc=metadata.query_start_loc,
        kv_start_loc=metadata.query_start_loc,
        max_query_len=metadata.max_query_len,
        max_kv_len=metadata.max_query_len,
        causal=True,
        softmax_scale=dims.softmax_scale,
    )
    del k, v
    if latent_cache is None or rows is None:
        return out, lse
    # Each pass is rounded to q's dtype once; merging in the LSE's dtype keeps it from being rounded again and again.
    out = out.to(lse.dtype)
    for chunk in metadata.context_chunks:
        gathered = kernels.gather_latent_cache(latent_cache, chunk.slots, out=rows)
        k, v = expand_latent(gathered[:, : dims.kv_lora_rank], gathered[:, dims.kv_lora_rank :], kv_b_proj, dims)
        tokens = slice(chunk.first_token, chunk.first_token + chunk.num_query_tokens)
        part_out, part_lse = kernels.varlen_attention(
            q[tokens],
            k,
            v,
            query_start_loc=chunk.query_start_loc,
            kv_start_loc=chunk.kv_start_loc,
            max_query_len=chunk.max_query_len,
            max_kv_len=chunk.max_kv_len,
            causal=False,
            softmax_scale=dims.softmax_scale,
        )
        del k, v
        merge_into_(out[tokens], lse[tokens], part_out, part_lse)
        del part_out, part_lse
    return out.to(q.dtype), lse


def check_workspace(
    workspace: torch.Tensor | None, metadata: PrefillMetadata, q: torch.Tensor, dims: MLADims
) -> torch.Tensor | None:
    """The rows that the context chunks are gathered into: the caller's, or new ones; None where there are no chunks.

    Parameters
    ----------
    workspace : torch.Tensor of shape (num_rows, latent_dim) or None
        In the dtype of q, with rows for the largest chunk.
    metadata : PrefillMetadata
        Of the prompts.
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Its dtype and device.
    dims : MLADims
        Dimensions.

    Raises
    ------
    KernelError
        A workspace that is too small, or of another shape, dtype or device.
    """
    needed = metadata.max_context_chunk_tokens
    if workspace is not None:
        check_tensor(
            "workspace",
            workspace,
            "(num_rows, latent_dim)",
            q.dtype,
            device=q.device,
            bound={"latent_dim": dims.latent_dim},
            error=KernelError,
        )
        if workspace.shape[0] < needed:
            raise KernelError(f"workspace: expected at least {needed} rows, got {workspace.shape[0]}")
    if not metadata.context_chunks:
        return None
    return q.new_empty(needed, dims.latent_dim) if workspace is None else workspace


def decode(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    kv_b_proj: torch.Tensor,
    dims: MLADims,
    kernels: KernelSet,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the decoding sequences: the query is folded into the latent space, the output folded back.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        Rotated queries of the decoding sequences.
    latent_cache : torch.Tensor of shape (num_blocks, block_size, latent_dim)
        Already holds the new tokens.
    metadata : DecodeMetadata
        Where the rows lie.
    kv_b_proj : torch.Tensor of shape (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
        The up-projection.
    dims : MLADims
        Dimensions and scale.
    kernels : KernelSet
        What runs.
    plan : Plan or None
        ``kernels.plan(metadata)``, made once for all layers; None makes it here.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of q.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        Natural logarithm; float64 for float64 inputs and float32 otherwise.

    Raises
    ------
    KernelError, CacheError
        Arguments that do not fit each other or the kernel set.

    Examples
    --------
    >>> from mla import RopeSpec, build_metadata, decode_group, kernels_for
    >>> dims = MLADims(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    ...                rope=RopeSpec(dim=8, interleaved=True))
    >>> metadata = build_metadata([decode_group(17, [7, 2]), decode_group(5, [3])], block_size=16).decode
    >>> q, latent_cache, kv_b_proj = torch.randn(2, 4, 24), torch.randn(8, 16, 40), torch.randn(160, 32)
    >>> out, lse = decode(q, latent_cache, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels_for("cpu"))
    >>> out.shape, lse.shape
    (torch.Size([2, 4, 24]), torch.Size([2, 4]))
    """
    check_instance("metadata", metadata, DecodeMetadata, KernelError)
    check_attention_inputs(q, latent_cache, metadata, dims, kernels)
    kernels.check_gradients(reads_cache=True, kv_b_proj=kv_b_proj)
    out, lse = kernels.paged_decode(
        absorb_query(q, kv_b_proj, dims),
        latent_cache,
        metadata,
        kv_lora_rank=dims.kv_lora_rank,
        softmax_scale=dims.softmax_scale,
        plan=plan,
    )
    return project_output(out, kv_b_proj, dims), lse
