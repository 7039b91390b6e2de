"""Records as pytree nodes, and `torch.export` of a decoding step: saved, and loaded again in another process."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest
import torch
from batches import small_dims
from torch import nn
from torch.utils import _pytree as pytree

from mla import (
    LatentCacheSpec,
    MLAAttention,
    MLAMetadata,
    RopeSpec,
    YarnSpec,
    attend,
    build_metadata,
    decode_group,
    prompt_group,
    register_pytrees,
    rope_table,
)
from mla.compute.select import CPU_MLA

BLOCK_SIZE, HIDDEN = 16, 20
YARN = RopeSpec(dim=6, interleaved=True, yarn=YarnSpec(factor=4.0, original_max_position_embeddings=64))
DIMS = attrs.evolve(small_dims(2), q_lora_rank=12, rope=YARN)
TABLE = rope_table(DIMS.rope, 256)


@pytest.fixture(autouse=True)
def registered():
    register_pytrees()


def decoding_step(lens, *, width=2):
    """A step of sequences of these lengths, each with `width` blocks or more."""
    counts = [max(width, -(-n // BLOCK_SIZE)) for n in lens]
    blocks = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(len(lens))).tolist())
    groups = [decode_group(n, [next(blocks) for _ in range(count)]) for n, count in zip(lens, counts, strict=True)]
    return build_metadata(groups, block_size=BLOCK_SIZE)


def inputs_for(metadata, *, num_blocks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(num_blocks, BLOCK_SIZE, DIMS.latent_dim, generator=generator)
    return torch.randn(metadata.num_tokens, HIDDEN, generator=generator), cache, metadata, TABLE


class Attend(nn.Module):
    """`attend` with projections of one's own."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = nn.Parameter(torch.randn(DIMS.num_heads * (10 + 8), DIMS.kv_lora_rank))
        self.q_proj = nn.Parameter(torch.randn(HIDDEN, DIMS.num_heads * DIMS.qk_head_dim))

    def forward(self, hidden, latent_cache, metadata, table):
        q = (hidden[:, None] * self.q_proj.t()).sum(2).unflatten(1, (DIMS.num_heads, DIMS.qk_head_dim))
        return attend(
            q, hidden[:, : DIMS.kv_lora_rank].contiguous(), hidden[:, : DIMS.qk_rope_head_dim].contiguous(),
            latent_cache, metadata, kv_b_proj=self.kv_b_proj, dims=DIMS, kernels=CPU_MLA,
        )  # fmt: skip


def make_module(kind):
    torch.manual_seed(0)
    return Attend() if kind == "attend" else MLAAttention(DIMS, HIDDEN)


EXAMPLES = [([5, 18, 30], 2, 16), ([5, 40], 3, 12), ([4, 17, 23, 9, 6], 4, 30)]
OTHERS = [([5, 18, 30], 2, 16), ([31], 2, 5), ([100, 2, 64, 65], 2, 40), ([7] * 9, 3, 27)]


def export_step(module):
    """Lengths, batch and cache sizes are dynamic, as these examples differ in them."""
    examples = [inputs_for(decoding_step(lens, width=width), num_blocks=blocks) for lens, width, blocks in EXAMPLES]
    more = torch.export.AdditionalInputs()
    for inputs in examples[1:]:
        more.add(inputs)
    with torch.no_grad():
        return torch.export.export(module, examples[0], dynamic_shapes=more)


def assert_same_bits(program, module):
    run = program.module()
    for seed, (lens, width, num_blocks) in enumerate(OTHERS):
        pair = [inputs_for(decoding_step(lens, width=width), num_blocks=num_blocks, seed=seed) for _ in range(2)]
        with torch.no_grad():
            expected, actual = module(*pair[0]), run(*pair[1])
        for x, y in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
            assert torch.equal(x, y)
            assert x.isfinite().all()
        assert torch.equal(pair[0][1], pair[1][1])


@pytest.mark.parametrize("kind", ["attend", "MLAAttention"])
def test_an_exported_decoding_step_has_the_bits_of_eager_code(kind):
    module = make_module(kind)
    program = export_step(module)
    assert_same_bits(program, module)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"mla.cpu_mla_paged_decode.default", "mla.cpu_mla_write_latent_cache_.default"} <= targets


