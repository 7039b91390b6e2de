"""Random batches, records, pools and cache writes against the specification or a plain Python model."""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest
import torch
from batches import Row, make_batch, small_dims
from compare import LSE_ABS, OUT_REL, assert_close
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mla import (
    BlockPool,
    CacheError,
    MetadataError,
    SequenceGroup,
    attend,
    build_metadata,
    decode_group,
    kernel_set,
    prompt_group,
    validate_metadata_values,
)
from mla.cache import copy_blocks_, gather_latent_cache, swap_blocks_, write_latent_cache_
from mla.cache.paged import _write_unchecked_
from mla.compute import reference
from mla.metadata.packing import HostBuffer

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
REPEATABLE = settings(deadline=None, derandomize=True)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 7, 16, 17, 64]) | st.integers(1, 64)
SEEDS = st.integers(0, 2**32 - 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return not a.numel() or torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


# Attention -----------------------------------------------------------------------------------------------------------


@st.composite
def attention_steps(draw):
    """Rows and options of one step, of one of the kinds that a scheduler makes."""
    kind = draw(st.sampled_from(["prefill", "chunked prefill", "mixed", "decode", "multi-token decode"]))
    block_size = draw(BLOCK_SIZES)
    rows, options = [], {}
    if kind in ("prefill", "chunked prefill", "mixed"):
        contexts = st.just(0) if kind == "prefill" else st.integers(0, 9) | st.integers(0, 70)
        row = st.builds(Row, query_len=st.integers(0, 9), context_len=contexts, lookahead=st.integers(0, 2))
        rows += draw(st.lists(row, min_size=1, max_size=4))
        sharers = sum(row.context_len > 0 for row in rows)
        if draw(st.booleans()):
            options["chunk_policy"] = "equal_shares"
            options["context_workspace_tokens"] = max(sharers, 1) * block_size * draw(st.integers(1, 4))
        else:
            options["context_chunk_tokens"] = chunk = draw(st.integers(1, 80))
            options["context_workspace_tokens"] = chunk + draw(st.integers(0, 80))
    if kind in ("mixed", "decode", "multi-token decode"):
        query_lens = st.just(1) if kind == "decode" else st.integers(0, 5)
        row = st.builds(
            Row,
            query_len=query_lens,
            context_len=st.integers(0, 9) | st.integers(0, 90),
            is_prompt=st.just(False),
            lookahead=st.integers(0, 2),
        )
        decodes = draw(st.lists(row, min_size=1, max_size=4))
        rows += decodes
        if draw(st.booleans()):
            options["pad_decodes_to"] = len(decodes) + draw(st.integers(0, 3))
    event(kind)
    return rows, block_size, options


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(F64, F64), (F32, F32), (BF16, BF16), (F16, F16), (F64, F32), (F32, BF16), (F32, F16)], ids=str
)
@settings(REPEATABLE, max_examples=50)
@given(
    step=attention_steps(),
    num_heads=st.integers(1, 5),
    q_scale=st.sampled_from([0.0, 1.0, 3.0]),
    spare_rows=st.none() | st.integers(0, 9),
    with_plan=st.booleans(),
    seed=SEEDS,
)
def test_attend_meets_the_reference(dtype, cache_dtype, step, num_heads, q_scale, spare_rows, with_plan, seed):
    rows, block_size, options = step
    kernels, dims = kernel_set("CPU_MLA"), small_dims(num_heads)
    # Keys are rounded to the dtype, which moves a score in proportion to its size: large scores only where rounding is small.
    q_scale = min(q_scale, 0.5) if dtype in (BF16, F16) else q_scale
    batch = make_batch(
        rows, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype, dims=dims, seed=seed, q_scale=q_scale, **options
    )
    metadata, before = batch.metadata, batch.latent_cache.clone()
    workspace = plan = None
    if spare_rows is not None and metadata.prefill is not None:
        size = metadata.prefill.max_context_chunk_tokens + spare_rows
        workspace = torch.full((size, dims.latent_dim), torch.nan, dtype=dtype)
    if with_plan and metadata.decode is not None:
        plan = kernels.plan(metadata.decode)
    out, lse = attend(
        batch.q,
        batch.kv_c,
        batch.k_pe,
        batch.latent_cache,
        metadata,
        kv_b_proj=batch.kv_b_proj,
        dims=dims,
        kernels=kernels,
        plan=plan,
        workspace=workspace,
    )

    assert out.dtype == dtype
    assert lse.dtype == (F64 if dtype == F64 else F32)
    split = metadata.num_prefill_tokens
    for part, tokens in ((metadata.prefill, slice(0, split)), (metadata.decode, slice(split, None))):
        if part is not None:
            expected_out, expected_lse = reference.latent_attention(
                batch.q[tokens], batch.latent_cache, part, kv_b_proj=batch.kv_b_proj, dims=dims
            )
            # The up-projection and, in decode, the absorbed query are rounded to bfloat16 beside the kernel's own products.
            assert_close(out[tokens], expected_out, rel=OUT_REL[dtype] * (2 if dtype == BF16 else 1))
            assert_close(lse[tokens], expected_lse, abs=LSE_ABS[dtype])
    num_real = sum(row.query_len for row in rows)
    assert not out[num_real:].any()
    assert bool((lse[num_real:] == -torch.inf).all())

    expected_cache = before.view(-1, dims.latent_dim)
    new_rows = torch.cat([batch.kv_c, batch.k_pe], dim=1).to(cache_dtype)
    for token, slot in enumerate(metadata.slot_mapping.tolist()):
        if slot >= 0:
            expected_cache[slot] = new_rows[token]
    assert same_bits(batch.latent_cache, before)


