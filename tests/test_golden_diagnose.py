"""A kernel with a deliberate mistake fails the shipped bundles, and the report names the mistake."""

from __future__ import annotations

import math
import re

import attrs
import pytest
import torch

from mla import golden, kernel_set
from mla.compute.kernels import KernelSet
from mla.golden.compare import compare_bits, compare_close
from mla.golden.diagnose import KEYS, Problem, diagnose
from mla.golden.inputs import make_inputs

RIGHT = kernel_set("CPU_MLA")
DECODE = "decode_f32_few_heads"
NEW_TOKENS = "decode_f32_new_tokens"


def broken(decode=None, varlen=None, **other):
    """CPU_MLA with a mistake in a kernel; its plan is left out, for the mistake may be in the metadata."""
    changes = dict(other)
    if decode is not None:
        changes |= {"paged_decode": decode, "make_plan": lambda metadata: None}
    if varlen is not None:
        changes["varlen_attention"] = varlen
    return attrs.evolve(RIGHT, **changes)


def failure(kernels: KernelSet, only: str, *, exact="auto") -> str:
    """Messages of the one bundle, which fails."""
    report = golden.check(kernels, only=only, exact=exact)
    assert [result.status for result in report.results] == ["failed"]
    assert not report.passed
    return "\n".join(report.results[0].messages)


def decode(q, latent_cache, metadata, **kwargs):
    return RIGHT.paged_decode(q, latent_cache, metadata, **{**kwargs, "plan": None})


def evolved(metadata, **changes):
    """A decode record with other tensors."""
    return attrs.evolve(metadata, **changes)


def test_the_right_kernels_pass_without_a_plan():
    assert golden.check(broken(decode=decode), only=DECODE).passed


@pytest.mark.parametrize("field", ["out", "lse"])
def test_one_bit_is_found_where_bits_must_agree(field):
    def one_bit(*args, **kwargs):
        out, lse = decode(*args, **kwargs)
        changed = {"out": out, "lse": lse}[field]
        changed.view(torch.int32)[(1, 0, 3)[: changed.dim()]] ^= 1
        return out, lse

    bundle = golden.load_bundle(golden.SHIPPED / DECODE)
    own = golden.record(bundle.case)  # by this torch on this machine
    result = golden.check_bundle(own, broken(decode=one_bit))
    assert result.status == "failed"
    place = "[1, 0, 3]" if field == "out" else "[1, 0]"
    total = own.out.numel() if field == "out" else own.lse.numel()
    assert f"{field}: 1 of {total} values differ, first at {place}: expected " in result.messages[0]
    assert "(1 bit); all within tolerance" in result.messages[0]
    assert result.messages[0].startswith("with 1 thread, ")
    assert len(result.messages) == 1
    assert golden.check_bundle(own, broken(decode=one_bit), exact="never").status == "passed"


def test_the_signs_of_zero_and_of_numbers_are_bits():
    zero = torch.zeros(2, 1)
    assert compare_bits("x", zero, zero) is None
    assert "2 of 2 values differ, first at [0, 0]: expected 0.0, got -0.0 (1 bit)" in compare_bits("x", -zero, zero)
    two = torch.tensor([1.0, 1.0])
    message = compare_bits("x", torch.tensor([1.0, 2.0]), two)
    assert "1 of 2 values differ, first at [1]: expected 1.0, got 2.0" in message
    assert "(8 bits)" in message


def test_one_wrong_row_among_many_is_found():
    expected, lse = torch.ones(1000, 2, 8, dtype=torch.float64), torch.zeros(1000, 2, dtype=torch.float64)
    out = expected.clone()
    out[700, 1, 5] += 0.1
    tolerance = golden.Tolerance(out_rel=4e-3, lse_abs=1e-3)
    assert compare_close(expected * 1.001, lse + 9e-4, expected, lse, tolerance) == []
    messages = compare_close(out, lse, expected, lse, tolerance)
    assert len(messages) == 1
    assert "worst at [700, 1, 5]: expected 1, got 1.1" in messages[0]
    assert re.search(r"relative error 7\.\S+e-04 \(limit 0.004\), of the worst row 3\.\S+e-02 \(limit 0.016\)", messages[0])
    assert "of the worst element 1.00e-01 (limit 0.064)" in messages[0]


