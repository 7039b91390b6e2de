"""What AMD's AITER can decode, release by release: a table as data, the choice of a kernel from it, and a sentence about it.

The rows were read in AITER's sources at its release tags (the dispatch in ``csrc/py_itfs_cu/asm_mla.cu``, the kernel lists
``hsa/<arch>/mla/mla_asm.csv`` and the second stage in ``aiter/mla.py``), not measured on a card.
"""

from __future__ import annotations

import re
from typing import Final

import attrs
import torch

from mla._checks import check_int, dtype_name
from mla.errors import KernelError

__all__ = [
    "ARCHS",
    "CAPABILITIES",
    "KV_LORA_RANK",
    "LATENT_DIM",
    "LSE_WORDS",
    "NUM_KV_SPLITS",
    "PAGE_SIZE",
    "PREFILL_HEAD_DIMS",
    "Capability",
    "HeadKernel",
    "check_decode",
    "check_prefill_head_dims",
    "explain_decode",
    "head_kernels",
    "kernel_for",
    "lse_source",
    "release_key",
]

ReleaseKey = tuple[tuple[int, ...], float]

KV_LORA_RANK: Final = 512
"""Columns of a value in every AITER decode kernel."""

LATENT_DIM: Final = 576
"""Columns of a cache row in every AITER decode kernel."""

PREFILL_HEAD_DIMS: Final = ((192, 128),)
"""Pairs (qk_head_dim, v_head_dim) that `varlen_attention` passes on."""

PAGE_SIZE: Final = 1
"""The bf16 kernels read one token a page; larger pages are accepted by AITER and give wrong answers."""

NUM_KV_SPLITS: Final = 16
"""Pieces that the keys of a row are cut into, always: AITER's own choice depends on the batch and the card, and so would bits.

It is the most that AITER chooses itself. More than one also keeps away from its one-split paths, which write the output
from inside the first stage and have broken in several releases.
"""

ARCHS: Final = ("gfx942", "gfx950")
"""Accelerators with decode kernels: MI300 (gfx942) and MI350 (gfx950) series."""


@attrs.frozen(kw_only=True)
class HeadKernel:
    """A decode kernel for one head count.

    Parameters
    ----------
    num_heads : int
        Query heads.
    split_tokens : int
        Keys that a split holds at least, for one new token per row; fewer splits than asked for are written where a
        sequence is too short to fill them.
    query_lens : tuple of int
        New tokens per row that AITER has a kernel for. Only 1 is used here: which kernel runs would otherwise depend on the
        longest row of the batch, and with it the bits.
    """

    num_heads: int
    split_tokens: int
    query_lens: tuple[int, ...] = (1,)


@attrs.frozen(kw_only=True)
class Capability:
    """What a range of releases decodes on some accelerators.

    Parameters
    ----------
    since, before : str
        The releases from `since` up to and without `before`; an empty `before` has no end.
    archs : tuple of str
        Accelerators.
    kernels : tuple of HeadKernel
        One for each head count, ascending.
    lse : str
        Where the log-sum-exp comes from: ``"returned splits"`` (`mla_decode_fwd` returns the LSE of each split),
        ``"stage 1"`` (what it returns is memory that nobody wrote, or asking for it finds no kernel: the first stage is
        called and its splits are merged here) or ``"return_lse"`` (trusted).
    dtype : torch.dtype
        Of queries and cache.
    page_size : int
        Tokens per page.
    """

    since: str
    before: str
    archs: tuple[str, ...]
    kernels: tuple[HeadKernel, ...]
    lse: str
    dtype: torch.dtype = torch.bfloat16
    page_size: int = PAGE_SIZE


def _heads(*rows: tuple[int, int]) -> tuple[HeadKernel, ...]:
    # Five to eight tokens at 16 heads have a kernel too, with wrong results on gfx942 (AITER's issue 5679).
    several = {16: (1, 2, 3, 4), 128: (1, 2, 3, 4)}
    return tuple(HeadKernel(num_heads=h, split_tokens=t, query_lens=several.get(h, (1,))) for h, t in rows)


_FIRST = _heads((16, 64), (128, 16))
_FOUR = _heads((16, 64), (32, 16), (64, 16), (128, 16))

