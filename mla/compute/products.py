"""Dense products over tokens whose row bits depend, on the CPU, on neither the number of tokens nor of threads.

A BLAS cuts the summed dimension K into blocks and adds the blocks' sums; where it cuts depends on the other dimensions and
threads. Within one block an entry is one chain of fused multiply-adds. So K is cut here, below the smallest block of the
libraries that torch uses on CPUs, and the parts are added in order. Very small products take other paths (matrix times vector,
or none of oneDNN), so rows are padded to a multiple of 16, columns to 16 and K to a multiple of 32.

The number of tokens may only change what no entry's chain depends on: how many rows, heads and columns a product has, and, with
columns a multiple of 16, which operand is the left one. With few rows that is a weight whose rows are contiguous: the libraries
read it as it lies instead of repacking it. Slices of bfloat16 are copied along their rows here, since torch copies them in any
case, and several times more slowly as the transposed matrices that they are.

MKL's code for CPUs without AVX-512 sums otherwise at the edges of its tiles. There, in float32 and float64, every product has
the same few rows and is one of at least two in a batch, which makes it the work of one thread; a single weight is a batch of
its two halves of columns. That makes large products two to three times slower.

This was observed with MKL's AVX-512 and AVX2 code and with oneDNN's AVX-512 and AMX code; the tests check it on the machine
that they run on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from mla._checks import check_floating, check_tensor
from mla.errors import KernelError

__all__ = ["head_linear", "linear", "write_head_linear"]

ROW_MULTIPLE = 16
ROW_TILE = 24  # where every product has the same rows
K_MULTIPLE = 32
COLUMN_MULTIPLE = 16
K_STEP = {torch.float64: 128, torch.float32: 256, torch.bfloat16: 384}

FEW_ROWS = {torch.float64: 32, torch.float32: 32, torch.bfloat16: 64}
"""Rows up to which a weight is the left operand; beyond, transposing the result takes longer than repacking the weight."""

BLOCK_ROWS = 1024
"""Rows of a product: fewer copy the weight's slices more often."""

BLOCK_HEAD_ROWS = 1 << 12
"""Heads times rows of a batch of products, unless two heads have more."""

BLOCK_COLUMNS = 1 << 13
"""Columns of a single weight's product: bounds the copy of a slice to what malloc keeps instead of giving it back."""

BLOCK_SUMS = 1 << 21
"""Rows times columns of a single weight's product: bounds the sums that parts are added in."""


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

    Examples
    --------
    On the CPU the row of a token has the same bits alone and in a batch.

    >>> x, weight = torch.randn(100, 64), torch.randn(48, 64)
    >>> out = linear(x, weight)
    >>> out.shape, torch.allclose(out, x @ weight.T, atol=1e-4), torch.equal(linear(x[:1], weight), out[:1])
    (torch.Size([100, 48]), True, True)
    """
    bound = check_tensor("x", x, "(num_tokens, in_features)", error=KernelError)
    check_floating("x", x, KernelError)
    check_tensor("weight", weight, "(out_features, in_features)", x.dtype, bound=bound, device=x.device, error=KernelError)
    if bias is not None:
        check_tensor("bias", bias, "(out_features,)", x.dtype, bound=bound, device=x.device, error=KernelError)
    out = _cpu_head_linear(x[:, None], weight.T[None])[:, 0] if x.device.type == "cpu" else x @ weight.T
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
        In the dtype of `x`.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit.

    Examples
    --------
    >>> x, weight = torch.randn(5, 4, 16), torch.randn(4, 16, 24)
    >>> out = head_linear(x, weight)
    >>> out.shape, torch.allclose(out[:, 2], x[:, 2] @ weight[2], atol=1e-4)
    (torch.Size([5, 4, 24]), True)
    """
    bound = check_tensor("x", x, "(num_tokens, num_heads, in_features)", error=KernelError)
    check_floating("x", x, KernelError)
    check_tensor(
        "weight", weight, "(num_heads, in_features, out_features)", x.dtype, bound=bound, device=x.device, error=KernelError
    )
    if x.device.type == "cpu":
        return _cpu_head_linear(x, weight)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def write_head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`head_linear` of CPU tensors that have been checked, without gradients.

    Parameters
    ----------
    x, weight : torch.Tensor
        As there.
    out : torch.Tensor of shape (num_tokens, num_heads, out_features)
        Written, in the dtype of `x`; any strides.
    """
    _cpu_product(x, weight, out)


def _cpu_head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product as it is, or in compiled code as one operator: tracing would unroll its parts for every number of rows."""
    if not torch.compiler.is_compiling():
        return _cpu_product(x, weight)
    out: torch.Tensor = torch.ops.mla.cpu_head_linear.default(x, weight)
    return out


def _run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _cpu_product(x, weight).contiguous()


_operator = torch.library.custom_op("mla::cpu_head_linear", _run, mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")


@_operator.register_fake
def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2])


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    g, w, rows = grad.transpose(0, 1).to(wide), weight.to(wide), x.transpose(0, 1).to(wide)
    return (g @ w.mT).transpose(0, 1).to(x.dtype), (rows.mT @ g).to(x.dtype)


