"""Dense products over tokens whose row bits depend, on the CPU, on neither the number of tokens nor of threads.

A BLAS cuts the summed dimension K into blocks and adds the blocks' sums; where it cuts depends on the other dimensions and
threads. Within one block an entry is one chain of fused multiply-adds. So K is cut here, below the smallest block of the
libraries that torch uses on CPUs, and the parts are added in order. Very small products take other paths (matrix times vector,
or none of oneDNN), so rows are padded to a multiple of 16, columns to 16 and K to a multiple of 32.

MKL's code for CPUs without AVX-512 sums otherwise at the edges of its tiles. There, in float32 and float64, every product has
the same few rows and is one of at least two in a batch, which makes it the work of one thread; a single weight is a batch of
its two halves of columns. That makes large products two to three times slower.

This was observed with MKL's AVX-512 and AVX2 code and with oneDNN's AVX-512 and AMX code; the tests check it on the machine
that they run on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mla._checks import check_floating, check_tensor
from mla.errors import KernelError

__all__ = ["head_linear", "linear"]

ROW_MULTIPLE = 16
ROW_TILE = 24  # where every product has the same rows
ROWS_AT_A_TIME = 512  # bounds the float32 sums that bfloat16 parts are added in
K_MULTIPLE = 32
MIN_COLUMNS = 16
K_STEP = {torch.float64: 128, torch.float32: 256, torch.bfloat16: 384}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Parameters
    ----------
    x : torch.Tensor of shape (num_tokens, in_features)
        Tokens. On the CPU float16 is computed in float32, since torch has no fast float16 product there.
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
    check_floating("x", x, KernelError)
    check_tensor("weight", weight, "(out_features, in_features)", x.dtype, bound=bound, device=x.device, error=KernelError)
    if bias is not None:
        check_tensor("bias", bias, "(out_features,)", x.dtype, bound=bound, device=x.device, error=KernelError)
    out = _cpu_product(x[None], weight.T[None])[0] if x.device.type == "cpu" else x @ weight.T
    return out if bias is None else out + bias


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product per head, ``out[t, h] = x[t, h] @ weight[h]``.

    Parameters
    ----------
    x : torch.Tensor of shape (num_tokens, num_heads, in_features)
        Tokens. On the CPU float16 is computed in float32.
    weight : torch.Tensor of shape (num_heads, in_features, out_features)
        In the dtype of `x`; any strides.

    Returns
    -------
    torch.Tensor of shape (num_tokens, num_heads, out_features)
        In the dtype of `x`; a transposed view.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.
    """
    bound = check_tensor("x", x, "(num_tokens, num_heads, in_features)", error=KernelError)
    check_floating("x", x, KernelError)
    check_tensor(
        "weight", weight, "(num_heads, in_features, out_features)", x.dtype, bound=bound, device=x.device, error=KernelError
    )
    rows = x.transpose(0, 1)
    out = _cpu_product(rows, weight) if x.device.type == "cpu" else torch.bmm(rows, weight)
    return out.transpose(0, 1)


def _cpu_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight`` for x (batch, rows, K) and weight (batch, K, columns), cut as the module says."""
    if x.dtype not in K_STEP:
        return _cpu_product(x.float(), weight.float()).to(x.dtype)
    num_rows, depth, columns = x.shape[1], x.shape[2], weight.shape[2]
    tiled = x.dtype != torch.bfloat16 and not torch.compiler.is_compiling() and _without_avx512()
    halves = 2 if tiled and x.shape[0] == 1 else 1
    more_k = max(-depth % K_MULTIPLE, K_MULTIPLE - depth)
    more_columns = max(-columns % halves, halves * MIN_COLUMNS - columns)
    if more_k or more_columns:
        weight = F.pad(weight, (0, more_columns, 0, more_k))
    x = F.pad(x, (0, more_k, 0, -num_rows % (ROW_TILE if tiled else ROW_MULTIPLE)))
    if halves == 2:
        x, weight = x.expand(2, -1, -1), weight[0].unflatten(1, (2, -1)).transpose(0, 1)
    step = ROW_TILE if tiled else ROWS_AT_A_TIME
    blocks = [slice(first, first + step) for first in range(0, x.shape[1], step)]
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        parts = [_sum_parts(x[:, rows], weight) for rows in blocks]
        out = torch.cat(parts, dim=1) if parts else x[..., :1] @ weight[:, :1]
    else:
        out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
        for rows in blocks:
            _sum_parts(x[:, rows], weight, out[:, rows])
    if halves == 2:
        out = out.transpose(0, 1).flatten(1)[None]
    return out[:, :num_rows, :columns]


def _without_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() != "AVX512"  # cannot be traced, so compiled code does not ask


def _sum_parts(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Parts in order; bfloat16 parts are rounded once each and added in float32."""
    step = K_STEP[x.dtype]
    part = _batched_product(x[..., :step], weight[:, :step], None, out)
    total = None
    for k in range(step, x.shape[2], step):
        rows, columns = x[..., k : k + step], weight[:, k : k + step]
        if x.dtype != torch.bfloat16:
            part = _batched_product(rows, columns, part, out)
        else:
            before = part.float() if total is None else total
            part = _batched_product(rows, columns, None, out)
            total = before + part
    if total is None:
        return part
    return total.to(x.dtype) if out is None else out.copy_(total)


def _batched_product(
    x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """``before + x @ weight``, into `out` where that is given."""
    if x.shape[0] == 1:  # as a plain matrix product: bmm would copy a transposed weight
        into = None if out is None else out[0]
        if before is None:
            return torch.mm(x[0], weight[0], out=into)[None]
        return torch.addmm(before[0], x[0], weight[0], out=into)[None]
    if before is None:
        return torch.bmm(x, weight, out=out)
    return torch.baddbmm(before, x, weight, out=out)
