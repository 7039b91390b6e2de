"""Prefill in plain torch: ragged causal or full attention, some heads of one sequence at a time.

Bits follow the rule of `mla.compute.cpu_plan`: the shape of every product is a function of the sequence's own lengths and
of the number of heads, no product runs alone, and none sums over more keys than a piece has. With the fused operator
(`mla.compute.cpu_flash`) the work of a thread is a head and a block of rows, of which there are two at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from mla.compute.cpu_flash import FEWEST_BLOCK_ROWS, attend_flash, is_fast
from mla.compute.cpu_plan import LONGEST_PIECE, UNIT
from mla.compute.cpu_stack import Guess, Workspace, attend_stack, merge_pieces
from mla.metadata.dims import MLADims

__all__ = ["attend_sequence", "clear_rows", "varlen_bytes"]

BLOCK_ROWS = 256
"""Query rows of a block: fewer pack the keys more often, more multiply more of the hidden triangle."""

STACK_SCORES = 1 << 20
"""Scores of a piece that are held at a time, unless two heads of one block are more."""

COPY_BYTES = 32 << 20
"""Bytes of head-major copies that are held at a time, unless two heads are more."""

FEW_ROWS = 512
"""Rows up to which a head-major copy costs more than it saves: each is read for few blocks of queries."""

CACHE_LINE = 64


def _up(length: int) -> int:
    return -(-length // UNIT) * UNIT


def _head_ranges(num_heads: int, most: int) -> list[tuple[int, int]]:
    """Ranges of equally many heads, `most` at most if that is two or more; none is a single head but the only one."""
    parts = max(1, min(num_heads // 2, -(-num_heads // max(2, most))))
    return list(itertools.pairwise([num_heads * i // parts for i in range(parts + 1)]))


def _head_major(x: torch.Tensor, name: str, stacked: int, width: int, dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    """(rows, heads, dim) as (heads, rows, width), rows and columns filled up with zeros; a single head fills several."""
    return _fill(workspace.take(name, (stacked, _up(x.shape[0]), width), dtype), x)


def _head_major_pieces(
    x: torch.Tensor, name: str, stacked: int, size: int, dtype: torch.dtype, workspace: Workspace
) -> list[torch.Tensor]:
    """(rows, heads, dim) cut after every `size` rows, each piece as `_head_major` and contiguous, unless it can stay."""
    pieces = x.split(size)
    lies_well = x.dtype == dtype and x.stride(2) == 1 and x.shape[0] % UNIT == 0
    if lies_well and x.shape[1] == stacked and x.shape[0] <= FEW_ROWS and dtype.itemsize >= 4:
        return [piece.transpose(0, 1) for piece in pieces]  # bits do not depend on strides; bfloat16 would be copied
    lengths = [_up(piece.shape[0]) for piece in pieces]
    copies = workspace.take(name, (sum(lengths) * stacked, x.shape[2]), dtype).split([n * stacked for n in lengths])
    return [_fill(copy.view(stacked, -1, x.shape[2]), piece) for copy, piece in zip(copies, pieces, strict=True)]


def _fill(copy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows, _, dim = x.shape
    copy[:, :rows, :dim].copy_(x.transpose(0, 1))
    if dim < copy.shape[2]:
        copy[:, :rows, dim:].zero_()
    if rows < copy.shape[1]:
        copy[:, rows:].zero_()
    return copy


def _can_stay(x: torch.Tensor) -> bool:
    """Whether the fused operator reads (rows, heads, dim) where it lies: few rows, each on a cache line of its own."""
    lines = all(stride * x.itemsize % CACHE_LINE == 0 for stride in x.stride()[:2]) and x.data_ptr() % CACHE_LINE == 0
    return x.shape[0] <= FEW_ROWS and x.stride(2) == 1 and lines


def _hider(num_keys: int, diagonal: int, triangle: torch.Tensor | None) -> Callable[[torch.Tensor], None] | None:
    """Writes -inf over the keys of one piece that do not exist or come later than a row's token; None if there are none.

    `num_keys` of the piece exist; row r sees those up to ``diagonal + r`` if there is a `triangle`.
    """
    first = max(0, diagonal)
    is_cut = triangle is not None and first < num_keys
    if not is_cut and num_keys % UNIT == 0:
        return None

    def hide(scores: torch.Tensor) -> None:
        if num_keys < scores.shape[1]:
            scores[:, num_keys:].fill_(-torch.inf)
        if is_cut and triangle is not None:
            # Adding is several times faster than filling through a broadcast mask.
            scores[:, first:num_keys].add_(triangle[first - diagonal : num_keys - diagonal, : scores.shape[2]])

    return hide


def _head_sizes(query_len: int, kv_len: int, widths: tuple[int, int, int]) -> tuple[int, int]:
    """Numbers that the copies of a head have, and scores of its largest piece."""
    copied = _up(query_len) * widths[0] + _up(kv_len) * (widths[1] + widths[2])
    return copied, min(_up(kv_len), LONGEST_PIECE) * min(_up(query_len), BLOCK_ROWS)


def _most_heads(copied_bytes: int, scores: int) -> int:
    """How many heads are worked on at a time."""
    return max(2, min(COPY_BYTES // copied_bytes, STACK_SCORES // scores if scores else COPY_BYTES))


def varlen_bytes(dims: MLADims, num_tokens: int, num_kv_tokens: int, dtype: torch.dtype) -> int:
    """Memory that attention of prompts takes beyond its results at most; see `KernelSet.varlen_bytes`."""
    if not num_tokens or not num_kv_tokens:
        return 0
    device, dtype = torch.device("cpu"), torch.float32 if dtype == torch.float16 else dtype
    dim, value_dim = dims.qk_head_dim, dims.v_head_dim
    fused = is_fast(dtype, device) and value_dim <= dim
    copied, scores = _head_sizes(num_tokens, num_kv_tokens, (dim, dim, dim if fused else value_dim))
    wide = max(4, dtype.itemsize)
    if fused:
        inside = _up(num_tokens) * dim * dtype.itemsize
    else:
        rows = min(_up(num_tokens), BLOCK_ROWS) * value_dim
        pieces = -(-num_kv_tokens // LONGEST_PIECE)
        inside = scores * (dtype.itemsize + (wide if dtype.itemsize < wide else 0)) + rows * (
            pieces * dtype.itemsize + 2 * wide
        )
    heads = min(max(2, dims.num_heads), _most_heads(copied * dtype.itemsize, 0 if fused else scores))
    return heads * (copied * dtype.itemsize + inside)


def clear_rows(out: torch.Tensor, lse: torch.Tensor) -> None:
    """The result of rows without keys."""
    out.zero_()
    lse.fill_(-torch.inf)


def attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dtype: torch.dtype,
    causal: bool,
    softmax_scale: float,
    workspace: Workspace,
) -> None:
    """Attention of one sequence.

    Parameters
    ----------
    q, k, v : torch.Tensor of shape (num_rows, num_heads, head_dim)
        Its rows, at least one of each, with any strides.
    out : torch.Tensor of shape (query_len, num_heads, v_head_dim)
        Written; 0 for rows that see no key.
    lse : torch.Tensor of shape (query_len, num_heads)
        Written: the natural logarithm; -inf for rows that see no key.
    dtype : torch.dtype
        Of the products.
    causal : bool
        The last query is aligned with the last key.
    softmax_scale : float
        Factor on q.k.
    workspace : Workspace
        Of this call.
    """
    (query_len, num_heads, dim), kv_len, value_dim = q.shape, k.shape[0], v.shape[2]
    first = max(0, query_len - kv_len) if causal else 0
    clear_rows(out[:first], lse[:first])
    fused = is_fast(dtype, q.device) and value_dim <= dim
    widths = (dim, dim, dim if fused else value_dim)
    copied, scores = _head_sizes(query_len - first, kv_len, widths)
    rows = (q[first:], k, v)
    for begin, end in _head_ranges(num_heads, _most_heads(copied * dtype.itemsize, 0 if fused else scores)):
        heads = [x[:, begin:end] for x in rows]
        results = (out[first:, begin:end], lse[first:, begin:end])
        if fused:
            # A single head is there twice where it would be a single piece of work.
            stacked = 2 if num_heads == 1 and query_len - first <= FEWEST_BLOCK_ROWS else end - begin
            stays = [stacked == end - begin and x.shape[2] == dim and _can_stay(x) for x in rows]
            qh, kh, vh = (
                x.transpose(0, 1) if stay else _head_major(x, name, stacked, dim, dtype, workspace)
                for x, name, stay in zip(heads, "qkv", stays, strict=True)
            )
            _attend_fused(
                qh, kh, vh, *results,
                kv_len=kv_len, causal=causal, softmax_scale=softmax_scale, workspace=workspace,
            )  # fmt: skip
        else:
            stacked = max(2, end - begin)
            qs, ks, vs = (
                _head_major_pieces(x, name, stacked, size, dtype, workspace)
                for x, name, size in zip(heads, "qkv", (BLOCK_ROWS, LONGEST_PIECE, LONGEST_PIECE), strict=True)
            )
            _attend_blocks(
                qs, ks, vs, *results,
                kv_len=kv_len, causal=causal, softmax_scale=softmax_scale, workspace=workspace,
            )  # fmt: skip


def _attend_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    kv_len: int,
    causal: bool,
    softmax_scale: float,
    workspace: Workspace,
) -> None:
    """Some heads by the fused operator, whose causal mask is a square: keys before it are attended apart."""
    (num_rows, num_heads, value_dim), q = out.shape, q[:, : out.shape[0]]
    context = kv_len - num_rows if causal else kv_len
    spans = [(0, context, False), (context, kv_len, causal)]
    parts = [
        attend_flash(q, k[:, begin:end], v[:, begin:end], softmax_scale=softmax_scale, causal=square)
        for begin, end, square in spans
        if begin < end
    ]
    o, z = parts[0]
    if len(parts) > 1:
        o, z = merge_pieces(*(torch.stack(x, 1) for x in zip(*parts, strict=True)), workspace=workspace)
    out.copy_(o[:num_heads, :, :value_dim].transpose(0, 1))
    lse.copy_(z[:num_heads].t())


def _attend_blocks(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    kv_len: int,
    causal: bool,
    softmax_scale: float,
    workspace: Workspace,
) -> None:
    """Some heads by separate products, a block of rows and a piece of keys at a time.

    In bfloat16 the maximum over the first piece of keys is the guess for the others, until it is a poor one for some row.
    """
    (query_len, num_heads, value_dim), stacked, dtype = out.shape, q[0].shape[0], q[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    triangle = None
    if causal:
        size = q[0].shape[1]
        triangle = torch.full((size, size), -torch.inf, dtype=dtype, device=out.device).tril_(-1)
    guesses = dtype == torch.bfloat16
    for queries, first in zip(q, range(0, query_len, BLOCK_ROWS), strict=True):
        last = min(first + BLOCK_ROWS, query_len)
        diagonal = kv_len - query_len + first  # the last key that the first row sees
        visible = min(kv_len, diagonal + last - first) if causal else kv_len
        rows, pieces = queries.shape[1], -(-visible // LONGEST_PIECE)
        parts = workspace.take("parts", (pieces, stacked, rows, value_dim), dtype)
        shifts, totals = workspace.take("sums", (2, pieces, stacked, rows), wide)
        guess: Guess | None = None
        for i in range(pieces):
            start, num_keys = i * LONGEST_PIECE, min(visible - i * LONGEST_PIECE, LONGEST_PIECE)
            keys, values = (_head_of_rows(x[i], _up(num_keys)) for x in (k, v))
            hide = _hider(num_keys, diagonal - start, triangle)
            shift, total = attend_stack(
                keys, values, queries, parts[i],
                softmax_scale=softmax_scale, hide=hide, workspace=workspace, guess=guess,
            )  # fmt: skip
            shifts[i], totals[i] = shift, total
            if guess is not None:
                guesses = shift is guess.shift
                guess = Guess(shift=shift, total=guess.total + total) if guesses else None
            elif guesses:
                rounded = shift.to(dtype)
                guess = Guess(shift=rounded, total=total * (shift - rounded).exp_())
        if pieces == 1:  # in place: wide copies of a short sequence would cost more than its products
            o, z = parts[0].div_(totals[0][..., None]), shifts[0] + totals[0].log()
        else:
            o, z = merge_pieces(parts.transpose(0, 1), shifts.transpose(0, 1), totals.transpose(0, 1), workspace=workspace)
        out[first:last] = o[:num_heads, : last - first].transpose(0, 1)
        lse[first:last] = z[:num_heads, : last - first].t()


def _head_of_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The first rows of (heads, rows, dim), as torch multiplies them: a batch of slices it would copy for each product."""
    return x if x.shape[1] == num_rows else x[:, :num_rows].contiguous()