def test_a_module_is_as_before_after_its_export():
    module = make_module("MLAAttention")
    export_step(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    pair = [inputs_for(decoding_step([5, 18, 30]), num_blocks=16) for _ in range(2)]
    with torch.no_grad():
        assert torch.equal(compiled(*pair[0]), module(*pair[1]))
    assert module.weights.o_proj is module.o_proj.weight


def test_a_flag_is_a_constant_of_the_program():
    program = export_step(make_module("MLAAttention"))
    hidden, cache, metadata, table = inputs_for(decoding_step([5, 18, 30]), num_blocks=16)
    other = attrs.evolve(metadata, decode=attrs.evolve(metadata.decode, over_buffers=True))
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        program.module()(hidden, cache, other, table)


def test_prompts_export_too():
    module = make_module("MLAAttention")
    metadata = build_metadata(
        [prompt_group(3, [1, 2, 5], context_len=37), prompt_group(7, [4])], block_size=BLOCK_SIZE, context_chunk_tokens=16
    )
    pair = [inputs_for(metadata, num_blocks=8) for _ in range(2)]
    with torch.no_grad():
        program = torch.export.export(module, inputs_for(metadata, num_blocks=8))
        assert torch.equal(program.module()(*pair[0]), module(*pair[1]))
    assert torch.equal(pair[0][1], pair[1][1])


FRESH = """
import sys

import torch

import mla

folder = sys.argv[1]
mla.register_pytrees()
program = torch.export.load(folder + "/step.pt2")
for i, (arguments, expected, cache_after) in enumerate(torch.load(folder + "/cases.pt", weights_only=False)):
    hidden, cache, groups, block_size, table = arguments
    metadata = mla.build_metadata([mla.decode_group(n, blocks) for n, blocks in groups], block_size=block_size)
    with torch.no_grad():
        out = program.module()(hidden, cache, metadata, mla.RopeTable(**table))
    assert torch.equal(out, expected), i
    assert torch.equal(cache, cache_after), i
print("the same bits", i + 1)
"""


def test_a_saved_step_has_the_same_bits_in_a_fresh_process(tmp_path):
    module = make_module("MLAAttention")
    torch.export.save(export_step(module), tmp_path / "step.pt2")
    assert_same_bits(torch.export.load(tmp_path / "step.pt2"), module)
    cases = []
    for lens, width, num_blocks in OTHERS:
        metadata = decoding_step(lens, width=width)
        hidden, cache, _, table = inputs_for(metadata, num_blocks=num_blocks)
        before = cache.clone()
        with torch.no_grad():
            out = module(hidden, cache, metadata, table)
        groups = list(zip(lens, metadata.decode.block_table.tolist(), strict=True))
        cases.append(((hidden, before, groups, BLOCK_SIZE, attrs.asdict(table)), out, cache))
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run([sys.executable, "-P", "-c", FRESH, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == f"the same bits {len(OTHERS)}\n", done.stderr
    assert "error" not in done.stderr.lower()  # torch logs what it cannot load as data only


def test_records_load_as_data_only(tmp_path):
    record = mixed_record()
    torch.save((record, TABLE, DIMS), tmp_path / "records.pt")
    loaded, table, dims = torch.load(tmp_path / "records.pt", weights_only=True)
    assert torch.equal(loaded.prefill.context_chunks[1].slots, record.prefill.context_chunks[1].slots)
    assert torch.equal(table.cos, TABLE.cos)
    assert dims == DIMS


def test_registering_is_explicit_and_idempotent():
    code = (
        "import mla\n"
        "from torch.utils import _pytree\n"
        "from mla.pytrees import RECORDS, SPECS\n"
        "kinds = [*RECORDS, *SPECS]\n"
        "assert not any(kind in _pytree.SUPPORTED_NODES for kind in kinds)\n"
        "mla.register_pytrees()\n"
        "nodes = [_pytree.SUPPORTED_NODES[kind] for kind in kinds]\n"
        "mla.register_pytrees()\n"
        "assert nodes == [_pytree.SUPPORTED_NODES[kind] for kind in kinds]\n"
    )
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def mixed_record():
    groups = [prompt_group(3, [1, 2, 5], context_len=37), prompt_group(7, [4]), decode_group(5, [9])]
    groups[1] = attrs.evolve(groups[1], multi_modal_placeholder_map={"image": [1]})
    return build_metadata(groups, block_size=BLOCK_SIZE, context_chunk_tokens=16, page_sizes=(1, 4))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(mixed_record(), id="MLAMetadata"),
        pytest.param(build_metadata([prompt_group(4)], block_size=4), id="profile run"),
        pytest.param(TABLE, id="RopeTable"),
        pytest.param(MLAAttention(DIMS, HIDDEN, bias=True).weights, id="MLAWeights"),
    ],
)
def test_a_record_taken_apart_and_put_together_is_the_same(record):
    def fields(value):
        if attrs.has(type(value)) and type(value) not in (type(DIMS), LatentCacheSpec):
            return {name: fields(getattr(value, name)) for name in [f.name for f in attrs.fields(type(value))]}
        return [fields(item) for item in value] if isinstance(value, tuple) else value

    def same(x, y):
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(same(x[name], y[name]) for name in x)
        if isinstance(x, list):
            return len(x) == len(y) and all(map(same, x, y))
        return x is y or x == y

    leaves, spec = pytree.tree_flatten(record)
    assert any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert same(fields(pytree.tree_unflatten(leaves, spec)), fields(record))
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert again == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(record)[0]]
    assert len(set(paths)) == len(leaves)


def test_specs_are_constants_that_are_saved():
    spec = LatentCacheSpec(kv_lora_rank=16, qk_rope_head_dim=6, block_size=4, dtype=torch.bfloat16)
    for value in (DIMS, DIMS.rope, spec):
        leaves, structure = pytree.tree_flatten(value)
        assert leaves == []
        again = pytree.treespec_loads(pytree.treespec_dumps(structure))
        assert pytree.tree_unflatten([], again) == value
        assert again == structure
    assert pytree.tree_structure(DIMS) != pytree.tree_structure(attrs.evolve(DIMS, softmax_scale=1.0))


def test_tree_map_reaches_every_tensor_of_a_record():
    record = mixed_record()
    moved = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), record)
    assert isinstance(moved, MLAMetadata)
    for tensor in (moved.positions, moved.decode.block_table, moved.prefill.context_chunks[0].slots):
        assert tensor.is_meta
    assert moved.decode.paged_kv_of(4).paged_kv_indptr.is_meta
    assert moved.multi_modal_placeholder_maps == record.multi_modal_placeholder_maps
