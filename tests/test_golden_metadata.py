"""Every metadata case of the golden folder, field by field.

Three values meet here: the seed's (from the file), ours (from `build_metadata`) and the derived one (plain Python loops over
the neutral input, below). Ours must equal the derived value for everything that a record holds, and the seed's for every field
of the file, unless a row of `DIFFERENCES` says that `mla` differs there on purpose. Rows are those of `golden/README.md`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from golden_io import GOLDEN_DIR, json_tensor, metadata_cases, sequence_groups

from mla import LatentCacheSpec, MetadataError, build_metadata, validate_metadata_values
from mla.metadata import context_workspace_tokens
from mla.metadata.build import DEFAULT_CONTEXT_CHUNK_TOKENS

PARTS = {"metadata": "whole", "prefill_metadata": "prefill", "decode_metadata": "decode"}

NAMES = {
    "num_prefills": "num_prefills",
    "num_prefill_tokens": "num_prefill_tokens",
    "num_decode_tokens": "num_decode_tokens",
    "slot_mapping": "slot_mapping",
    "is_profile_run": "is_profile_run",
    "input_positions": "positions",
    "seq_lens": "seq_lens",
    "seq_lens_tensor": "seq_lens",
    "context_lens_tensor": "context_lens",
    "block_tables": "block_table",
    "graph_block_tables_after": "block_table",
    "query_start_loc": "query_start_loc",
    "seq_start_loc": "seq_start_loc",
    "max_query_len": "max_query_len",
    "max_prefill_seq_len": "prefill.max_seq_len",
    "max_decode_seq_len": "decode.max_seq_len",
    "max_decode_query_len": "decode.max_query_len",
    "context_chunk_cu_seq_lens": "chunks.kv_start_loc",
    "context_chunk_starts": "chunks.starts",
    "context_chunk_seq_tot": "chunks.num_kv_tokens",
    "context_chunk_max_seq_lens": "chunks.max_kv_len",
    "paged_kv_indptr": "paged_kv_indptr",
    "paged_kv_indices": "paged_kv_indices",
    "paged_kv_last_page_lens": "paged_kv_last_page_lens",
    "qo_indptr": "query_start_loc",
}
"""Fields of the GPU builders, by our names."""

CPU_NAMES = {
    "num_prefills": "num_prefills",
    "num_prefill_tokens": "num_prefill_tokens",
    "num_decode_tokens": "num_decode_tokens",
    "slot_mapping": "slot_mapping",
    "is_profile_run": "is_profile_run",
    "input_positions": "positions",
    "input_positions_1d": "positions",
    "seq_lens": "prefill.seq_lens",
    "seq_lens_tensor": "seq_lens",
    "max_decode_seq_len": "decode.max_seq_len",
    "block_tables": "decode.block_table",
    "prefill_block_tables": "prefill.block_table",
    "max_query_len": "prefill.max_query_len",
    "max_kv_len": "prefill.max_seq_len",
    "prefill_query_start_loc": "prefill.query_start_loc",
    "kv_start_loc": "prefill.seq_start_loc",
    "query_start_loc": "query_start_loc",
}
"""Fields of the CPU builder, by our names."""

WITHOUT_COUNTERPART = {
    "block_table_bound",
    "chunked_prefill",
    "context_chunk_workspace",
    "cross_block_tables",
    "cross_slot_mapping",
    "enable_kv_scales_calculation",
    "encoder_seq_lens",
    "encoder_seq_lens_tensor",
    "head_dim",
    "max_encoder_seq_len",
    "multi_modal_placeholder_index_maps",
    "num_encoder_tokens",
    "use_cuda_graph",
}


# --- the neutral input ---


@attrs.frozen
class Sequence:
    """One sequence; a padded one has no tokens, but `rows` token rows."""

    query_len: int
    context_len: int
    table: list[int] | None
    rows: int
    seq_id: int | None = None

    @property
    def seq_len(self) -> int:
        return self.query_len + self.context_len


class Batch:
    """A case's neutral input, and what follows from it."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.input = case["input"]
        self.builder = case["builder"]
        self.block_size = self.input["block_size"]
        self.groups = self.input["groups"]
        self.pad = max(self.input["cuda_graph_pad_size"], 0)
        graph = self.input["cuda_graph_pad_size"] >= 0
        self.runner = self.input["runner"] if graph else None
        self.max_blocks = self.runner["max_blocks"] if self.runner else None
        self.prompts = [s for group in self.groups if group["is_prompt"] for s in self._sequences(group)]
        self.real_decodes = [s for group in self.groups if not group["is_prompt"] for s in self._sequences(group)]
        longest = max((s.query_len for s in self.real_decodes), default=1)
        self.decodes = self.real_decodes + [Sequence(0, 0, [], longest)] * self.pad
        self.no_tables = [all(s["block_ids"] is None for s in group["sequences"]) for group in self.groups]
        self.is_profile_run = all(self.no_tables)
        self.workspace = self.input["context_chunk_workspace_size"]

    def _sequences(self, group: dict[str, Any]) -> list[Sequence]:
        out = []
        for s in group["sequences"]:
            table = s["block_ids"]
            if table is not None and self.max_blocks is not None:
                table = table[: self.max_blocks]
            out.append(Sequence(s["query_len"], s["context_len"], table, s["query_len"], s["seq_id"]))
        return out

    @property
    def pad_decodes_to(self) -> int | None:
        """Rows of the decode part with a graph: the padded batch, as far as the graph's table has room."""
        if self.runner is None:
            return None
        return min(len(self.decodes), self.runner["max_batch_size"] - len(self.prompts))

    def build(self, *page_sizes: int):
        return build_metadata(
            sequence_groups(self.input),
            block_size=self.block_size,
            page_sizes=page_sizes,
            chunk_policy="equal_shares",
            context_workspace_tokens=self.workspace,
            pad_decodes_to=self.pad_decodes_to,
            max_blocks_per_seq=self.max_blocks,
        )

    def refusal(self) -> tuple[str, str] | None:
        """The row and the text with which `build_metadata` must refuse this input, None where it must not."""
        if not self.groups:
            return "16", "groups: expected at least one sequence group, got none"
        if self.input["sliding_window"] is not None:
            return "20", rf"sliding_window: expected None .* got {self.input['sliding_window']} in groups\[0\]"
        for i in range(1, len(self.groups)):
            if self.groups[i]["is_prompt"] and not self.groups[i - 1]["is_prompt"]:
                return "15", rf"groups: expected prompts before decoding sequences, got prompt groups\[{i}\] after a decode"
        return self._refused_table() or self._refused_size()

    def _refused_table(self) -> tuple[str, str] | None:
        for i, group in enumerate(self.groups):
            if self.no_tables[i] and group["prefix_cache_hit"]:
                return "17", rf"block_ids: expected blocks for a group with prefix_cache_hit, got None in groups\[{i}\]"
            if self.no_tables[i] and not group["is_prompt"]:
                return "17", rf"block_ids: expected blocks for a decoding group, got None in groups\[{i}\]"
        if any(self.no_tables) and not self.is_profile_run:
            i = self.no_tables.index(True)
            return "23", rf"block_ids: expected blocks for all groups or for none \(profile run\), got None in groups\[{i}\]"
        if not self.is_profile_run:
            for s in self.prompts + self.real_decodes:
                if s.table is None:
                    return "17", f"block_ids: expected blocks for sequence {s.seq_id}, got None"
        return None

    def _refused_size(self) -> tuple[str, str] | None:
        for s in self.prompts + self.real_decodes:
            needed = -(-s.seq_len // self.block_size)
            if self.max_blocks is not None and needed > self.max_blocks:
                return "10", f"max_blocks_per_seq: expected at least {needed} .* sequence {s.seq_id}, got {self.max_blocks}"
            if not self.is_profile_run and len(s.table) < needed:
                return "17", (
                    f"block_ids: expected at least {needed} blocks of {self.block_size} for the {s.seq_len} tokens of "
                    f"sequence {s.seq_id}, got {len(s.table)}"
                )
        if self.pad_decodes_to is not None and self.pad_decodes_to < len(self.real_decodes):
            return "17", f"pad_decodes_to: expected an int in {len(self.real_decodes)}..2147483647, got {self.pad_decodes_to}"
        sharers = sum(s.context_len > 0 for s in self.prompts)
        if self.workspace is not None and sharers and self.workspace // sharers < self.block_size:
            return "13", (
                f"context_workspace_tokens: expected at least {sharers * self.block_size} .*one block of {self.block_size} for "
                f"each of {sharers} prompts.* got {self.workspace}"
            )
        return None

    def derive(self, part: str, page_size: int) -> dict[str, Any]:
        """What a record of this batch, or of one part of it, must hold."""
        prompts = self.prompts if part != "decode" else []
        decodes = self.decodes if part != "prefill" else []
        both = prompts + decodes
        out = {
            "num_prefills": len(prompts),
            "num_prefill_tokens": sum(s.rows for s in prompts),
            "num_decode_tokens": sum(s.rows for s in decodes),
            "is_profile_run": self.is_profile_run,
            "slot_mapping": [slot for s in both for slot in self._slots(s, s.context_len, s.query_len, s.rows)],
            "positions": [p for s in both for p in [*range(s.context_len, s.seq_len), *[0] * (s.rows - s.query_len)]],
        }
        for scope, sequences in (("", both), ("prefill.", prompts), ("decode.", decodes)):
            values = self._describe(sequences, page_size)
            out |= {scope + name: values[name] if sequences else None for name in values}
        return out | self._chunks(prompts)

    def _slots(self, s: Sequence, first: int, count: int, rows: int) -> list[int]:
        if self.is_profile_run:
            return [-1] * rows
        size = self.block_size
        return [s.table[p // size] * size + p % size for p in range(first, first + count)] + [-1] * (rows - count)

    def _describe(self, sequences: list[Sequence], page_size: int) -> dict[str, Any]:
        seq_lens = [s.seq_len for s in sequences]
        pages = [] if self.is_profile_run else [self._pages(s, page_size) for s in sequences]
        paged = {
            "paged_kv_indptr": starts([len(p) for p in pages]),
            "paged_kv_indices": [page for p in pages for page in p],
            "paged_kv_last_page_lens": [n and (n - 1) % page_size + 1 for n in seq_lens],
        }
        tables = [s.table for s in sequences]
        return {
            "seq_lens": seq_lens,
            "context_lens": [s.context_len for s in sequences],
            "query_start_loc": starts([s.query_len for s in sequences]),
            "seq_start_loc": starts(seq_lens),
            "max_query_len": max((s.query_len for s in sequences), default=0),
            "max_seq_len": max(seq_lens, default=0),
            "min_num_blocks": 0 if self.is_profile_run else 1 + max((b for table in tables for b in table), default=-1),
            "block_table": None if self.is_profile_run else trimmed(tables),
        } | {name: None if self.is_profile_run else value for name, value in paged.items()}

    def _pages(self, s: Sequence, page_size: int) -> list[int]:
        """Pages in use: where every page's first token lies."""
        firsts = range(0, s.seq_len, page_size)
        return [self._slots(s, p, 1, 1)[0] // page_size for p in firsts]

    def _chunks(self, prompts: list[Sequence]) -> dict[str, Any]:
        """Context chunks by the rule of equal shares, over the contexts of prompts alone."""
        sharers = sum(s.context_len > 0 for s in prompts)
        workspace = DEFAULT_CONTEXT_CHUNK_TOKENS if self.workspace is None else self.workspace
        share = workspace // max(sharers, 1) // self.block_size * self.block_size
        longest = max((s.context_len for s in prompts), default=0)
        cuts = [[min(max(s.context_len - first, 0), share) for s in prompts] for first in range(0, longest, share)]
        firsts = range(0, longest, share)
        return {
            "chunks.kv_start_loc": [starts(lens) for lens in cuts] or None,
            "chunks.starts": [[first] * len(prompts) for first in firsts] or None,
            "chunks.num_kv_tokens": [sum(lens) for lens in cuts] or None,
            "chunks.max_kv_len": [max(lens) for lens in cuts] or None,
            "chunks.query_start_loc": [starts([s.query_len for s in prompts])] * len(cuts) or None,
            "chunks.slots": [
                [slot for s, n in zip(prompts, lens, strict=True) for slot in self._slots(s, first, n, n)]
                for first, lens in zip(firsts, cuts, strict=True)
            ]
            or None,
        }


def starts(lens: list[int]) -> list[int]:
    return [sum(lens[:i]) for i in range(len(lens) + 1)]


def trimmed(table: list[list[int]]) -> list[list[int]]:
    """A table without the zeros that pad its rows, so that tables of different widths compare."""
    rows = [list(row) for row in table]
    for row in rows:
        while row and row[-1] == 0:
            row.pop()
    return rows


# --- our records ---


DTYPES = {"slot_mapping": torch.int64, "positions": torch.int64, "slots": torch.int64}


def listed(name: str, tensor: torch.Tensor | None) -> list[Any] | None:
    """The values of one of our tensors, which must be int64 for slots and positions and int32 otherwise."""
    if tensor is None:
        return None
    assert tensor.dtype == DTYPES.get(name, torch.int32), name
    assert tensor.ndim == (2 if name == "block_table" else 1), name
    return trimmed(tensor.tolist()) if name == "block_table" else tensor.tolist()


def describe_part(part, page_size: int) -> dict[str, Any]:
    names = ("seq_lens", "context_lens", "query_start_loc", "seq_start_loc", "block_table")
    paged = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_lens")
    pages = {paged.page_size: paged for paged in part.paged_kv}.get(page_size)
    return (
        {name: listed(name, getattr(part, name)) for name in names}
        | {name: getattr(part, name) for name in ("max_query_len", "max_seq_len", "min_num_blocks")}
        | {name: None if pages is None else listed(name, getattr(pages, name)) for name in paged}
    )


def joined(name: str, values: list[Any]) -> Any:
    """A whole-batch value from those of the parts."""
    if any(value is None for value in values):
        return None
    if name.startswith(("max_", "min_")):
        return max(values)
    if name.endswith(("_start_loc", "_indptr")):
        return values[0] + [n + values[0][-1] for value in values[1:] for n in value[1:]]
    return [item for value in values for item in value]


def ours(record, part: str, page_size: int) -> dict[str, Any]:
    """A record, or one part of it, in the words of `Batch.derive`."""
    prefill = record.prefill if part != "decode" else None
    decode = record.decode if part != "prefill" else None
    parts = {name: p for name, p in (("prefill", prefill), ("decode", decode)) if p is not None}
    tokens = {
        name: [n for p in parts.values() for n in listed(name, getattr(p, name))] for name in ("slot_mapping", "positions")
    }
    if part == "whole":
        assert tokens == {name: listed(name, getattr(record, name)) for name in tokens}
    out = {
        "num_prefills": prefill.num_seqs if prefill else 0,
        "num_prefill_tokens": prefill.num_tokens if prefill else 0,
        "num_decode_tokens": decode.num_tokens if decode else 0,
        "is_profile_run": record.is_profile_run,
    } | tokens
    described = {name: describe_part(p, page_size) for name, p in parts.items()}
    for name in next(iter(described.values())):
        out[name] = joined(name, [values[name] for values in described.values()])
        for scope in ("prefill", "decode"):
            out[f"{scope}.{name}"] = described[scope][name] if scope in described else None
    chunks = prefill.context_chunks if prefill else ()
    for chunk in chunks:
        assert (chunk.first_seq, chunk.num_seqs) == (0, prefill.num_seqs)
        assert (chunk.first_token, chunk.num_query_tokens) == (0, prefill.num_tokens)
        assert chunk.max_query_len == prefill.max_query_len
    for name in ("kv_start_loc", "starts", "query_start_loc", "slots"):
        out[f"chunks.{name}"] = [listed(name, getattr(chunk, name)) for chunk in chunks] or None
    for name in ("num_kv_tokens", "max_kv_len"):
        out[f"chunks.{name}"] = [getattr(chunk, name) for chunk in chunks] or None
    return out


def parts_of(record) -> list[str]:
    return ["whole", *(name for name in ("prefill", "decode") if getattr(record, name) is not None)]


# --- the seeds' fields ---


def seed_value(field: str, value: Any) -> Any:
    """A field of the file as plain Python; the CPU builder's 2-D positions are one row."""
    if not isinstance(value, dict):
        return value
    tensor = json_tensor(value)
    if field == "input_positions" and tensor.ndim == 2:
        tensor = tensor[0]
    return trimmed(tensor.tolist()) if "block_tables" in field and tensor.ndim == 2 else tensor.tolist()


def fields_of(case: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Every field of a case that was built, as (part, field, value of the file)."""
    out = []
    for name, value in case["expected"].items():
        if name not in PARTS:
            out.append(("whole", name, value))
        elif isinstance(value, dict):
            out += [(PARTS[name], field, item) for field, item in value.items()]
    return out


def has_multi_token(batch: Batch) -> bool:
    return any(s.query_len != 1 for s in batch.prompts + batch.real_decodes)


def longest_context(sequences: list[Sequence]) -> int:
    return max((s.context_len for s in sequences), default=0)


def is_mixed(batch: Batch) -> bool:
    return bool(batch.prompts and batch.decodes)


def leaves_prompts_without_tables(batch: Batch, part: str) -> bool:
    """Whether the builder leaves the rows of prompts empty."""
    given = batch.input["chunked_prefill_enabled"] or any(group["prefix_cache_hit"] for group in batch.groups)
    return bool(batch.prompts) and part != "decode" and not given and not batch.is_profile_run


def has_lookahead(batch: Batch) -> bool:
    """Whether aiter's page list, cut nowhere, is longer than the pages in use."""
    tables = [s["block_ids"] for group in batch.groups for s in group["sequences"]]
    used = sum(s.seq_len for s in batch.prompts + batch.real_decodes)
    return not batch.is_profile_run and sum(map(len, tables)) > used


# Row of the README, fields that differ, whether they do in this batch and part.
DIFFERENCES = (
    (
        "1",
        {
            "num_prefills",
            "num_prefill_tokens",
            "slot_mapping",
            "seq_lens",
            "seq_lens_tensor",
            "context_lens_tensor",
            "query_start_loc",
            "seq_start_loc",
            "max_decode_query_len",
        },
        lambda b, part: b.builder == "aiter" and b.is_profile_run and any(len(group["sequences"]) > 1 for group in b.groups),
    ),
    ("2", {"block_tables", "paged_kv_indptr", "qo_indptr"}, lambda b, part: b.is_profile_run),
    (
        "3",
        {"paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_lens", "qo_indptr"},
        lambda b, part: part != "whole" and is_mixed(b),
    ),
    ("3", {"seq_start_loc"}, lambda b, part: part == "decode" and is_mixed(b)),
    ("3", {"seq_lens", "context_lens_tensor"}, lambda b, part: part == "decode"),
    ("4", {"qo_indptr"}, lambda b, part: has_multi_token(b)),
    ("5", {"max_query_len"}, lambda b, part: part == "decode" and is_mixed(b)),
    ("5", {"max_decode_query_len"}, lambda b, part: not b.decodes),
    ("7", {"paged_kv_indices"}, lambda b, part: has_lookahead(b)),
    (
        "8",
        {"seq_lens", "seq_lens_tensor", "context_lens_tensor", "query_start_loc", "seq_start_loc"},
        lambda b, part: b.builder != "cpu" and b.pad > 0 and part != "prefill",
    ),
    (
        "9",
        {"block_tables", "graph_block_tables_after"},
        lambda b, part: b.runner is not None and b.runner["graph_block_tables_initial"] is not None,
    ),
    (
        "12",
        {"context_chunk_cu_seq_lens", "context_chunk_starts", "context_chunk_seq_tot", "context_chunk_max_seq_lens"},
        lambda b, part: part != "decode" and 0 < longest_context(b.prompts) < longest_context(b.decodes),
    ),
    ("21", {"seq_lens_tensor", "query_start_loc"}, lambda b, part: b.builder == "cpu"),
    ("tables of prompts", {"block_tables"}, lambda b, part: b.builder != "cpu" and leaves_prompts_without_tables(b, part)),
    ("tables of prompts", {"prefill_block_tables"}, lambda b, part: b.builder == "cpu"),
)

REFUSED_ONLY_HERE = {"15", "16", "20", "23"}


def accepted_only_here(batch: Batch) -> str | None:
    """The rule by which we take an input that the seed refuses."""
    if batch.builder == "cpu" and (batch.input["chunked_prefill_enabled"] or batch.input["prefix_caching_enabled"]):
        return "24"
    if batch.builder == "aiter" and batch.block_size != 1:
        return "page sizes are independent of the block size"
    return None


def rows_for(batch: Batch, part: str, field: str) -> list[str]:
    return [row for row, fields, applies in DIFFERENCES if field in fields and applies(batch, part)]


def compared_fields(case: dict[str, Any], values: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, Any, Any]]:
    """(part, field, value of the file, value of `values`) of every field with a counterpart."""
    names = CPU_NAMES if case["builder"] == "cpu" else NAMES
    for part, field, item in fields_of(case):
        if field in WITHOUT_COUNTERPART:
            continue
        assert field in names, f"{case['id']}: {field} is neither in the map of names nor among those without a counterpart"
        seed, value = seed_value(field, item), values[part][names[field]]
        if value is None and seed in (0, []):  # a part that is absent
            seed = None
        if field == "graph_block_tables_after":
            value = value + [[]] * (len(seed) - len(value))
        yield part, field, seed, value


def derived(batch: Batch) -> dict[str, dict[str, Any]]:
    return {part: batch.derive(part, 1) for part in PARTS.values()}


# --- tests ---


def test_every_case_is_built_or_refused_with_the_reason(metadata_case):
    batch = Batch(metadata_case)
    refusal = batch.refusal()
    seed_raises = "raises" in metadata_case["expected"]
    if refusal is None:
        assert not seed_raises or accepted_only_here(batch)
        validate_metadata_values(batch.build(*{1, batch.block_size}))
        return
    row, text = refusal
    assert seed_raises or row in REFUSED_ONLY_HERE, f"row {row} is not one by which we refuse more than the seeds"
    with pytest.raises(MetadataError, match=text):
        batch.build(1)


def test_every_record_equals_what_the_neutral_input_gives(metadata_case):
    batch = Batch(metadata_case)
    if batch.refusal() is not None:
        return  # The first test holds the reason.
    page_sizes = {1, batch.block_size}
    record = batch.build(*page_sizes)
    assert record.block_size == batch.block_size
    assert record.multi_modal_placeholder_maps == (None,) * len(batch.groups)
    assert (record.prefill is None, record.decode is None) == (not batch.prompts, not batch.decodes)
    for page_size in page_sizes:
        for part in parts_of(record):
            got, want = ours(record, part, page_size), batch.derive(part, page_size)
            assert got.keys() == want.keys()
            for name in want:
                assert got[name] == want[name], f"{part}: {name} at page size {page_size}"


def test_every_field_of_the_seed_agrees_or_a_row_says_why_not(metadata_case):
    batch, expected = Batch(metadata_case), metadata_case["expected"]
    if batch.refusal() is not None or "raises" in expected:
        return  # The first test holds the reason.
    record = batch.build(1)
    for name in ("prefill", "decode"):
        assert (expected[f"{name}_metadata"] is None) == (getattr(record, name) is None)
    values = {part: ours(record, part, 1) for part in parts_of(record)}
    pairs = zip(compared_fields(metadata_case, values), compared_fields(metadata_case, derived(batch)), strict=True)
    for (part, field, seed, got), (*_, want) in pairs:
        rows = rows_for(batch, part, field)
        if rows:
            assert got == want, f"{part}: {field}, where row {' and '.join(rows)} applies"
        else:
            assert got == seed, f"{part}: {field}, where no row applies"


def test_tensors_of_the_seed_have_our_dtypes(metadata_case):
    if "raises" in metadata_case["expected"]:
        return
    names = CPU_NAMES if metadata_case["builder"] == "cpu" else NAMES
    for part, field, value in fields_of(metadata_case):
        if field in WITHOUT_COUNTERPART or not isinstance(value, dict):
            continue
        dtype = DTYPES.get(names[field], torch.int32)
        if value["dtype"] == "float32":  # row 21
            assert metadata_case["builder"] == "cpu", f"{part}: {field}"
            assert value["data"] == [], f"{part}: {field}"
        else:
            assert value["dtype"] == str(dtype).removeprefix("torch."), f"{part}: {field}"


def test_every_row_of_the_table_of_differences_is_needed():
    used = Counter()
    for case in metadata_cases(GOLDEN_DIR):
        batch = Batch(case)
        if batch.refusal() is None and "raises" not in case["expected"]:
            for part, field, seed, want in compared_fields(case, derived(batch)):
                used.update((row, field) for row in rows_for(batch, part, field) if seed != want)
    unused = {(row, field) for row, fields, _ in DIFFERENCES for field in fields if not used[row, field]}
    assert not unused, sorted(unused)


def test_the_workspace_has_the_seeds_size(workspace_case):
    given, expected = dict(workspace_case["input"]), workspace_case["expected"]
    enabled = given.pop("chunked_prefill_enabled") | given.pop("prefix_caching_enabled")
    least = given["max_num_seqs"] * given["block_size"]
    if "raises" in expected:
        with pytest.raises(MetadataError, match=f"limit: expected at least {least} .* got 131072"):
            context_workspace_tokens(**given)
        return
    # No engine flags here: where the seed has neither feature and no workspace, ours follows the same formula.
    formula = min(max(8 * given["max_model_len"], 4 * least), 131072)
    tokens = context_workspace_tokens(**given)
    assert tokens == (expected["context_chunk_workspace_size"] if enabled else formula)
    if "workspace_shape" in expected:
        spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=given["block_size"], dtype=torch.bfloat16)
        assert [tokens, spec.latent_dim] == expected["workspace_shape"]


def test_the_default_folder_holds_what_its_readme_says():
    rows = re.findall(r"^\| `(\S+)` \|.*\| (\d+) \|$", (GOLDEN_DIR / "README.md").read_text(), re.MULTILINE)
    listed_files = {path.name for pattern, _ in rows for path in GOLDEN_DIR.glob(pattern)}
    assert listed_files == {path.name for path in GOLDEN_DIR.iterdir()} - {"README.md"}
    for pattern, count in rows:
        assert count_cases(sorted(GOLDEN_DIR.glob(pattern))) == int(count), pattern


def count_cases(paths: list[Path]) -> int:
    """Files of a kind, or the cases of a JSON file."""
    if paths[0].suffix == ".npz":
        return len(paths)
    content = json.loads(paths[0].read_text())
    if isinstance(content, list):
        return len(content)
    sections = [content["rows"]] if "rows" in content else content.values()
    return sum(len(section) if isinstance(section, list) else 1 for section in sections)
