"""A stand-in for AMD's AITER, as strict as its kernels are lax: every argument is checked, unwritten memory is NaN.

It is put on ``sys.path`` by a fixture only. `use_release` makes the module look and act like one release; the parameter lists
are written out here, by hand, from the contract. Kernels compute in float64 and round to bfloat16.
"""

from __future__ import annotations

import inspect
import math

import torch

from . import mla  # noqa: TID253  (the stand-in itself)

RELEASES = ("0.1.3", "0.1.7.post2.dev18", "0.1.10", "0.1.10.post3", "0.1.16", "0.1.20")

_DECODE_FIRST = "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q"
_DECODE_OLD = f"{_DECODE_FIRST}, sm_scale=None, logit_cap=0.0, num_kv_splits=None"
_WORK = (
    "num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, "
    "reduce_final_map=None, reduce_partial_map=None, q_scale=None, kv_scale=None"
)
_RETURNS = "intra_batch_mode=False, return_logits=False, return_lse=False"
_DECODE_PAGED = (
    f"{_DECODE_FIRST}, page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, {_WORK}, {_RETURNS}"
)
DECODE = {
    "0.1.3": _DECODE_OLD,
    "0.1.7.post2.dev18": f"{_DECODE_OLD}, {_WORK}",
    "0.1.10": f"{_DECODE_OLD}, {_WORK}, {_RETURNS}",
    "0.1.10.post3": _DECODE_PAGED,
    "0.1.16": _DECODE_PAGED,
    "0.1.20": f"{_DECODE_PAGED}, g_kv_indptr=None, cp_world_size=1, cp_rank=0, causal=True",
}
_VARLEN = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, "
_VARLEN += "logits_soft_cap=0.0, causal=False, window_size=(-1, -1), bias=None, alibi_slopes=None, deterministic=False, "
_VARLEN += "return_lse=False, return_attn_probs=False, "
_PADDED = "block_table=None, out=None, cu_seqlens_q_padded=None, cu_seqlens_k_padded=None"
VARLEN = {
    "0.1.3": f"{_VARLEN}block_table=None, out=None",
    "0.1.7.post2.dev18": f"{_VARLEN}how_v3_bf16_cvt=1, {_PADDED}",
    **dict.fromkeys(RELEASES[2:], f"{_VARLEN}how_v3_bf16_cvt=1, {_PADDED}, sink_ptr=None"),
}
_STAGE_FIRST = "Q, KV, qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens"
_STAGE_LAST = "softmax_scale, splitData, splitLse, output"
STAGE_1 = {
    "0.1.3": f"{_STAGE_FIRST}, max_seqlen_q, softmax_scale, splitData, splitLse",
    "0.1.7.post2.dev18": f"{_STAGE_FIRST}, num_kv_splits_indptr, work_metadata, work_indptr, work_info_set, max_seqlen_q, "
    f"{_STAGE_LAST}, q_scale=None, kv_scale=None",
    "0.1.10": f"{_STAGE_FIRST}, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, max_seqlen_q, "
    f"{_STAGE_LAST}, q_scale=None, kv_scale=None",
    "0.1.10.post3": f"{_STAGE_FIRST}, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, max_seqlen_q, "
    f"page_size, nhead_kv, {_STAGE_LAST}, q_scale=None, kv_scale=None",
    "0.1.16": f"{_STAGE_FIRST}, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, max_seqlen_q, "
    f"page_size, nhead_kv, {_STAGE_LAST}, lse=None, q_scale=None, kv_scale=None",
    "0.1.20": f"{_STAGE_FIRST}, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, max_seqlen_q, "
    f"page_size, nhead_kv, {_STAGE_LAST}, lse=None, q_scale=None, kv_scale=None, g_kv_indptr=None, cp_world_size=1, "
    "cp_rank=0, valid_split_count=None, use_valid_split_count_reduce=0, causal=1",
}