@pytest.mark.parametrize("kernels", ["CPU_MLA", "TORCH"])
@pytest.mark.parametrize("change", [lambda x: x + 0.15, lambda x: 0.0, lambda x: -x], ids=["added", "zero", "sign"])
def test_one_wrong_element_of_the_real_shape_is_found(kernels, change):
    right, only = kernel_set(kernels), "decode_bf16_deepseek_v3"
    expected = golden.load_bundle(golden.SHIPPED / only).out
    place = tuple(int(i) for i in torch.unravel_index((expected + 0.317).abs().argmin(), expected.shape))

    def one_element(*args, **kwargs):
        out, lse = right.paged_decode(*args, **kwargs)
        out[place] = change(float(out[place]))
        return out, lse

    text = failure(attrs.evolve(right, paged_decode=one_element), only, exact="never")
    assert re.match(r"out: relative error .*, of the worst element \S+ \(limit 0\.064\); worst at ", text)
    assert f"worst at {list(place)}: expected -0.31" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_element_is_limited_by_the_rms_of_its_own_row(dtype):
    tolerance = golden.load_bundle(golden.SHIPPED / DECODE).tolerances.of(dtype)
    expected, lse = torch.ones(3, 2, 512, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    expected[1] *= 0.01  # a small row beside large ones
    for row in (0, 1):
        scale = float(expected[row, 0, 0])
        for factor, good in ((15.9, True), (16.1, False)):
            out = expected.clone()
            out[row, 0, 5] += factor * tolerance.out_rel * scale
            messages = compare_close(out, lse, expected, lse, tolerance)
            assert (messages == []) is good
            assert good or f"worst at [{row}, 0, 5]: expected {scale:g}, got " in messages[0]


def test_a_row_of_zeros_must_be_exactly_zero():
    tolerance = golden.Tolerance(out_rel=4e-3, lse_abs=1e-3)
    expected, lse = torch.ones(3, 2, 8, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    expected[2] = 0
    out = expected.clone()
    out[2] = -0.0
    assert compare_close(out, lse, expected, lse, tolerance) == []
    out[2, 1, 3] = 1e-9
    (message,) = compare_close(out, lse, expected, lse, tolerance)
    assert "of the worst element inf (limit 0.064); worst at [2, 1, 3]: expected 0, got 1e-09" in message


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("field", ["out", "lse", "empty"])
def test_infinity_and_nan_in_the_wrong_place_are_found(field, wrong):
    expected, expected_lse = torch.ones(3, 2, 8, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    expected[2], expected_lse[2] = 0, -torch.inf
    out, lse = expected.clone(), expected_lse.clone()
    tolerance = golden.Tolerance(out_rel=0.01, lse_abs=0.01)
    assert compare_close(out, lse, expected, expected_lse, tolerance) == []
    if field == "out":
        out[1, 0, 3] = wrong
    else:
        lse[1 if field == "lse" else 2, 0] = wrong
    messages = compare_close(out, lse, expected, expected_lse, tolerance)
    if field == "empty" and wrong == -math.inf:
        assert messages == []
        return
    place = {"out": r"out: .*worst at \[1, 0, 3\]", "lse": r"lse: .*worst at \[1, 0\]", "empty": r"lse: .*worst at \[2, 0\]"}
    assert len(messages) == 1
    assert re.match(place[field], messages[0])


@pytest.mark.parametrize("only", [DECODE, "decode_bf16_deepseek_v3", "decode_f16_ragged"])
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("latent_dim", lambda dims: dims.latent_dim**-0.5),
        ("kv_lora_rank", lambda dims: dims.kv_lora_rank**-0.5),
        ("no scale at all", lambda dims: 1.0),
        ("log2", lambda dims: dims.softmax_scale / math.log(2)),
    ],
)
def test_a_wrong_scale_is_named(only, name, scale):
    dims = golden.load_bundle(golden.SHIPPED / only).case.dims
    wrong = scale(dims)

    def scaled(*args, **kwargs):
        return decode(*args, **{**kwargs, "softmax_scale": wrong})

    text = failure(broken(decode=scaled), only)
    assert re.search(
        rf"looks like softmax_scale {re.escape(f'{wrong:.7g}')} = .*{name}.*, expected {dims.softmax_scale:.7g}", text
    )


def test_the_scale_of_the_cache_row_of_deepseek_v3_is_named():
    def scaled(*args, **kwargs):
        return decode(*args, **{**kwargs, "softmax_scale": 576**-0.5})

    text = failure(broken(decode=scaled), "decode_bf16_deepseek_v3")
    assert "looks like softmax_scale 0.04166667 = 576 ** -0.5 (latent_dim), expected 0.1352338" in text


def test_every_name_of_a_scale_is_listed():
    """Where qk_head_dim is 24, the right scale squared and the literal of DeepSeek-V3 are one number."""

    def scaled(*args, **kwargs):
        return decode(*args, **{**kwargs, "softmax_scale": 576**-0.5})

    bundle = golden.load_bundle(golden.SHIPPED / DECODE)
    dims = bundle.case.dims
    assert dims.qk_head_dim == 24
    literal = "576 ** -0.5 (a literal, latent_dim of DeepSeek-V3)"
    text = failure(broken(decode=scaled), DECODE)
    assert f"looks like softmax_scale 0.04166667 = {literal} or the right one squared, expected 0.2041241" in text
    text = failure(broken(decode=scaled), "decode_bf16_many_heads")
    assert f"looks like softmax_scale 0.04166667 = {literal}" in text


def test_a_scale_without_yarn_is_named_for_prompts_too():
    def scaled(*args, **kwargs):
        return RIGHT.varlen_attention(*args, **{**kwargs, "softmax_scale": 192**-0.5})

    text = failure(broken(varlen=scaled), "prefill_bf16_deepseek_v3")
    assert "looks like softmax_scale 0.07216878 = 192 ** -0.5 (qk_head_dim), expected 0.1352338" in text


@pytest.mark.parametrize("only", [DECODE, "decode_bf16_deepseek_v3", "decode_bf16_new_tokens_padded"])
def test_an_lse_in_base_2_is_named(only):
    def base_2(*args, **kwargs):
        out, lse = decode(*args, **kwargs)
        return out, lse / math.log(2)

    text = failure(broken(decode=base_2), only)
    assert "LSE is the expected one divided by ln 2: base 2?" in text
    assert "lse: absolute error" in text
    assert "out: relative error" not in text


def test_an_lse_in_base_2_of_prompts_is_named():
    def base_2(*args, **kwargs):
        out, lse = RIGHT.varlen_attention(*args, **kwargs)
        return out, lse / math.log(2)

    assert "LSE is the expected one divided by ln 2: base 2?" in failure(broken(varlen=base_2), "prefill_f32_ragged")


def test_two_mistakes_at_once_are_both_named():
    def both(*args, **kwargs):
        out, lse = decode(*args, **{**kwargs, "softmax_scale": 40**-0.5})
        return out, lse / math.log(2)

    text = failure(broken(decode=both), DECODE)
    assert "looks like softmax_scale 0.1581139 = 40 ** -0.5 (latent_dim)" in text
    assert "LSE is the expected one divided by ln 2: base 2?" in text


def test_a_context_merged_by_an_lse_in_base_2_is_named():
    def base_2(*args, **kwargs):
        out, lse = RIGHT.varlen_attention(*args, **kwargs)
        return out, lse / math.log(2)

    text = failure(broken(varlen=base_2), "context_f32_chunks")
    assert "looks as if the parts of a context were merged by an LSE in base 2" in text


def test_a_context_that_is_averaged_is_named():
    def no_lse(*args, **kwargs):
        out, lse = RIGHT.varlen_attention(*args, **kwargs)
        return out, torch.where(lse.isneginf(), lse, 0.0)

    text = failure(broken(varlen=no_lse), "context_f32_chunks")
    assert "looks as if the parts of a context were averaged and not merged by LSE" in text


@pytest.mark.parametrize("only", ["context_f32_chunks", "context_bf16_one_chunk"])
def test_merging_by_the_lse_itself_is_right(only):
    bundle = golden.load_bundle(golden.SHIPPED / only)
    out, lse = Problem.of(bundle.case, make_inputs(bundle.case)).merge(1.0)
    torch.testing.assert_close(out, bundle.out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, bundle.lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("only", [DECODE, "decode_bf16_deepseek_v3", NEW_TOKENS])
def test_a_dropped_last_token_is_named(only):
    def dropped(q, latent_cache, metadata, **kwargs):
        seq_lens = (metadata.seq_lens - 1).clamp(min=0)
        changed = evolved(metadata, seq_lens=seq_lens, context_lens=(metadata.context_lens - 1).clamp(min=0))
        return kernel_set("TORCH").paged_decode(q, latent_cache, changed, **{**kwargs, "plan": None})

    sentence = "the last key of every query were" if only == NEW_TOKENS else "the last key were"
    assert f"looks as if {sentence} not attended" in failure(broken(decode=dropped), only)


@pytest.mark.parametrize("index", range(len(KEYS)))
def test_every_mistake_about_keys_is_named(index):
    """By results made with the mistake itself, on the case that shows it."""
    sentence, choose = KEYS[index]
    bundle = golden.load_bundle(golden.SHIPPED / ("context_f32_chunks" if "context" in sentence else NEW_TOKENS))
    inputs = make_inputs(bundle.case)
    problem = Problem.of(bundle.case, inputs)
    tolerance = bundle.tolerances.of(torch.float32)
    right = problem.attend()
    assert diagnose(bundle.case, inputs, *right, bundle.out, bundle.lse, tolerance) == []
    wrong = problem.attend(choose=choose)
    assert diagnose(bundle.case, inputs, *wrong, bundle.out, bundle.lse, tolerance) == [f"looks as if {sentence}"]


@pytest.mark.parametrize("only", [DECODE, "decode_bf16_many_heads", "decode_bf16_block_size_1"])
def test_a_swapped_block_is_named(only):
    """The first blocks of two sequences are taken for each other."""
    case = golden.load_bundle(golden.SHIPPED / only).case
    long = [i for i, (query, context) in enumerate(case.sequences) if query + context >= case.block_size][:2]

    def swapped(q, latent_cache, metadata, **kwargs):
        table = metadata.block_table.clone()
        table[long, 0] = table[long[::-1], 0]
        return decode(q, latent_cache, evolved(metadata, block_table=table), **kwargs)

    text = failure(broken(decode=swapped), only)
    blocks = [case.groups[i].block_ids[0][0] for i in long]
    for i, right, wrong in ((long[0], *blocks), (long[1], *blocks[::-1])):
        assert f"looks as if sequence {i} read block {wrong} of the cache as its block 0, expected {right}" in text


def test_a_swapped_block_of_a_context_is_named():
    case = golden.load_bundle(golden.SHIPPED / "context_f32_chunks").case
    first, second = case.groups[0].block_ids[0][0], case.groups[3].block_ids[0][0]

    def gather(latent_cache, slots, *, out):
        size = latent_cache.shape[1]
        blocks = torch.where(slots // size == first, second, torch.where(slots // size == second, first, slots // size))
        return RIGHT.gather_latent_cache(latent_cache, blocks * size + slots % size, out=out)

    text = failure(broken(gather_latent_cache=gather), "context_f32_chunks")
    assert f"looks as if sequence 0 read block {second} of the cache as its block 0, expected {first}" in text
    assert f"looks as if sequence 3 read block {first} of the cache as its block 0, expected {second}" in text


def test_a_block_that_nobody_filled_shows_as_nan():
    def last_first(q, latent_cache, metadata, **kwargs):
        table = metadata.block_table.clone()
        table[2] = torch.cat([table[2, 1:], table[2, :1]])  # the partly filled block comes too early
        return decode(q, latent_cache, evolved(metadata, block_table=table), **kwargs)

    text = failure(broken(decode=last_first), DECODE)
    assert re.search(
        r"64 of \d+ outputs are NaN, first at \[2, 0, 0\]: looks as if cache rows were read that no key lies in", text
    )


def test_a_table_of_another_sequence_is_named():
    def shifted(q, latent_cache, metadata, **kwargs):
        table = metadata.block_table.clone()
        table[2], table[5] = table[5].clone(), table[2].clone()
        return decode(q, latent_cache, evolved(metadata, block_table=table), **kwargs)

    text = failure(broken(decode=shifted), DECODE)
    assert "looks as if sequence 2 read the blocks of sequence 5" in text
    assert "outputs are NaN" in text  # sequence 5 is longer than the table of sequence 2


@pytest.mark.parametrize("part", ["rope", "nope"])
def test_columns_that_do_not_count_are_named(part):
    def partial(q, latent_cache, metadata, **kwargs):
        q = q.clone()
        q[..., slice(32, None) if part == "rope" else slice(0, 32)] = 0
        return decode(q, latent_cache, metadata, **kwargs)

    sentence = "looks as if the k_pe columns did not count" if part == "rope" else "looks as if only the k_pe columns counted"
    assert sentence in failure(broken(decode=partial), DECODE)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda out, lse: (out.flip(1), lse), "row [1, 0] (token, head) has what is expected in row [1, 1]"),
        (lambda out, lse: (out * 3, lse), "looks like the expected output times 3"),
        (lambda out, lse: (out, -lse), "LSE is the expected one with the other sign"),
        (lambda out, lse: (out, lse * math.log(2)), "LSE is the expected one times ln 2"),
        (lambda out, lse: (out, lse / math.log(10)), "LSE is the expected one divided by ln 10: base 10?"),
        (lambda out, lse: (out, lse.exp()), "LSE is the sum of exponentials itself: logarithm missing?"),
        (
            lambda out, lse: (out, lse.T.contiguous()),
            "lse: expected shape (5, 2), got (2, 5); looks like (num_heads, num_tokens)",
        ),
        (lambda out, lse: (out[..., :8], lse), "out: expected shape (5, 2, 32), got (5, 2, 8)"),
        (lambda out, lse: (out.double(), lse), "out: expected float32, got float64"),
        (lambda out, lse: (None, lse), "out: expected a torch.Tensor, got NoneType"),
    ],
)
def test_other_mistakes_are_named(change, sentence):
    text = failure(broken(decode=lambda *args, **kwargs: change(*decode(*args, **kwargs))), DECODE)
    assert sentence in text


