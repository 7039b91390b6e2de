"""Prefill in Triton: attention over ragged batches of queries and keys.

Two kernels. One for Hopper and the widths of DeepSeek-V3 (`triton_prefill_hopper_kernels`), one for every other device, width
and dtype (`triton_prefill_kernels`); `prefill_route` says which and why, from what a batch cannot change.

No call of torch's own serves here (torch 2.11 with cuDNN 9.19 on an H200). cuDNN's attention over ragged batches,
`aten._cudnn_attention_forward`, takes 192 / 128 and keeps bits, but builds its graph anew at every call, for 47 to 70 ms, and
aligns causal masks with the first key. Its dense attention wants the lengths on the host. FlashAttention 2, which `varlen_attn`
calls, wants values as wide as keys; filled up it reached 194 useful TFLOP/s.
"""

from __future__ import annotations

import functools
import re

import attrs
import torch

from mla._checks import check_int, check_positive_float, check_tensor, dtype_name
from mla.compute.triton_launch import OPTIONS, Launcher, num_processors, raw_stream
from mla.errors import KernelError

__all__ = ["PrefillRoute", "Tiles", "prefill_route", "tiles_for", "varlen_attention"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634
HOPPER_WIDTHS = (192, 128)
HOPPER_BLOCK = 128
GLUON_RELEASE = (3, 6)
"""The first Triton whose Gluon has what the kernel for Hopper needs."""
HEADS_AT_A_TIME = 4
"""Heads whose keys should share the second cache: within them, the blocks of queries with most keys come first."""
MIN_V_WIDTH = 32
"""Triton 3.6 compiles tiles of 16 values for Hopper into code that reads and writes what it should not."""


@attrs.frozen(kw_only=True)
class PrefillRoute:
    """Which kernel a call takes, and why.

    Parameters
    ----------
    name : str
        ``"hopper"`` or ``"portable"``.
    reason : str
        The end of a sentence.
    """

    name: str
    reason: str


@functools.cache
def prefill_route(dtype: torch.dtype, qk_head_dim: int, v_head_dim: int, device: torch.device) -> PrefillRoute:
    """The kernel for tensors of this kind; nothing else decides, lengths and strides included.

    Parameters
    ----------
    dtype : torch.dtype
        Of q, k and v.
    qk_head_dim, v_head_dim : int
        Columns of a key and of a value.
    device : torch.device
        Where they lie.
    """
    portable = functools.partial(PrefillRoute, name="portable")
    if device.type != "cuda" or torch.version.hip is not None:
        return portable(reason=f"{device.type} is not an NVIDIA GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return portable(reason=f"compute capability {capability[0]}.{capability[1]} is not Hopper's 9.0")
    if dtype.itemsize != 2 or (qk_head_dim, v_head_dim) != HOPPER_WIDTHS:
        return portable(
            reason=f"the kernel for Hopper takes 16-bit floats of widths {HOPPER_WIDTHS[0]} and {HOPPER_WIDTHS[1]}, "
            f"not {dtype_name(dtype)} of {qk_head_dim} and {v_head_dim}"
        )
    import triton

    release = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if release < GLUON_RELEASE:
        return portable(reason=f"Triton {triton.__version__} is older than {GLUON_RELEASE[0]}.{GLUON_RELEASE[1]}")
    return PrefillRoute(name="hopper", reason="compute capability 9.0, 16-bit floats, widths 192 and 128")


@attrs.frozen(kw_only=True)
class Tiles:
    """How the portable kernel cuts a problem: by dtype and widths only, so that bits do not depend on the batch.

    Parameters
    ----------
    block_m, block_n : int
        Queries of one program, and keys that it takes at a time.
    widths : tuple of int
        Powers of two that a row of q and k is cut into: two tiles, or one and 0; filled up with zeros on the chip.
    sizes : tuple of int
        Columns that lie in each.
    v_width : int
        The tile of a value.
    num_warps, num_stages : int
        Of the launch.
    """

    block_m: int
    block_n: int
    widths: tuple[int, int]
    sizes: tuple[int, int]
    v_width: int
    num_warps: int
    num_stages: int


def _tile(width: int) -> int:
    """The power of two that holds `width` columns: 16 at least, for tensor cores."""
    return max(16, 1 << (width - 1).bit_length())


def tiles_for(dtype: torch.dtype, qk_head_dim: int, v_head_dim: int) -> Tiles:
    """The tiles of a dtype and two widths.

    Parameters
    ----------
    dtype : torch.dtype
        Of q, k and v.
    qk_head_dim, v_head_dim : int
        Columns of a key and of a value.

    Raises
    ------
    KernelError
        A width below 1.
    """
    for name, value in (("qk_head_dim", qk_head_dim), ("v_head_dim", v_head_dim)):
        check_int(name, value, low=1, error=KernelError)
    whole = _tile(qk_head_dim)
    half = whole // 2
    rest = qk_head_dim - half
    # 192 is 128 + 64: a quarter less than one tile of 256.
    if half < 16 or qk_head_dim == whole or _tile(rest) == half:
        widths, sizes = (whole, 0), (qk_head_dim, 0)
    else:
        widths, sizes = (half, _tile(rest)), (half, rest)
    v_width = max(_tile(v_head_dim), MIN_V_WIDTH)
    numbers = sum(widths) + v_width
    if dtype == torch.float32:
        block_m, block_n, num_warps, num_stages = (32, 32, 4, 1) if numbers <= 512 else (16, 16, 4, 1)
    elif numbers <= 384:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3
    elif numbers <= 640:
        block_m, block_n, num_warps, num_stages = 64, 32, 4, 2
    else:
        block_m, block_n, num_warps, num_stages = 32, 16, 4, 1
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        widths=widths,
        sizes=sizes,
        v_width=v_width,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    max_query_len: int,
    max_kv_len: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla.compute.VarlenAttention` in Triton, with bits that do not depend on the batch.

    Parameters
    ----------
    q : torch.Tensor of shape (num_tokens, num_heads, qk_head_dim)
        bfloat16 or float16; float32 for checks, without tensor cores. Rows beyond ``query_start_loc[-1]`` are empty.
    k : torch.Tensor of shape (num_kv_tokens, num_heads, qk_head_dim)
        Any strides; numbers of a head that are not side by side are copied first.
    v : torch.Tensor of shape (num_kv_tokens, num_heads, v_head_dim)
        Likewise.
    query_start_loc, kv_start_loc : torch.Tensor of shape (num_seqs + 1,), int32
        Cumulative lengths, from 0; never read on the host.
    max_query_len, max_kv_len : int
        Longest row of each kind; the grid is made of the first, and longer rows are left unwritten.
    causal : bool
        Whether a query sees only keys up to its own position, the last query the last key.
    softmax_scale : float
        Factor on q.k.

    Returns
    -------
    out : torch.Tensor of shape (num_tokens, num_heads, v_head_dim)
        In the dtype of q; 0 in rows without keys.
    lse : torch.Tensor of shape (num_tokens, num_heads), float32
        Natural logarithm; -inf in rows without keys.

    Raises
    ------
    KernelError
        Naming the argument.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning".
    """
    bound = check_tensor("q", q, "(num_tokens, num_heads, qk_head_dim)", DTYPES, error=KernelError)
    checks = (
        ("k", k, "(num_kv_tokens, num_heads, qk_head_dim)", q.dtype),
        ("v", v, "(num_kv_tokens, num_heads, v_head_dim)", q.dtype),
        ("query_start_loc", query_start_loc, "(num_seqs + 1,)", torch.int32),
        ("kv_start_loc", kv_start_loc, "(num_seqs + 1,)", torch.int32),
    )
    for name, x, shape, dtype in checks:
        check_tensor(name, x, shape, dtype, device=q.device, bound=bound, error=KernelError)
    for name, value in (("max_query_len", max_query_len), ("max_kv_len", max_kv_len)):
        check_int(name, value, low=0, error=KernelError)
    scale = check_positive_float("softmax_scale", softmax_scale, KernelError)
    num_tokens, num_heads = q.shape[:2]
    if 0 in (num_tokens, num_heads, k.shape[0], max_query_len):
        return q.new_zeros(num_tokens, num_heads, v.shape[2]), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    out = q.new_empty(num_tokens, num_heads, v.shape[2])
    lse = q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    route = prefill_route(q.dtype, q.shape[2], v.shape[2], q.device)
    launch = _launch_hopper if route.name == "hopper" else _launch_portable
    with torch.cuda.device_of(q):
        launch(q, k, v, out, lse, query_start_loc.contiguous(), kv_start_loc.contiguous(), max_query_len, causal, scale)
    return out, lse


def _launch_portable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    max_query_len: int,
    causal: bool,
    scale: float,
) -> None:
    import triton

    from mla.compute.triton_prefill_kernels import varlen_kernel  # noqa: PLC0415

    num_tokens, num_heads, v_head_dim = out.shape
    tiles = tiles_for(q.dtype, q.shape[2], v_head_dim)
    q, k, v = (_with_near_rows(x, rows) for x, rows in ((q, tiles.block_m), (k, tiles.block_n), (v, tiles.block_n)))
    num_seqs = query_start_loc.shape[0] - 1
    num_blocks = triton.cdiv(max_query_len, tiles.block_m)
    group = min(HEADS_AT_A_TIME, num_heads)
    grid = ((num_seqs + 1) * triton.cdiv(num_heads, group) * num_blocks * group,)
    varlen_kernel[grid](
        q, k, v, out, lse, query_start_loc, kv_start_loc, num_tokens, num_seqs, num_blocks, num_heads, group,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), scale * LOG2_E,
        CAUSAL=causal, SIZE_A=tiles.sizes[0], SIZE_B=tiles.sizes[1], V_DIM=v_head_dim,
        WIDTH_A=tiles.widths[0], WIDTH_B=tiles.widths[1], WIDTH_V=tiles.v_width,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **OPTIONS,
    )  # fmt: skip


def _with_near_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The tensor with the numbers of a head side by side, and rows so close that 31 bits reach across a tile of them."""
    return x if x.stride(2) == 1 and x.stride(0) * num_rows < 2**31 else x.contiguous()


@functools.lru_cache(maxsize=64)
def _hopper_launcher(device: torch.device, dtype: torch.dtype, causal: bool) -> Launcher:
    from mla.compute.triton_prefill_hopper_kernels import hopper_varlen_kernel  # noqa: PLC0415

    return Launcher(hopper_varlen_kernel, {"CAUSAL": causal, "num_warps": 4, "maxnreg": 168})


def _launch_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    max_query_len: int,
    causal: bool,
    scale: float,
) -> None:
    num_tokens, num_heads, _ = out.shape
    num_seqs = query_start_loc.shape[0] - 1
    num_blocks = -(-max_query_len // HOPPER_BLOCK)
    num_items = (num_seqs + 1) * num_blocks * num_heads
    q, k, v = (_with_aligned_rows(x) for x in (q, k, v))
    # A token is a row; a head begins at a multiple of the heads' stride, wherever in memory that leads.
    launch = _hopper_launcher(q.device, q.dtype, causal).way
    boxes = [
        argument
        for x, box in ((q, (64, 64)), (k, (128, 64)), (v, (128, 128)))
        for argument in launch.boxes(x, (x.shape[0], (num_heads - 1) * x.stride(1) + x.shape[2]), x.stride(0), box)
    ]
    counter = query_start_loc.new_zeros(1)
    programs = min(num_items, num_processors(q.device))
    launch(
        (programs, 1, 1), raw_stream(q.device),
        *boxes, out, lse, counter, query_start_loc, kv_start_loc, num_tokens, num_seqs, num_blocks, num_heads,
        min(HEADS_AT_A_TIME, num_heads), q.stride(1), k.stride(1), v.stride(1), scale * LOG2_E,
    )  # fmt: skip


def _with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor as the chip's tensor memory accelerator reads it: rows of numbers side by side, 16 bytes aligned."""
    step = 16 // x.itemsize
    reach = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    readable = x.stride(2) == 1 and x.stride(0) > 0 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0 and reach < 2**31
    return x if readable else x.clone(memory_format=torch.contiguous_format)
