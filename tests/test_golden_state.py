"""Every case of the golden folder on buffers of graph capture and on stepping, field by field.

As in `test_golden_metadata`, three values meet: the seed's (from the file), ours (a record over a state's buffers, or a stepped
record) and the derived one (plain Python over the neutral input). Ours must equal the derived value everywhere, and the seed's
for every field of the file unless a row of `DIFFERENCES` says that `mla` differs there on purpose. Numbers are rows of the
README's table on batches; `ROWS` holds those on state and stepping.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from conftest import SECTIONS
from golden_io import GOLDEN_DIR, json_tensor, section_cases, sequence_groups

from mla import MetadataError, MLAMetadata, build_metadata, decode_group, validate_metadata_values
from mla.metadata import DecodeMetadata, PagedKV
from mla.metadata.advance import advance_step
from mla.state import DecodeGraphState

ROWS = {
    "6": "the pages in use are known from the start, not from the first step on",
    "8": "rows without a sequence are empty in every array; cumulative arrays repeat their last value",
    "9": "no stale ids in the tails of tables",
    "10": "blocks beyond the buffers are dropped if they are look-ahead",
    "b": "`load_` copies the slots too",
    "c": "what lies beyond the last indptr is unreachable, so page lists are compared up to there",
    "d": "a batch of another size is padded up or refused, never broadcast",
    "f": "an exception inside a capture restores the state",
    "g": "sizes above the maximum are refused",
    "allocated once": "buffers outlive the capture; two states share none",
    "stepping": "every derived field advances; padded rows stay empty",
    "capacities": "host integers of a record over buffers are those of the largest batch",
    "token ids": "sampled tokens belong to the caller",
}

NAMES = {
    "num_prefills": "num_prefills",
    "num_prefill_tokens": "num_prefill_tokens",
    "num_decode_tokens": "num_decode_tokens",
    "is_profile_run": "is_profile_run",
    "slot_mapping": "slot_mapping",
    "input_positions": "positions",
    "positions_unused": "positions",
    "seq_lens": "seq_lens",
    "seq_lens_tensor": "seq_lens",
    "context_lens_tensor": "context_lens",
    "block_tables": "block_table",
    "query_start_loc": "query_start_loc",
    "qo_indptr": "query_start_loc",
    "seq_start_loc": "seq_start_loc",
    "max_query_len": "max_query_len",
    "max_decode_query_len": "max_query_len",
    "max_decode_seq_len": "max_seq_len",
    "max_prefill_seq_len": "prefill.max_seq_len",
    "context_chunk_cu_seq_lens": "prefill.context_chunks",
    "context_chunk_starts": "prefill.context_chunks",
    "context_chunk_seq_tot": "prefill.context_chunks",
    "context_chunk_max_seq_lens": "prefill.context_chunks",
    "paged_kv_indptr": "paged_kv_indptr",
    "paged_kv_indices": "paged_kv_indices",
    "paged_kv_last_page_lens": "paged_kv_last_page_lens",
    "block_table_bound": "pages_in_use",
    "room for pages": "room for pages",
}
"""Fields of the files, by our names."""

WITHOUT_COUNTERPART = {
    "context_chunk_workspace",
    "enable_kv_scales_calculation",
    "head_dim",
    "input_tokens",
    "multi_modal_placeholder_index_maps",
    "use_cuda_graph",
}

FACTS_WITHOUT_COUNTERPART = {
    "clone_before_capture",
    "clone_has_buffers",
    "clone_is_capturing",
    "clone_type_same",
    "encoder_decoder",
}


# --- the neutral input ---


@attrs.frozen
class Row:
    """One decoding sequence; the default is a padded one."""

    context_len: int = 0
    query_len: int = 0
    table: tuple[int, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len

    def stepped(self) -> Row:
        """One token further."""
        return attrs.evolve(self, context_len=self.seq_len, query_len=1)


def rows_of(groups: list[dict[str, Any]], max_blocks: int | None = None) -> list[Row]:
    return [
        Row(s["context_len"], s["query_len"], tuple(s["block_ids"][:max_blocks]))
        for group in groups
        for s in group["sequences"]
    ]


def trimmed(table: list[list[int]]) -> list[list[int]]:
    """A table without the zeros that pad its rows, so that tables of different widths compare."""
    rows = [list(row) for row in table]
    for row in rows:
        while row and row[-1] == 0:
            row.pop()
    return rows


def starts(lens: list[int]) -> list[int]:
    return [sum(lens[:i]) for i in range(len(lens) + 1)]


def derive(
    rows: list[Row], *, num_rows: int, block_size: int, page_size: int | None, width: int, max_seq_len: int | None = None
) -> dict[str, Any]:
    """What a record of these rows of at most one new token must hold; `max_seq_len` is that of buffers."""
    padded = rows + [Row()] * (num_rows - len(rows))
    slots = [row.table[row.context_len // block_size] * block_size + row.context_len % block_size for row in rows]
    out = {
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "num_decode_tokens": num_rows,
        "is_profile_run": False,
        "prefill.max_seq_len": 0,
        "prefill.context_chunks": None,
        "slot_mapping": slots + [-1] * (num_rows - len(rows)),
        "positions": [row.context_len for row in padded],
        "seq_lens": [row.seq_len for row in padded],
        "context_lens": [row.context_len for row in padded],
        "block_table": [[*row.table[:width], *[0] * (width - len(row.table))] for row in padded],
        "query_start_loc": starts([row.query_len for row in padded]),
        "seq_start_loc": starts([row.seq_len for row in padded]),
        "max_query_len": 1,
        "max_seq_len": max(row.seq_len for row in rows) if max_seq_len is None else max_seq_len,
    }
    pages = page_size and [
        [(row.table[p // block_size] * block_size + p % block_size) // page_size for p in range(0, row.seq_len, page_size)]
        for row in padded
    ]
    return out | {
        "paged_kv_indptr": page_size and starts([len(own) for own in pages]),
        "paged_kv_indices": page_size and [page for own in pages for page in own],
        "paged_kv_last_page_lens": page_size and [row.seq_len and (row.seq_len - 1) % page_size + 1 for row in padded],
        "pages_in_use": page_size and [len(own) for own in pages],
    }


# --- our records ---

DTYPES = {"slot_mapping": torch.int64, "positions": torch.int64}


def listed(record: Any, name: str) -> list[Any]:
    """The values of one of our tensors, which must be int64 for slots and positions and int32 otherwise."""
    tensor = getattr(record, name)
    assert tensor.dtype == DTYPES.get(name, torch.int32), name
    assert tensor.ndim == (2 if name == "block_table" else 1), name
    return tensor.tolist()


def held(record: MLAMetadata, page_size: int | None) -> dict[str, Any]:
    """A record without prompts in the words of `derive`."""
    validate_metadata_values(record)
    decode = record.decode
    assert record.prefill is None
    assert record.slot_mapping.data_ptr() == decode.slot_mapping.data_ptr()
    assert record.positions.data_ptr() == decode.positions.data_ptr()
    names = ("slot_mapping", "positions", "seq_lens", "context_lens", "block_table", "query_start_loc", "seq_start_loc")
    out = {name: listed(decode, name) for name in names}
    out |= {
        name: getattr(record, name) for name in ("num_prefills", "num_prefill_tokens", "num_decode_tokens", "is_profile_run")
    }
    out |= {"prefill.max_seq_len": 0, "prefill.context_chunks": None}
    out |= {"max_query_len": decode.max_query_len, "max_seq_len": decode.max_seq_len}
    assert [paged.page_size for paged in decode.paged_kv] == ([] if page_size is None else [page_size])
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_lens")
    out |= {name: page_size and listed(decode.paged_kv_of(page_size), name) for name in names}
    out["pages_in_use"] = page_size and decode.paged_kv_of(page_size).paged_kv_indptr.diff().tolist()
    if page_size is not None:  # row c
        del out["paged_kv_indices"][out["paged_kv_indptr"][-1] :]
    return out


# --- the seeds' fields ---


@attrs.frozen
class Outcome:
    """What one record of a case holds, beside the file and the derived values."""

    by: str
    seed: dict[str, Any]
    got: dict[str, Any]
    want: dict[str, Any]


def plain(fields: dict[str, Any], *, cut: bool = True) -> dict[str, Any]:
    """Fields of a file as plain Python; page lists of a batch end at the last indptr (row c)."""
    out = {name: json_tensor(v).tolist() if isinstance(v, dict) and "dtype" in v else v for name, v in fields.items()}
    if cut and "paged_kv_indices" in out:
        out["paged_kv_indices"] = out["paged_kv_indices"][: out["paged_kv_indptr"][-1]]
    return out


def page_size_of(case: dict[str, Any]) -> int | None:
    """The seed's only page size is its block size, and only AITER has page lists."""
    return case["input"]["block_size"] if case.get("builder", "aiter") == "aiter" else None