def test_padded_rows_must_be_the_empty_identity():
    def ones(*args, **kwargs):
        out, lse = decode(*args, **kwargs)
        out[lse == -torch.inf] = 1
        return out, lse

    text = failure(broken(decode=ones), "decode_bf16_new_tokens_padded")
    assert "row [6, 0] sees no key: expected an output of 0 and an LSE of -inf" in text


def test_an_unknown_mistake_still_shows_its_worst_place():
    def worse(*args, **kwargs):
        out, lse = decode(*args, **kwargs)
        out[3, 1, 7] += 5
        return out, lse

    text = failure(broken(decode=worse), DECODE, exact="never")
    assert re.search(r"^out: relative error .*; worst at \[3, 1, 7\]: expected ", text)
    assert "looks" not in text


def test_an_error_in_a_kernel_is_a_failure():
    def crash(*args, **kwargs):
        raise RuntimeError("no such instruction")

    assert failure(broken(decode=crash), DECODE, exact="never") == "raised RuntimeError: no such instruction"


@pytest.mark.parametrize("shift", [1, -1])
def test_rows_stored_elsewhere_are_named(shift):
    def shifted(latent_cache, kv_c, k_pe, slot_mapping):
        moved = torch.where(
            slot_mapping < 0, slot_mapping, (slot_mapping + shift) % (latent_cache.shape[0] * latent_cache.shape[1])
        )
        RIGHT.write_latent_cache_(latent_cache, kv_c, k_pe, moved)

    assert re.search(
        r"latent_cache: \d+ rows differ after write_latent_cache_", failure(broken(write_latent_cache_=shifted), DECODE)
    )


def test_a_padded_token_that_is_stored_is_named():
    def stored(latent_cache, kv_c, k_pe, slot_mapping):
        latent_cache.view(-1, latent_cache.shape[2])[slot_mapping] = torch.cat([kv_c, k_pe], dim=1)  # -1 is the last row

    text = failure(broken(write_latent_cache_=stored), "decode_bf16_new_tokens_padded")
    assert "1 rows differ after write_latent_cache_, first row 15 of block" in text
    assert "which was written and should not" in text


def test_a_damaged_reference_is_named():
    bundle = golden.load_bundle(golden.SHIPPED / DECODE)
    out = bundle.out.clone()
    out[1, 1, 1] += 1
    result = golden.check_bundle(attrs.evolve(bundle, out=out), "cpu")
    assert result.status == "failed"
    assert any("the bundle itself looks damaged" in message for message in result.messages)
