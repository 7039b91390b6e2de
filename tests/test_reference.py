"""The specification itself: against attention written out, and its absorbed form against the unabsorbed one."""

from __future__ import annotations

import itertools
import math

import attrs
import pytest
import torch
from batches import Row, make_batch, small_dims
from compare import assert_close

from mla import KernelError, MLADims, RopeSpec, YarnSpec, build_metadata, prompt_group, rope_table
from mla.cache import write_latent_cache_
from mla.compute import absorb_query, apply_rope, merge_attn_states, project_output, reference

F64 = torch.float64


def filled(batch):
    """The batch with its new tokens in the cache."""
    write_latent_cache_(batch.latent_cache, batch.kv_c, batch.k_pe, batch.metadata.slot_mapping)
    return batch


def decode_rows(*lengths):
    return [Row(query_len=query_len, context_len=context_len, is_prompt=False) for query_len, context_len in lengths]


def written_out(q, k, v, *, first_position, softmax_scale):
    """Softmax attention of one sequence with a mask; query i stands at `first_position` + i among the keys."""
    scores = torch.einsum("thd,lhd->htl", q, k) * softmax_scale
    seen = torch.arange(len(k))[None, :] <= first_position + torch.arange(len(q))[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("htl,lhe->the", scores.softmax(-1), v), scores.logsumexp(-1).T


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("yarn", [None, YarnSpec(factor=40.0, original_max_position_embeddings=64, mscale_all_dim=1.0)])
def test_absorbed_equals_unabsorbed(num_heads, block_size, yarn):
    dims = small_dims(num_heads)
    # Built anew, since evolve would keep the scale.
    names = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dims = MLADims(**{name: getattr(dims, name) for name in names}, rope=attrs.evolve(dims.rope, yarn=yarn))
    rows = decode_rows((1, 0), (1, 30), (3, 14), (0, 9), (4, 0), (1, block_size - 1), (2, block_size))
    batch = filled(make_batch(rows, block_size=block_size, dtype=F64, seed=1, dims=dims, q_scale=2.0, pad_decodes_to=9))
    decode, options = batch.metadata.decode, {"kv_b_proj": batch.kv_b_proj, "dims": dims}
    latent, lse = reference.paged_decode(
        absorb_query(batch.q, batch.kv_b_proj, dims),
        batch.latent_cache,
        decode,
        kv_lora_rank=dims.kv_lora_rank,
        softmax_scale=dims.softmax_scale,
    )
    expected_out, expected_lse = reference.latent_attention(batch.q, batch.latent_cache, decode, **options)
    assert_close(project_output(latent, batch.kv_b_proj, dims), expected_out, rel=1e-12)
    assert_close(lse, expected_lse, rel=1e-12)


def test_latent_attention_equals_attention_written_out():
    dims = small_dims()
    rows = [Row(query_len=n, context_len=context_len) for n, context_len in ((5, 0), (3, 11), (0, 4), (1, 7))]
    batch = filled(make_batch(rows, block_size=4, dtype=F64, seed=2, dims=dims))
    part = batch.metadata.prefill
    out, lse = reference.latent_attention(batch.q, batch.latent_cache, part, kv_b_proj=batch.kv_b_proj, dims=dims)
    weight = batch.kv_b_proj.view(dims.num_heads, -1, dims.kv_lora_rank)
    starts = part.query_start_loc.tolist()
    for i, row in enumerate(rows):
        blocks = batch.latent_cache[part.block_table[i].long()]
        latent, k_pe = blocks.flatten(0, 1)[: row.seq_len].split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1)
        keys = torch.stack(
            [torch.cat([latent @ weight[h, : dims.qk_nope_head_dim].T, k_pe], dim=1) for h in range(dims.num_heads)], dim=1
        )
        values = torch.stack([latent @ weight[h, dims.qk_nope_head_dim :].T for h in range(dims.num_heads)], dim=1)
        tokens = slice(starts[i], starts[i + 1])
        expected_out, expected_lse = written_out(
            batch.q[tokens], keys, values, first_position=row.context_len, softmax_scale=dims.softmax_scale
        )
        assert_close(out[tokens], expected_out, rel=1e-12)
        assert_close(lse[tokens], expected_lse, rel=1e-12)


