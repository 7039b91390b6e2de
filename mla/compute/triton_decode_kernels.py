"""The Triton kernels of decode: attention over pieces of the cached keys, and the joining of the pieces.

Importing this module imports Triton; `mla.compute.triton_decode` does so when it launches.

A sequence's rows are its new tokens times the heads, token after token: all of them attend the same cached rows. A work item
is one tile of a sequence's rows over one piece of its keys. Programs walk the items of the batch with a stride; each finds its
items from the lengths alone, so there is no list to prepare and nothing is read on the host.
"""

from __future__ import annotations

import triton  # noqa: TID253  (this module is imported inside the launching function only)
import triton.language as tl  # noqa: TID253

__all__ = ["attend_pieces", "merge_pieces"]


@triton.jit
def _cut(
    seq_len,
    PIECE_KEYS: tl.constexpr, LONG_SEQ: tl.constexpr, LONG_PIECE_KEYS: tl.constexpr,
    MAX_PIECES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Keys of a piece and number of pieces, from the sequence's own length alone."""
    share = (seq_len + MAX_PIECES - 1) // MAX_PIECES
    piece_keys = tl.where(seq_len > LONG_SEQ, LONG_PIECE_KEYS, PIECE_KEYS)
    piece_keys = tl.maximum(piece_keys, (share + UNIT - 1) // UNIT * UNIT)
    return piece_keys, (seq_len + piece_keys - 1) // piece_keys


@triton.jit
def _offsets(index, row, ALIGN: tl.constexpr):
    """Where rows begin, `row` numbers long: ALIGN overrules what Triton makes of the product, which can be too much."""
    return tl.multiple_of(index.to(tl.int64) * row, ALIGN)


@triton.jit
def _columns(row, exists, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT columns from FIRST on of the rows at pointers `row`, in a tile WIDTH wide; 0 where nothing exists."""
    columns = tl.arange(0, WIDTH)
    at = row[:, None] + (FIRST + columns)[None, :]
    if COUNT == WIDTH:
        tile = tl.load(at, mask=exists[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=exists[:, None] & (columns < COUNT)[None, :], other=0.0)
    return tile


@triton.jit
def _attend(
    acc, high, total, q_latent, q_rope, latent_cache, table, begin, stop, end, visible, scale_log2,
    MASKED: tl.constexpr, KV_LORA_RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LATENT_ALIGN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Walk the keys from `begin` to `stop` in tiles: the usual running maximum, sum and output, in powers of 2.

    Keys from `end` on do not exist. Not MASKED, every row sees every key of every tile.
    """
    for key in tl.range(begin, stop, KEYS, num_stages=STAGES):
        position = key + tl.arange(0, KEYS)
        # What does not exist is loaded as 0: a weight of 0 would not silence a NaN.
        exists = position < (end if MASKED else stop)
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        row = latent_cache + _offsets(slot, KV_LORA_RANK + ROPE_DIM, LATENT_ALIGN)
        latent = _columns(row, exists, 0, KV_LORA_RANK, LATENT).to(q_latent.dtype)
        scores = tl.dot(q_latent, latent.T, input_precision="ieee")
        if ROPE > 0:
            rope = _columns(row, exists, KV_LORA_RANK, ROPE_DIM, ROPE).to(q_latent.dtype)
            # Apart from the others and then added: matrix units cut what they add to a running sum.
            scores += tl.dot(q_rope, rope.T, input_precision="ieee")
        scores *= scale_log2
        if MASKED:
            scores = tl.where(position[None, :] < visible[:, None], scores, float("-inf"))
        new_high = tl.maximum(high, tl.max(scores, 1))
        # Rows that have seen no key: -inf - -inf would be NaN.
        shift = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(high - shift)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * kept[:, None], input_precision="ieee")
        high = new_high
    return acc, high, total


@triton.jit
def _clear_tail(
    out, lse, first, num_tokens, program, num_programs,
    NUM_HEADS: tl.constexpr, KV_LORA_RANK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rows of tokens that belong to no sequence: 0 and -inf."""
    chunk = tl.arange(0, CHUNK)
    for token in range(first + program, num_tokens, num_programs):
        for start in range(0, NUM_HEADS * KV_LORA_RANK, CHUNK):
            at = out + tl.cast(token, tl.int64) * (NUM_HEADS * KV_LORA_RANK) + start + chunk
            tl.store(at, tl.zeros([CHUNK], out.dtype.element_ty), mask=start + chunk < NUM_HEADS * KV_LORA_RANK)
        for start in range(0, NUM_HEADS, CHUNK):
            at = lse + tl.cast(token, tl.int64) * NUM_HEADS + start + chunk
            tl.store(at, tl.full([CHUNK], float("-inf"), tl.float32), mask=start + chunk < NUM_HEADS)


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_tokens", "rows_above", "rows_up_to", "pieces_per_seq", "rows_per_seq"]
)
def attend_pieces(
    q, latent_cache, block_table, query_start_loc, seq_lens, out, lse, part_out, part_log,
    q_token, q_head, table_stride, num_seqs, num_tokens, rows_above, rows_up_to, pieces_per_seq, rows_per_seq, scale_log2,
    NUM_HEADS: tl.constexpr, KV_LORA_RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    Q_ALIGN: tl.constexpr, LATENT_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    SEQS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    PIECE_KEYS: tl.constexpr, LONG_SEQ: tl.constexpr, LONG_PIECE_KEYS: tl.constexpr,
    MAX_PIECES: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one piece of the keys with one tile of rows, item after item.

    Takes the sequences with more than `rows_above` and at most `rows_up_to` rows. A sequence of one piece gets its result at
    once; pieces of others are left in `part_out` and `part_log` (base 2), (num_seqs, pieces_per_seq, rows_per_seq, ...).
    `num_tokens` above 0 also fills the rows of q behind the last sequence. The strides of q are multiples of Q_ALIGN.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    seqs = tl.arange(0, SEQS)
    is_seq = seqs < num_seqs
    first_tokens = tl.load(query_start_loc + seqs, mask=is_seq, other=0)
    row_counts = (tl.load(query_start_loc + seqs + 1, mask=is_seq, other=0) - first_tokens) * NUM_HEADS
    _, piece_counts = _cut(
        tl.load(seq_lens + seqs, mask=is_seq, other=0), PIECE_KEYS, LONG_SEQ, LONG_PIECE_KEYS, MAX_PIECES, UNIT
    )
    is_mine = (row_counts > rows_above) & (row_counts <= rows_up_to)
    # A sequence without keys is one empty piece, so that its rows are filled.
    counts = tl.where(is_mine, tl.maximum(piece_counts, 1) * ((row_counts + ROWS - 1) // ROWS), 0)
    ends = tl.cumsum(counts, 0)

    for item in range(program, tl.sum(counts, 0), num_programs):
        is_before = ends <= item
        seq = tl.sum(is_before.to(tl.int32), 0)
        item_of_seq = item - tl.sum(tl.where(is_before, counts, 0), 0)
        seq_len = tl.load(seq_lens + seq)
        first_token = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - first_token
        row_tiles = (query_len * NUM_HEADS + ROWS - 1) // ROWS
        piece = item_of_seq // row_tiles  # tiles of rows over one piece run side by side and share what they read
        piece_keys, num_pieces = _cut(seq_len, PIECE_KEYS, LONG_SEQ, LONG_PIECE_KEYS, MAX_PIECES, UNIT)

        row = item_of_seq % row_tiles * ROWS + tl.arange(0, ROWS)
        token, head = row // NUM_HEADS, row % NUM_HEADS
        is_row = token < query_len
        visible = tl.where(is_row, seq_len - query_len + token + 1, 0)
        q_row = q + _offsets(first_token + token, q_token, Q_ALIGN) + _offsets(head, q_head, Q_ALIGN)
        q_latent = _columns(q_row, is_row, 0, KV_LORA_RANK, LATENT)
        q_rope = _columns(q_row, is_row, KV_LORA_RANK, ROPE_DIM, ROPE) if ROPE > 0 else q_latent

        begin = piece * piece_keys
        end = tl.minimum(begin + piece_keys, seq_len)
        # The tiles that every row sees in full, and the rest.
        whole = tl.maximum(tl.minimum(end, seq_len - query_len + 1) - begin, 0) // KEYS * KEYS + begin
        table = block_table + seq.to(tl.int64) * table_stride
        acc = tl.zeros([ROWS, LATENT], tl.float32)
        high = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc, high, total = _attend(
            acc, high, total, q_latent, q_rope, latent_cache, table, begin, whole, end, visible, scale_log2,
            False, KV_LORA_RANK, ROPE_DIM, BLOCK_SIZE, LATENT_ALIGN, ROWS, KEYS, LATENT, ROPE, STAGES,
        )  # fmt: skip
        acc, high, total = _attend(
            acc, high, total, q_latent, q_rope, latent_cache, table, whole, end, end, visible, scale_log2,
            True, KV_LORA_RANK, ROPE_DIM, BLOCK_SIZE, LATENT_ALIGN, ROWS, KEYS, LATENT, ROPE, STAGES,
        )  # fmt: skip

        is_blind = total == 0
        acc = acc / tl.where(is_blind, 1.0, total)[:, None]
        log = tl.where(is_blind, float("-inf"), high + tl.log2(tl.where(is_blind, 1.0, total)))
        columns = tl.arange(0, LATENT)
        mask = is_row[:, None] & (columns < KV_LORA_RANK)[None, :]
        if num_pieces <= 1:
            place = first_token.to(tl.int64) * NUM_HEADS + row
            at = out + _offsets(place, KV_LORA_RANK, OUT_ALIGN)[:, None] + columns[None, :]
            tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
            tl.store(lse + place, log * 0.6931471805599453, mask=is_row)
        else:
            place = (seq.to(tl.int64) * pieces_per_seq + piece) * rows_per_seq + row
            tl.store(part_out + _offsets(place, KV_LORA_RANK, OUT_ALIGN)[:, None] + columns[None, :], acc, mask=mask)
            tl.store(part_log + place, log, mask=is_row)

    if num_tokens > 0:
        _clear_tail(
            out, lse, tl.load(query_start_loc + num_seqs), num_tokens, program, num_programs, NUM_HEADS, KV_LORA_RANK, LATENT
        )


@triton.jit(do_not_specialize=["rows_above", "rows_up_to", "pieces_per_seq", "rows_per_seq"])
def merge_pieces(
    part_out, part_log, query_start_loc, seq_lens, out, lse, rows_above, rows_up_to, pieces_per_seq, rows_per_seq,
    NUM_HEADS: tl.constexpr, KV_LORA_RANK: tl.constexpr, OUT_ALIGN: tl.constexpr, LATENT: tl.constexpr,
    PIECE_KEYS: tl.constexpr, LONG_SEQ: tl.constexpr, LONG_PIECE_KEYS: tl.constexpr,
    MAX_PIECES: tl.constexpr, UNIT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Join the pieces of one row of one sequence in key order; sequences of one piece are done already.

    The weights of all pieces are computed side by side, MAX_PIECES wide whatever the sequence has; the outputs are added
    TOGETHER at a time.
    """
    row, seq = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(query_start_loc + seq)
    num_rows = (tl.load(query_start_loc + seq + 1) - first_token) * NUM_HEADS
    _, num_pieces = _cut(tl.load(seq_lens + seq), PIECE_KEYS, LONG_SEQ, LONG_PIECE_KEYS, MAX_PIECES, UNIT)
    if (num_pieces > 1) & (row < num_rows) & (num_rows > rows_above) & (num_rows <= rows_up_to):
        place = seq.to(tl.int64) * pieces_per_seq * rows_per_seq + row  # of piece 0
        pieces = tl.arange(0, MAX_PIECES)
        log = tl.load(part_log + place + pieces * rows_per_seq, mask=pieces < num_pieces, other=float("-inf"))
        high = tl.max(log, 0)
        shift = tl.where(high == float("-inf"), 0.0, high)
        total = tl.sum(tl.exp2(log - shift), 0)
        columns = tl.arange(0, LATENT)
        acc = tl.zeros([LATENT], tl.float32)
        for first in range(0, num_pieces, TOGETHER):
            some = first + tl.arange(0, TOGETHER)
            exists = some < num_pieces
            at = place + some.to(tl.int64) * rows_per_seq
            weights = tl.exp2(tl.load(part_log + at, mask=exists, other=float("-inf")) - shift)
            parts = tl.load(
                part_out + _offsets(at, KV_LORA_RANK, OUT_ALIGN)[:, None] + columns[None, :],
                mask=exists[:, None] & (columns < KV_LORA_RANK)[None, :],
                other=0.0,
            )
            acc += tl.sum(parts * weights[:, None], 0)
        is_blind = total == 0
        acc = acc / tl.where(is_blind, 1.0, total)
        place = first_token.to(tl.int64) * NUM_HEADS + row
        tl.store(out + place * KV_LORA_RANK + columns, acc.to(out.dtype.element_ty), mask=columns < KV_LORA_RANK)
        log = tl.where(is_blind, float("-inf"), shift + tl.log2(tl.where(is_blind, 1.0, total)))
        tl.store(lse + place, log * 0.6931471805599453)