HEADS = {
    "0.1.3": {"gfx942": {16: 64, 128: 16}},
    "0.1.7.post2.dev18": {"gfx942": {16: 64, 128: 16}},
    "0.1.10": {"gfx942": {16: 64, 32: 16, 64: 16, 128: 16}},
    "0.1.10.post3": {"gfx942": {16: 64, 32: 16, 64: 16, 128: 16}},
    "0.1.16": {"gfx942": {8: 64, 16: 64, 32: 16, 128: 16}, "gfx950": {8: 64, 16: 64, 64: 32, 128: 16}},
    "0.1.20": {"gfx942": {8: 64, 16: 64, 32: 16, 128: 16}, "gfx950": {8: 64, 16: 64, 64: 32, 128: 16}},
}
"""Head counts of the bf16 kernels for one new token, each with the fewest keys of a split."""
for _release in RELEASES[:4]:
    HEADS[_release]["gfx950"] = HEADS[_release]["gfx942"]

calls: list[tuple[str, dict]] = []
"""Every call since `use_release`: the name of the function and its arguments by name."""

_library: list[torch.library.Library] = []


def use_release(release: str, arch: str = "gfx942") -> None:
    """Become this release on this accelerator."""
    close()
    heads = HEADS[release][arch]
    globals()["__version__"] = release

    def wrap(name, parameters, function):
        scope: dict = {}
        exec(f"def {name}({parameters}): pass", scope)
        signature = inspect.signature(scope[name])

        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append((name, dict(bound.arguments)))
            return function(**bound.arguments)

        call.__name__ = name
        call.__signature__ = signature
        return call

    mla.mla_decode_fwd = wrap("mla_decode_fwd", DECODE[release], lambda **a: _decode_fwd(release, heads, **a))
    globals()["flash_attn_varlen_func"] = wrap("flash_attn_varlen_func", VARLEN[release], _varlen)
    stage_1 = wrap("mla_decode_stage1_asm_fwd", STAGE_1[release], lambda **a: _stage_1(heads, **a))
    if release == "0.1.3":
        globals()["mla_decode_stage1_asm_fwd"] = stage_1
        return
    # From 2025-11 on, compiled functions are operators of torch behind a wrapper whose own signature says nothing.
    library = torch.library.Library("aiter", "FRAGMENT")
    library.define(f"mla_decode_stage1_asm_fwd({_schema(STAGE_1[release])}) -> ()")
    library.impl("mla_decode_stage1_asm_fwd", stage_1, "CPU")
    _library.append(library)
    globals()["mla_decode_stage1_asm_fwd"] = _opaque


def _opaque(*args, **kwargs):
    return torch.ops.aiter.mla_decode_stage1_asm_fwd(*args, **kwargs)


def close() -> None:
    """Forget the calls and the operator."""
    calls.clear()
    while _library:
        _library.pop()._destroy()


def _schema(parameters: str) -> str:
    written, letter = [], iter("abcdefghijklmnopqrstuvwxyz")
    for parameter in parameters.split(", "):
        name, _, default = parameter.partition("=")
        if name in (
            "max_seqlen_q",
            "page_size",
            "nhead_kv",
            "cp_world_size",
            "cp_rank",
            "use_valid_split_count_reduce",
            "causal",
        ):
            kind = "int"
        elif name == "softmax_scale":
            kind = "float"
        else:
            optional = default == "None" or name == "num_kv_splits_indptr" or name.startswith("work_")
            kind = f"Tensor({next(letter)}!){'?' if optional else ''}"
        written.append(f"{kind} {name}{'=' + default if default else ''}")
    return ", ".join(written)


def _int32(name: str, x, shape, device) -> None:
    assert isinstance(x, torch.Tensor), name
    assert (x.dtype, x.device, x.is_contiguous()) == (torch.int32, device, True), f"{name}: {x.dtype} {x.device}"
    assert shape is None or tuple(x.shape) == shape, f"{name}: {tuple(x.shape)}, not {shape}"


def _bf16(name: str, x, shape, device) -> None:
    assert isinstance(x, torch.Tensor), name
    assert (x.dtype, x.device, x.is_contiguous()) == (torch.bfloat16, device, True), f"{name}: {x.dtype} {x.stride()}"
    assert tuple(x.shape) == shape, f"{name}: {tuple(x.shape)}, not {shape}"


