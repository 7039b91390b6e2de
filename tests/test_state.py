"""The buffers of graph capture and stepping, against freshly built metadata and a model on plain lists."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from batches import small_dims
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla import (
    KernelError,
    MetadataError,
    MLAMetadata,
    SequenceGroup,
    attend,
    build_metadata,
    decode_group,
    kernel_set,
    prompt_group,
    validate_metadata_values,
)
from mla.metadata import DecodeMetadata
from mla.metadata.advance import advance_step
from mla.state import DecodeGraphState

CPU = kernel_set("CPU_MLA")
REPEATABLE = settings(deadline=None, derandomize=True)
CUMULATIVE = ("query_start_loc", "seq_start_loc", "paged_kv_indptr")


@pytest.fixture(autouse=True)
def one_thread(restore_num_threads: None) -> None:
    """Everything here is small: waking a second thread costs more than it saves."""
    torch.set_num_threads(1)


# Records -------------------------------------------------------------------------------------------------------------


def mapped(record: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same record with `function` of every tensor."""
    if isinstance(record, torch.Tensor):
        return function(record)
    if isinstance(record, tuple):
        return tuple(mapped(item, function) for item in record)
    if attrs.has(type(record)):
        return type(record)(**{f.name: mapped(getattr(record, f.name), function) for f in attrs.fields(type(record))})
    return record


def tensors_of(record: MLAMetadata) -> dict[str, torch.Tensor]:
    """Every tensor of the decode part, by name; those of page lists with their page size."""
    decode = record.decode
    out = {f.name: getattr(decode, f.name) for f in attrs.fields(DecodeMetadata)}
    for paged in decode.paged_kv:
        out |= {f"{f.name} {paged.page_size}": getattr(paged, f.name) for f in attrs.fields(type(paged))}
    return {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}


def plain(value: Any) -> Any:
    """A record as nested dictionaries, lists and numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    return value


def is_cumulative(name: str) -> bool:
    return name.startswith(CUMULATIVE)


# The model -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Row:
    """One sequence on plain numbers."""

    context_len: int
    query_len: int
    blocks: tuple[int, ...]
    is_prompt: bool = False

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len

    def stepped(self) -> Row:
        """The next step: all new tokens are accepted, as many again follow, or one after a prompt."""
        return Row(self.seq_len, 1 if self.is_prompt else self.query_len, self.blocks)


@attrs.frozen
class Geometry:
    """Capacities of a state."""

    max_num_seqs: int = 4
    max_seq_len: int = 64
    block_size: int = 16
    num_blocks: int = 64
    query_len: int = 1
    page_sizes: tuple[int, ...] = (1, 16)
    capture_sizes: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return max(self.max_num_seqs, *self.capture_sizes, 1)

    @property
    def width(self) -> int:
        return -(-self.max_seq_len // self.block_size)

    def state(self, **changes: Any) -> DecodeGraphState:
        return DecodeGraphState(**attrs.asdict(self) | changes)

    def build(self, rows: list[Row], **changes: Any) -> MLAMetadata:
        groups = [
            SequenceGroup(
                is_prompt=row.is_prompt, query_lens=[row.query_len], context_lens=[row.context_len], block_ids=[row.blocks]
            )
            for row in rows
        ]
        return build_metadata(groups, **{"block_size": self.block_size, "page_sizes": self.page_sizes} | changes)

    def room(self, rows: list[Row]) -> int:
        """Tokens that every row can still take."""
        return min((min(len(row.blocks) * self.block_size, self.max_seq_len) - row.seq_len for row in rows), default=0)


def whole_buffers(state: DecodeGraphState) -> MLAMetadata:
    """A record over all rows; the capture is given up, so that its size is not one that batches are padded to."""
    with suppress(KeyboardInterrupt), state.capture():
        record = state.metadata_for(state.max_num_decodes)
        raise KeyboardInterrupt
    return record


def assert_buffers_hold(record: MLAMetadata, rows: list[Row], geometry: Geometry) -> None:
    """A record over buffers equals, field by field, the freshly built record of `rows` padded to as many."""
    got, decode, size = tensors_of(record), record.decode, record.num_decodes
    assert torch.equal(record.slot_mapping, decode.slot_mapping)
    assert torch.equal(record.positions, decode.positions)
    assert (record.prefill, record.is_profile_run, record.block_size) == (None, False, geometry.block_size)
    capacities = (geometry.block_size, geometry.query_len, geometry.max_seq_len, geometry.num_blocks)
    assert (decode.block_size, decode.max_query_len, decode.max_seq_len, decode.min_num_blocks) == capacities
    assert [paged.page_size for paged in decode.paged_kv] == list(geometry.page_sizes)
    fill = {"slot_mapping": -1}
    lengths = {name: tensor.shape[0] for name, tensor in got.items()}
    assert lengths["slot_mapping"] == lengths["positions"] == size * geometry.query_len
    if rows:
        fresh = tensors_of(geometry.build(rows, pad_decodes_to=size))
    else:
        empty = {name: torch.full_like(tensor, fill.get(name, 0)) for name, tensor in got.items()}
        fresh = empty | {name: tensor[:0] for name, tensor in empty.items() if name.startswith("paged_kv_indices")}
    assert got.keys() == fresh.keys()
    for name, tensor in got.items():
        want, used = fresh[name], tensor
        assert tensor.dtype == want.dtype, name
        if name.startswith("paged_kv_indices"):
            used = tensor[: want.shape[0]]  # What lies past the last indptr is unreachable.
        elif name == "block_table":
            assert tensor.shape == (size, geometry.width)
            want = torch.nn.functional.pad(want[:, : geometry.width], (0, max(geometry.width - want.shape[1], 0)))
        elif name in ("slot_mapping", "positions"):
            real = sum(row.query_len for row in rows)
            want = torch.cat([want[:real], want.new_full((lengths[name] - real,), fill.get(name, 0))])
        assert torch.equal(used, want), name
    validate_metadata_values(record, num_blocks=geometry.num_blocks)


class Watched:
    """A state beside its model; `check` compares all that the two say."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.state = geometry.state()
        self.whole = whole_buffers(self.state)
        self.pointers = {name: tensor.data_ptr() for name, tensor in tensors_of(self.whole).items()}
        self.captured: dict[int, MLAMetadata] = {}
        self.record: MLAMetadata | None = None
        self.rows: list[Row] = []
        self.steps_left = 0

    def size_for(self, num_rows: int) -> int:
        sizes = self.captured or {self.geometry.max_num_seqs, *self.geometry.capture_sizes}
        return min(size for size in sizes if size >= num_rows)

    @property
    def longest(self) -> int:
        return max(row.query_len for row in self.rows)

    def load(self, rows: list[Row], record: MLAMetadata) -> None:
        size = self.size_for(record.num_decodes)
        self.record, self.rows = self.state.load_(record), rows
        self.steps_left = min(record.decode.steps_left, self.geometry.max_seq_len - record.decode.max_seq_len)
        assert self.record.num_decodes == size

    def advance(self) -> None:
        """One step, or the refusal of one for which there is no room."""
        if not self.rows or self.steps_left < self.longest:
            text = (
                f"steps_left: expected at least {self.longest} for another step, got {self.steps_left}"
                if self.rows
                else "advance_: expected a loaded batch, got none"
            )
            with pytest.raises(MetadataError, match=text):
                self.state.advance_()
            return
        size = self.record.num_decodes
        self.record = self.state.advance_()
        assert self.record.num_decodes == size
        self.steps_left -= self.longest
        self.rows = [row.stepped() for row in self.rows]

    def capture(self, sizes: list[int]) -> None:
        with self.state.capture() as state:
            assert state is self.state
            self.record, self.rows, self.steps_left = None, [], 0
            for size in sizes:
                self.captured[size] = state.metadata_for(size)
                assert_buffers_hold(self.captured[size], [], self.geometry)
            self.check()

    def check(self) -> None:
        assert self.state.steps_left == self.steps_left
        assert self.steps_left <= self.geometry.room(self.rows)
        whole = tensors_of(self.whole)
        if self.record is None:
            assert_buffers_hold(self.whole, [], self.geometry)
        else:
            assert_buffers_hold(self.record, self.rows, self.geometry)
            for name, tensor in tensors_of(self.record).items():
                tail = whole[name][tensor.shape[0] :]
                fill = tensor[-1:] if is_cumulative(name) else torch.tensor(-1 if name == "slot_mapping" else 0)
                assert bool((tail == fill).all()), name
        for name, tensor in whole.items():
            assert not is_cumulative(name) or not bool((tensor.diff() < 0).any()), name
        for record in (self.record, self.whole, *self.captured.values()):
            pointers = {name: tensor.data_ptr() for name, tensor in tensors_of(record).items()} if record else self.pointers
            assert pointers == self.pointers


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def geometries(draw, **given: Any):
    block_size = draw(st.sampled_from([1, 2, 7, 16, 32]) | st.integers(1, 32))
    sizes = {
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_seq_len": draw(st.integers(8, 70)),
        "block_size": block_size,
        "query_len": draw(st.integers(1, 4)),
        "page_sizes": tuple(draw(st.lists(st.sampled_from(divisors(block_size)), max_size=2, unique=True))),
        "capture_sizes": tuple(draw(st.lists(st.integers(1, 8), max_size=2))),
    } | given
    geometry = Geometry(**sizes)
    return attrs.evolve(geometry, num_blocks=geometry.num_rows * (geometry.width + 3))


