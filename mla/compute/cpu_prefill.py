"""Prefill in plain torch: ragged causal or full attention, heads stacked, blocks of rows against pieces of keys.

Bits follow the rule of `mla.compute.cpu_plan`: the shape of every product is a function of the sequence's own lengths and
of the number of heads, no product runs alone, and none sums over more keys than a piece has.
"""

from __future__ import annotations

import itertools

import attrs
import torch

from mla.compute.cpu_plan import LONGEST_PIECE, UNIT
from mla.compute.cpu_stack import Workspace, attend_stack, merge_pieces

__all__ = ["HeadMajor", "attend_sequence", "head_major"]

BLOCK_ROWS = 256
"""Query rows of a block: fewer pack the keys more often, more multiply more of the hidden triangle."""

STACK_SCORES = 1 << 20
"""Scores of a piece that are held at a time, unless two heads of one block are more."""


def _up(length: int) -> int:
    return -(-length // UNIT) * UNIT


@attrs.frozen(kw_only=True, eq=False)
class HeadMajor:
    """Head-major copies of one sequence, rows padded with zeros to a multiple of 16; a single head is there twice.

    Parameters
    ----------
    q : torch.Tensor of shape (num_heads, padded_query_len, qk_head_dim)
        Queries.
    k : tuple of torch.Tensor of shape (num_heads, padded_piece_len, qk_head_dim)
        Keys, a tensor for each piece.
    v : tuple of torch.Tensor of shape (num_heads, padded_piece_len, v_head_dim)
        Values, likewise.
    query_len, kv_len : int
        Rows that exist.
    """

    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    query_len: int
    kv_len: int


def _copy(x: torch.Tensor, name: str, dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    """(rows, heads, dim) to (heads, padded rows, dim); a single head is taken twice, for no product may run alone."""
    rows, heads, dim = x.shape
    copy = workspace.take(name, (max(2, heads), _up(rows), dim), dtype)
    copy[:, :rows].copy_(x.transpose(0, 1))
    copy[:, rows:].zero_()
    return copy


def _copies(x: torch.Tensor, name: str, dtype: torch.dtype, workspace: Workspace) -> tuple[torch.Tensor, ...]:
    """One copy for each piece: torch copies a batch of slices of a longer tensor anew for each product."""
    return tuple(_copy(piece, f"{name}{i}", dtype, workspace) for i, piece in enumerate(x.split(LONGEST_PIECE)))


def head_major(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, workspace: Workspace) -> HeadMajor:
    """Copy one sequence into the layout of the products.

    Parameters
    ----------
    q, k, v : torch.Tensor of shape (num_rows, num_heads, head_dim)
        Rows of one sequence, with any strides.
    dtype : torch.dtype
        Of the products.
    workspace : Workspace
        Holds the copies.
    """
    return HeadMajor(
        q=_copy(q, "q", dtype, workspace),
        k=_copies(k, "k", dtype, workspace),
        v=_copies(v, "v", dtype, workspace),
        query_len=q.shape[0],
        kv_len=k.shape[0],
    )


def _head_ranges(num_heads: int, scores_per_head: int) -> list[tuple[int, int]]:
    """Ranges of at least two heads with at most `STACK_SCORES` scores where that is possible."""
    parts = max(1, min(num_heads // 2, -(-num_heads * scores_per_head // STACK_SCORES)))
    return list(itertools.pairwise([num_heads * i // parts for i in range(parts + 1)]))


@attrs.frozen(kw_only=True, eq=False)
class _Hide:
    """Writes -inf over the keys of one piece that do not exist or come later than a row's token.

    `num_keys` of the piece exist; row r sees those up to ``diagonal + r`` if there is a `triangle`.
    """

    num_keys: int
    diagonal: int
    triangle: torch.Tensor | None

    def __call__(self, scores: torch.Tensor) -> None:
        scores[:, self.num_keys :].fill_(-torch.inf)
        first = max(0, self.diagonal)
        if self.triangle is not None and first < self.num_keys:
            # Adding is several times faster than filling through a broadcast mask.
            mask = self.triangle[first - self.diagonal : self.num_keys - self.diagonal, : scores.shape[2]]
            scores[:, first : self.num_keys].add_(mask)


def attend_sequence(
    seq: HeadMajor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    triangle: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Attention of one sequence.

    Parameters
    ----------
    seq : HeadMajor
        Its copies.
    out : torch.Tensor of shape (query_len, num_heads, v_head_dim)
        Written, but for rows of blocks that see no key at all.
    lse : torch.Tensor of shape (query_len, num_heads)
        Likewise; natural logarithm.
    causal : bool
        The last query is aligned with the last key.
    softmax_scale : float
        Factor on q.k.
    triangle : torch.Tensor of shape (BLOCK_ROWS, BLOCK_ROWS)
        By key and row: -inf where the key is later, else 0.
    workspace : Workspace
        Of this call.
    """
    heads = out.shape[1]
    wide = torch.promote_types(seq.q.dtype, torch.float32)
    for first in range(0, seq.query_len, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, seq.query_len)
        diagonal = seq.kv_len - seq.query_len + first  # the last key that the first row sees
        visible = min(seq.kv_len, diagonal + last - first) if causal else seq.kv_len
        if visible <= 0:
            continue
        rows, pieces = _up(last - first), -(-visible // LONGEST_PIECE)
        for begin, end in _head_ranges(seq.q.shape[0], min(_up(visible), LONGEST_PIECE) * rows):
            shape = (pieces, end - begin, rows)
            parts = workspace.take("parts", (*shape, seq.v[0].shape[2]), seq.q.dtype)
            shifts, totals = workspace.take("sums", (2, *shape), wide)
            queries = seq.q[begin:end, first : first + rows].contiguous()
            for i in range(pieces):
                keys = min(visible - i * LONGEST_PIECE, LONGEST_PIECE)
                shifts[i], totals[i] = attend_stack(
                    seq.k[i][begin:end, : _up(keys)].contiguous(), seq.v[i][begin:end, : _up(keys)], queries, parts[i],
                    softmax_scale=softmax_scale,
                    hide=_Hide(num_keys=keys, diagonal=diagonal - i * LONGEST_PIECE, triangle=triangle if causal else None),
                    workspace=workspace,
                )  # fmt: skip
            if pieces == 1:  # in place: float32 copies of a short sequence would cost more than its products
                o, z = parts[0].div_(totals[0].masked_fill(totals[0] == 0, 1)[..., None]), shifts[0] + totals[0].log_()
            else:
                o, z = merge_pieces(parts.transpose(0, 1), shifts.transpose(0, 1), totals.transpose(0, 1))
            stop = min(end, heads)
            out[first:last, begin:stop] = o[: stop - begin, : last - first].transpose(0, 1)
            lse[first:last, begin:stop] = z[: stop - begin, : last - first].t()