def _check_rows(heads, q, kv, qo_indptr, kv_indptr, kv_indices, last_page_lens, max_seqlen_q) -> None:
    device, (num_rows, num_heads) = q.device, q.shape[:2]
    _bf16("q", q, (num_rows, num_heads, 576), device)
    assert kv.dim() == 4, f"kv_buffer: {tuple(kv.shape)}"
    _bf16("kv_buffer", kv, (kv.shape[0], kv.shape[1], 1, 576), device)
    num_seqs = qo_indptr.shape[0] - 1
    _int32("qo_indptr", qo_indptr, None, device)
    _int32("kv_indptr", kv_indptr, (num_seqs + 1,), device)
    _int32("kv_indices", kv_indices, None, device)
    _int32("kv_last_page_lens", last_page_lens, (num_seqs,), device)
    assert qo_indptr[0] == 0
    assert qo_indptr[-1] == num_rows
    assert bool((qo_indptr.diff() >= 0).all()), "qo_indptr: decreases"
    assert int(qo_indptr.diff().max()) <= max_seqlen_q
    assert kv_indptr[0] >= 0
    assert bool((kv_indptr.diff() > 0).all()), "kv_indptr: a kernel cannot take a row without keys"
    assert kv_indptr[-1] <= kv_indices.shape[0], "kv_indptr: beyond kv_indices"
    used = kv_indices[kv_indptr[0] : kv_indptr[-1]]
    assert bool((used >= 0).all()), "kv_indices: negative"
    assert bool((used < kv.shape[0]).all()), "kv_indices: beyond the cache"
    assert bool((last_page_lens >= 1).all())
    assert bool((last_page_lens <= kv.shape[1]).all())
    if num_heads not in heads or (max_seqlen_q != 1 and num_heads != 16):
        raise RuntimeError(f"mla_decode_stage1_asm_fwd: cannot find suitable kernel for {num_heads=} and {max_seqlen_q=}")


def _splits(heads, q, kv, qo_indptr, kv_indptr, kv_indices, scale, num_splits):
    """Partial output and LSE of each split; those without keys stay NaN. A page is read as if it held one token."""
    rows = kv.reshape(-1, 576).double()
    out = torch.full((q.shape[0], num_splits, q.shape[1], 512), torch.nan, dtype=torch.float64)
    lse = torch.full((q.shape[0], num_splits, q.shape[1], 1), torch.nan, dtype=torch.float64)
    for seq in range(len(qo_indptr) - 1):
        first, last = qo_indptr[seq : seq + 2].tolist()
        begin, end = kv_indptr[seq : seq + 2].tolist()
        keys = rows[kv_indices[begin:end].long()]
        for t in range(first, last):
            seen = keys[: len(keys) - (last - 1 - t)]
            size = max(heads[q.shape[1]], math.ceil(len(seen) / num_splits))
            for i, part in enumerate(seen.split(size)):
                scores = q[t].double() @ part.T * scale
                lse[t, i, :, 0] = torch.logsumexp(scores, 1)
                out[t, i] = scores.softmax(1) @ part[:, :512]
    return out, lse


def _stage_1(heads, *, Q, KV, softmax_scale, splitData, splitLse, max_seqlen_q, **a):
    _check_rows(heads, Q, KV, a["qo_indptr"], a["kv_indptr"], a["kv_page_indices"], a["kv_last_page_lens"], max_seqlen_q)
    num_splits = splitData.shape[1]
    assert splitData.dtype == splitLse.dtype == torch.float32
    assert splitData.shape == (len(Q), num_splits, Q.shape[1], 512)
    assert splitLse.shape == (len(Q), num_splits, Q.shape[1], 1)
    assert splitData.is_contiguous()
    assert splitLse.is_contiguous()
    assert isinstance(softmax_scale, float)
    if "output" in a:
        _bf16("output", a["output"], (len(Q), Q.shape[1], 512), Q.device)
        indptr = a["num_kv_splits_indptr"]
        _int32("num_kv_splits_indptr", indptr, (len(a["qo_indptr"]),), Q.device)
        assert indptr.tolist() == [i * num_splits for i in range(len(indptr))]
        assert all(a.get(name) is None for name in ("work_metadata", "work_meta_data", "work_indptr", "work_info_set"))
        assert all(a.get(name) is None for name in ("lse", "q_scale", "kv_scale", "g_kv_indptr", "valid_split_count"))
        assert (a.get("page_size", 1), a.get("nhead_kv", 1)) == (1, 1)
    out, lse = _splits(heads, Q, KV, a["qo_indptr"], a["kv_indptr"], a["kv_page_indices"], softmax_scale, num_splits)
    splitData.copy_(out)
    splitLse.copy_(lse)