CAPABILITIES: Final = (
    Capability(since="0.1.3", before="0.1.6.post2", archs=ARCHS, kernels=_FIRST, lse="returned splits"),
    Capability(since="0.1.6.post2", before="0.1.9.post1", archs=ARCHS, kernels=_FIRST, lse="stage 1"),
    Capability(since="0.1.9.post1", before="0.1.13", archs=ARCHS, kernels=_FOUR, lse="stage 1"),
    # From here on the dispatch asks for a 64-head kernel of its own for one new token, which only gfx950 has.
    Capability(
        since="0.1.13", before="0.1.14", archs=("gfx942",), kernels=_heads((16, 64), (32, 16), (128, 16)), lse="stage 1"
    ),
    Capability(
        since="0.1.13",
        before="0.1.14",
        archs=("gfx950",),
        kernels=_heads((16, 64), (32, 16), (64, 32), (128, 16)),
        lse="stage 1",
    ),
    Capability(
        since="0.1.14",
        before="0.1.19",
        archs=("gfx942",),
        kernels=_heads((8, 64), (16, 64), (32, 16), (128, 16)),
        lse="stage 1",
    ),
    Capability(
        since="0.1.14",
        before="0.1.15",
        archs=("gfx950",),
        kernels=_heads((8, 64), (16, 64), (32, 16), (64, 32), (128, 16)),
        lse="stage 1",
    ),
    # The 32-head kernel of gfx950 was replaced by one that reads 32 keys at a time while the second stage still counts
    # splits of 16: left out, since short sequences would read splits that nobody wrote.
    Capability(
        since="0.1.15",
        before="0.1.19",
        archs=("gfx950",),
        kernels=_heads((8, 64), (16, 64), (64, 32), (128, 16)),
        lse="stage 1",
    ),
    Capability(
        since="0.1.19", before="", archs=("gfx942",), kernels=_heads((8, 64), (16, 64), (32, 16), (128, 16)), lse="return_lse"
    ),
    Capability(
        since="0.1.19", before="", archs=("gfx950",), kernels=_heads((8, 64), (16, 64), (64, 32), (128, 16)), lse="return_lse"
    ),
)
"""The table; the rows that fit a release and an accelerator apply."""

_VERSION = re.compile(r"v?(?P<release>\d+(?:\.\d+)*)(?:rc\d+)?(?:\.?post(?P<post>\d+))?(?P<dev>\.?dev\d+)?")


def release_key(release: str) -> ReleaseKey | None:
    """A key that orders releases, None for a text that is no version; a development build comes before its release.

    Examples
    --------
    >>> release_key("0.1.7.post2.dev18+g1") < release_key("0.1.7.post2") < release_key("0.1.10")
    True
    """
    match = _VERSION.match(release)
    if match is None:
        return None
    numbers = tuple(int(number) for number in match["release"].split("."))
    return (*numbers, 0, 0)[:3], int(match["post"] or 0) - (0.5 if match["dev"] else 0.0)


def _rows(release: str | None, arch: str | None) -> list[Capability]:
    if arch is not None and arch not in ARCHS:
        raise KernelError(f"arch: expected {' or '.join(ARCHS)} (AITER has no decode kernel for others), got {arch!r}")
    key = None if release is None else release_key(release)

    def fits(row: Capability) -> bool:
        since, before = release_key(row.since), release_key(row.before)
        return key is None or (since is not None and since <= key and (before is None or key < before))

    rows = [row for row in CAPABILITIES if (arch is None or arch in row.archs) and fits(row)]
    if not rows:
        raise KernelError(f"amd-aiter: expected release {CAPABILITIES[0].since} or newer, got {release}")
    return rows


def head_kernels(release: str | None, arch: str | None) -> tuple[HeadKernel, ...]:
    """The decode kernels of a release on an accelerator; for an unknown one, those that all of them share.

    Raises
    ------
    KernelError
        A release or an accelerator without kernels.
    """
    first, *others = _rows(release, arch)
    return tuple(kernel for kernel in first.kernels if all(kernel in row.kernels for row in others))


def lse_source(release: str | None) -> str | None:
    """`Capability.lse` of a release, None for an unknown one.

    Raises
    ------
    KernelError
        A release without kernels.
    """
    sources = {row.lse for row in _rows(release, None)}
    return sources.pop() if len(sources) == 1 else None


