"""Rotary position embedding: the table of cos and sin, and turning queries and keys by it."""

from __future__ import annotations

import math

import attrs
import torch

from mla._checks import (
    check_floating,
    check_instance,
    check_int,
    check_record,
    check_tensor,
    describe,
    named_fields,
    tensor,
    usable_device,
)
from mla.errors import KernelError
from mla.metadata.dims import RopeSpec

__all__ = ["RopeTable", "apply_rope", "rope_frequencies", "rope_table"]


@named_fields(KernelError)
@attrs.frozen(kw_only=True, eq=False)
class RopeTable:
    """cos and sin of every position, as `rope_table` makes them.

    Parameters
    ----------
    cos, sin : torch.Tensor of shape (max_len, num_frequencies), float32 or float64
        Row p holds ``cos(p * frequency)`` and ``sin(p * frequency)``, times YaRN's rotation factor.
    interleaved : bool
        Pairing of the columns, see `RopeSpec`.

    Raises
    ------
    KernelError
        A wrong shape, dtype or device.

    Examples
    --------
    >>> angles = torch.arange(100)[:, None] * torch.tensor([1.0, 0.01])
    >>> table = RopeTable(cos=angles.cos(), sin=angles.sin(), interleaved=True)
    >>> table.max_len, table.cos.dtype
    (100, torch.float32)
    """

    cos: torch.Tensor = attrs.field(metadata=tensor("(max_len, num_frequencies)", None))
    sin: torch.Tensor = attrs.field(metadata=tensor("(max_len, num_frequencies)", None))
    interleaved: bool

    def __attrs_post_init__(self) -> None:
        check_record(self, KernelError)
        if self.cos.dtype not in (torch.float32, torch.float64):
            raise KernelError(f"cos: expected float32 or float64, got {self.cos.dtype}")
        if self.sin.dtype != self.cos.dtype:
            raise KernelError(f"sin: expected {self.cos.dtype} as cos has, got {self.sin.dtype}")
        if not isinstance(self.interleaved, bool):
            raise KernelError(f"interleaved: expected True or False, got {describe(self.interleaved)}")

    @property
    def max_len(self) -> int:
        """Positions in the table."""
        return self.cos.shape[0]


def rope_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Angle per position of each pair of columns, shape (dim / 2,), float64.

    Without YaRN ``theta ** (-2 i / dim)``. With it, pairs that turn more than `beta_fast` times over the original context keep
    their frequency, pairs that turn less than `beta_slow` times are slowed down by `factor`, and a linear ramp lies between.

    References
    ----------
    Su et al., "RoFormer"; Peng et al., "YaRN", section 3.2 ("NTK-by-parts"), with DeepSeek-V2's rounding of the ramp's ends.
    """
    half = spec.dim // 2
    frequencies = spec.theta ** (-torch.arange(half, dtype=torch.float64) * 2 / spec.dim)
    yarn = spec.yarn
    if yarn is None:
        return frequencies

    def pair_with_rotations(rotations: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return spec.dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low = max(math.floor(pair_with_rotations(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(yarn.beta_slow)), spec.dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(half, dtype=torch.float64) - low) / width).clamp(0, 1)
    return frequencies / yarn.factor * slowed + frequencies * (1 - slowed)


def rope_table(
    spec: RopeSpec, max_len: int, device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.float32
) -> RopeTable:
    """Cos and sin for positions ``0 .. max_len - 1``; make it once and pass it to every call.

    Angles are computed in float64 and rounded once, so long positions lose nothing.

    Parameters
    ----------
    spec : RopeSpec
        Frequencies and pairing.
    max_len : int
        Positions, at least 1.
    device : torch.device or str
        Where the table lives.
    dtype : torch.dtype
        float32, or float64 for float64 models.

    Raises
    ------
    KernelError
        `max_len` below 1, another dtype, or no such device.

    Examples
    --------
    >>> rope_table(RopeSpec(dim=64, interleaved=True), 4096).cos.shape
    torch.Size([4096, 32])
    """
    check_instance("spec", spec, RopeSpec, KernelError)
    check_int("max_len", max_len, low=1, error=KernelError)
    where = usable_device("device", device, KernelError)
    if dtype not in (torch.float32, torch.float64):
        raise KernelError(f"dtype: expected float32 or float64, got {dtype}")
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * rope_frequencies(spec)
    factor = 1.0 if spec.yarn is None else spec.yarn.rotation_factor
    cos, sin = ((f(angles) * factor).to(where, dtype) for f in (torch.cos, torch.sin))
    return RopeTable(cos=cos, sin=sin, interleaved=spec.interleaved)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Turn each pair of columns by its position's angle; the columns keep their places.

    Computed in the table's dtype and returned in the dtype of `x`; float64 needs a float64 table.

    Parameters
    ----------
    x : torch.Tensor of shape (num_tokens, dim) or (num_tokens, num_heads, dim)
        Queries or keys.
    positions : torch.Tensor of shape (num_tokens,), int64
        Positions, within the table.
    table : RopeTable
        From `rope_table`.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of `x`.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices that do not fit; on the CPU also a position outside the table.

    Examples
    --------
    Position 0 turns nothing, and no position changes a length.

    >>> table, x = rope_table(RopeSpec(dim=8, interleaved=True), 4), torch.randn(2, 8)
    >>> turned = apply_rope(x, torch.tensor([0, 3]), table)
    >>> torch.equal(turned[0], x[0]), torch.allclose(turned.norm(dim=1), x.norm(dim=1))
    (True, True)
    >>> apply_rope(x, torch.tensor([0, 4]), table)
    Traceback (most recent call last):
        ...
    mla.errors.KernelError: positions: expected positions in 0..3, got 4
    """
    check_instance("table", table, RopeTable, KernelError)
    shape = "(num_tokens, num_heads, dim)" if isinstance(x, torch.Tensor) and x.dim() == 3 else "(num_tokens, dim)"
    bound = check_tensor("x", x, shape, bound={"dim": 2 * table.cos.shape[1]}, device=table.cos.device, error=KernelError)
    check_floating("x", x, KernelError)
    if x.dtype == torch.float64 and table.cos.dtype != torch.float64:
        raise KernelError(f"table: expected float64 for float64 columns, got {table.cos.dtype}")
    check_tensor("positions", positions, "(num_tokens,)", torch.int64, bound=bound, device=x.device, error=KernelError)
    if x.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= table.max_len:
            raise KernelError(f"positions: expected positions in 0..{table.max_len - 1}, got {low if low < 0 else high}")
    cos, sin = table.cos[positions], table.sin[positions]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    wide = x.to(table.cos.dtype)
    if table.interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    if table.interleaved:
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(turned, dim=-1).to(x.dtype)
