"""Records print as tables: the numbers are right, and nothing that a caller named becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser

import attrs
import pytest
import torch
from torch._subclasses import FakeTensorMode

from mla import BlockPool, DecodeGraphState, MLADims, RopeSpec, YarnSpec, build_metadata, decode_group, prompt_group
from mla.metadata import DecodeMetadata
from mla.metadata.show import MAX_ROWS, MAX_RUNS, Table, as_html, as_text, runs


class Reader(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def batch(**options):
    groups = [
        prompt_group(3, [50]),
        prompt_group(6, [0, 1, 2, 3, 5, 6, 8, 9], context_len=16),
        decode_group(20, [0, 1, 2, 3, 4]),
    ]
    return build_metadata(groups, block_size=4, **options)


def rows_of(text, title):
    """The lines below a title, split at two blanks or more."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(title))
    found = []
    for line in lines[first + 1 :]:
        if not line.startswith("  "):
            break
        found.append([cell.strip() for cell in line.strip().split("  ") if cell.strip()])
    return found


def test_a_batch_prints_its_sequences():
    text = str(batch(pad_decodes_to=2))
    assert text.startswith("MLAMetadata: 2 decode_tokens, 2 decodes, 9 prefill_tokens, 2 prefills, 11 tokens, block_size 4\n")
    header, *rows = rows_of(text, "prefill: PrefillMetadata: 2 seqs, 9 tokens, block_size 4, max_query_len 6, max_seq_len 22")
    assert header == [
        "seq", "query_start_loc", "seq_start_loc", "seq_lens", "context_lens", "slot_mapping", "positions", "block_table",
    ]  # fmt: skip
    assert rows == [
        ["0", "0:3", "0:3", "3", "0", "200..202", "0..2", "50"],
        ["1", "3:9", "3:25", "22", "16", "20..25", "16..21", "0..3, 5, 6 | 8, 9"],
    ]
    _, *rows = rows_of(text, "decode: DecodeMetadata: 2 seqs, 2 tokens")
    assert rows == [["0", "0:1", "0:20", "20", "19", "19", "19", "0..4"], ["1", "1:1", "20:20", "0", "0"]]


def test_chunks_and_pages_are_shown_with_their_record():
    text = str(batch(page_sizes=(2,), context_chunk_tokens=8))
    assert rows_of(text, "context_chunks[1]: ContextChunk: 8 kv_tokens, first_seq 1")[1] == ["0", "0:6", "0:8", "8", "8..15"]
    assert rows_of(text, "paged_kv[0]: PagedKV: page_size 2")[2] == ["1", "2:13", "0..7, 10..12", "2"]


def test_html_has_the_same_cells_as_the_text():
    record = batch(page_sizes=(1,), context_chunk_tokens=8)
    read = Reader(record._repr_html_())
    assert not read.open
    assert set(read.tags) == {"p", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    words = " ".join(t.strip() for t in read.texts).split()
    assert words == str(record).split()


def test_names_of_sequences_are_escaped():
    names = ["<script>alert(1)</script>", '"quoted" & <b>bold</b>', "</td></table>", ("a", 1)]
    pool = BlockPool.empty(num_blocks=8, block_size=4)
    for i, name in enumerate(names):
        pool = pool.allocate(name, [i, i, i])
    read = Reader(pool._repr_html_())
    assert set(read.tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert [text for text in read.texts if text in map(str, names)] == [str(name) for name in names]
    assert "<script" not in pool._repr_html_()
    title = as_html([Table(title="<i>"), Table(title="<i>", columns=("<u>",), rows=(("<s>",),))])
    assert set(Reader(title).tags) == {"p", "table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_a_pool_prints_who_holds_what():
    pool = BlockPool.empty(num_blocks=16, block_size=4)
    pool = pool.allocate("a", range(10)).mark_computed("a").allocate("b", [*range(8), 90], lookahead=4)
    pool = pool.allocate("c", range(100, 108)).mark_computed("c").free("c")
    assert str(pool).splitlines()[0] == "BlockPool: 16 blocks of 4 tokens, 11 free (2 of them with known tokens), 2 shared"
    header, *rows = rows_of(str(pool), "BlockPool")
    assert header == ["seq_id", "tokens", "computed", "reused", "new", "block_ids"]
    assert rows == [["a", "10", "10", "0", "0", "0..2"], ["b", "9", "8", "8", "1", "0, 1, 3, 4"]]


def test_dims_print_their_fields_and_what_follows_from_them():
    dims = MLADims(
        num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        rope=RopeSpec(dim=64, interleaved=True, yarn=YarnSpec(factor=40, original_max_position_embeddings=4096)),
    )  # fmt: skip
    shown = dict(rows_of(str(dims), "MLADims")[1:])
    assert shown["num_heads"] == "16"
    assert shown["latent_dim"] == "576"
    assert shown["qk_head_dim"] == "192"
    assert shown["rope.yarn.factor"] == "40"
    assert float(shown["softmax_scale"]) == pytest.approx(192**-0.5, rel=1e-5)
    assert "MLADims(num_heads=16, kv_lora_rank=512" in repr(dims)


def test_repr_keeps_every_value():
    record = batch()
    assert repr(record.decode).startswith("DecodeMetadata(query_start_loc=tensor([0, 1], dtype=torch.int32)")
    assert "BlockPool(num_blocks=2, block_size=4, " in repr(BlockPool.empty(num_blocks=2, block_size=4))


def test_a_record_without_values_shows_shapes():
    meta = str(batch().to("meta").decode)
    assert ["seq_lens", "(num_seqs,)", "(1,)", "int32", "meta"] in rows_of(meta, "DecodeMetadata")
    mode = FakeTensorMode()
    decode = batch().decode
    fields = {field.name: getattr(decode, field.name) for field in attrs.fields(DecodeMetadata)}
    fake = {name: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in fields.items()}
    assert ["seq_lens", "(num_seqs,)", "(1,)", "int32", "cpu"] in rows_of(str(DecodeMetadata(**fake)), "DecodeMetadata")


def test_a_record_over_buffers_shows_what_they_hold_now():
    state = DecodeGraphState(max_num_seqs=2, max_seq_len=32, block_size=4, num_blocks=8)
    record = state.load_(build_metadata([decode_group(5, [3, 6])], block_size=4)).decode
    assert "over_buffers" in str(record).splitlines()[0]
    assert rows_of(str(record), "DecodeMetadata")[1][3] == "5"
    state.advance_()
    assert rows_of(str(record), "DecodeMetadata")[1][3] == "6"


def test_long_tables_and_lists_are_cut():
    groups = [decode_group(1, [i]) for i in range(100)]
    lines = rows_of(str(build_metadata(groups, block_size=4)), "decode:")
    assert len(lines) == 1 + MAX_ROWS + 1
    assert [line for line in lines if line[0].startswith("...")] == [["... 70 more"]]
    assert lines[1][0] == "0"
    assert lines[-1][0] == "99"
    odd = runs(range(1, 100, 2))
    assert odd.count(",") == MAX_RUNS - 1
    assert odd.endswith("... (50 in all)")
    assert runs([]) == ""
    assert runs([-1, -1]) == "-1, -1"


def test_numbers_are_aligned_to_the_right_and_words_to_the_left():
    text = as_text([Table(title="t", columns=("n", "word"), rows=((5, "a"), (100, "bcd")))])
    assert text == "t\n    n  word\n    5  a\n  100  bcd"