def state_for(case: dict[str, Any], num_blocks: int, **changes: Any) -> DecodeGraphState:
    given = case["input"]
    sizes = {"max_num_seqs": given.get("max_batch_size"), "max_seq_len": given.get("max_seq_len_to_capture")} | changes
    page_size = page_size_of(case)
    return DecodeGraphState(
        block_size=given["block_size"], num_blocks=num_blocks, page_sizes=[page_size] if page_size else (), **sizes
    )


def empty_rows(case: dict[str, Any], num_rows: int, max_seq_len: int) -> dict[str, Any]:
    block_size, page_size = case["input"]["block_size"], page_size_of(case)
    width = -(-max_seq_len // block_size)
    return derive([], num_rows=num_rows, block_size=block_size, page_size=page_size, width=width, max_seq_len=max_seq_len)


def buffers_outcome(
    case: dict[str, Any], seed: dict[str, Any], record: MLAMetadata, want: dict[str, Any], pages: int
) -> Outcome:
    """Beside the pages in use, the length of the page list; all of it is zeros where no batch was loaded."""
    page_size, loaded = page_size_of(case), any(want["seq_lens"])
    got, fields = held(record, page_size), plain(seed, cut=loaded)
    if page_size:
        indices = record.decode.paged_kv_of(page_size).paged_kv_indices.tolist()
        got["room for pages"], want = len(indices), want | {"room for pages": pages}
        if not loaded:
            got["paged_kv_indices"], want["paged_kv_indices"] = indices, [0] * pages
    if "paged_kv_indices" in seed:
        fields["room for pages"] = json_tensor(seed["paged_kv_indices"]).numel()
    return Outcome("buffers", fields, got, want)


def alloc_outcomes(case: dict[str, Any]) -> Iterator[Outcome]:
    rows, block_size, blocks = (case["input"][name] for name in ("max_batch_size", "block_size", "max_block_per_batch"))
    state = state_for(case, 1, max_seq_len=blocks * block_size)
    with state.capture():
        record = state.metadata_for(rows)
        yield buffers_outcome(case, case["expected"], record, empty_rows(case, rows, blocks * block_size), rows * blocks)


def capture_outcomes(case: dict[str, Any]) -> Iterator[Outcome]:
    given, expected = case["input"], case["expected"]
    rows, length = given["max_batch_size"], given["max_seq_len_to_capture"]
    pages = rows * -(-length // given["block_size"])
    state = state_for(case, 1, capture_sizes=given["batch_sizes"])
    with state.capture():
        yield buffers_outcome(case, expected["buffers"], state.metadata_for(rows), empty_rows(case, rows, length), pages)
        for item in expected["metadata_for_batch"]:
            record = state.metadata_for(item["batch_size"])
            want = empty_rows(case, item["batch_size"], length)
            yield buffers_outcome(case, item["metadata"], record, want, pages)
            yield buffers_outcome(case, item["input_buffers"], record, want, pages)


def replay_outcomes(case: dict[str, Any]) -> Iterator[Outcome]:
    given, page_size = case["input"], page_size_of(case)
    size, length, block_size = given["batch_size"], given["max_seq_len_to_capture"], given["block_size"]
    width = -(-length // block_size)
    state = state_for(case, 1 + max(block for step in given["steps"] for row in rows_of(step["groups"]) for block in row.table))
    with state.capture():
        captured = state.metadata_for(size)
    for step, expected in zip(given["steps"], case["expected"], strict=True):
        batch = build_metadata(
            sequence_groups({"sliding_window": None, **step}),
            block_size=block_size,
            page_sizes=[page_size] if page_size else (),
        )
        loaded = state.load_(batch)
        want = derive(
            rows_of(step["groups"]),
            num_rows=size,
            block_size=block_size,
            page_size=page_size,
            width=width,
            max_seq_len=length,
        )
        seed = {} if "raises" in expected else expected
        for record in (captured, loaded):
            yield buffers_outcome(case, seed, record, want, given["max_batch_size"] * width)


def stepped_by_both(
    record: MLAMetadata,
    seeds: list[dict[str, Any]],
    rows: list[Row],
    num_rows: int,
    page_size: int | None,
    *,
    turn: bool = False,
) -> Iterator[Outcome]:
    """`rows` and the record one step further for each entry, as a pure function and over buffers."""
    block_size, width = record.block_size, max(part.block_table.shape[1] for part in (record.prefill, record.decode) if part)
    geometry = {"num_rows": num_rows, "block_size": block_size, "page_size": page_size, "width": width}
    length = width * block_size
    state = DecodeGraphState(
        max_num_seqs=num_rows,
        max_seq_len=length,
        block_size=block_size,
        num_blocks=record.min_num_blocks,
        page_sizes=[page_size] if page_size else (),
    )
    if not turn:
        state.load_(record)
    for i, seed in enumerate(seeds):
        rows = [row.stepped() for row in rows]
        record = advance_step(record, turn_prefills_into_decodes=turn and i == 0)
        yield Outcome("advance_step", plain(seed), held(record, page_size), derive(rows, **geometry))
        over_buffers = state.load_(record) if turn and i == 0 else state.advance_()
        want = derive(rows, **geometry, max_seq_len=length)
        yield Outcome("advance_", plain(seed), held(over_buffers, page_size), want)


def op_record(given: dict[str, Any], page_size: int | None) -> tuple[MLAMetadata, list[Row]]:
    """The record before the step: the first `num_queries` rows are real, the others are padding by our rule."""
    real, block_size = given["num_queries"], given["block_size"]
    tensors = {name: json_tensor(value) for name, value in given.items() if isinstance(value, dict)}
    tables = trimmed(tensors["block_tables"].tolist())
    lens = tensors["seq_lens"].clone()
    lens[real:] = 0
    contexts = tensors["input_positions"].int()
    rows = [Row(context, 1, tuple(tables[i])) for i, context in enumerate(contexts.tolist()[:real])]
    paged = ()
    if page_size is not None:
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_lens")
        paged = (PagedKV(page_size=page_size, **{name: tensors[name] for name in names}),)
    query_lens = (torch.arange(given["num_seqs"]) < real).int()
    decode = DecodeMetadata(
        query_start_loc=torch.tensor([0, *query_lens.cumsum(0).tolist()], dtype=torch.int32),
        seq_start_loc=torch.tensor([0, *((contexts + 1) * query_lens).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=lens,
        context_lens=contexts,
        slot_mapping=tensors["slot_mapping"],
        positions=tensors["input_positions"],
        block_size=block_size,
        max_query_len=1,
        max_seq_len=int(lens.max()),
        min_num_blocks=1 + int(tensors["block_tables"].max()),
        paged_kv=paged,
        block_table=tensors["block_tables"],
        steps_left=min(len(row.table) * block_size - row.seq_len for row in rows),
    )
    record = MLAMetadata(slot_mapping=decode.slot_mapping, positions=decode.positions, block_size=block_size, decode=decode)
    validate_metadata_values(record)
    return record, rows


def op_outcomes(case: dict[str, Any]) -> Iterator[Outcome]:
    given = case["input"]
    page_size = given["block_size"] if case["op"] == "advance_step_flashinfer" else None
    record, rows = op_record(given, page_size)
    seed = {} if "raises" in case["expected"] else case["expected"]
    yield from stepped_by_both(record, [seed], rows, given["num_seqs"], page_size)


def step_batch(case: dict[str, Any]) -> MLAMetadata:
    given, page_size = case["input"], page_size_of(case)
    pad = max(given["cuda_graph_pad_size"], 0)
    decodes = sum(len(group["sequences"]) for group in given["groups"] if not group["is_prompt"])
    return build_metadata(
        sequence_groups(given),
        block_size=given["block_size"],
        page_sizes=[page_size] if page_size else (),
        pad_decodes_to=decodes + pad if pad else None,
        max_blocks_per_seq=given["runner"] and given["runner"]["max_blocks"],
    )


def step_outcomes(case: dict[str, Any]) -> Iterator[Outcome]:
    given, turn = case["input"], case["turn_prefills_into_decodes"]
    rows = rows_of(given["groups"], given["runner"] and given["runner"]["max_blocks"])
    assert len(rows) == case["num_queries"]
    seeds = [entry["metadata"] | {"input_positions": entry["input_positions"]} for entry in case["expected"]]
    for entry in case["expected"]:
        assert entry.keys() <= {"metadata", "input_positions"} | WITHOUT_COUNTERPART
    yield from stepped_by_both(step_batch(case), seeds, rows, case["num_seqs"], page_size_of(case), turn=turn)


OUTCOMES: dict[str, Callable[[dict[str, Any]], Iterator[Outcome]]] = {
    "metadata_alloc": alloc_outcomes,
    "capture": capture_outcomes,
    "replay": replay_outcomes,
    "op": op_outcomes,
    "metadata": step_outcomes,
}


def is_padded(case: dict[str, Any]) -> bool:
    """Whether some batch of the case has rows without a sequence."""
    given = case["input"]
    if "steps" in given:
        return any(step["cuda_graph_pad_size"] > 0 for step in given["steps"])
    counts = given if "num_seqs" in given else case
    return counts["num_queries"] < counts["num_seqs"]


def is_of_another_size(case: dict[str, Any]) -> bool:
    return any(
        len(rows_of(s["groups"])) + s["cuda_graph_pad_size"] != case["input"]["batch_size"] for s in case["input"]["steps"]
    )


# Row, section, fields that differ, whether they do in this case and record.
DIFFERENCES = (
    ("8", "metadata_alloc", {"paged_kv_last_page_lens"}, lambda case, by: True),
    (
        "8",
        "capture",
        {
            "context_lens_tensor",
            "paged_kv_last_page_lens",
            "query_start_loc",
            "seq_lens",
            "seq_lens_tensor",
            "seq_start_loc",
        },
        lambda case, by: True,
    ),
    ("6", "capture", {"block_table_bound"}, lambda case, by: True),
    ("b", "replay", {"slot_mapping"}, lambda case, by: True),
    ("8", "replay", {"seq_lens_tensor"}, lambda case, by: is_padded(case)),
    ("9", "replay", {"block_tables"}, lambda case, by: len(case["input"]["steps"]) > 1),
    ("d", "replay", {"seq_lens_tensor", "block_tables"}, lambda case, by: is_of_another_size(case)),
    ("8", "op", {"seq_lens"}, lambda case, by: is_padded(case)),
    (
        "8",
        "metadata",
        {"context_lens_tensor", "query_start_loc", "seq_lens", "seq_lens_tensor", "seq_start_loc"},
        lambda case, by: is_padded(case),
    ),
    ("stepping", "metadata", {"context_lens_tensor", "seq_start_loc"}, lambda case, by: True),
    ("stepping", "metadata", {"query_start_loc"}, lambda case, by: case["turn_prefills_into_decodes"]),
    ("capacities", "metadata", {"max_decode_seq_len"}, lambda case, by: by == "advance_"),
)


def rows_for(section: str, case: dict[str, Any], by: str, field: str) -> list[str]:
    return [row for row, of, fields, applies in DIFFERENCES if of == section and field in fields and applies(case, by)]


def compared_fields(outcome: Outcome) -> Iterator[tuple[str, Any, Any]]:
    """(field, value of the file, our value) of every field with a counterpart."""
    for field, seed in outcome.seed.items():
        if field in WITHOUT_COUNTERPART:
            continue
        assert field in NAMES, f"{field} is neither in the map of names nor among those without a counterpart"
        value = outcome.got[NAMES[field]]
        yield (field, trimmed(seed), trimmed(value)) if field == "block_tables" else (field, seed, value)


def assert_explained(section: str, case: dict[str, Any]) -> None:
    """Ours is the derived value everywhere, and the seed's where no row applies."""
    for outcome in OUTCOMES[section](case):
        assert outcome.got.keys() == outcome.want.keys()
        for name in outcome.want:
            assert outcome.got[name] == outcome.want[name], f"{outcome.by}: {name}"
        for field, seed, value in compared_fields(outcome):
            if not rows_for(section, case, outcome.by, field):
                assert value == seed, f"{outcome.by}: {field}, where no row applies"


# --- tests ---


def test_buffers_have_the_seeds_sizes_and_hold_empty_rows(alloc_case):
    assert_explained("metadata_alloc", alloc_case)


def test_metadata_for_capture_is_the_seeds(capture_case):
    assert_explained("capture", capture_case)


def test_input_buffers_alias_the_captured_tensors(capture_case):
    given, page_size = capture_case["input"], page_size_of(capture_case)
    state = state_for(capture_case, 1, capture_sizes=given["batch_sizes"])
    group = {"is_prompt": False, "prefix_cache_hit": False}
    group["sequences"] = [{"query_len": 1, "context_len": 0, "orig_seq_len": 1, "seq_id": 0, "block_ids": [0]}]
    for item in capture_case["expected"]["metadata_for_batch"]:
        size = item["batch_size"]
        with state.capture():
            whole, record = state.metadata_for(given["max_batch_size"]), state.metadata_for(size)
        batch = build_metadata(
            sequence_groups({"groups": [group], "sliding_window": None}),
            block_size=given["block_size"],
            page_sizes=[page_size] if page_size else (),
            pad_decodes_to=size,
        )
        loaded = state.load_(batch)
        for field in item["input_buffers"]:
            name = NAMES[field]
            parts = [r.decode.paged_kv_of(page_size) if name.startswith("paged") else r.decode for r in (whole, record, loaded)]
            assert len({getattr(part, name).data_ptr() for part in parts}) == 1, field


def test_replayed_buffers_are_the_seeds(replay_case):
    assert_explained("replay", replay_case)


def test_what_the_seed_cannot_replay_is_padded_or_cut(replay_case):
    """Row d or row 10: the batch fits, so it is loaded (the test above holds the values)."""
    if not any("raises" in step for step in replay_case["expected"]):
        return  # The seed replays it.
    given = replay_case["input"]
    width = -(-given["max_seq_len_to_capture"] // given["block_size"])
    rows = [row for step in given["steps"] for row in rows_of(step["groups"])]
    assert max(row.seq_len for row in rows) <= given["max_seq_len_to_capture"]
    assert is_of_another_size(replay_case) or max(len(row.table) for row in rows) > width


def test_the_step_of_the_kernels_is_ours(op_case):
    given, expected = op_case["input"], op_case["expected"]
    lens = given["seq_lens"]["shape"][0]
    if lens != given["num_seqs"]:
        assert "raises" in expected
        with pytest.raises(
            MetadataError, match=rf"seq_lens: expected shape .* with num_seqs={given['num_seqs']}, got \({lens},\)"
        ):
            op_record(given, None)
        return
    # Flat ids are refused by one kernel; here they never arrive (token ids).
    assert ("raises" in expected) <= (len(given["sampled_token_ids"]["shape"]) == 1)
    assert_explained("op", op_case)


def test_stepping_whole_metadata_is_ours(step_case):
    prompts = sum(len(group["sequences"]) for group in step_case["input"]["groups"] if group["is_prompt"])
    if prompts and not step_case["turn_prefills_into_decodes"]:
        assert all("raises" in step for step in step_case["expected"])
        with pytest.raises(MetadataError, match=f"metadata: expected decoding sequences only .* got {prompts} prompts"):
            advance_step(step_batch(step_case))
        return
    assert_explained("metadata", step_case)


def lifecycle_state() -> DecodeGraphState:
    return DecodeGraphState(max_num_seqs=4, max_seq_len=8, block_size=1, num_blocks=4, page_sizes=[1])


def assert_not_capturing(state: DecodeGraphState) -> None:
    with pytest.raises(MetadataError, match="metadata_for: expected a capture in progress, got a call outside of it"):
        state.metadata_for(1)


def metadata_before_capture(seed: str) -> None:
    assert seed == "AssertionError"
    assert_not_capturing(lifecycle_state())


def metadata_after_capture(seed: str) -> None:
    assert seed == "AssertionError"
    state = lifecycle_state()
    with state.capture():
        state.metadata_for(1)
    assert_not_capturing(state)


def more_rows_than_the_maximum(seed: int) -> None:
    """Row g."""
    assert seed in (4, 9)
    state = lifecycle_state()
    with state.capture(), pytest.raises(MetadataError, match=r"num_decodes: expected an int in 1\.\.4, got 9"):
        state.metadata_for(9)


def buffers_after_capture(seed: int) -> None:
    """Row "allocated once": the seed drops its buffers, ours are those of the capture."""
    assert seed == 0
    state = lifecycle_state()
    with state.capture():
        captured = state.metadata_for(4).decode
    batch = build_metadata([decode_group(3, [1, 2, 3])], block_size=1, page_sizes=[1])
    loaded = state.load_(batch).decode
    assert loaded.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
    assert captured.seq_lens.tolist() == [3, 0, 0, 0]


def fail(_: MLAMetadata) -> None:
    raise KeyError


def after_exception(seed: bool | int) -> None:
    """Row f: the seed goes on capturing with the buffers of the capture that failed."""
    assert seed in (True, 8)
    state = lifecycle_state()
    with pytest.raises(KeyError), state.capture():
        fail(state.metadata_for(2))
    assert_not_capturing(state)
    with state.capture():
        record = state.metadata_for(4)
    assert held(record, 1) == derive([], num_rows=4, block_size=1, page_size=1, width=8, max_seq_len=8)


LIFECYCLE = {
    "metadata_before_capture": metadata_before_capture,
    "metadata_after_capture": metadata_after_capture,
    "batch_larger_than_max_gives_rows": more_rows_than_the_maximum,
    "batch_larger_than_max_num_decode_tokens": more_rows_than_the_maximum,
    "buffers_after_capture": buffers_after_capture,
    "after_exception_is_capturing": after_exception,
    "after_exception_buffers_kept": after_exception,
}


def test_every_fact_of_the_lifecycle_holds_or_differs_by_a_row(lifecycle_fact):
    name = lifecycle_fact["id"]
    if name in FACTS_WITHOUT_COUNTERPART:
        # A state is a plain object: no encoder, and in place of a clone another state, which shares nothing.
        one, other = lifecycle_state(), lifecycle_state()
        with one.capture(), other.capture():
            pointers = [state.metadata_for(4).decode.seq_lens.data_ptr() for state in (one, other)]
        assert pointers[0] != pointers[1]
        assert not {word for word in dir(one) if "clone" in word or "encoder" in word}
        return
    assert name in LIFECYCLE, "neither a fact with a test nor among those without a counterpart"
    LIFECYCLE[name](lifecycle_fact["expected"])


def test_every_row_of_the_table_of_differences_is_needed():
    used = Counter()
    for file, section in SECTIONS.values():
        for case in section_cases(GOLDEN_DIR, file, section) if section in OUTCOMES else ():
            if case.get("id") in ("error_wrong_seq_lens_size", "error_mixed_without_turn"):
                continue  # Refused: nothing to compare.
            for outcome in OUTCOMES[section](case):
                for field, seed, value in compared_fields(outcome):
                    used.update((row, section, field) for row in rows_for(section, case, outcome.by, field) if seed != value)
    needed = {(row, section, field) for row, section, fields, _ in DIFFERENCES for field in fields}
    assert not needed - set(used), sorted(needed - set(used))
    assert {row for row, *_ in DIFFERENCES} <= set(ROWS)


def test_no_section_of_the_files_is_left_out():
    for file in ("state.json", "advance_step.json"):
        sections = {section for name, section in SECTIONS.values() if name == file}
        assert json.loads((GOLDEN_DIR / file).read_text()).keys() == sections