_operator.register_autograd(_backward, setup_context=_save)


def _cpu_product(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """``x[t, h] @ weight[h]`` for x (rows, heads, K) and weight (heads, K, columns), cut as the module says."""
    if x.dtype not in K_STEP:
        wide = _cpu_product(x.float(), weight.float())
        return wide.to(x.dtype) if into is None else into.copy_(wide)
    num_heads, depth, columns = weight.shape
    tiled = x.dtype != torch.bfloat16 and _without_avx512()
    halves = 2 if tiled and num_heads == 1 else 1
    more_k = max(-depth % K_MULTIPLE, K_MULTIPLE - depth)
    more_columns = max(-columns % halves, halves * COLUMN_MULTIPLE - columns)
    if more_k or more_columns:
        x, weight = F.pad(x, (0, more_k)), F.pad(weight, (0, more_columns, 0, more_k))
    if halves == 2:
        x, weight = x.expand(-1, 2, -1), weight[0].unflatten(1, (2, -1)).transpose(0, 1)
    shape = (x.shape[0], *weight.shape[::2])
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        step = ROW_TILE if tiled else max(1, shape[0])
        parts = [_block(x[i : i + step], weight, tiled=tiled) for i in range(0, max(1, shape[0]), step)]
        out = torch.cat(parts).to(x.dtype)
    elif into is None and shape[1] == 1 and len(list(_blocks(shape, tiled=tiled))) == 1:
        out = _block(x, weight, tiled=tiled).to(x.dtype).contiguous()
    else:
        out = into if into is not None and into.shape == shape else x.new_empty(shape)
        for rows, heads, block in _blocks(shape, tiled=tiled):
            out[rows, heads, block] = _block(x[rows, heads], weight[heads, :, block], tiled=tiled)
    if out is into:
        return out
    if halves == 2:
        out = out.flatten(1)[:, None]
    out = out[..., :columns]
    return out if into is None else into.copy_(out)


def _without_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() != "AVX512"


def _blocks(shape: tuple[int, ...], *, tiled: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, heads and columns of each product; none is of one head unless there is only one."""
    num_rows, num_heads, columns = shape
    step, head_parts, column_parts = ROW_TILE, 1, 1
    if not tiled:
        step = max(1, min(num_rows, BLOCK_ROWS))
        head_parts = max(1, min(num_heads // 2, -(-num_heads * step // BLOCK_HEAD_ROWS)))
        if num_heads == 1:
            column_parts = -(-columns // min(BLOCK_COLUMNS, max(COLUMN_MULTIPLE, BLOCK_SUMS // step)))
    for heads in _ranges(num_heads, head_parts):
        for block in _ranges(columns, column_parts, COLUMN_MULTIPLE):
            for first in range(0, num_rows, step):
                yield slice(first, first + step), heads, block


def _ranges(size: int, parts: int, multiple: int = 1) -> list[slice]:
    ends = [size * i // parts // multiple * multiple for i in range(parts)]
    return [slice(*pair) for pair in itertools.pairwise([*ends, size])]


def _block(x: torch.Tensor, weight: torch.Tensor, *, tiled: bool) -> torch.Tensor:
    """One product, (rows, heads, columns), its parts in order; those of bfloat16 are rounded once each and added in float32."""
    num_rows, _, depth = x.shape
    more_rows = -num_rows % (ROW_TILE if tiled else ROW_MULTIPLE)
    if more_rows:  # F.pad would copy x in any case
        x = F.pad(x, (0, 0, 0, 0, 0, more_rows))
    x = x.transpose(0, 1)
    few = not tiled and num_rows <= FEW_ROWS[x.dtype]
    left = few and weight.stride(1) == 1 and weight.shape[2] % COLUMN_MULTIPLE == 0
    step = K_STEP[x.dtype]
    total = _part(x[..., :step], weight[:, :step], left=left)
    if x.dtype == torch.bfloat16 and step < depth:
        total = total.float()
    for k in range(step, depth, step):
        _add_part(total, x[..., k : k + step], weight[:, k : k + step], left=left)
    return (total.permute(2, 0, 1) if left else total.transpose(0, 1))[:num_rows]


def _part(x: torch.Tensor, weight: torch.Tensor, *, left: bool) -> torch.Tensor:
    a, b = _operands(x, weight, left=left)
    # A single matrix by mm: bmm would copy a transposed weight.
    return torch.mm(a[0], b[0])[None] if a.shape[0] == 1 else torch.bmm(a, b)


def _add_part(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, left: bool) -> None:
    if x.dtype == torch.bfloat16:
        total.add_(_part(x, weight, left=left))
        return
    a, b = _operands(x, weight, left=left)
    if a.shape[0] == 1:
        total[0].addmm_(a[0], b[0])
    else:
        total.baddbmm_(a, b)


def _operands(x: torch.Tensor, weight: torch.Tensor, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a part, the weight's transpose times that of x if `left`."""
    if x.dtype == torch.bfloat16:
        x = x.contiguous()
        if not left:  # else torch copies it along its rows, if it has to
            weight = weight.mT.contiguous().mT if weight.stride(1) == 1 else weight.contiguous()
    return (weight.mT, x.mT) if left else (x, weight)