def kernel_for(num_heads: int, *, release: str | None, arch: str | None) -> HeadKernel:
    """The kernel with the fewest heads that holds `num_heads`; the heads it has too many are filled with zeros.

    Raises
    ------
    KernelError
        More heads than any kernel has, or a release or an accelerator without kernels.
    """
    kernels = head_kernels(release, arch)
    check_int("num_heads", num_heads, low=1, high=kernels[-1].num_heads, error=KernelError)
    return next(kernel for kernel in kernels if kernel.num_heads >= num_heads)


def check_decode(
    num_heads: int, *, dtype: torch.dtype, release: str | None, arch: str | None, kv_lora_rank: int, latent_dim: int
) -> HeadKernel:
    """The kernel for such a model, as `kernel_for`.

    Raises
    ------
    KernelError
        What AITER cannot decode.
    """
    if dtype != torch.bfloat16:
        raise KernelError(f"dtype: expected bfloat16 (AITER's decode kernels take no other), got {dtype_name(dtype)}")
    for name, value, wanted in (("kv_lora_rank", kv_lora_rank, KV_LORA_RANK), ("latent_dim", latent_dim, LATENT_DIM)):
        if value != wanted:
            raise KernelError(f"{name}: expected {wanted} (AITER's decode kernels have no other), got {value}")
    return kernel_for(num_heads, release=release, arch=arch)


def check_prefill_head_dims(qk_head_dim: int, v_head_dim: int) -> None:
    """Refuse head widths that AITER's prefill is not called with.

    Raises
    ------
    KernelError
        Another pair than those of `PREFILL_HEAD_DIMS`.
    """
    if (qk_head_dim, v_head_dim) not in PREFILL_HEAD_DIMS:
        wanted = " or ".join(map(str, PREFILL_HEAD_DIMS))
        raise KernelError(f"qk_head_dim, v_head_dim: expected {wanted} for AITER's prefill, got {(qk_head_dim, v_head_dim)}")


LSE_WORDS: Final[dict[str | None, str]] = {
    "returned splits": "LSE from the splits that AITER returns",
    "stage 1": "LSE and output from the splits of AITER's first stage, since its own LSE is not to be trusted",
    "return_lse": "LSE from AITER",
    None: "LSE by the installed signature",
}


def explain_decode(
    num_heads: int,
    *,
    query_len: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    release: str | None = None,
    arch: str | None = None,
    kv_lora_rank: int = KV_LORA_RANK,
    latent_dim: int = LATENT_DIM,
) -> str:
    """One sentence on how AITER decodes this, with what padding, or why it does not.

    Parameters
    ----------
    num_heads : int
        Query heads.
    query_len : int
        New tokens of each sequence.
    dtype : torch.dtype
        Of queries and cache.
    release : str or None
        Version of amd-aiter; None for an unknown one.
    arch : str or None
        Accelerator, such as ``"gfx942"``; None for an unknown one.
    kv_lora_rank, latent_dim : int
        Columns of a value and of a cache row.

    Raises
    ------
    KernelError
        A query length below 1.

    Examples
    --------
    >>> explain_decode(256, release="0.1.10", arch="gfx942")
    'ROCM_AITER_MLA does not run: num_heads: expected an int in 1..128, got 256'
    """
    check_int("query_len", query_len, low=1, error=KernelError)
    try:
        kernel = check_decode(
            num_heads, dtype=dtype, release=release, arch=arch, kv_lora_rank=kv_lora_rank, latent_dim=latent_dim
        )
    except KernelError as error:
        return f"ROCM_AITER_MLA does not run: {error}"
    extra = kernel.num_heads - num_heads
    heads = f"the kernel for {kernel.num_heads} heads" + (f", {extra} of them zero" if extra else "")
    tokens = f"; {query_len} new tokens of a sequence are {query_len} rows" if query_len > 1 else ""
    if query_len > 1 and query_len in kernel.query_lens:
        tokens += " (AITER's kernel for several at once would make bits depend on the batch)"
    where = f"amd-aiter {release or 'of unknown release'} on {arch or 'an unknown accelerator'}"
    return (
        f"ROCM_AITER_MLA runs {num_heads} heads in {dtype_name(dtype)} with {where} by {heads}, one new token per row{tokens}; "
        f"page size {PAGE_SIZE}, {NUM_KV_SPLITS} fixed splits, {LSE_WORDS[lse_source(release)]}"
    )
