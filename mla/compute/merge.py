"""Joining attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

import torch

from mla._checks import check_floating, check_tensor
from mla.errors import KernelError

__all__ = ["merge_attn_states"]

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

    wide = torch.promote_types(torch.promote_types(prefix_out.dtype, suffix_out.dtype), prefix_lse.dtype)
    num_tokens = prefix_out.shape[0]
    step = ROWS_AT_A_TIME if device.type == "cpu" else max(num_tokens, 1)
    out = prefix_out.new_empty(prefix_out.shape, dtype=torch.promote_types(prefix_out.dtype, suffix_out.dtype))
    lse = torch.empty_like(prefix_lse)
    for first in range(0, num_tokens, step):
        rows = slice(first, first + step)
        out[rows], lse[rows] = _merge(prefix_out[rows], prefix_lse[rows], suffix_out[rows], suffix_lse[rows], wide)
    return out, lse


def _merge(
    x: torch.Tensor, lse_x: torch.Tensor, y: torch.Tensor, lse_y: torch.Tensor, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_x, lse_y))
    no_a, no_b = a == -torch.inf, b == -torch.inf
    high = torch.maximum(a, b)
    # exp(-inf - -inf) is NaN; two empty sides get a harmless maximum.
    shift = high.masked_fill(no_a & no_b, 0)
    weight_a, weight_b = (a - shift).exp(), (b - shift).exp()
    total = weight_a + weight_b
    lse = shift + total.log()
    lse = torch.where(no_a, b, torch.where(no_b, a, lse))
    # Masked, not multiplied by 0: an empty side may hold NaN.
    x, y = x.to(wide), y.to(wide)
    weight_a, weight_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    mixed = x * weight_a + y * weight_b
    out = torch.where(no_a[..., None], y, torch.where(no_b[..., None], x, mixed))
    return out.masked_fill((no_a & no_b)[..., None], 0), lse
