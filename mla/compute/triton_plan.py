"""Decode by Triton, the plan: how sequences are cut into pieces and tiles, and how much memory the pieces may take.

Which pieces exist depends on lengths that only the device knows. A list of them would be built by one more kernel at every
call of a captured step; instead every program of `attend_pieces` scans the lengths of the batch itself (up to `MAX_SEQS`
numbers that lie in the chip's cache, once per program) and takes every n-th work item. So there is nothing to prepare for a
step: the kernels need no `make_plan`. The host fixes the launch from shapes and from the record's host integers alone,
capacities under graph capture.

Bits
----
Pieces begin at position 0 and their length is a function of the sequence's own; the tiles are a function of the number of
heads, of the sequence's own new tokens, of widths and dtypes. Pieces are joined in key order. Nothing else about a batch, its
blocks or the launch enters a sum.
"""

from __future__ import annotations

import functools

import attrs

__all__ = ["MAX_SEQS", "UNIT", "Launch", "RowClass", "Tiling", "launches_for", "max_pieces_of", "seqs_at_a_time", "tiling_for"]

MAX_SEQS = 1024
"""Sequences of one launch: what a program scans."""

UNIT = 128
"""Pieces longer than asked for are a multiple of this; every tile of keys divides it."""

LONG_SEQ = 16384
"""Longer sequences may have shorter pieces: they come in small batches, which need the parallel work."""

MAX_PART_BYTES = 2**29
"""Memory for unfinished pieces: larger batches go in several launches, which reuse it."""

UNLIMITED = 2**31 - 1


@attrs.frozen(kw_only=True)
class RowClass:
    """How a tile of so many rows is worked on, for 2-byte rows of up to 576 columns; measured on one H200.

    Parameters
    ----------
    rows : int
        Rows of a tile: new tokens times heads.
    keys : int
        Keys that are taken at a time.
    num_warps, num_stages, programs_per_processor : int
        Of the launch.
    piece_keys, long_piece_keys, max_pieces : int
        Keys of a piece at least, those of sequences beyond `LONG_SEQ`, and pieces of a sequence at most. Short pieces spread
        few sequences over the chip; but each leaves `rows` rows of float32 to be merged.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_processor: int
    piece_keys: int
    long_piece_keys: int
    max_pieces: int


ROW_CLASSES = (
    RowClass(
        rows=16, keys=32, num_warps=4, num_stages=2, programs_per_processor=2,
        piece_keys=512, long_piece_keys=512, max_pieces=128,
    ),
    RowClass(
        rows=32, keys=64, num_warps=8, num_stages=2, programs_per_processor=1,
        piece_keys=1024, long_piece_keys=512, max_pieces=128,
    ),
    RowClass(
        rows=64, keys=64, num_warps=8, num_stages=2, programs_per_processor=1,
        piece_keys=2048, long_piece_keys=1024, max_pieces=64,
    ),
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Tiling:
    """A row class fitted to widths and dtypes.

    Parameters
    ----------
    rows, keys, num_warps, num_stages, programs_per_processor, piece_keys, long_piece_keys, max_pieces
        As in `RowClass`.
    latent, rope : int
        Powers of two that hold the columns of a value, and the others (0 for none).
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_processor: int
    piece_keys: int
    long_piece_keys: int
    max_pieces: int
    latent: int
    rope: int


@attrs.frozen(kw_only=True)
class Launch:
    """One launch of `attend_pieces`: the sequences with more than `rows_above` and at most `rows_up_to` rows."""

    tiling: Tiling
    rows_above: int
    rows_up_to: int


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tiling_for(row_class: RowClass, kv_lora_rank: int, latent_dim: int, itemsize: int) -> Tiling:
    """Fewer rows and keys at a time where they are wider or numbers longer, so that both still fit on the chip.

    Parameters
    ----------
    row_class : RowClass
        For DeepSeek's rows of 576 columns in 2 bytes.
    kv_lora_rank, latent_dim : int
        Columns of a value and of a row.
    itemsize : int
        Bytes of the wider one of a number of q and a number of the cache.
    """
    latent = max(16, _power_of_two(kv_lora_rank))
    rope = max(16, _power_of_two(latent_dim - kv_lora_rank)) if latent_dim > kv_lora_rank else 0
    excess = _power_of_two(-(-(latent + rope) * itemsize // 1152))
    options = attrs.asdict(row_class)
    for name in ("rows", "keys"):
        options[name] = max(16, options[name] // excess)
    return Tiling(**options, latent=latent, rope=rope)


@functools.lru_cache(maxsize=256)
def launches_for(num_heads: int, max_query_len: int, kv_lora_rank: int, latent_dim: int, itemsize: int) -> tuple[Launch, ...]:
    """The launches of a step: one for sequences of one new token, and another if longer ones may need a larger tile.

    Which tile a sequence gets depends on its own rows only, so that a batch mate with more new tokens changes nothing.

    Parameters
    ----------
    num_heads, max_query_len : int
        Of the step.
    kv_lora_rank, latent_dim : int
        Columns of a value and of a row.
    itemsize : int
        Bytes of the wider one of a number of q and a number of the cache.
    """
    classes = {row_class.rows: tiling_for(row_class, kv_lora_rank, latent_dim, itemsize) for row_class in ROW_CLASSES}
    largest = max(classes)
    small = next((rows for rows in sorted(classes) if rows >= num_heads), largest)
    if small == largest:
        return (Launch(tiling=classes[largest], rows_above=0, rows_up_to=UNLIMITED),)
    first = Launch(tiling=classes[small], rows_above=0, rows_up_to=small)
    if num_heads * max_query_len <= small:
        return (first,)
    return (first, Launch(tiling=classes[largest], rows_above=small, rows_up_to=UNLIMITED))


def max_pieces_of(max_seq_len: int, tiling: Tiling) -> int:
    """Pieces of a sequence of up to `max_seq_len` keys, at most."""
    keys = tiling.piece_keys if max_seq_len <= LONG_SEQ else min(tiling.piece_keys, tiling.long_piece_keys)
    return min(-(-max_seq_len // keys), tiling.max_pieces)


def seqs_at_a_time(bytes_per_seq: int) -> int:
    """Sequences of one launch, so that their unfinished pieces stay within `MAX_PART_BYTES`."""
    return max(1, min(MAX_SEQS, MAX_PART_BYTES // max(bytes_per_seq, 1)))
