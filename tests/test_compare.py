"""The comparison helper passes what is equal and fails on everything that a wrong kernel could give."""

import re

import pytest
import torch
from compare import LSE_ABS, OUT_REL, assert_close

INF, NAN = torch.inf, torch.nan
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def ramp(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, steps=torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_close_to_itself(dtype):
    x = ramp(3, 5).to(dtype)
    assert_close(x, x.clone(), rel=0, abs=0)


def test_errors_within_the_limits_pass():
    x = ramp(3, 5)
    assert_close(x * (1 + 1e-7), x, rel=2e-7, abs=2e-7)


def test_equal_positions_of_inf_pass():
    x = torch.tensor([1.0, INF, -INF, 2.0])
    assert_close(x, x.clone(), rel=0, abs=0)


def test_nan_passes_only_where_expected_has_it_and_it_is_allowed():
    x = torch.tensor([1.0, NAN, 2.0])
    assert_close(x, x.clone(), rel=0, abs=0, allow_nan=True)
    with pytest.raises(AssertionError, match="1 misplaced"):
        assert_close(x, x.clone(), rel=0, abs=0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_equal_empty_tensors_pass(shape):
    assert_close(torch.empty(shape), torch.empty(shape), rel=0, abs=0)


def test_an_all_zero_expected_passes_only_with_zeros():
    zeros = torch.zeros(4)
    assert_close(zeros, zeros, rel=1e-3)
    assert_close(torch.full((4,), 1e-9), zeros, abs=1e-8)
    with pytest.raises(AssertionError, match="relative error inf"):
        assert_close(torch.full((4,), 1e-30), zeros, rel=1e-3)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        pytest.param(ramp(6), ramp(2, 3), id="other rank"),
        pytest.param(ramp(3, 2), ramp(2, 3), id="transposed shape"),
        pytest.param(ramp(1, 3), ramp(2, 3), id="broadcastable"),
        pytest.param(torch.empty(0, 3), torch.empty(3, 0), id="empty of another shape"),
        pytest.param(torch.empty(0), torch.zeros(1), id="empty against one"),
    ],
)
def test_another_shape_fails(actual, expected):
    with pytest.raises(AssertionError, match="expected shape"):
        assert_close(actual, expected, rel=1, abs=1)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        pytest.param([NAN, 1.0], [0.0, 1.0], id="NaN in actual"),
        pytest.param([0.0, 1.0], [NAN, 1.0], id="NaN in expected"),
        pytest.param([NAN, 1.0], [1.0, NAN], id="NaN moved"),
        pytest.param([INF, 1.0], [1.0, INF], id="inf moved"),
        pytest.param([-INF, 1.0], [INF, 1.0], id="sign of inf"),
        pytest.param([-INF, 1.0], [-1e30, 1.0], id="-inf for a large number"),
        pytest.param([0.0, 1.0], [-INF, 1.0], id="a number for -inf"),
        pytest.param([NAN, 1.0], [INF, 1.0], id="NaN for inf"),
    ],
)
@pytest.mark.parametrize("allow_nan", [False, True])
def test_a_misplaced_inf_or_nan_fails_whatever_the_tolerance(actual, expected, allow_nan):
    with pytest.raises(AssertionError, match="positions of inf and NaN"):
        assert_close(torch.tensor(actual), torch.tensor(expected), rel=INF, abs=INF, allow_nan=allow_nan)


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        pytest.param(lambda x: x * 1.01, "relative error", id="scaled by 1.01"),
        pytest.param(lambda x: -x, "cosine", id="sign"),
        pytest.param(lambda x: x.roll(1, 0), "relative error", id="rows moved"),
        pytest.param(lambda x: x.flip(-1), "relative error", id="columns reversed"),
        pytest.param(torch.zeros_like, "cosine", id="all zero"),
        pytest.param(lambda x: x + 1e-2, "relative error", id="offset"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_tensor_fails_at_every_tolerance_of_the_table(change, failure, dtype):
    x = ramp(4, 6)
    with pytest.raises(AssertionError, match=failure):
        assert_close(change(x), x, rel=OUT_REL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_fails_and_is_named(dtype):
    x = torch.ones(40, 50, dtype=torch.float64)
    wrong = x.clone()
    wrong[7, 11] += 2 * LSE_ABS[dtype]
    with pytest.raises(AssertionError, match=re.escape(f"worst at (7, 11): expected 1.0, got {float(wrong[7, 11])!r}")):
        assert_close(wrong, x, abs=LSE_ABS[dtype])


def test_one_wrong_element_that_hides_in_the_norm_is_caught_by_abs():
    x = torch.ones(1000, dtype=torch.float64)
    wrong = x.clone()
    wrong[3] += 1e-2
    assert_close(wrong, x, rel=1e-3)
    with pytest.raises(AssertionError, match="absolute error"):
        assert_close(wrong, x, rel=1e-3, abs=1e-3)


def test_the_message_holds_every_number():
    with pytest.raises(AssertionError) as failure:
        assert_close(torch.tensor([3.0, -4.0]), torch.tensor([3.0, 4.0]), rel=1e-6, abs=1e-5, name="out")
    text = str(failure.value)
    for part in (
        "out:",
        "shape (2,)",
        "relative error 1.600e+00 (limit 1e-06)",
        "absolute error 8.000e+00 (limit 1e-05)",
        "cosine -0.28",
        "0 misplaced",
        "worst at (1,): expected 4.0, got -4.0",
    ):
        assert part in text


def test_a_single_number_can_be_compared():
    with pytest.raises(AssertionError, match=re.escape("worst at (): expected 1.0, got 2.0")):
        assert_close(torch.tensor(2.0), torch.tensor(1.0), abs=0.5)


def test_a_comparison_without_a_tolerance_is_refused():
    with pytest.raises(ValueError, match="at least one tolerance"):
        assert_close(torch.ones(1), torch.ones(1))