def varlen(query_lens, kv_lens, *, causal, q_scale=1.0, softmax_scale=0.3, v_head_dim=4):
    """Inputs and result of the reference, sequence by sequence."""
    generator = torch.Generator().manual_seed(4)
    total_q, total_kv = sum(query_lens), sum(kv_lens)
    q = torch.randn(total_q, 2, 6, generator=generator, dtype=F64) * q_scale
    k = torch.randn(total_kv, 2, 6, generator=generator, dtype=F64)
    v = torch.randn(total_kv, 2, v_head_dim, generator=generator, dtype=F64)
    starts = [torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (query_lens, kv_lens)]
    out, lse = reference.varlen_attention(
        q,
        k,
        v,
        query_start_loc=starts[0],
        kv_start_loc=starts[1],
        max_query_len=max(query_lens),
        max_kv_len=max(kv_lens),
        causal=causal,
        softmax_scale=softmax_scale,
    )
    parts = [x.split(lens) for x, lens in ((q, query_lens), (k, kv_lens), (v, kv_lens), (out, query_lens), (lse, query_lens))]
    return zip(*parts, strict=True)


@pytest.mark.parametrize("q_scale", [1.0, 300.0])
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_attention_equals_softmax_written_out(causal, q_scale):
    query_lens, kv_lens = [5, 1, 3, 2, 0], [5, 8, 9, 2, 3]
    for q, k, v, out, lse in varlen(query_lens, kv_lens, causal=causal, q_scale=q_scale):
        first = len(k) - len(q) if causal else len(k)
        expected_out, expected_lse = written_out(q, k, v, first_position=first, softmax_scale=0.3)
        assert_close(out, expected_out, rel=1e-12)
        assert_close(lse, expected_lse, rel=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_keys_are_empty(causal):
    for q, k, _, out, lse in varlen([2, 3, 1], [0, 1, 4], causal=causal):
        hidden = len(q) if not len(k) else max(len(q) - len(k), 0) if causal else 0
        assert not out[:hidden].any()
        assert bool((lse[:hidden] == -torch.inf).all())
        assert bool(lse[hidden:].isfinite().all())


def test_decode_rows_without_keys_are_empty():
    batch = filled(make_batch(decode_rows((0, 0), (2, 3), (0, 5)), block_size=4, dtype=F64, seed=5, pad_decodes_to=5))
    for out, lse in (
        reference.latent_attention(
            batch.q, batch.latent_cache, batch.metadata.decode, kv_b_proj=batch.kv_b_proj, dims=batch.dims
        ),
        reference.paged_decode(
            absorb_query(batch.q, batch.kv_b_proj, batch.dims),
            batch.latent_cache,
            batch.metadata.decode,
            kv_lora_rank=batch.dims.kv_lora_rank,
            softmax_scale=1.0,
        ),
    ):
        assert len(out) == 2 + 2 * 2
        assert not out[2:].any()
        assert bool((lse[2:] == -torch.inf).all())
        assert bool(out[:2].all())


def test_causal_is_aligned_at_the_end():
    # With equal scores a row averages the values that it sees: keys 0 .. 3, then 0 .. 4.
    starts = [torch.tensor(s, dtype=torch.int32) for s in ([0, 2], [0, 5])]
    out, lse = reference.varlen_attention(
        torch.zeros(2, 1, 3),
        torch.randn(5, 1, 3),
        torch.arange(5.0).view(5, 1, 1),
        query_start_loc=starts[0],
        kv_start_loc=starts[1],
        max_query_len=2,
        max_kv_len=5,
        causal=True,
        softmax_scale=1.0,
    )
    assert_close(out.flatten(), torch.tensor([1.5, 2.0]), rel=1e-15)
    assert_close(lse.flatten(), torch.tensor([4.0, 5.0], dtype=F64).log(), rel=1e-15)


def test_several_new_tokens_see_one_key_more_each():
    batch = make_batch(decode_rows((3, 4)), block_size=2, dtype=F64, seed=6)
    batch.q.zero_()
    _, lse = reference.latent_attention(
        batch.q, filled(batch).latent_cache, batch.metadata.decode, kv_b_proj=batch.kv_b_proj, dims=batch.dims
    )
    assert_close(lse, torch.tensor([5.0, 6.0, 7.0], dtype=F64).log()[:, None].expand(3, batch.dims.num_heads), rel=1e-15)


@pytest.mark.parametrize("cut", range(10))
def test_merging_two_halves_gives_the_whole(cut):
    query_lens, kv_lens = [4, 2], [9, 9]
    for q, k, v, out, lse in varlen(query_lens, kv_lens, causal=False):
        halves = []
        for keys in (slice(0, cut), slice(cut, None)):
            locs = [torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k[keys])]
            halves += reference.varlen_attention(
                q,
                k[keys],
                v[keys],
                query_start_loc=locs[0],
                kv_start_loc=locs[1],
                max_query_len=len(q),
                max_kv_len=9,
                causal=False,
                softmax_scale=0.3,
            )
        merged_out, merged_lse = merge_attn_states(*halves)
        assert_close(merged_out, out, rel=1e-12)
        assert_close(merged_lse, lse, rel=1e-12)