@st.composite
def decode_rows(draw, geometry: Geometry, max_rows: int):
    """Rows that fit, with scattered blocks of their own, look-ahead included."""
    uniform = draw(st.none() | st.integers(1, geometry.query_len))
    ids = iter(np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(geometry.num_blocks).tolist())
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        query_len = uniform or draw(st.integers(1, geometry.query_len))
        context_len = draw(
            st.integers(0, min(9, geometry.max_seq_len - query_len)) | st.integers(0, geometry.max_seq_len - query_len)
        )
        count = -(-(context_len + query_len) // geometry.block_size) + draw(st.integers(0, 3))
        rows.append(Row(context_len, query_len, tuple(itertools.islice(ids, min(count, geometry.width + 2)))))
    return rows


# Batches that do not fit ---------------------------------------------------------------------------------------------


def spare_row(geometry: Geometry, length: int, query_len: int = 1, *, first: int = 0, is_prompt: bool = False) -> Row:
    """A row of its own blocks from `first` on."""
    count = -(-length // geometry.block_size)
    return Row(length - query_len, query_len, tuple(range(first, first + count)), is_prompt)


def with_token_rows(record: MLAMetadata, num_tokens: int) -> MLAMetadata:
    """The record with more token rows than its sequences have tokens."""
    fields = {"slot_mapping": torch.full((num_tokens,), -1), "positions": torch.zeros(num_tokens, dtype=torch.int64)}
    return attrs.evolve(record, decode=attrs.evolve(record.decode, **fields), **fields)


def unfit(geometry: Geometry, largest: int) -> dict[str, tuple[Callable[[], Any], str]]:
    """What `load_` must refuse where `largest` sequences are the most, each with what the refusal says."""
    g, row, prompt = geometry, spare_row(geometry, 5), spare_row(geometry, 3, 3, first=20, is_prompt=True)
    tokens = largest * g.query_len
    too_many = f"num_decodes: expected at most {largest} sequences and {tokens} tokens, got"
    one_prompt = "metadata: expected decoding sequences only, got 1 prompts"
    beyond = f"min_num_blocks: expected at most {g.num_blocks}, got {g.num_blocks + 1}"
    cases = {
        "too long": (
            lambda: g.build([row, spare_row(g, g.max_seq_len + 1, first=9)]),
            f"max_seq_len: expected at most {g.max_seq_len}, got {g.max_seq_len + 1}",
        ),
        "too many": (
            lambda: g.build([spare_row(g, 1, first=i) for i in range(largest + 1)]),
            f"{too_many} {largest + 1} and {largest + 1}",
        ),
        "too many with padding": (
            lambda: g.build([row], pad_decodes_to=largest + 1),
            f"{too_many} {largest + 1} and {largest + 1}",
        ),
        "too many token rows": (lambda: with_token_rows(g.build([row]), tokens + 1), f"{too_many} 1 and {tokens + 1}"),
        "too many tokens in a row": (
            lambda: g.build([spare_row(g, g.query_len + 1, g.query_len + 1)]),
            f"max_query_len: expected at most {g.query_len}, got {g.query_len + 1}",
        ),
        "another block size": (
            lambda: g.build([row], block_size=g.block_size * 2),
            f"block_size: expected {g.block_size}, got {g.block_size * 2}",
        ),
        "with a prompt": (lambda: g.build([prompt, row]), one_prompt),
        "prompts only": (lambda: g.build([prompt]), one_prompt),
        "a profile run": (lambda: build_metadata([prompt_group(3)], block_size=g.block_size), one_prompt),
        "a block beyond the cache": (lambda: g.build([Row(0, 1, (g.num_blocks,))]), beyond),
        "a block to come beyond the cache": (
            lambda: g.build([attrs.evolve(row, blocks=(*row.blocks, g.num_blocks))]),
            beyond,
        ),
        "a part": (lambda: g.build([row]).decode, "metadata: expected MLAMetadata, got DecodeMetadata"),
        "nothing": (lambda: None, "metadata: expected MLAMetadata, got None"),
    }
    for size in g.page_sizes:
        others = tuple(n for n in g.page_sizes if n != size)
        cases[f"no page size {size}"] = (
            lambda others=others: g.build([row], page_sizes=others),
            re.escape(f"paged_kv: expected page size {size}, got {list(others)}; build with page_sizes=({size},)"),
        )
    return cases


UNFIT = Geometry(num_blocks=64, query_len=2, capture_sizes=(2, 4))


@pytest.mark.parametrize("kind", unfit(UNFIT, 4))
@pytest.mark.parametrize("loaded", [False, True])
def test_what_does_not_fit_is_refused_before_anything_is_written(kind: str, loaded: bool) -> None:
    watched = Watched(UNFIT)
    if loaded:
        rows = [spare_row(UNFIT, 30, 2), spare_row(UNFIT, 17, first=2), spare_row(UNFIT, 3, 2, first=4)]
        watched.load(rows, UNFIT.build(rows))
    before = plain(watched.whole)
    make, text = unfit(UNFIT, 4)[kind]
    record = make()
    with pytest.raises(MetadataError, match=text):
        watched.state.load_(record)
    assert plain(watched.whole) == before
    watched.check()
    watched.advance()
    watched.check()


def fail_after(record: MLAMetadata, fail: Callable[[], Any]) -> None:
    """What is done inside a capture: a record is made, then something fails."""
    assert record.num_decodes
    fail()


# Sequences of operations ---------------------------------------------------------------------------------------------


class StateMachine(RuleBasedStateMachine):
    """Captures, loads, steps and refusals in any order."""

    @initialize(geometry=geometries())
    def start(self, geometry: Geometry) -> None:
        torch.set_num_threads(1)
        self.watched = Watched(geometry)

    @rule(data=st.data())
    def capture(self, data: Any) -> None:
        sizes = st.integers(1, self.watched.geometry.num_rows)
        self.watched.capture(data.draw(st.lists(sizes, min_size=1, max_size=3)))

    @precondition(lambda self: not self.watched.rows)
    @rule(size=st.integers(1, 8), nested=st.booleans())
    def capture_that_fails(self, size: int, nested: bool) -> None:
        state = self.watched.state
        text = "capture: expected no capture in progress" if nested else "num_decodes: expected an int in"
        fail = state.capture().__enter__ if nested else lambda: state.metadata_for(state.max_num_decodes + size)
        with pytest.raises(MetadataError, match=text), state.capture():
            fail_after(state.metadata_for(min(size, state.max_num_decodes)), fail)

    def draw_rows(self, data: Any) -> list[Row]:
        watched = self.watched
        largest = max(watched.captured or {watched.geometry.num_rows: None})
        return data.draw(decode_rows(watched.geometry, largest))

    @rule(data=st.data())
    def load_(self, data: Any) -> None:
        watched, rows = self.watched, self.draw_rows(data)
        size = data.draw(st.none() | st.integers(len(rows), watched.size_for(len(rows))))
        watched.load(rows, watched.geometry.build(rows, pad_decodes_to=size))

    @rule(data=st.data())
    def load_what_was_stepped(self, data: Any) -> None:
        watched, rows = self.watched, self.draw_rows(data)
        record, longest = watched.geometry.build(rows), max(row.query_len for row in rows)
        while record.decode.steps_left >= longest and record.decode.max_seq_len + longest <= watched.geometry.max_seq_len:
            record, rows = advance_step(record), [row.stepped() for row in rows]
        watched.load(rows, record)

    @rule()
    def advance_(self) -> None:
        self.watched.advance()

    @rule(data=st.data())
    def load_what_does_not_fit(self, data: Any) -> None:
        watched = self.watched
        cases = unfit(watched.geometry, max(watched.captured or {watched.geometry.num_rows: None}))
        make, text = cases[data.draw(st.sampled_from(sorted(cases)))]
        record = make()
        before = plain(watched.whole)
        with pytest.raises(MetadataError, match=text):
            watched.state.load_(record)
        assert plain(watched.whole) == before

    @rule()
    def metadata_outside_of_a_capture(self) -> None:
        with pytest.raises(MetadataError, match="metadata_for: expected a capture in progress, got a call outside of it"):
            self.watched.state.metadata_for(1)

    @rule()
    def clear_(self) -> None:
        watched = self.watched
        watched.state.clear_()
        watched.record, watched.rows, watched.steps_left = None, [], 0

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "watched"):
            self.watched.check()


TestOperations = StateMachine.TestCase
TestOperations.settings = settings(REPEATABLE, max_examples=200, stateful_step_count=12)


# Captures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: expected an int >= 1, got 0"),
        ({"max_seq_len": 2.0}, "max_seq_len: expected an int >= 1, got 2.0"),
        ({"block_size": True}, "block_size: expected an int >= 1, got True"),
        ({"num_blocks": -1}, "num_blocks: expected an int >= 1, got -1"),
        ({"query_len": 0}, "query_len: expected an int >= 1, got 0"),
        ({"capture_sizes": (4, 0)}, "capture_sizes: expected an int >= 1, got 0"),
        ({"capture_sizes": 4}, "capture_sizes: expected a sequence, got int 4"),
        ({"page_sizes": (3,)}, "page_sizes: expected divisors of block_size 16, got 3"),
        ({"page_sizes": (1, 1)}, "page_sizes: expected "),
        ({"device": "nowhere"}, "device: expected a device of torch, got str 'nowhere'"),
    ],
)
def test_a_state_that_could_hold_nothing_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(MetadataError, match=text):
        Geometry().state(**changes)