# Records -------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Sequence:
    """What the model of `build_metadata` knows of a sequence."""

    query_len: int
    context_len: int
    blocks: tuple[int, ...]

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len


@attrs.frozen(kw_only=True)
class Step:
    """Arguments of `build_metadata`, and the same sequences for the model."""

    groups: list[SequenceGroup]
    prompts: list[Sequence]
    decodes: list[Sequence]
    block_size: int
    options: dict

    def build(self, **changes):
        return build_metadata(self.groups, block_size=self.block_size, **(self.options | changes))


LENGTHS = st.tuples(st.integers(0, 7), st.integers(0, 9) | st.integers(0, 70), st.integers(0, 3), st.integers(0, 4))
GROUPS = st.lists(st.lists(LENGTHS, min_size=1, max_size=3), max_size=3)


@st.composite
def record_steps(draw):
    """Groups of several sequences, full prefix blocks shared by some, ids scattered, and all options."""
    block_size = draw(BLOCK_SIZES)
    profile = draw(st.integers(0, 9)) == 0
    prompt_groups = draw(GROUPS)
    decode_groups = [] if profile else draw(GROUPS)
    if not prompt_groups and not decode_groups:
        prompt_groups = [[(3, 5, 0, 0)]]
    ids = iter(np.random.default_rng(draw(SEEDS)).permutation(500).tolist())
    prefix = [next(ids) for _ in range(4)]
    container = draw(st.sampled_from([tuple, list, np.array, lambda t: np.array(t, np.int32)]))
    groups, parts = [], {True: [], False: []}
    for is_prompt, lengths in [(True, g) for g in prompt_groups] + [(False, g) for g in decode_groups]:
        sequences = []
        for query_len, context_len, lookahead, shared in lengths:
            blocks = prefix[: min(shared, context_len // block_size)]
            while len(blocks) * block_size < context_len + query_len:
                blocks.append(next(ids))
            blocks += [next(ids) for _ in range(lookahead)]
            sequences.append(Sequence(query_len=query_len, context_len=context_len, blocks=tuple(blocks)))
        parts[is_prompt] += sequences
        groups.append(
            SequenceGroup(
                is_prompt=is_prompt,
                query_lens=[s.query_len for s in sequences],
                context_lens=[s.context_len for s in sequences],
                block_ids=None if profile else [container(s.blocks) if s.blocks else () for s in sequences],
                seq_lens=draw(st.sampled_from([None, [s.seq_len for s in sequences]])),
                multi_modal_placeholder_map=draw(st.sampled_from([None, {"image": 1}])),
            )
        )
    options = {"page_sizes": tuple(n for n in range(1, block_size + 1) if block_size % n == 0)}
    if draw(st.booleans()):
        options["chunk_policy"] = "equal_shares"
        options["context_workspace_tokens"] = draw(st.integers(1, 300))
    else:
        options["context_chunk_tokens"] = chunk = draw(st.integers(1, 100))
        options["context_workspace_tokens"] = draw(st.sampled_from([None, chunk, chunk + 1, 3 * chunk, 1000]))
    if not profile and draw(st.booleans()):
        options["pad_decodes_to"] = max(len(parts[False]), 1) + draw(st.integers(0, 2))
    if not profile and draw(st.booleans()):
        needed = max(-(-s.seq_len // block_size) for s in parts[True] + parts[False])
        options["max_blocks_per_seq"] = max(needed, 1) + draw(st.integers(0, 2))
    return Step(groups=groups, prompts=parts[True], decodes=parts[False], block_size=block_size, options=options)


def plain(value):
    """A record as nested dictionaries, lists and numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    return value


def running_totals(counts):
    totals = [0]
    for count in counts:
        totals.append(totals[-1] + count)
    return totals


def room(s, block_size):
    return len(s.blocks) * block_size - s.seq_len


def model_part(sequences, num_rows, pad_tokens, step):
    """Every field of a part, token by token."""
    block_size, profile = step.block_size, step.groups[0].block_ids is None
    limit = step.options.get("max_blocks_per_seq")
    real = [attrs.evolve(s, blocks=() if profile else s.blocks[:limit]) for s in sequences]
    padded = real + [Sequence(query_len=0, context_len=0, blocks=())] * (num_rows - len(real))
    slots, positions = [], []
    for s in real:
        for position in range(s.context_len, s.seq_len):
            block = None if profile else s.blocks[position // block_size]
            slots.append(-1 if profile else block * block_size + position % block_size)
            positions.append(position)
    width = max((len(s.blocks) for s in real), default=0)
    paged = []
    for size in () if profile else step.options["page_sizes"]:
        pages, counts, last = [], [], []
        for s in padded:
            own, tokens = [], 0
            for position in range(s.seq_len):
                if position % size == 0:
                    own.append((s.blocks[position // block_size] * block_size + position % block_size) // size)
                    tokens = 0
                tokens += 1
            pages += own
            counts.append(len(own))
            last.append(tokens)
        paged.append(
            {
                "page_size": size,
                "paged_kv_indptr": running_totals(counts),
                "paged_kv_indices": pages,
                "paged_kv_last_page_lens": last,
            }
        )
    return {
        "query_start_loc": running_totals(s.query_len for s in padded),
        "seq_start_loc": running_totals(s.seq_len for s in padded),
        "seq_lens": [s.seq_len for s in padded],
        "context_lens": [s.context_len for s in padded],
        "slot_mapping": slots + [-1] * pad_tokens,
        "positions": positions + [0] * pad_tokens,
        "block_size": block_size,
        "max_query_len": max((s.query_len for s in real), default=0),
        "max_seq_len": max((s.seq_len for s in real), default=0),
        "min_num_blocks": max((block + 1 for s in real for block in s.blocks), default=0),
        "steps_left": 0
        if profile
        else min((len(s.blocks) * block_size - s.seq_len for s in real if s.seq_len), default=2**31 - 1),
        "paged_kv": paged,
        "block_table": None if profile else [list(s.blocks) + [0] * (width - len(s.blocks)) for s in padded],
    }, real


def model_passes(prompts, step):
    """The passes over the context: a dictionary from prompt to the positions of its piece each; None if refused."""
    block_size, options = step.block_size, step.options
    sharers = sum(s.context_len > 0 for s in prompts)
    longest = max((s.context_len for s in prompts), default=0)
    if options.get("chunk_policy") == "equal_shares":
        if not sharers:
            return []
        share = options["context_workspace_tokens"] // sharers
        share -= share % block_size
        if not share:
            return None
        return [
            {i: range(start, max(start, min(start + share, s.context_len))) for i, s in enumerate(prompts)}
            for start in range(0, longest, share)
        ]
    chunk = options["context_chunk_tokens"]
    workspace = options["context_workspace_tokens"] or chunk
    passes = []
    for cut in range(0, longest, chunk):
        current, used = {}, 0
        for i, s in enumerate(prompts):
            piece = range(cut, min(cut + chunk, s.context_len))
            if not piece:
                continue
            if current and used + len(piece) > workspace:
                passes.append(current)
                current, used = {}, 0
            current[i] = piece
            used += len(piece)
        passes.append(current)
    return passes


def model_chunk(pieces, prompts, block_size):
    """Every field of a pass."""
    first, last = min(pieces), max(pieces) + 1
    covered = [(prompts[i], pieces.get(i, range(0))) for i in range(first, last)]
    return {
        "first_seq": first,
        "num_seqs": last - first,
        "first_token": sum(s.query_len for s in prompts[:first]),
        "num_query_tokens": sum(s.query_len for s, _ in covered),
        "query_start_loc": running_totals(s.query_len for s, _ in covered),
        "kv_start_loc": running_totals(len(piece) for _, piece in covered),
        "starts": [piece.start for _, piece in covered],
        "slots": [s.blocks[p // block_size] * block_size + p % block_size for s, piece in covered for p in piece],
        "max_query_len": max(s.query_len for s, _ in covered),
        "max_kv_len": max(len(piece) for _, piece in covered),
    }


@settings(REPEATABLE, max_examples=300)
@given(step=record_steps())
def test_build_metadata_meets_a_token_by_token_model(step):
    profile = step.groups[0].block_ids is None
    passes = [] if profile else model_passes(step.prompts, step)
    if passes is None:
        with pytest.raises(MetadataError, match="context_workspace_tokens: expected at least"):
            step.build()
        return
    metadata = step.build()
    num_rows = step.options.get("pad_decodes_to", len(step.decodes))
    longest = max((s.query_len for s in step.decodes), default=1)
    pad_tokens = (num_rows - len(step.decodes)) * longest
    prefill = decode = None
    if step.prompts:
        prefill, real = model_part(step.prompts, len(step.prompts), 0, step)
        prefill["context_chunks"] = [model_chunk(pieces, real, step.block_size) for pieces in passes]
    if num_rows:
        decode, _ = model_part(step.decodes, num_rows, pad_tokens, step)
        decode["over_buffers"] = False
    parts = [part for part in (prefill, decode) if part is not None]
    assert plain(metadata) == {
        "slot_mapping": [slot for part in parts for slot in part["slot_mapping"]],
        "positions": [position for part in parts for position in part["positions"]],
        "block_size": step.block_size,
        "prefill": prefill,
        "decode": decode,
        "is_profile_run": profile,
        "multi_modal_placeholder_maps": [group.multi_modal_placeholder_map for group in step.groups],
    }
    if metadata.prefill is not None:
        assert metadata.prefill.max_context_chunk_tokens == max((sum(map(len, p.values())) for p in passes), default=0)
    validate_metadata_values(metadata)
    validate_metadata_values(metadata, num_blocks=metadata.min_num_blocks)
    if metadata.min_num_blocks:
        with pytest.raises(MetadataError, match=f"got {metadata.min_num_blocks}"):
            validate_metadata_values(metadata, num_blocks=metadata.min_num_blocks - 1)


def shapes(value):
    """A record as nested dictionaries with the shape and dtype of every tensor."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return [shapes(item) for item in value]
    if attrs.has(type(value)):
        return {field.name: shapes(getattr(value, field.name)) for field in attrs.fields(type(value))}
    return value


def devices(value):
    """Devices of all tensors of a record."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    if attrs.has(type(value)):
        value = tuple(getattr(value, field.name) for field in attrs.fields(type(value)))
    return set().union(*map(devices, value)) if isinstance(value, tuple) else set()


@settings(REPEATABLE, max_examples=100)
@given(step=record_steps())
def test_records_are_repeatable_and_move(step):
    if step.options.get("chunk_policy") == "equal_shares":
        step.options["context_workspace_tokens"] = 10_000
    metadata = step.build()
    assert plain(step.build()) == plain(metadata)
    assert plain(metadata.to("cpu")) == plain(metadata)
    for moved in (metadata.to("meta"), step.build(device="meta")):
        assert shapes(moved) == shapes(metadata)
        assert devices(moved) == {"meta"}


@settings(REPEATABLE, max_examples=100)
@given(step=record_steps(), workspaces=st.lists(st.integers(0, 400), min_size=2, max_size=2))
def test_workspace_decides_grouping_only(step, workspaces):
    chunk = step.options.get("context_chunk_tokens", 16)
    step.options.pop("chunk_policy", None)
    records, orders = [], []
    for extra in workspaces:
        metadata = step.build(context_chunk_tokens=chunk, context_workspace_tokens=chunk + extra)
        record, pieces = plain(metadata), []
        chunks = [] if metadata.prefill is None else record["prefill"].pop("context_chunks")
        for entry in chunks:
            assert len(entry["slots"]) <= chunk + extra
            for i, (begin, end) in enumerate(zip(entry["kv_start_loc"], entry["kv_start_loc"][1:], strict=False)):
                if end > begin:
                    pieces.append((entry["first_seq"] + i, entry["starts"][i], entry["slots"][begin:end]))
        records.append(record)
        orders.append(pieces)
    assert records[0] == records[1]
    assert orders[0] == orders[1]


def test_the_one_copy_to_a_device_keeps_every_array():
    class Elsewhere(str):
        """A name of the CPU that does not say so, which takes the path of other devices."""

        __slots__ = ()
        type = "elsewhere"

    rng = np.random.default_rng(3)
    arrays = [
        rng.integers(0, 2**31, shape).astype(dtype)
        for shape in ((5,), (0,), (3, 0), (3, 7), (1,))
        for dtype in (np.int32, np.int64)
    ]
    buffer = HostBuffer()
    tickets = [buffer.add(array) for array in arrays]
    buffer.move(Elsewhere("cpu"))
    for ticket, array in zip(tickets, arrays, strict=True):
        taken = buffer.take(ticket)
        assert same_bits(taken, torch.from_numpy(array))
        assert not array.size or taken.data_ptr() % 16 == 0


# The pool of blocks --------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 1), max_size=9)
LOOKAHEAD = st.integers(0, 5)


class PoolMachine(RuleBasedStateMachine):
    """`BlockPool` beside a mutable model that also holds what a real cache would: each row names the prefix it came from."""

    ids = Bundle("ids")

    @initialize(num_blocks=st.integers(4, 12), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.pool = BlockPool.empty(num_blocks=num_blocks, block_size=block_size)
        self.tokens, self.computed, self.blocks = {}, {}, {}
        self.known, self.rows, self.history = {}, {}, []
        self.next_id = 0

    def holders(self):
        return Counter(block for blocks in self.blocks.values() for block in blocks)

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.pool.block_size)

    def after(self, operation):
        """The result of an operation that must leave the pool itself as it was."""
        before = plain_pool(self.pool)
        self.history.append((self.pool, before))
        try:
            return operation(self.pool)
        finally:
            assert plain_pool(self.pool) == before

    def refused(self, operation):
        with pytest.raises(CacheError):
            self.after(operation)

    def give_away(self, fresh, held):
        """Check that blocks come from the free ones; what they held is gone."""
        assert len(set(fresh)) == len(fresh)
        assert not set(fresh) & set(held)
        self.known = {prefix: block for prefix, block in self.known.items() if block not in fresh}
        self.rows = {place: prefix for place, prefix in self.rows.items() if place[0] not in fresh}

    @rule(target=ids, tokens=TOKENS, lookahead=LOOKAHEAD)
    def allocate(self, tokens, lookahead):
        size, seq_id = self.pool.block_size, self.next_id
        shared = []
        for end in range(size, len(tokens), size):
            if tuple(tokens[:end]) not in self.known:
                break
            shared.append(self.known[tuple(tokens[:end])])
        held = set(self.holders()) | set(shared)
        wanted = self.blocks_for(len(tokens) + lookahead) - len(shared)
        if not tokens or wanted > self.pool.num_blocks - len(held):
            self.refused(lambda pool: pool.allocate(seq_id, tokens, lookahead=lookahead))
            return multiple()
        self.pool = self.after(lambda pool: pool.allocate(seq_id, tokens, lookahead=lookahead))
        sequence = self.pool[seq_id]
        assert sequence.block_ids[: len(shared)] == tuple(shared)
        assert len(sequence.block_ids) == len(shared) + wanted
        assert sequence.num_reused == len(shared) * size
        self.give_away(sequence.block_ids[len(shared) :], held)
        self.tokens[seq_id], self.blocks[seq_id], self.computed[seq_id] = tokens, sequence.block_ids, len(shared) * size
        self.next_id += 1
        return seq_id

    @rule(seq_id=ids, tokens=TOKENS, lookahead=LOOKAHEAD)
    def append(self, seq_id, tokens, lookahead):
        size, old, holders = self.pool.block_size, self.blocks[seq_id], self.holders()
        first, total = len(self.tokens[seq_id]), len(self.tokens[seq_id]) + len(tokens)
        touched = range(first // size, min(self.blocks_for(total + lookahead), len(old)))
        to_replace = [i for i in touched if holders[old[i]] > 1]
        to_copy = [i for i in to_replace if i * size < first]
        missing = max(self.blocks_for(total + lookahead) - len(old), 0)
        if len(to_replace) + missing > self.pool.num_blocks - len(holders):
            self.refused(lambda pool: pool.append(seq_id, tokens, lookahead=lookahead))
            return
        self.pool, copies = self.after(lambda pool: pool.append(seq_id, tokens, lookahead=lookahead))
        new = self.pool[seq_id].block_ids
        assert [source for source, _ in copies] == [old[i] for i in to_copy]
        assert [destination for _, destination in copies] == [new[i] for i in to_copy]
        assert len(new) == len(old) + missing
        assert all(new[i] == old[i] for i in range(len(old)) if i not in to_replace)
        self.give_away([new[i] for i in to_replace] + list(new[len(old) :]), holders)
        for source, destination in copies:
            for offset in range(size):
                if (source, offset) in self.rows:
                    self.rows[destination, offset] = self.rows[source, offset]
        self.tokens[seq_id], self.blocks[seq_id] = self.tokens[seq_id] + tokens, new

    @rule(seq_id=ids, num_tokens=st.none() | st.integers(-1, 10))
    def mark_computed(self, seq_id, num_tokens):
        size, first = self.pool.block_size, self.computed[seq_id]
        left = len(self.tokens[seq_id]) - first
        count = left if num_tokens is None else num_tokens
        if not 0 <= count <= left:
            self.refused(lambda pool: pool.mark_computed(seq_id, num_tokens))
            return
        holders = self.holders()
        for position in range(first, first + count):
            block = self.blocks[seq_id][position // size]
            assert holders[block] == 1, "a write into a block that others hold"
            self.rows[block, position % size] = tuple(self.tokens[seq_id][: position + 1])
        self.pool = self.after(lambda pool: pool.mark_computed(seq_id, num_tokens))
        self.computed[seq_id] = first + count
        if self.computed[seq_id] // size > first // size:
            for i in range(self.computed[seq_id] // size):
                self.known.setdefault(tuple(self.tokens[seq_id][: (i + 1) * size]), self.blocks[seq_id][i])

    @rule(target=ids, seq_id=ids)
    def fork(self, seq_id):
        new_id = self.next_id
        if self.computed[seq_id] < len(self.tokens[seq_id]):
            self.refused(lambda pool: pool.fork(seq_id, new_id))
            return multiple()
        self.pool = self.after(lambda pool: pool.fork(seq_id, new_id))
        for table in (self.tokens, self.computed, self.blocks):
            table[new_id] = table[seq_id]
        self.blocks[new_id] = self.blocks[seq_id][: self.blocks_for(len(self.tokens[seq_id]))]  # no look-ahead
        self.next_id += 1
        return new_id

    @rule(seq_id=consumes(ids))
    def free(self, seq_id):
        self.pool = self.after(lambda pool: pool.free(seq_id))
        for table in (self.tokens, self.computed, self.blocks):
            del table[seq_id]

    @rule(seq_id=ids)
    def wrong_names_are_refused(self, seq_id):
        unknown = "nobody"
        self.refused(lambda pool: pool.allocate(seq_id, [1]))
        self.refused(lambda pool: pool.fork(seq_id, seq_id))
        self.refused(lambda pool: pool.append(unknown, [1]))
        self.refused(lambda pool: pool.mark_computed(unknown))
        self.refused(lambda pool: pool.fork(unknown, "new"))
        self.refused(lambda pool: pool.free(unknown))

    @invariant()
    def pool_agrees_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        holders = self.holders()
        assert self.pool.holders == tuple(holders[block] for block in range(self.pool.num_blocks))
        assert sorted(self.pool.free_order) == [block for block in range(self.pool.num_blocks) if not holders[block]]
        assert self.pool.num_free == len(self.pool.free_order)
        assert sorted(self.pool.sequences) == sorted(self.tokens)
        assert sorted(self.pool.block_of.values()) == sorted(self.known.values())
        assert {block: digest for digest, block in self.pool.block_of.items()} == dict(self.pool.digest_of)
        for seq_id, tokens in self.tokens.items():
            sequence = self.pool[seq_id]
            assert sequence.token_ids == tuple(tokens)
            assert sequence.block_ids == tuple(self.blocks[seq_id])
            assert (sequence.num_computed, sequence.num_new) == (self.computed[seq_id], len(tokens) - self.computed[seq_id])

    @invariant()
    def computed_rows_come_from_the_sequence_s_own_prefix(self):
        if not hasattr(self, "pool"):
            return
        for seq_id, tokens in self.tokens.items():
            for position in range(self.computed[seq_id]):
                block, offset = divmod(position, self.pool.block_size)
                assert self.rows[self.blocks[seq_id][block], offset] == tuple(tokens[: position + 1])

    def teardown(self):
        for pool, before in getattr(self, "history", ()):
            assert plain_pool(pool) == before


def plain_pool(pool):
    """A copy of everything that a pool holds."""
    return {
        "sequences": dict(pool.sequences),
        "holders": tuple(pool.holders),
        "free_order": tuple(pool.free_order),
        "block_of": dict(pool.block_of),
        "digest_of": dict(pool.digest_of),
    }


TestPool = PoolMachine.TestCase
TestPool.settings = settings(REPEATABLE, max_examples=100, stateful_step_count=40)


def test_lookahead_room_of_a_forked_sequence_is_its_own():
    pool = BlockPool.empty(num_blocks=8, block_size=4)
    pool = pool.allocate("a", [1, 2, 3], lookahead=6).mark_computed("a").fork("a", "b")
    pool, _ = pool.append("a", [4], lookahead=4)
    room = pool["a"].block_ids[:2]
    assert [pool.holders[block] for block in room] == [1, 1]


# Cache writes --------------------------------------------------------------------------------------------------------

CACHE_DTYPES = st.sampled_from([F64, F32, BF16, F16])


@st.composite
def caches(draw):
    """A random cache, NaN in some rows, and a generator."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(2, 9)))
    cache = torch.randn(shape, generator=generator).to(draw(CACHE_DTYPES))
    cache[torch.rand(shape[:2], generator=generator) < 0.3] = torch.nan
    return cache, generator


def slots_to_write(draw, num_slots, skipped):
    """Each valid slot at most once, skipped ones between them."""
    valid = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=8))
    return draw(st.permutations(valid + draw(st.lists(skipped, max_size=4))))


@settings(REPEATABLE, max_examples=200)
@given(made=caches(), dtype=CACHE_DTYPES, data=st.data())
def test_write_meets_a_loop(made, dtype, data):
    cache, generator = made
    num_blocks, block_size, width = cache.shape
    slots = slots_to_write(data.draw, num_blocks * block_size, st.just(-1))
    rank = data.draw(st.integers(1, width - 1))
    values = torch.randn(len(slots), width, generator=generator).to(dtype)
    values[torch.tensor(slots, dtype=torch.int64) < 0] = torch.nan
    expected = cache.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, slot % block_size] = values[row].to(cache.dtype)
    write_latent_cache_(cache, values[:, :rank], values[:, rank:], torch.tensor(slots, dtype=torch.int64))
    assert same_bits(cache, expected)


@settings(REPEATABLE, max_examples=60)
@given(made=caches(), data=st.data())
def test_refused_writes_leave_the_cache(made, data):
    cache, generator = made
    num_slots, width = cache.shape[0] * cache.shape[1], cache.shape[2]
    good = slots_to_write(data.draw, num_slots, st.just(-1))
    bad = [num_slots, num_slots + 100, -2, -num_slots - 1, 2**40, *(slot for slot in good[:1] if slot >= 0)]
    slots = data.draw(st.permutations([*good, data.draw(st.sampled_from(bad))]))
    values, before = torch.randn(len(slots), width, generator=generator), cache.clone()
    with pytest.raises(CacheError, match="slot_mapping"):
        write_latent_cache_(cache, values[:, :1], values[:, 1:], torch.tensor(slots))
    assert same_bits(cache, before)


@settings(REPEATABLE, max_examples=200)
@given(made=caches(), dtype=CACHE_DTYPES, data=st.data())
def test_unchecked_write_meets_a_loop(made, dtype, data):
    cache, generator = made
    rows = cache.flatten(0, 1)
    outside = st.sampled_from([-1, -2, -len(rows), len(rows), len(rows) + 1, 2**40])
    slots = slots_to_write(data.draw, len(rows), outside)
    values = torch.randn(len(slots), rows.shape[1], generator=generator).to(rows.dtype)
    expected = rows.clone()
    for row, slot in enumerate(slots):
        if 0 <= slot < len(rows):
            expected[slot] = values[row]
        else:
            values[row] = torch.nan
    _write_unchecked_(rows, values, torch.tensor(slots, dtype=torch.int64))
    assert same_bits(rows, expected)


@pytest.mark.parametrize(
    "slots", [[], [-1], [-1, -1, 99], [2], [2, -1, 4], [-1, 0], [0, -1, -1], [5, 0], [6, 5], [0, 1, 2, 3, 4, 5]], ids=str
)
def test_unchecked_write_at_the_edges(slots):
    rows = torch.arange(18.0).reshape(6, 3)
    rows[0] = torch.nan
    values = torch.full((len(slots), 3), -1.0)
    expected = rows.clone()
    for slot in slots:
        if 0 <= slot < 6:
            expected[slot] = -1.0
    _write_unchecked_(rows, values, torch.tensor(slots, dtype=torch.int64))
    assert same_bits(rows, expected)


def test_unchecked_write_to_a_cache_without_blocks():
    rows = torch.zeros(0, 3)
    _write_unchecked_(rows, torch.ones(2, 3), torch.tensor([0, -1]))
    assert rows.shape == (0, 3)


@settings(REPEATABLE, max_examples=150)
@given(made=caches(), dtype=CACHE_DTYPES, spare=st.integers(0, 3), data=st.data())
def test_gather_meets_a_loop(made, dtype, spare, data):
    cache, _ = made
    num_blocks, block_size, width = cache.shape
    slots = data.draw(st.lists(st.integers(0, num_blocks * block_size - 1), max_size=12))
    before, out = cache.clone(), torch.full((len(slots) + spare, width), 7.0, dtype=dtype)
    expected = out.clone()
    for row, slot in enumerate(slots):
        expected[row] = cache[slot // block_size, slot % block_size].to(dtype)
    gathered = gather_latent_cache(cache, torch.tensor(slots, dtype=torch.int64), out=out)
    assert same_bits(out, expected)
    assert same_bits(gathered, expected[: len(slots)])
    assert same_bits(cache, before)


@st.composite
def block_pairs(draw, num_sources, num_destinations):
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True, max_size=num_destinations))
    return [(draw(st.integers(0, num_sources - 1)), destination) for destination in destinations]