def _decode_fwd(release, heads, q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, **a):
    assert a["sm_scale"] is not None, "sm_scale: the default is wrong for every model"
    assert isinstance(a["sm_scale"], float)
    assert a["logit_cap"] <= 0
    assert a["num_kv_splits"] is not None, "num_kv_splits: chosen by the batch and the card"
    assert a["num_kv_splits"] > 1, "num_kv_splits: the path of one split is not to be trusted"
    _check_rows(heads, q, kv_buffer, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q)
    _bf16("o", o, (len(q), q.shape[1], 512), q.device)
    num_splits = a["num_kv_splits"]
    if a.get("num_kv_splits_indptr") is not None:
        indptr = a["num_kv_splits_indptr"]
        _int32("num_kv_splits_indptr", indptr, (len(qo_indptr),), q.device)
        assert indptr.tolist() == [i * num_splits for i in range(len(indptr))]
    if "page_size" in a:
        assert (a["page_size"], a["nhead_kv"]) == (kv_buffer.shape[1], 1)
    out, lse = _splits(heads, q, kv_buffer, qo_indptr, kv_indptr, kv_indices, a["sm_scale"], num_splits)
    valid = lse.nan_to_num(-torch.inf)
    weights = valid.softmax(1)
    # The storage is swapped, as on AITER's path of several tokens: whoever kept a view of `o` sees none of this.
    o.set_((out.nan_to_num(0) * weights).sum(1).to(torch.bfloat16))
    if release == "0.1.3":
        return out.float(), lse.float()
    final = torch.full((len(q), q.shape[1]), torch.nan)
    if release == "0.1.16" and a["return_lse"]:
        raise RuntimeError("get_heuristic_kernel_mla: cannot get heuristic kernel! lse:1")
    if release == "0.1.20":
        return out.float(), torch.logsumexp(valid, 1).squeeze(2).float() if a["return_lse"] else None
    return out.float(), final


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **a):
    device, num_heads = q.device, q.shape[1]
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert (q.shape[2], k.shape[2], v.shape[2]) == (192, 192, 128)
    assert k.shape[:2] == v.shape[:2]
    assert k.shape[1] == num_heads
    assert all(x.device == device and x.stride(2) == 1 for x in (q, k, v))
    for name, x, n, longest in (("q", cu_seqlens_q, len(q), max_seqlen_q), ("k", cu_seqlens_k, len(k), max_seqlen_k)):
        _int32(f"cu_seqlens_{name}", x, (len(cu_seqlens_q),), device)
        assert x[0] == 0
        assert bool((x.diff() >= 0).all())
        assert x[-1] <= n
        assert isinstance(longest, int)
        assert int(x.diff().max()) <= longest
    assert isinstance(a["softmax_scale"], float), "softmax_scale: the default is wrong under YaRN"
    assert a["return_lse"]
    assert not a["return_attn_probs"]
    assert (a["dropout_p"], a["logits_soft_cap"], a["window_size"], a["out"]) == (0.0, 0.0, (-1, -1), None)
    out = torch.full((len(q), num_heads, 128), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((num_heads, len(q)), torch.nan)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for first, last, begin, end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        for t in range(first, last):
            stop = end - (last - 1 - t) if a["causal"] else end
            if stop <= begin:
                continue
            scores = torch.einsum("hd,lhd->hl", q[t].double(), k[begin:stop].double()) * a["softmax_scale"]
            lse[:, t] = torch.logsumexp(scores, 1)
            out[t] = torch.einsum("hl,lhe->he", scores.softmax(1), v[begin:stop].double())
    return out, lse
