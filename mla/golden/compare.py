"""Comparing results with what is expected, by bits or within a tolerance, with the worst index of every failure."""

from __future__ import annotations

import math

import attrs
import torch

from mla._checks import dtype_name
from mla.golden.bundle import Tolerance

__all__ = ["Errors", "close", "compare_bits", "compare_close", "errors_of", "place", "wrong_form"]

ROW_FACTOR = 4.0
"""How many times `out_rel` a single row may be off, relative to its own norm or, if that is larger, to the mean row's."""

ELEMENT_FACTOR = 16.0
"""How many times `out_rel` a single element may be off, relative to the root mean square of its own expected row.

A row whose expected elements are all 0, as of a token that sees no key, must be exactly 0. Rounding alone stays below 4 times
in the shipped bundles.
"""

INT_OF_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@attrs.frozen(kw_only=True)
class Errors:
    """How far results are from the reference.

    Parameters
    ----------
    out_rel : float
        Relative error of the output in the Frobenius norm.
    row_rel : float
        The same of the worst row.
    element_rel : float
        Largest error of a single element of the output, relative to the root mean square of its expected row.
    lse_abs : float
        Largest absolute error of the LSE.
    """

    out_rel: float
    row_rel: float
    element_rel: float
    lse_abs: float


def place(index: int, shape: torch.Size) -> str:
    """A flat index as ``[token, head, column]``."""
    return f"[{', '.join(str(int(i)) for i in torch.unravel_index(torch.tensor(index), shape))}]"


