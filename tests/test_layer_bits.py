"""Bits of the whole layer on the CPU: a sequence gives the same ones alone, in a batch, padded, elsewhere, on any threads."""

from __future__ import annotations

import attrs
import pytest
import torch
from batches import Row, row_groups, shuffled_tables

from mla import MLADims, MLAWeights, RopeSpec, build_metadata, kernel_set, mla_attention, rope_table

HIDDEN_SIZE = 256
CHUNK = 64
THREADS = (1, 2)
BLOCK_SIZES = (1, 64)  # beside 16, which everything else runs on
STEPS = {
    "one-shot prefill": [Row(query_len=n) for n in (1, 2, 3, 5, 15, 16, 17, 33, 64, 127, 150)],
    "chunked prefill": [
        Row(query_len=n, context_len=context)
        for n, context in ((1, 1), (2, 63), (3, 64), (1, 65), (7, 130), (16, 40), (70, 200), (33, 17))
    ],
    "decode": [Row(query_len=1, context_len=n, is_prompt=False) for n in (0, 1, 14, 15, 16, 63, 64, 100, 255, 256, 300)],
    "multi-token decode": [
        Row(query_len=n, context_len=context, is_prompt=False)
        for n, context in ((2, 0), (3, 14), (2, 62), (4, 63), (5, 200), (1, 31), (8, 257))
    ],
}
MATES = [
    Row(query_len=19),
    Row(query_len=45, context_len=70),
    Row(query_len=1, context_len=90, is_prompt=False),
    Row(query_len=3, context_len=35, is_prompt=False),
]


def make_weights(dtype, num_heads):
    dims = MLADims(
        num_heads=num_heads,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        q_lora_rank=80,
        rope=RopeSpec(dim=16, interleaved=True),
    )
    generator = torch.Generator().manual_seed(num_heads)

    def matrix(rows, columns):
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    def vector(size, mean):
        return (torch.randn(size, generator=generator) * 0.3 + mean).to(dtype)

    return MLAWeights(
        dims=dims,
        q_a_proj=matrix(80, HIDDEN_SIZE),
        q_a_layernorm=vector(80, 1.0),
        q_b_proj=matrix(num_heads * dims.qk_head_dim, 80),
        kv_a_proj_with_mqa=matrix(dims.latent_dim, HIDDEN_SIZE),
        kv_a_layernorm=vector(64, 1.0),
        kv_b_proj=matrix(num_heads * (32 + 24), 64),
        o_proj=matrix(HIDDEN_SIZE, num_heads * 24),
        kv_a_proj_with_mqa_bias=vector(dims.latent_dim, 0.0),
        o_proj_bias=vector(HIDDEN_SIZE, 0.0),
    )


@attrs.frozen(kw_only=True, eq=False)
class Sequence:
    """A row with inputs of its own: the same wherever and with whomever it runs."""

    row: Row
    hidden: torch.Tensor
    context: torch.Tensor

    @classmethod
    def of(cls, row, weights, seed):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((row.query_len, HIDDEN_SIZE), (row.context_len, weights.dims.latent_dim))
        hidden, context = (torch.randn(shape, generator=generator).to(weights.dtype) for shape in shapes)
        return cls(row=row, hidden=hidden, context=context)


