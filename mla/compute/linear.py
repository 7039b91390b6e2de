"""Dense products over tokens whose row bits depend on neither the number of tokens nor of threads."""

from __future__ import annotations

import torch

from mla._checks import check_tensor
from mla.errors import KernelError

__all__ = ["head_linear", "linear"]

ROW_MULTIPLE = 16


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with zero rows up to a multiple of 16: BLAS takes other paths, with other bits, for very few or odd rows."""
    missing = -x.shape[0] % ROW_MULTIPLE
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """float16 has no fast product on a CPU and is computed in float32 there."""
    return torch.float32 if x.dtype == torch.float16 and x.device.type == "cpu" else x.dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Parameters
    ----------
    x : torch.Tensor of shape (num_tokens, in_features)
        Tokens.
    weight : torch.Tensor of shape (out_features, in_features)
        In the dtype of `x`.
    bias : torch.Tensor of shape (out_features,) or None
        In the dtype of `x`.

    Returns
    -------
    torch.Tensor of shape (num_tokens, out_features)
        In the dtype of `x`.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.
    """
    bound = check_tensor("x", x, "(num_tokens, in_features)", error=KernelError)
    check_tensor("weight", weight, "(out_features, in_features)", x.dtype, bound=bound, device=x.device, error=KernelError)
    dtype = _product_dtype(x)
    out = (_padded_rows(x.to(dtype)) @ weight.to(dtype).T)[: x.shape[0]]
    return (out if bias is None else out + bias).to(x.dtype)


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product per head, ``out[t, h] = x[t, h] @ weight[h]``.

    Parameters
    ----------
    x : torch.Tensor of shape (num_tokens, num_heads, in_features)
        Tokens.
    weight : torch.Tensor of shape (num_heads, in_features, out_features)
        In the dtype of `x`; any strides.

    Returns
    -------
    torch.Tensor of shape (num_tokens, num_heads, out_features)
        In the dtype of `x`.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.
    """
    bound = check_tensor("x", x, "(num_tokens, num_heads, in_features)", error=KernelError)
    check_tensor("weight", weight, "(num_heads, in_features, out_features)", x.dtype, bound=bound, device=x.device,
                 error=KernelError)
    dtype = _product_dtype(x)
    rows = _padded_rows(x.to(dtype)).transpose(0, 1).contiguous()
    return torch.bmm(rows, weight.to(dtype)).transpose(0, 1)[: x.shape[0]].to(x.dtype)
