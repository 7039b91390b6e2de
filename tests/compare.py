"""The one comparison of floating-point tensors that all tests use, and its tolerances by dtype."""

from __future__ import annotations

import math

import torch

OUT_REL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Largest relative Frobenius error of an attention output, by the dtype of the inputs."""

LSE_ABS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""Largest absolute error of a log-sum-exp, by the dtype of the inputs."""

MOST_ON_A_GPU = 2**24
"""Larger tensors are compared on the CPU: the comparison takes some ten times the memory of float64."""


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) if x.numel() else 0.0


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


def _cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    lengths = _norm(x), _norm(y)
    if 0 in lengths:
        return float(lengths == (0, 0))
    return float((x / lengths[0] * (y / lengths[1])).sum())


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    rel: float | None = None,
    abs: float | None = None,  # noqa: A002  (the word that pytest.approx and the tables use)
    name: str = "",
    allow_nan: bool = False,
) -> None:
    """Fail unless shapes agree, inf and NaN stand at the same places and the finite values are close enough.

    `rel` limits the Frobenius norm of the difference over that of `expected` (an all-zero `expected` then allows no difference
    at all) and with it the cosine similarity; `abs` limits the largest difference. At least one of them is given. NaN fails
    unless `allow_nan` is set and `expected` has it at the same place. The message holds every number and the worst element.
    """
    if rel is None and abs is None:
        raise ValueError("rel, abs: expected at least one tolerance, got None for both")
    label = f"{name or 'tensor'}: "
    if actual.shape != expected.shape:
        raise AssertionError(f"{label}expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    device = expected.device if actual.device == expected.device and expected.numel() <= MOST_ON_A_GPU else "cpu"
    a, e = (x.detach().to(device, torch.float64) for x in (actual, expected))
    misplaced = torch.zeros(e.shape, dtype=torch.bool, device=device)
    for special in (torch.isposinf, torch.isneginf, torch.isnan):
        misplaced |= special(a) != special(e)
    if not allow_nan:
        misplaced |= a.isnan() | e.isnan()

    finite = a.isfinite() & e.isfinite()
    difference = torch.where(finite, a - e, 0.0)
    relative = _relative(_norm(difference), _norm(e[finite]))
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    cosine = _cosine(a[finite], e[finite])
    floor = -1.0 if rel is None else math.sqrt(max(1 - rel * rel, 0.0)) - 1e-13
    failed = [
        what
        for what, bad in (
            ("positions of inf and NaN", bool(misplaced.any())),
            ("relative error", rel is not None and not relative <= rel),
            ("absolute error", abs is not None and not largest <= abs),
            ("cosine", rel is not None and not cosine >= floor),
        )
        if bad
    ]
    if not failed:
        return
    worst = torch.where(misplaced, torch.inf, difference.abs()).flatten().argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, e.shape))
    raise AssertionError(
        f"{label}{', '.join(failed)}: shape {tuple(e.shape)}, relative error {relative:.3e} (limit {rel}), "
        f"absolute error {largest:.3e} (limit {abs}), cosine {cosine:.15f} (floor {floor:.15f}), "
        f"{int(misplaced.sum())} misplaced inf or NaN; worst at {index}: expected {float(e[index])!r}, got {float(a[index])!r}"
    )