def run(sequences, weights, table, *, block_size=16, threads=2, seed=0, lookahead=0, **options):
    """Output and LSE of each sequence, in the order given; prompts are sorted before decoding sequences for the step."""
    order = sorted(range(len(sequences)), key=lambda i: not sequences[i].row.is_prompt)
    ordered = [sequences[i] for i in order]
    rows = [attrs.evolve(sequence.row, lookahead=lookahead) for sequence in ordered]
    tables, num_blocks = shuffled_tables(rows, block_size, seed=seed)
    cache = torch.full((num_blocks, block_size, weights.dims.latent_dim), torch.nan, dtype=weights.dtype)
    for sequence, blocks in zip(ordered, tables, strict=True):
        positions = torch.arange(sequence.row.context_len)
        slots = torch.tensor(blocks, dtype=torch.int64)[positions // block_size] * block_size + positions % block_size
        cache.view(-1, cache.shape[2])[slots] = sequence.context
    metadata = build_metadata(row_groups(rows, tables), block_size=block_size, context_chunk_tokens=CHUNK, **options)
    real = torch.cat([sequence.hidden for sequence in ordered])
    hidden = torch.full((metadata.num_tokens, HIDDEN_SIZE), torch.nan, dtype=weights.dtype)
    hidden[: len(real)] = real
    torch.set_num_threads(threads)
    out, lse = mla_attention(hidden, weights, cache, metadata, table, kernel_set("CPU_MLA"))
    lens = [row.query_len for row in rows]
    parts = zip(out[: len(real)].split(lens), lse[: len(real)].split(lens), strict=True)
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]


@pytest.mark.usefixtures("restore_num_threads")
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("num_heads", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_gives_the_same_bits_everywhere(dtype, num_heads, kind):
    weights = make_weights(dtype, num_heads)
    table = rope_table(weights.dims.rope, 512)
    sequences = [Sequence.of(row, weights, seed) for seed, row in enumerate(STEPS[kind])]
    mates = [Sequence.of(row, weights, 100 + seed) for seed, row in enumerate(MATES)]
    alone = [run([sequence], weights, table, threads=1)[0] for sequence in sequences]
    for out, lse in alone:
        assert bool(out.isfinite().all())
        assert bool(lse.isfinite().all())

    def differing(results):
        return [
            (sequence.row.query_len, sequence.row.context_len, name)
            for sequence, mine, theirs in zip(sequences, alone, results, strict=True)
            for name, a, b in zip(("out", "lse"), mine, theirs, strict=True)
            if not torch.equal(a, b)
        ]

    found = {}
    for threads in THREADS:
        variants = {
            "alone": [run([sequence], weights, table, threads=threads)[0] for sequence in sequences],
            "with spare blocks": [run([s], weights, table, threads=threads, seed=7, lookahead=2)[0] for s in sequences],
            "batch": run(sequences, weights, table, threads=threads, seed=8),
            "reversed batch": run(sequences[::-1], weights, table, threads=threads, seed=9)[::-1],
            "with mates": run([*mates, *sequences], weights, table, threads=threads, seed=10)[len(mates) :],
        }
        if sequences[0].row.is_prompt:
            wide = 10 * CHUNK
            variants["wide workspace"] = run(sequences, weights, table, threads=threads, context_workspace_tokens=wide)
        else:
            variants["padded alone"] = [run([s], weights, table, threads=threads, pad_decodes_to=6)[0] for s in sequences]
            variants["padded batch"] = run(sequences, weights, table, threads=threads, pad_decodes_to=len(sequences) + 5)
        for block_size in BLOCK_SIZES:
            variants[f"blocks of {block_size}"] = [
                run([s], weights, table, threads=threads, block_size=block_size, seed=11)[0] for s in sequences
            ]
            variants[f"batch on blocks of {block_size}"] = run(
                sequences, weights, table, threads=threads, block_size=block_size, seed=12
            )
        found |= {(threads, name): rows for name, results in variants.items() if (rows := differing(results))}
    assert not found


def test_the_comparison_notices_another_cut(monkeypatch):
    """Cutting the context elsewhere moves bits, so the test above can fail."""
    weights = make_weights(torch.float32, 4)
    table = rope_table(weights.dims.rope, 512)
    sequence = Sequence.of(Row(query_len=9, context_len=130), weights, 1)
    first = run([sequence], weights, table)[0]
    monkeypatch.setitem(globals(), "CHUNK", 48)
    second = run([sequence], weights, table)[0]
    assert not torch.equal(first[0], second[0])
    assert torch.allclose(first[0], second[0], rtol=1e-4, atol=1e-5)
