"""Joining attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mla._checks import check_floating, check_tensor
from mla.errors import KernelError

__all__ = ["merge_attn_states", "merge_into_"]

ROWS_AT_A_TIME = 256  # on the CPU: whole temporaries of a long prompt cost page faults, and memory


def merge_attn_states(
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_out: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from the attention over each.

    With ``m = max(lse)``, each side weighs ``exp(lse - m)``. A side whose LSE is -inf or +inf is empty: the other side comes
    back exactly, whatever the empty side's output holds (NaN included). Two empty sides give ``out = 0``, ``lse = -inf``.

    Parameters
    ----------
    prefix_out, suffix_out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        Normalised outputs; their dtypes may differ.
    prefix_lse, suffix_lse : torch.Tensor of shape (num_tokens, num_heads), float32 or float64
        Natural logarithms.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the wider dtype of the two outputs; computed in the LSE's dtype or wider.
    lse : torch.Tensor of shape (num_tokens, num_heads)
        In the LSE's dtype.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.

    References
    ----------
    "Cascade inference" of FlashInfer; Ye et al., section 2.2 of "FlashInfer: Efficient and Customizable Attention Engine".

    Examples
    --------
    Sums 2 and 8 with values 0 and 1 give 0.8.

    >>> lse = torch.tensor([[2.0]]).log(), torch.tensor([[8.0]]).log()
    >>> out, _ = merge_attn_states(torch.zeros(1, 1, 1), lse[0], torch.ones(1, 1, 1), lse[1])
    >>> round(out.item(), 6)
    0.8
    """
    shape, floats = "(num_tokens, num_heads, v_head_dim)", (torch.float32, torch.float64)
    bound = check_tensor("prefix_out", prefix_out, shape, error=KernelError)
    device = prefix_out.device
    check_tensor("suffix_out", suffix_out, shape, bound=bound, device=device, error=KernelError)
    for name, out in (("prefix_out", prefix_out), ("suffix_out", suffix_out)):
        check_floating(name, out, KernelError)
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        check_tensor(name, lse, "(num_tokens, num_heads)", floats, bound=bound, device=device, error=KernelError)
    if prefix_lse.dtype != suffix_lse.dtype:
        raise KernelError(f"suffix_lse: expected {prefix_lse.dtype}, got {suffix_lse.dtype}")

    inputs = prefix_out, prefix_lse, suffix_out, suffix_lse
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.mla.merge_attn_states.default(*inputs)
        return result
    return _merge(*inputs)


def _merge(
    prefix_out: torch.Tensor, prefix_lse: torch.Tensor, suffix_out: torch.Tensor, suffix_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(torch.promote_types(prefix_out.dtype, suffix_out.dtype), prefix_lse.dtype)
    out = prefix_out.new_empty(prefix_out.shape, dtype=torch.promote_types(prefix_out.dtype, suffix_out.dtype))
    lse = prefix_lse.clone()
    for rows in _row_blocks(prefix_out):
        # Masked, not multiplied by 0: an empty side may hold NaN.
        prefix = prefix_out[rows].to(wide).masked_fill(_is_empty(prefix_lse[rows])[..., None], 0)
        suffix = suffix_out[rows].masked_fill(_is_empty(suffix_lse[rows])[..., None], 0)
        _merge_into_(prefix, lse[rows], suffix, suffix_lse[rows])
        out[rows] = prefix
    return out, lse


def merge_into_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """`merge_attn_states` of what kernels return, written over its first side; checks nothing.

    Parameters
    ----------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of the LSE; finite where that is -inf.
    lse : torch.Tensor of shape (num_tokens, num_heads), float32 or float64
        Natural logarithms.
    part_out, part_lse : torch.Tensor
        The other side, likewise; its output may have a narrower dtype.
    """
    if torch.compiler.is_compiling():
        torch.ops.mla.merge_into_.default(out, lse, part_out, part_lse)
    else:
        _merge_rows_(out, lse, part_out, part_lse)


def _merge_rows_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    for rows in _row_blocks(out):
        _merge_into_(out[rows], lse[rows], part_out[rows], part_lse[rows])


def _row_blocks(out: torch.Tensor) -> Iterator[slice]:
    step = ROWS_AT_A_TIME if out.device.type == "cpu" else max(out.shape[0], 1)
    return (slice(first, first + step) for first in range(0, out.shape[0], step))


def _is_empty(lse: torch.Tensor) -> torch.Tensor:
    return lse.isinf()


def _merge_into_(x: torch.Tensor, lse_x: torch.Tensor, y: torch.Tensor, lse_y: torch.Tensor) -> None:
    a, b = (lse.masked_fill(_is_empty(lse), -torch.inf) for lse in (lse_x, lse_y))
    high = torch.maximum(a, b)
    shift = high.masked_fill(high == -torch.inf, 0)  # exp(-inf - -inf) would be NaN
    weight_a, weight_b = (a - shift).exp_(), (b - shift).exp_()
    total = weight_a + weight_b
    lse_x.copy_(total.log().add_(shift))
    total.masked_fill_(total == 0, 1)
    x.mul_(weight_a.div_(total)[..., None]).addcmul_(y, weight_b.div_(total)[..., None])


_SIDES = "(Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, Tensor suffix_lse) -> (Tensor, Tensor)"
_operator = torch.library.custom_op("mla::merge_attn_states", _merge, mutates_args=(), schema=_SIDES)
_operator_ = torch.library.custom_op(
    "mla::merge_into_",
    _merge_rows_,
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse) -> ()",
)


@_operator.register_fake
def _fake(
    prefix_out: torch.Tensor, prefix_lse: torch.Tensor, suffix_out: torch.Tensor, suffix_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(prefix_out.dtype, suffix_out.dtype)
    return prefix_out.new_empty(prefix_out.shape, dtype=dtype), prefix_lse.new_empty(prefix_lse.shape)


@_operator_.register_fake
def _fake_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    return


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The derivative of a weighted mean, ``w * g`` and ``w * (<g, side - mean> + g_lse)`` with ``w = exp(lse_side - lse)``."""
    prefix_out, prefix_lse, suffix_out, suffix_lse, lse = ctx.saved_tensors
    wide = torch.promote_types(torch.promote_types(prefix_out.dtype, suffix_out.dtype), lse.dtype)
    none = _is_empty(lse)
    shift, g_lse = (x.to(wide).masked_fill(none, 0) for x in (lse, grad_lse))
    g = grad_out.to(wide).masked_fill(none[..., None], 0)
    empties = [_is_empty(x) for x in (prefix_lse, suffix_lse)]
    sides = [x.to(wide).masked_fill(empty[..., None], 0) for x, empty in zip((prefix_out, suffix_out), empties, strict=True)]
    weights = [
        (x.to(wide) - shift).exp().masked_fill(empty, 0) for x, empty in zip((prefix_lse, suffix_lse), empties, strict=True)
    ]
    products = [(g * side).sum(-1) for side in sides]
    mean = weights[0] * products[0] + weights[1] * products[1]
    return (
        (weights[0][..., None] * g).to(prefix_out.dtype),
        (weights[0] * (products[0] - mean + g_lse)).to(prefix_lse.dtype),
        (weights[1][..., None] * g).to(suffix_out.dtype),
        (weights[1] * (products[1] - mean + g_lse)).to(suffix_lse.dtype),
    )


_operator.register_autograd(_backward, setup_context=_save)