def test_batches_are_padded_to_the_captured_sizes() -> None:
    geometry = Geometry(max_num_seqs=8, num_blocks=8)
    watched = Watched(geometry)
    batch = geometry.build([spare_row(geometry, 5), spare_row(geometry, 6, first=1)])
    assert watched.state.load_(batch).num_decodes == 8
    for sizes, expected in (([4], 4), ([2, 6], 2)):
        watched.capture(sizes)
        assert watched.state.load_(batch).num_decodes == expected
    assert watched.state.max_num_decodes == 8
    with pytest.raises(MetadataError, match="num_decodes: expected at most 6 sequences and 6 tokens, got 7 and 7"):
        watched.state.load_(geometry.build([spare_row(geometry, 5, first=i) for i in range(7)]))


@pytest.mark.parametrize("loaded", [False, True])
def test_an_exception_inside_a_capture_leaves_the_state_as_it_was(loaded: bool) -> None:
    geometry = Geometry(max_num_seqs=4)
    watched = Watched(geometry)
    watched.capture([3, 4])
    rows = [spare_row(geometry, 30), spare_row(geometry, 17, first=2)]
    if loaded:
        watched.load(rows, geometry.build(rows))
    before = plain(watched.whole)
    with pytest.raises(KeyError), watched.state.capture():
        fail_after(watched.state.metadata_for(2), lambda: {}["nothing"])
    assert plain(watched.whole) == before
    watched.check()
    watched.advance()
    watched.load(rows, geometry.build(rows))
    assert watched.record.num_decodes == 3, "the size of the capture that failed is not one to pad to"
    with pytest.raises(MetadataError, match="metadata_for: expected a capture in progress"):
        watched.state.metadata_for(2)
    watched.capture([2])
    assert watched.state.load_(geometry.build(rows)).num_decodes == 2