@settings(REPEATABLE, max_examples=150)
@given(made=caches(), dtype=st.sampled_from([torch.int32, torch.int64]), data=st.data())
def test_copy_and_swap_meet_a_loop(made, dtype, data):
    cache, generator = made
    layers = [cache, cache.flip(0).contiguous()]
    pairs = data.draw(block_pairs(len(cache), len(cache)))
    expected = [layer.clone() for layer in layers]
    for layer, target in zip(layers, expected, strict=True):
        for source, destination in pairs:
            target[destination] = layer[source]
    copy_blocks_(layers, torch.tensor(pairs, dtype=dtype).reshape(-1, 2))
    assert all(map(same_bits, layers, expected))

    other = torch.randn((data.draw(st.integers(1, 6)), *cache.shape[1:]), generator=generator).to(cache.dtype)
    pairs = data.draw(block_pairs(len(cache), len(other)))
    before, expected_other = cache.clone(), other.clone()
    for source, destination in pairs:
        expected_other[destination] = cache[source]
    swap_blocks_(cache, other, torch.tensor(pairs, dtype=dtype).reshape(-1, 2))
    assert same_bits(other, expected_other)
    assert same_bits(cache, before)


@settings(REPEATABLE, max_examples=60)
@given(made=caches(), data=st.data())
def test_refused_copies_leave_the_caches(made, data):
    cache, _ = made
    pairs = data.draw(block_pairs(len(cache), len(cache)))
    bad = [(0, len(cache)), (len(cache), 0), (-1, 0), (0, -1), *((0, destination) for _, destination in pairs[:1])]
    pairs = torch.tensor(data.draw(st.permutations([*pairs, data.draw(st.sampled_from(bad))])))
    before, other = cache.clone(), cache.clone()
    for operation in (lambda: copy_blocks_([cache, other], pairs), lambda: swap_blocks_(cache, other, pairs)):
        with pytest.raises(CacheError, match="src_to_dst"):
            operation()
        assert same_bits(cache, before)
        assert same_bits(other, before)


def test_look_ahead_blocks_that_others_hold_are_no_room():
    def steps_left(*tables):
        return build_metadata([decode_group(3, table) for table in tables], block_size=4).decode.steps_left

    assert steps_left([0, 1, 2], [5, 6, 7]) == 9
    assert steps_left([0, 1, 2], [5, 6, 2]) == 5
    assert steps_left([0, 2, 1], [5, 2, 7]) == 1
    assert steps_left([0, 1, 2], [5, 0, 7]) == 1
    assert steps_left([0, 1, 1], [5, 6, 7]) == 1
    assert steps_left([0], [5, 6, 7]) == 1
    mixed = build_metadata([prompt_group(3, [0, 1]), decode_group(3, [5, 1])], block_size=4)
    assert (mixed.prefill.steps_left, mixed.decode.steps_left) == (1, 1)