def wrong_form(name: str, actual: object, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """What is wrong with the type, shape or dtype of a result, or None."""
    if not isinstance(actual, torch.Tensor):
        return f"{name}: expected a torch.Tensor, got {type(actual).__name__}"
    if tuple(actual.shape) != shape:
        hint = ""
        if name == "lse" and tuple(actual.shape) == shape[::-1]:
            hint = "; looks like (num_heads, num_tokens): transposed?"
        return f"{name}: expected shape {shape}, got {tuple(actual.shape)}{hint}"
    if actual.dtype != dtype:
        return f"{name}: expected {dtype_name(dtype)}, got {dtype_name(actual.dtype)}"
    return None


def _rows(difference: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each row, (num_tokens, num_heads)."""
    norms = torch.linalg.vector_norm(expected, dim=-1)
    mean = norms.square().mean().sqrt() if norms.numel() else norms.sum()
    scale = torch.maximum(norms, mean)
    off = torch.linalg.vector_norm(difference, dim=-1)
    return torch.where(off == 0, 0.0, off / scale)


def _elements(difference: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Error of each element relative to the root mean square of its expected row; infinite in a row of zeros."""
    scale = expected.square().mean(dim=-1, keepdim=True).sqrt()
    off = difference.abs()
    return torch.where(off == 0, 0.0, off / scale)


def errors_of(out: torch.Tensor, lse: torch.Tensor, expected_out: torch.Tensor, expected_lse: torch.Tensor) -> Errors:
    """Errors of float64 results of the right shapes; infinite where NaN or infinity stand in the wrong place.

    Parameters
    ----------
    out, expected_out : torch.Tensor of shape (num_tokens, num_heads, width), float64
        Outputs.
    lse, expected_lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithms.
    """
    if not out.numel():
        return Errors(out_rel=0.0, row_rel=0.0, element_rel=0.0, lse_abs=0.0)
    out_rel = row_rel = element_rel = lse_abs = math.inf
    if bool(out.isfinite().all()):
        difference = out - expected_out
        norm, off = float(torch.linalg.vector_norm(expected_out)), float(torch.linalg.vector_norm(difference))
        out_rel = 0.0 if off == 0 else off / norm if norm else math.inf
        row_rel = float(_rows(difference, expected_out).max())
        element_rel = float(_elements(difference, expected_out).max())
    if bool((lse.isneginf() == expected_lse.isneginf()).all()):
        off_lse = torch.where(expected_lse.isneginf(), 0.0, lse - expected_lse).abs()
        lse_abs = float(off_lse.max()) if bool(off_lse.isfinite().all()) else math.inf
    return Errors(out_rel=out_rel, row_rel=row_rel, element_rel=element_rel, lse_abs=lse_abs)


def _rows_close(errors: Errors, tolerance: Tolerance) -> bool:
    """Whether the whole output and each of its rows are close enough."""
    return errors.out_rel <= tolerance.out_rel and errors.row_rel <= ROW_FACTOR * tolerance.out_rel


def close(errors: Errors, tolerance: Tolerance) -> tuple[bool, bool]:
    """Whether output and LSE are close enough."""
    out = _rows_close(errors, tolerance) and errors.element_rel <= ELEMENT_FACTOR * tolerance.out_rel
    return out, errors.lse_abs <= tolerance.lse_abs


def compare_close(
    out: torch.Tensor, lse: torch.Tensor, expected_out: torch.Tensor, expected_lse: torch.Tensor, tolerance: Tolerance
) -> list[str]:
    """What is out of tolerance, each with its worst place; empty if nothing is.

    Parameters
    ----------
    out, expected_out : torch.Tensor of shape (num_tokens, num_heads, width), float64
        Outputs.
    lse, expected_lse : torch.Tensor of shape (num_tokens, num_heads), float64
        Natural logarithms.
    tolerance : Tolerance
        Limits.
    """
    errors = errors_of(out, lse, expected_out, expected_lse)
    good_out, good_lse = close(errors, tolerance)
    found = []
    if not good_out:
        difference = (out - expected_out).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if _rows_close(errors, tolerance):
            worst = int(_elements(difference, expected_out).flatten().argmax())
        else:
            row = int(_rows(difference, expected_out).nan_to_num(nan=torch.inf).flatten().argmax())
            width = out.shape[2]
            worst = row * width + int(difference.reshape(-1, width)[row].argmax())
        found.append(
            f"out: relative error {errors.out_rel:.2e} (limit {tolerance.out_rel:g}), of the worst row {errors.row_rel:.2e} "
            f"(limit {ROW_FACTOR * tolerance.out_rel:g}), of the worst element {errors.element_rel:.2e} "
            f"(limit {ELEMENT_FACTOR * tolerance.out_rel:g}); worst at {place(worst, out.shape)}: expected "
            f"{float(expected_out.flatten()[worst]):.8g}, got {float(out.flatten()[worst]):.8g}"
        )
    if not good_lse:
        same = lse == expected_lse  # -inf minus -inf is NaN
        off = torch.where(same, 0.0, (lse - expected_lse).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst = int(off.flatten().argmax())
        found.append(
            f"lse: absolute error {errors.lse_abs:.2e} (limit {tolerance.lse_abs:g}); worst at {place(worst, lse.shape)}: "
            f"expected {float(expected_lse.flatten()[worst]):.8g}, got {float(lse.flatten()[worst]):.8g}"
        )
    return found


def compare_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What differs between two tensors of one shape and dtype, bit for bit, or None.

    Parameters
    ----------
    name : str
        Opens the message.
    actual, expected : torch.Tensor of shape (any)
        On the CPU.
    """
    kind = INT_OF_SIZE[expected.dtype.itemsize]
    a, e = (x.contiguous().view(kind).flatten() for x in (actual, expected))
    wrong = (a != e).nonzero().flatten()
    if not len(wrong):
        return None
    first = int(wrong[0])
    got, want = actual.flatten()[first], expected.flatten()[first]
    changed = int(a[first]) ^ int(e[first])
    bits = (changed & ((1 << 8 * expected.dtype.itemsize) - 1)).bit_count()
    return (
        f"{name}: {len(wrong)} of {expected.numel()} values differ, first at {place(first, expected.shape)}: expected "
        f"{float(want)!r}, got {float(got)!r} ({bits} bit{'s' if bits > 1 else ''})"
    )