def test_a_capture_within_a_capture_is_refused_and_the_outer_one_goes_on() -> None:
    state = Geometry().state()
    with state.capture():
        with pytest.raises(MetadataError, match="capture: expected no capture in progress, got one inside another"):
            state.capture().__enter__()
        assert_buffers_hold(state.metadata_for(3), [], Geometry())
    assert state.load_(Geometry().build([spare_row(Geometry(), 5)])).num_decodes == 3


def test_two_states_share_nothing() -> None:
    one, other = (tensors_of(whole_buffers(Geometry().state())) for _ in range(2))
    pointers = [tensor.data_ptr() for buffers in (one, other) for tensor in buffers.values()]
    assert len(set(pointers)) == len(pointers)


# Stepping without buffers --------------------------------------------------------------------------------------------


@st.composite
def mixed_rows(draw, block_size: int):
    """Prompts, then decodes of one query length or of several, each with blocks to come; perhaps neither of the two."""
    uniform = draw(st.none() | st.integers(1, 4))
    kinds = [True] * draw(st.integers(0, 3)) + [False] * draw(st.integers(0, 3)) or [False]
    ids = iter(np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(800).tolist())
    rows = []
    for is_prompt in kinds:
        query_len = draw(st.integers(1, 9)) if is_prompt else uniform or draw(st.integers(1, 4))
        context_len = draw(st.integers(0, 5) | st.integers(0, 60))
        count = -(-(context_len + query_len) // block_size) + draw(st.integers(0, 12 if block_size < 4 else 2))
        rows.append(Row(context_len, query_len, tuple(itertools.islice(ids, count)), is_prompt))
    return rows


def assert_stepped(record: MLAMetadata, rows: list[Row], geometry: Geometry) -> None:
    """A stepped record equals the freshly built one; its bounds are those of its longest row where rows differ."""
    fresh = geometry.build(rows, pad_decodes_to=record.num_decodes)
    validate_metadata_values(record, num_blocks=fresh.min_num_blocks)
    assert (record.prefill, record.is_profile_run, record.block_size) == (None, False, geometry.block_size)
    assert record.slot_mapping is record.decode.slot_mapping
    assert record.positions is record.decode.positions
    got, want = tensors_of(record), tensors_of(fresh)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        used = want[name].shape[0] if name.startswith("paged_kv_indices") else tensor.shape[0]
        assert torch.equal(tensor[:used], want[name]), name
        assert tensor.dtype == want[name].dtype, name
    decode, built = record.decode, fresh.decode
    assert (decode.block_size, decode.max_query_len) == (built.block_size, built.max_query_len)
    assert decode.min_num_blocks == built.min_num_blocks
    assert decode.max_seq_len >= built.max_seq_len
    assert decode.steps_left <= built.steps_left
    if len({row.query_len for row in rows}) == 1:
        assert (decode.max_seq_len, decode.steps_left) == (built.max_seq_len, built.steps_left)


@settings(REPEATABLE, max_examples=200)
@given(data=st.data(), block_size=st.sampled_from([1, 2, 16]) | st.integers(1, 32), padding=st.integers(0, 2))
def test_a_stepped_record_equals_a_fresh_one(data, block_size, padding):
    rows = data.draw(mixed_rows(block_size))
    sizes = data.draw(st.lists(st.sampled_from(divisors(block_size)), max_size=2, unique=True))
    geometry = Geometry(block_size=block_size, page_sizes=tuple(sizes))
    num_decodes = sum(not row.is_prompt for row in rows) + padding
    record = geometry.build(rows, pad_decodes_to=num_decodes or None)
    turn = any(row.is_prompt for row in rows)
    if turn:
        with pytest.raises(MetadataError, match="metadata: expected decoding sequences only unless turn_prefills_into_decodes"):
            advance_step(record)
    for _ in range(4):
        before = plain(record)
        parts = [part for part in (record.prefill, record.decode) if part is not None]
        needs = [1 if part is record.prefill else part.max_query_len for part in parts]
        short = [(need, part.steps_left) for need, part in zip(needs, parts, strict=True) if part.steps_left < need]
        if short:
            event("no room for another step")
            text = f"steps_left: expected at least {short[0][0]} for another step, got {short[0][1]}"
            with pytest.raises(MetadataError, match=text):
                advance_step(record, turn_prefills_into_decodes=turn)
            assert plain(record) == before
            return
        event("turned" if turn else "stepped")
        after = advance_step(record, turn_prefills_into_decodes=turn)
        rows = [row.stepped() for row in rows]
        assert_stepped(after, rows, geometry)
        assert plain(record) == before
        record, turn = after, False


@pytest.mark.parametrize(("query_len", "blocks", "steps"), [(1, 1, 3), (1, 2, 7), (2, 2, 3), (3, 3, 3), (4, 1, 0)])
def test_a_record_steps_as_often_as_its_blocks_allow(query_len: int, blocks: int, steps: int) -> None:
    """Blocks of 4 tokens; the other row has room for more."""
    geometry = Geometry(block_size=4, max_seq_len=40, query_len=query_len, page_sizes=(1, 2, 4))
    tight = Row(1, query_len, tuple(range(blocks))) if query_len < 4 else Row(0, 4, (0,))
    tight = attrs.evolve(tight, context_len=max(blocks * 4 - (steps + 1) * query_len, 0))
    record = geometry.build([tight, Row(0, query_len, tuple(range(10, 18)))])
    state = geometry.state()
    state.load_(record)
    for _ in range(steps):
        record = advance_step(record)
        state.advance_()
        assert state.steps_left == record.decode.steps_left
    loaded = state.load_(record)
    before = plain(loaded)
    text = f"steps_left: expected at least {query_len} for another step, got {record.decode.steps_left}"
    with pytest.raises(MetadataError, match=text):
        advance_step(record)
    with pytest.raises(MetadataError, match=text):
        state.advance_()
    assert plain(loaded) == before


def test_a_step_needs_sequences_with_blocks() -> None:
    profile = build_metadata([prompt_group(3)], block_size=4)
    for turn in (False, True):
        with pytest.raises(MetadataError, match="metadata: expected sequences with blocks, got a profile run"):
            advance_step(profile, turn_prefills_into_decodes=turn)
    with pytest.raises(MetadataError, match="metadata: expected MLAMetadata, got DecodeMetadata"):
        advance_step(build_metadata([decode_group(3, [0, 1])], block_size=4).decode)


def test_a_step_keeps_what_was_passed_through() -> None:
    maps = ({"image": 1}, None)
    groups = [
        SequenceGroup(is_prompt=i == 0, query_lens=[1], context_lens=[3], block_ids=[(i, 9 - i)], multi_modal_placeholder_map=m)
        for i, m in enumerate(maps)
    ]
    stepped = advance_step(build_metadata(groups, block_size=4), turn_prefills_into_decodes=True)
    assert stepped.multi_modal_placeholder_maps == maps


def test_buffers_that_are_narrower_than_the_table_still_step_to_their_end() -> None:
    """Look-ahead past the longest sequence is cut, and a step past the longest sequence is refused."""
    geometry = Geometry(max_seq_len=6, block_size=4, page_sizes=(1, 2, 4))
    watched = Watched(geometry)
    rows = [Row(3, 1, (7, 5, 3, 1)), Row(0, 1, (2, 4))]
    watched.load(rows, geometry.build(rows))
    for left in (2, 1, 0, 0):
        assert watched.state.steps_left == left
        watched.check()
        watched.advance()
    assert watched.record.decode.seq_lens.tolist() == [6, 3, 0, 0]


# Decode over buffers -------------------------------------------------------------------------------------------------

SCALE = {"kv_lora_rank": 16, "softmax_scale": 0.25}


def cache_of(rows: list[Row], geometry: Geometry, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows where the sequences or their next tokens lie, NaN elsewhere."""
    cache = torch.full((geometry.num_blocks, geometry.block_size, 20), torch.nan)
    blocks = sorted({block for row in rows for block in row.blocks})
    cache[blocks] = torch.randn(len(blocks), geometry.block_size, 20, generator=torch.Generator().manual_seed(seed))
    return cache.to(dtype)


def assert_decodes_alike(record: MLAMetadata, rows: list[Row], geometry: Geometry, dtype: torch.dtype, seed: int) -> None:
    """Over buffers and over a fresh record: the same bits, and empty rows in the padding, whatever its queries hold."""
    cache, real = cache_of(rows, geometry, dtype, seed), sum(row.query_len for row in rows)
    q = torch.full((record.num_tokens, 2, 20), torch.nan, dtype=dtype)
    q[:real] = torch.randn(real, 2, 20, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    out, lse = CPU.paged_decode(q, cache, record.decode, **SCALE)
    expected = CPU.paged_decode(q[:real], cache, geometry.build(rows).decode, **SCALE)
    assert torch.equal(out[:real], expected[0])
    assert torch.equal(lse[:real], expected[1])
    assert not out.isnan().any()
    assert not out[real:].any()
    assert bool((lse[real:] == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(REPEATABLE, max_examples=60)
@given(data=st.data(), geometry=geometries(), seed=st.integers(0, 2**32 - 2))
def test_decode_over_buffers_has_the_bits_of_decode_over_a_fresh_record(dtype, data, geometry, seed):
    watched = Watched(geometry)
    if data.draw(st.booleans()):
        watched.capture([geometry.num_rows, data.draw(st.integers(1, geometry.num_rows))])
    for _ in range(2):
        rows = data.draw(decode_rows(geometry, max(watched.captured or {geometry.num_rows: None})))
        watched.load(rows, geometry.build(rows))
        assert_decodes_alike(watched.record, rows, geometry, dtype, seed)
        watched.advance()
        assert_decodes_alike(watched.record, watched.rows, geometry, dtype, seed)


def test_every_plan_is_of_the_batch_that_is_loaded() -> None:
    """A plan is made of values: that of a record over buffers ends with the next batch, and is refused from then on."""
    geometry = Geometry(page_sizes=())
    state, rows = geometry.state(), [spare_row(geometry, 17), spare_row(geometry, 30, first=2)]
    cache, q = cache_of(rows, geometry, torch.float32, 1), torch.randn(4, 2, 20, generator=torch.Generator().manual_seed(2))
    with state.capture():
        captured = state.metadata_for(4)
        plan = CPU.plan(captured.decode)
    state.load_(geometry.build(rows))
    expected, _ = CPU.paged_decode(q[:2], cache, geometry.build(rows).decode, **SCALE)
    out, _ = CPU.paged_decode(q, cache, captured.decode, **SCALE)
    assert torch.equal(out[:2], expected)
    with suppress(KernelError):
        out, _ = CPU.paged_decode(q, cache, captured.decode, plan=plan, **SCALE)
        assert torch.equal(out[:2], expected), "the plan of another batch was used"


# What runs on the device ---------------------------------------------------------------------------------------------

IN_PLACE = {"aten::copy_", "aten::fill_", "aten::zero_"}
VIEWS = {"aten::slice", "aten::view", "aten::expand", "aten::as_strided", "aten::select", "aten::alias", "aten::detach"}


class Operations(TorchDispatchMode):
    """Records every operation of torch: its name, its tags, the elements that it writes by storage, what it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.written: Counter[int] = Counter()
        self.reads_values: set[str] = set()
        self.devices: set[str] = set()
        self.allocated: set[str] = set()
        self.between_devices: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.names[name] += 1
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.devices |= {t.device.type for t in given}
        # An index of integers has the shape of the index; a mask has to be counted.
        counted = name != "aten::index" or any(t.dtype == torch.bool for t in given[1:])
        if counted and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.reads_values.add(name)
        if name == "aten::copy_" and args[0].device != args[1].device:
            self.between_devices.append((args[1], args[0], args[2:] == (True,)))
        if name in IN_PLACE:
            self.written[args[0].untyped_storage()._cdata] += args[0].numel()
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in given}
        if any(t.untyped_storage()._cdata not in inputs for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            self.allocated.add(name)
        return out


def test_the_recorder_sees_what_it_must() -> None:
    with Operations() as seen:
        x = torch.zeros(3)
        x[:2].copy_(torch.ones(2))
        x.nonzero()
        assert x[x > 0].shape == x[torch.tensor([0, 1])].shape
        float(x.sum())
        bool(torch.equal(x, x))
    assert seen.reads_values == {"aten::nonzero", "aten::index", "aten::_local_scalar_dense", "aten::equal"}
    assert {"aten::zeros", "aten::ones", "aten::sum"} <= seen.allocated
    assert "aten::slice" not in seen.allocated
    assert list(seen.written.values()) == [2]


def many_rows(geometry: Geometry, count: int, lengths: range, query_len: int = 1) -> list[Row]:
    """`count` rows of lengths that go round `lengths`, each with one block to come."""
    rows, first = [], 0
    for i in range(count):
        length = lengths[i % len(lengths)]
        rows.append(spare_row(geometry, length, query_len, first=first))
        first += len(rows[-1].blocks) + 1
        rows[-1] = attrs.evolve(rows[-1], blocks=(*rows[-1].blocks, first - 1))
    return rows


def test_loading_1024_sequences_allocates_nothing_and_reads_no_value() -> None:
    geometry = Geometry(max_num_seqs=1024, max_seq_len=640, num_blocks=1024 * 21, query_len=2, page_sizes=(1, 4, 16))
    state, rows = geometry.state(), many_rows(geometry, 1024, range(200, 300), 2)
    with state.capture():
        for size in (256, 1024):
            state.metadata_for(size)
    for part in (rows, rows[:200]):
        batch = geometry.build(part)
        with Operations() as seen:
            record = state.load_(batch)
        assert set(seen.names) <= IN_PLACE | VIEWS
        assert not seen.allocated
        assert not seen.reads_values
        assert_buffers_hold(record, part, geometry)


def test_a_host_batch_is_moved_without_memory_of_its_own_on_the_device() -> None:
    """Between devices torch copies strided memory through a contiguous temporary, and waits unless told not to."""
    geometry = Geometry(max_seq_len=640, num_blocks=100)
    rows = many_rows(geometry, 3, range(20, 60))
    state, batch = geometry.state(device="meta"), geometry.build(rows)
    assert batch.decode.block_table.shape[1] < geometry.width
    with Operations() as seen:
        state.load_(batch)
    assert seen.between_devices
    for source, target, asynchronous in seen.between_devices:
        assert asynchronous
        assert source.is_contiguous(), tuple(source.shape)
        assert target.is_contiguous(), tuple(target.shape)


def loaded_elements(geometry: Geometry, *batches: list[Row]) -> tuple[Counter[str], MLAMetadata]:
    """Elements that the last load writes into each buffer."""
    watched = Watched(geometry)
    for rows in batches:
        batch = geometry.build(rows)
        with Operations() as seen:
            watched.state.load_(batch)
    names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors_of(watched.whole).items()}
    assert set(seen.written) <= set(names)
    return Counter({names[storage]: count for storage, count in seen.written.items()}), batch


def test_what_is_copied_follows_the_batch_and_not_the_buffers() -> None:
    small = Geometry(max_num_seqs=16, max_seq_len=320, num_blocks=1000, page_sizes=(1, 16))
    large = attrs.evolve(small, max_num_seqs=512, max_seq_len=8192)
    rows = many_rows(small, 12, range(100, 200))
    few, batch = loaded_elements(small, rows)
    many, _ = loaded_elements(large, rows)
    for name, tensor in tensors_of(batch).items():
        if is_cumulative(name):
            # Its last value is repeated to the end of the buffer, however long the batch.
            assert tensor.numel() <= few[name] <= small.num_rows + 1
            assert tensor.numel() <= many[name] <= large.num_rows + 1
        else:
            assert few[name] == many[name] == tensor.numel(), name
    # After a larger batch, what that one left behind is cleared, and no more.
    larger, shorter = many_rows(small, 16, range(200, 220)), many_rows(small, 3, range(20, 40))
    before = tensors_of(small.build(larger))
    written, batch = loaded_elements(large, larger, shorter)
    for name, tensor in tensors_of(batch).items():
        if not is_cumulative(name):
            assert tensor.numel() <= written[name] <= tensor.numel() + before[name].numel(), name


def step_on(device: str, state: DecodeGraphState, batch: MLAMetadata, mixed: MLAMetadata) -> list[MLAMetadata]:
    """Everything that must run without the host."""
    out = [state.load_(batch), state.advance_(), state.load_(advance_step(batch)), state.advance_()]
    out += [advance_step(mixed, turn_prefills_into_decodes=True)]
    out += [advance_step(out[-1])]
    assert {t.device.type for record in out for t in tensors_of(record).values()} == {device}
    return out


STEPPING = Geometry(max_num_seqs=6, query_len=2, page_sizes=(1, 16))


def stepping_batches() -> tuple[MLAMetadata, MLAMetadata]:
    """Decodes of several query lengths, and prompts beside padded decodes."""
    ragged = [attrs.evolve(row, blocks=(*row.blocks, 40 + i)) for i, row in enumerate(many_rows(STEPPING, 3, range(14, 20), 2))]
    ragged[1] = attrs.evolve(ragged[1], context_len=ragged[1].seq_len - 1, query_len=1)
    prompts = [attrs.evolve(ragged[0], query_len=ragged[0].seq_len, context_len=0, is_prompt=True)]
    return STEPPING.build(ragged), STEPPING.build([*prompts, *ragged[1:]], pad_decodes_to=4)


def test_stepping_reads_no_value_on_the_host() -> None:
    batch, mixed = stepping_batches()
    with STEPPING.state().capture() as state:
        state.metadata_for(4)
    with Operations() as seen:
        step_on("cpu", state, batch, mixed)
    assert seen.names
    assert not seen.reads_values


def test_stepping_works_on_tensors_without_values() -> None:
    """On fake tensors a read value is an error; on the meta device so is a tensor that was left on the host."""
    batch, mixed = stepping_batches()
    expected = step_on("cpu", STEPPING.state(), batch, mixed)
    with FakeTensorMode() as mode:
        faked = step_on("cpu", STEPPING.state(), mapped(batch, mode.from_tensor), mapped(mixed, mode.from_tensor))
    meta = step_on("meta", STEPPING.state(device="meta"), batch.to("meta"), mixed.to("meta"))
    for record, *others in zip(expected, faked, meta, strict=True):
        for other in others:
            assert {n: (t.shape, t.dtype) for n, t in tensors_of(other).items()} == {
                n: (t.shape, t.dtype) for n, t in tensors_of(record).items()
            }
            assert (other.decode.steps_left, other.decode.max_seq_len) == (record.decode.steps_left, record.decode.max_seq_len)
    # A host batch is loaded into buffers of another device.
    assert STEPPING.state(device="meta").load_(batch).decode.seq_lens.device.type == "meta"


# Cases from the field ------------------------------------------------------------------------------------------------


def test_case_11_a_long_request_after_a_short_one_leaves_no_tail() -> None:
    geometry = Geometry(max_seq_len=1024, num_blocks=200)
    state = geometry.state()
    whole = whole_buffers(state)
    with state.capture():
        for size in (2, 4):
            state.metadata_for(size)
    state.load_(geometry.build([spare_row(geometry, 10, first=i) for i in range(4)]))
    assert whole.decode.paged_kv_of(1).paged_kv_indptr.tolist() == [0, 10, 20, 30, 40]
    state.load_(geometry.build([spare_row(geometry, 900), spare_row(geometry, 700, first=60)]))
    assert whole.decode.paged_kv_of(1).paged_kv_indptr.tolist() == [0, 900, 1600, 1600, 1600]
    for name, tensor in tensors_of(whole).items():
        assert not is_cumulative(name) or bool((tensor.diff() >= 0).all()), name


def test_case_18_junk_of_one_replay_does_not_reach_the_next() -> None:
    geometry = Geometry(max_num_seqs=8, num_blocks=16)
    state = geometry.state()
    with state.capture():
        captured = state.metadata_for(8).decode
    cache = torch.randn(16, 16, 20, generator=torch.Generator().manual_seed(3))
    cache[7, 3:] = torch.nan
    q = torch.randn(8, 2, 20, generator=torch.Generator().manual_seed(4))
    q[7, 0] = torch.inf
    state.load_(geometry.build([spare_row(geometry, 9, first=i) for i in range(8)]))
    out, lse = CPU.paged_decode(q, cache, captured, **SCALE)
    assert out[7].isnan().any()
    assert out[:7].isfinite().all()
    alone = geometry.build([spare_row(geometry, 9)])
    state.load_(alone)
    for _ in range(2):
        out, lse = CPU.paged_decode(q, cache, captured, **SCALE)
        eager = CPU.paged_decode(q[:1], cache, alone.decode, **SCALE)
        assert out[0].isfinite().all()
        assert torch.equal(out[:1], eager[0])
        assert torch.equal(lse[:1], eager[1])
        assert not out[1:].any()
        assert bool((lse[1:] == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query_len", [1, 3])
def test_case_20_the_warm_up_of_a_capture_leaves_the_cache_as_it_is(dtype: torch.dtype, query_len: int) -> None:
    dims, geometry = small_dims(), Geometry(query_len=query_len, num_blocks=8)
    rows = [spare_row(geometry, 20, query_len), spare_row(geometry, 20, query_len, first=2)]
    state = geometry.state()
    state.load_(geometry.build(rows))
    cache = torch.full((8, 16, dims.latent_dim), torch.nan, dtype=dtype)
    before = cache.view(torch.uint8).clone()
    with state.capture():
        for size in (1, 2, 4):
            tokens = size * query_len
            out, lse = attend(
                torch.ones(tokens, dims.num_heads, dims.qk_head_dim, dtype=dtype),
                torch.ones(tokens, dims.kv_lora_rank, dtype=dtype),
                torch.ones(tokens, dims.qk_rope_head_dim, dtype=dtype),
                cache,
                state.metadata_for(size),
                kv_b_proj=torch.ones(dims.num_heads * 18, dims.kv_lora_rank, dtype=dtype),
                dims=dims,
                kernels=CPU,
            )
            assert not out.any()
            assert bool((lse == -torch.inf).all())
    assert torch.equal(cache.view(torch.uint8), before)


def test_case_24_every_buffer_holds_the_largest_capture_size() -> None:
    geometry = Geometry(max_num_seqs=16, query_len=2, capture_sizes=(1, 2, 4, 8, 16, 24, 32))
    state = geometry.state()
    assert state.max_num_decodes == 32
    whole = whole_buffers(state)
    rows = {name: tensor.shape[0] for name, tensor in tensors_of(whole).items()}
    assert rows == {
        "query_start_loc": 33,
        "seq_start_loc": 33,
        "seq_lens": 32,
        "context_lens": 32,
        "slot_mapping": 64,
        "positions": 64,
        "block_table": 32,
        "paged_kv_indptr 1": 33,
        "paged_kv_indices 1": 32 * 64,
        "paged_kv_last_page_lens 1": 32,
        "paged_kv_indptr 16": 33,
        "paged_kv_indices 16": 32 * 4,
        "paged_kv_last_page_lens 16": 32,
    }
    batch = [spare_row(geometry, 16, 2, first=i) for i in range(32)]
    assert_buffers_hold(state.load_(geometry.build(batch)), batch, geometry)


def test_case_26_page_lists_are_sized_in_tokens_where_they_hold_tokens() -> None:
    geometry = Geometry(max_num_seqs=2)
    state = geometry.state()
    rows = [spare_row(geometry, 64), spare_row(geometry, 64, first=10)]
    record = state.load_(geometry.build(rows))
    paged = record.decode.paged_kv_of(1)
    assert paged.paged_kv_indices.tolist() == [*range(64), *range(160, 224)]
    assert paged.paged_kv_indptr.tolist() == [0, 64, 128]
    assert record.decode.paged_kv_of(16).paged_kv_indices.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert_buffers_hold(record, rows, geometry)


def test_case_28_addresses_stay_and_contents_change() -> None:
    geometry = Geometry(max_num_seqs=2, query_len=2)
    state = geometry.state()
    with state.capture():
        captured = state.metadata_for(2)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors_of(captured).items()}
    seen = [plain(captured)]
    for length in (5, 20, 40):
        state.load_(geometry.build([spare_row(geometry, length, 2), spare_row(geometry, length + 1, first=5)]))
        seen.append(plain(captured))
        assert {name: tensor.data_ptr() for name, tensor in tensors_of(captured).items()} == pointers
    assert all(a != b for a, b in itertools.pairwise(seen))
    for name in attrs.asdict(captured.decode, filter=lambda _, value: isinstance(value, torch.Tensor)):
        assert seen[-1]["decode"][name] != seen[0]["decode"][name], name


def test_case_29_cumulative_arrays_repeat_their_last_value() -> None:
    geometry = Geometry(max_num_seqs=4)
    rows = [spare_row(geometry, 5), spare_row(geometry, 7, first=1)]
    over_buffers = geometry.state().load_(geometry.build(rows)).decode
    for decode in (over_buffers, geometry.build(rows, pad_decodes_to=4).decode):
        assert decode.paged_kv_of(1).paged_kv_indptr.tolist() == [0, 5, 12, 12, 12]
        assert decode.seq_start_loc.tolist() == [0, 5, 12, 12, 12]
        assert decode.query_start_loc.tolist() == [0, 1, 2, 2, 2]
        assert decode.paged_kv_of(16).paged_kv_indptr.tolist() == [0, 1, 2, 2, 2]


def test_case_30_an_update_stores_no_host_scalar_and_reads_none() -> None:
    """On the meta device a tensor of the host shows."""
    batch = stepping_batches()[0].to("meta")
    state = STEPPING.state(device="meta")
    buffers = {tensor.untyped_storage()._cdata for tensor in tensors_of(whole_buffers(state)).values()}
    with Operations() as seen:
        state.load_(batch)
        state.advance_()
    assert seen.devices == {"meta"}
    assert set(seen.written) <= buffers
    assert not seen.reads_values
