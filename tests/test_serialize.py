"""Records go to JSON and come back as they were; what is no record gives one clear error."""

from __future__ import annotations

import json
import random
import re

import attrs
import numpy as np
import pytest
import torch

from mla import (
    DecodeGraphState,
    LatentCacheSpec,
    MLADims,
    RopeSpec,
    SequenceGroup,
    YarnSpec,
    build_metadata,
    decode_group,
    prompt_group,
    serialize,
)
from mla.errors import GoldenError, MLAError
from mla.serialize import dumps, from_json, loads, parse_json, to_json

YARN = YarnSpec(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1 / 3)
ROPE = RopeSpec(dim=64, interleaved=False, theta=1e6, yarn=YARN)
DIMS = MLADims(
    num_heads=3, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=96, rope=ROPE, q_lora_rank=7
)
SPEC = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=16, dtype=torch.bfloat16)
SAMPLES = SequenceGroup(
    is_prompt=False,
    query_lens=(1, 2),
    context_lens=(4, 30),
    block_ids=(np.array([3], np.uint16), [1, 7]),
    seq_lens=(5, 32),
    seq_ids=(-1, 2**62),
    multi_modal_placeholder_map={"image": [0, 1.5, None, True, {"é": "x"}], "empty": {}},
)


def same(a, b):
    """Whether two values are the same, tensors and arrays with their dtypes, numbers with their types."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if attrs.has(type(a)):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in attrs.fields(type(a)))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("record", [YARN, ROPE, DIMS, SPEC], ids=lambda record: type(record).__name__)
def test_plain_records_come_back_equal(record):
    back = loads(dumps(record))
    assert back == record
    assert same(back, record)


def test_groups_come_back_with_their_arrays_and_maps():
    back = loads(dumps(SAMPLES))
    assert back.block_ids[0].dtype == np.uint16
    assert back.block_ids[1] == (1, 7)  # a list comes back as a tuple
    assert same(back, attrs.evolve(SAMPLES, block_ids=(SAMPLES.block_ids[0], (1, 7))))
    assert same(loads(dumps(prompt_group(3))), prompt_group(3))


def random_metadata(seed):
    """A step of prompts and decoding sequences, with pages, context and padding now and then."""
    pick = random.Random(seed)
    bs, block, groups = pick.choice([1, 4, 16]), 0, []
    for is_prompt in (True, False):
        for _ in range(pick.randrange(1, 4)):
            query, context = pick.randrange(1, 6), pick.choice([0, pick.randrange(40)])
            blocks = list(range(block, block := block + -(-(query + context) // bs) + pick.randrange(2)))
            if is_prompt:
                groups.append(prompt_group(query, blocks, context_len=context))
            else:
                groups.append(decode_group(query + context, blocks, query_len=query))
    return build_metadata(
        groups,
        block_size=bs,
        page_sizes=pick.choice([(), (1,), (1, bs)[: 1 + (bs > 1)]]),
        context_chunk_tokens=pick.choice([16, 4096]),
        pad_decodes_to=pick.choice([None, 5]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_metadata_come_back_whole_and_in_parts(seed):
    metadata = random_metadata(seed)
    back = loads(dumps(metadata))
    assert same(back, metadata)
    assert dumps(back) == dumps(metadata)
    parts = [metadata.prefill, metadata.decode, *metadata.prefill.context_chunks, *metadata.decode.paged_kv]
    for part in parts:
        assert same(loads(dumps(part)), part)


def test_profile_runs_and_records_over_buffers_come_back():
    profile = build_metadata([prompt_group(3), prompt_group(2)], block_size=16)
    assert same(loads(dumps(profile)), profile)
    state = DecodeGraphState(max_num_seqs=4, max_seq_len=64, block_size=16, num_blocks=8)
    over = state.load_(build_metadata([decode_group(20, [1, 3])], block_size=16)).decode
    assert over.over_buffers
    assert same(loads(dumps(over)), over)


def test_an_empty_table_keeps_its_shape():
    metadata = build_metadata([decode_group(0, [], query_len=0)], block_size=16)
    assert metadata.decode.block_table.shape == (1, 0)
    assert same(loads(dumps(metadata)), metadata)


def changed(record, **fields):
    return {**to_json(record), **fields}


METADATA = build_metadata([decode_group(20, [1, 3])], block_size=16)


def with_tensor(**fields):
    """The JSON of metadata whose slots are said otherwise."""
    data = to_json(METADATA)
    return {**data, "slot_mapping": {**data["slot_mapping"], **fields}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "type: expected one of SequenceGroup, MLADims, .*, got list"),
        ({"type": "Exception"}, "type: expected one of .*, got Exception"),
        ({"type": ["MLADims"]}, "type: expected one of"),
        (changed(ROPE, size=3), "RopeSpec: expected fields of dim, interleaved, theta, yarn, got size"),
        ({"type": "RopeSpec", "dim": 64}, "RopeSpec.interleaved: expected a value, got none"),
        (changed(ROPE, interleaved=1), "RopeSpec.interleaved: expected bool, got 1"),
        (changed(ROPE, dim=True), "RopeSpec.dim: expected an integer of 64 bits, got True"),
        (changed(ROPE, dim=64.0), "RopeSpec.dim: expected an integer of 64 bits, got 64.0"),
        (changed(ROPE, dim=2**63), f"RopeSpec.dim: expected an integer of 64 bits, got {2**63}"),
        (changed(ROPE, dim=63), "RopeSpec.dim: expected an even number of rotated columns, got 63"),
        (changed(ROPE, theta="1e4"), "RopeSpec.theta: expected a finite number, got 1e4"),
        (changed(ROPE, yarn=[]), r"RopeSpec.yarn: expected an object with the fields of YarnSpec, got \[\]"),
        (changed(ROPE, yarn={**to_json(YARN)}), "RopeSpec.yarn: expected fields of .*, got type"),
        (changed(DIMS, softmax_scale=-1.0), "MLADims.softmax_scale: expected a finite number > 0, got -1.0"),
        (changed(SPEC, dtype="int8"), "LatentCacheSpec.dtype: expected one of float64, float32, bfloat16, float16, got int8"),
        (changed(SPEC, dtype=4), "LatentCacheSpec.dtype: expected one of .*, got 4"),
        (changed(SAMPLES, query_lens=3), "SequenceGroup.query_lens: expected a list, got 3"),
        (changed(SAMPLES, query_lens=[1, "2"]), r"SequenceGroup.query_lens\[1\]: expected an integer of 64 bits, got 2"),
        (
            changed(SAMPLES, query_lens=[1]),
            "SequenceGroup.context_lens: expected 1 entries, one per entry of query_lens, got 2",
        ),
        (changed(SAMPLES, block_ids=[[1], 2]), r"SequenceGroup.block_ids\[1\]: expected a list, got 2"),
        (changed(SAMPLES, block_ids=[[1], [None]]), r"SequenceGroup.block_ids\[1\]\[0\]: expected an integer"),
        (changed(SAMPLES, multi_modal_placeholder_map=[]), "SequenceGroup.multi_modal_placeholder_map: expected an object"),
        (changed(SAMPLES, prefix_cache_hit=None), "SequenceGroup.prefix_cache_hit: expected bool, got None"),
        (with_tensor(data=[]), r"MLAMetadata.slot_mapping.data: expected 1 integers for shape \(1,\), got 0 of them"),
        (with_tensor(data="x"), "MLAMetadata.slot_mapping.data: expected 1 integers for .*, got x"),
        (with_tensor(data=[1.5]), r"MLAMetadata.slot_mapping.data\[0\]: expected an integer of int64, got 1.5"),
        (with_tensor(data=[2**70]), r"MLAMetadata.slot_mapping.data\[0\]: expected an integer of int64"),
        (with_tensor(dtype="int32"), "MLAMetadata.slot_mapping: expected int64, got torch.int32"),
        (with_tensor(dtype="uint8", data=[300]), r"MLAMetadata.slot_mapping.data\[0\]: expected an integer of uint8, got 300"),
        (with_tensor(dtype="object"), "MLAMetadata.slot_mapping.dtype: expected one of int64, .*, got object"),
        (with_tensor(shape=[10**12]), f"MLAMetadata.slot_mapping.shape: expected one or two integers in 0..{2**31 - 1}"),
        (with_tensor(shape=[10**9]), f"MLAMetadata.slot_mapping.data: expected {10**9} integers"),
        (with_tensor(shape=[-1]), "MLAMetadata.slot_mapping.shape: expected one or two integers"),
        (with_tensor(shape=[1] * 3), "MLAMetadata.slot_mapping.shape: expected one or two integers"),
        (with_tensor(extra=1), "MLAMetadata.slot_mapping: expected an object of dtype, shape and data"),
        (changed(METADATA, decode=None), "MLAMetadata.prefill, decode: expected at least one part, got None for both"),
        (changed(METADATA, is_profile_run=0), "MLAMetadata.is_profile_run: expected bool, got 0"),
        (changed(METADATA, block_size=8), "MLAMetadata.decode.block_size: expected 8, got 16"),
    ],
)
def test_data_that_are_no_record_give_one_clear_error(data, message):
    with pytest.raises(GoldenError, match=f"^{message}") as caught:
        loads(json.dumps(data))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "json: expected JSON, got Expecting value"),
        ("[1, 2", "json: expected JSON, got"),
        (b"\xff\xfe", "json: expected JSON, got"),
        ("[" * 200_000, "json: expected JSON of a few levels, got brackets nested too deeply"),
        ('{"a":' * 200_000, "json: expected JSON of a few levels, got brackets nested too deeply"),
        ("[NaN]", "json: expected finite numbers, got NaN"),
        ("[-Infinity]", "json: expected finite numbers, got -Infinity"),
        ("1e999", "json: expected finite numbers, got 1e999"),
        ('{"dim": 1, "dim": 2}', "json: expected every key once, got 'dim' twice"),
        ("9" * 10_000, "json: expected JSON, got Exceeds the limit"),
        (3, "json: expected JSON text of at most 67108864 bytes, got int 3"),
    ],
)
def test_text_that_is_no_json_gives_one_clear_error(text, message):
    with pytest.raises(GoldenError, match=f"^{re.escape(message)}") as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_long_text_is_not_parsed(monkeypatch):
    monkeypatch.setattr(serialize, "MAX_JSON_BYTES", 10)
    assert parse_json("[1, 2, 3]") == [1, 2, 3]
    with pytest.raises(GoldenError, match="json: expected JSON text of at most 10 bytes, got 11 bytes"):
        parse_json("[1, 2, 3, ]")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (3, "record: expected one of .*, got int 3"),
        (
            attrs.evolve(SAMPLES, multi_modal_placeholder_map={"a": (1,)}),
            r"multi_modal_placeholder_map.a: expected JSON values",
        ),
        (
            attrs.evolve(SAMPLES, multi_modal_placeholder_map={1: 2}),
            "multi_modal_placeholder_map: expected keys that are strings",
        ),
        (attrs.evolve(SAMPLES, multi_modal_placeholder_map={"a": [np.nan]}), r"placeholder_map.a\[0\]: expected JSON values"),
        (attrs.evolve(SAMPLES, multi_modal_placeholder_map={"a": torch.zeros(1)}), "expected JSON values .*, got Tensor"),
        (attrs.evolve(SAMPLES, query_lens=(1, 2.0)), r"SequenceGroup.query_lens\[1\]: expected an integer of 64 bits, got 2.0"),
        (attrs.evolve(SAMPLES, block_ids=(np.zeros(1), [1])), r"block_ids\[0\]: expected one of int64, .*, got float64"),
        (attrs.evolve(SAMPLES, block_ids=(3, [1])), r"SequenceGroup.block_ids\[0\]: expected Iterable, got 3"),
    ],
)
def test_what_json_cannot_hold_is_refused(record, message):
    with pytest.raises(GoldenError, match=message):
        dumps(record)


def test_defaults_may_be_left_out():
    assert from_json({"type": "RopeSpec", "dim": 2, "interleaved": True}) == RopeSpec(dim=2, interleaved=True)


def mutated(data, pick):
    """The data with one value somewhere changed to nonsense."""
    nonsense = [None, True, -1, 2**64, 1.5, "x", [], {}, [[]], {"dtype": "int32"}, [None] * 3]
    if isinstance(data, dict) and data and pick.random() < 0.9:
        key = pick.choice(list(data))
        return {**data, key: mutated(data[key], pick)}
    if isinstance(data, list) and data and pick.random() < 0.9:
        i = pick.randrange(len(data))
        return [*data[:i], mutated(data[i], pick), *data[i + 1 :]]
    return pick.choice(nonsense)


@pytest.mark.parametrize("record", [METADATA, SAMPLES, DIMS, random_metadata(3)], ids=["metadata", "group", "dims", "chunks"])
def test_nonsense_anywhere_gives_an_error_of_the_family_or_a_record(record):
    refused = 0
    for seed in range(300):
        data = mutated(to_json(record), random.Random(seed))
        try:
            from_json(data)
        except MLAError:
            refused += 1
    assert refused > 200