def test_unread_memory_does_not_matter():
    rows = decode_rows((2, 3), (1, 8))
    outs = []
    for poison in (torch.nan, 0.0, torch.inf):
        batch = filled(make_batch(rows, block_size=4, dtype=F64, seed=7))
        batch.latent_cache.masked_fill_(batch.latent_cache.isnan(), poison)
        outs.append(
            reference.latent_attention(
                batch.q, batch.latent_cache, batch.metadata.decode, kv_b_proj=batch.kv_b_proj, dims=batch.dims
            )[0]
        )
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_narrow_inputs_are_widened_exactly():
    batch = filled(make_batch(decode_rows((2, 30)), block_size=16, dtype=torch.bfloat16, seed=8))
    narrow = (batch.q, batch.latent_cache, batch.kv_b_proj)
    outs = [
        reference.latent_attention(q, cache, batch.metadata.decode, kv_b_proj=weight, dims=batch.dims)[0]
        for q, cache, weight in (narrow, [x.double() for x in narrow])
    ]
    assert outs[0].dtype == F64
    assert torch.equal(*outs)


def test_a_profile_run_has_nothing_to_read():
    batch = make_batch([Row(query_len=3)], block_size=4, dtype=F64, seed=9)
    profile = build_metadata([prompt_group(3)], block_size=4)
    with pytest.raises(KernelError, match="metadata: expected a block table, got a profile run"):
        reference.latent_attention(batch.q, batch.latent_cache, profile.prefill, kv_b_proj=batch.kv_b_proj, dims=batch.dims)


def dims_with(yarn=None, interleaved=True):
    return MLADims(
        num_heads=2,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeSpec(dim=64, interleaved=interleaved, yarn=yarn),
    )


def yarn_of(**numbers):
    return YarnSpec(factor=40.0, original_max_position_embeddings=4096, **numbers)


@pytest.mark.parametrize(
    ("yarn", "scale"),
    [
        (None, 0.0721688),
        (yarn_of(mscale=1.0, mscale_all_dim=1.0), 0.135234),
        (yarn_of(mscale=0.5, mscale_all_dim=1.0), 0.135234),
        (yarn_of(mscale=0.707, mscale_all_dim=0.707), 0.114721),
        (yarn_of(mscale=1.0), 0.0721688),
        (YarnSpec(factor=1.0, original_max_position_embeddings=4096, mscale_all_dim=1.0), 0.0721688),
    ],
)
def test_softmax_scale(yarn, scale):
    assert dims_with(yarn).softmax_scale == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.0), (0.707, 0.707)])
def test_yarn_table_written_out(mscale, mscale_all_dim):
    yarn = yarn_of(mscale=mscale, mscale_all_dim=mscale_all_dim)
    table = rope_table(RopeSpec(dim=64, interleaved=True, yarn=yarn), 200, dtype=F64)

    def temperature(weight):
        return 0.1 * weight * math.log(40.0) + 1.0

    def pair(rotations):
        return 64 * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    for i in range(32):
        frequency = 10000.0 ** (-2 * i / 64)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequency = frequency / 40.0 * ramp + frequency * (1 - ramp)
        factor = temperature(mscale) / temperature(mscale_all_dim)
        for position in (0, 1, 77, 199):
            assert table.cos[position, i].item() == pytest.approx(math.cos(position * frequency) * factor, abs=1e-13)
            assert table.sin[position, i].item() == pytest.approx(math.sin(position * frequency) * factor, abs=1e-13)


def test_scores_depend_on_the_distance_only_and_on_neither_style():
    generator = torch.Generator().manual_seed(10)
    q, k = torch.randn(2, 1, 64, generator=generator, dtype=F64)
    to_halves = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
    scores = []
    for interleaved, columns in ((True, torch.arange(64)), (False, to_halves)):
        table = rope_table(RopeSpec(dim=64, interleaved=interleaved), 300, dtype=F64)
        for position in (0, 5, 250):
            turned = [
                apply_rope(x[:, columns], torch.tensor([place]), table) for x, place in ((q, position + 9), (k, position))
            ]
            scores.append((turned[0] * turned[1]).sum().item())
    assert scores == pytest.approx([scores[0]] * 6, rel=1e-12)
    mixed = rope_table(RopeSpec(dim=64, interleaved=False), 300, dtype=F64)
    assert (apply_rope(q, torch.tensor([9]), mixed) * k).sum().item() != pytest.approx(scores[0], rel=1e-3)
