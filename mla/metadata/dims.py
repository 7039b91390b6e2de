"""What a model fixes: ranks, head dimensions, softmax scale and RoPE numbers."""

from __future__ import annotations

import math
from typing import Any

import attrs

from mla._checks import check_int, check_positive_float, named_fields
from mla.errors import DimsError
from mla.metadata.show import Shown

__all__ = ["MLADims", "RopeSpec", "YarnSpec", "yarn_mscale"]


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, ``0.1 * mscale * ln(factor) + 1`` for ``factor > 1`` and 1 otherwise.

    References
    ----------
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", section 3.4; the `mscale` weight is
    DeepSeek-V2's.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _count(low: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[int], value: object) -> None:
        check_int(attribute.name, value, low=low, error=DimsError)

    return check


def _positive(_: object, attribute: attrs.Attribute[float], value: object) -> None:
    check_positive_float(attribute.name, value, DimsError)


def _not_negative(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise DimsError(f"{attribute.name}: expected a finite number >= 0, got {value!r}")


@named_fields(DimsError)
@attrs.frozen(kw_only=True)
class YarnSpec(Shown):
    """Numbers of the YaRN context extension, named as in the model configs.

    Parameters
    ----------
    factor : float
        New context length over the original one, at least 1.
    original_max_position_embeddings : int
        Original context length in tokens.
    beta_fast, beta_slow : float
        Rotations over the original context above which a frequency is kept, below which it is divided by `factor`.
    mscale, mscale_all_dim : float
        cos and sin are multiplied by ``yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)``, the softmax
        scale by ``yarn_mscale(factor, mscale_all_dim) ** 2``.

    Raises
    ------
    DimsError
        A number that is not finite or out of range.

    Examples
    --------
    >>> yarn = YarnSpec(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)  # DeepSeek-V3
    >>> round(yarn.rotation_factor, 4), round(yarn.softmax_factor, 4)
    (1.0, 1.8739)
    """

    factor: float = attrs.field(validator=_positive)
    original_max_position_embeddings: int = attrs.field(validator=_count(1))
    beta_fast: float = attrs.field(default=32.0, validator=_positive)
    beta_slow: float = attrs.field(default=1.0, validator=_positive)
    mscale: float = attrs.field(default=1.0, validator=_not_negative)
    mscale_all_dim: float = attrs.field(default=0.0, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        if self.factor < 1:
            raise DimsError(f"factor: expected a number >= 1, got {self.factor!r}")
        if self.beta_fast <= self.beta_slow:
            raise DimsError(f"beta_fast: expected more than beta_slow {self.beta_slow!r}, got {self.beta_fast!r}")

    @property
    def rotation_factor(self) -> float:
        """Factor on cos and sin."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@named_fields(DimsError)
@attrs.frozen(kw_only=True)
class RopeSpec(Shown):
    """Rotary position embedding of the `qk_rope_head_dim` columns.

    Parameters
    ----------
    dim : int
        Rotated columns; even.
    interleaved : bool
        True pairs columns (0, 1), (2, 3), ... as DeepSeek does; False pairs column i with i + dim / 2. There is no default:
        the wrong one gives plausible nonsense.
    theta : float
        Base of the frequencies, ``theta ** (-2 i / dim)``.
    yarn : YarnSpec or None
        Context extension, if any.

    Raises
    ------
    DimsError
        An odd `dim`, or a number out of range; YaRN needs ``theta > 1``.

    Examples
    --------
    >>> RopeSpec(dim=64, interleaved=True).theta
    10000.0
    >>> RopeSpec(dim=64, interleave=True)
    Traceback (most recent call last):
        ...
    mla.errors.DimsError: RopeSpec: expected fields of dim, interleaved, theta, yarn, got interleave
    """

    dim: int = attrs.field(validator=_count(2))
    interleaved: bool = attrs.field()
    theta: float = attrs.field(default=10000.0, validator=_positive)
    yarn: YarnSpec | None = attrs.field(default=None)

    @dim.validator
    def _check_even(self, _: object, value: int) -> None:
        if value % 2:
            raise DimsError(f"dim: expected an even number of rotated columns, got {value}")

    @interleaved.validator
    def _check_flag(self, _: object, value: object) -> None:
        if not isinstance(value, bool):
            raise DimsError(f"interleaved: expected True or False, got {value!r}")

    @yarn.validator
    def _check_yarn(self, _: object, value: object) -> None:
        if value is not None and not isinstance(value, YarnSpec):
            raise DimsError(f"yarn: expected a YarnSpec or None, got {value!r}")

    def __attrs_post_init__(self) -> None:
        if self.yarn is not None and self.theta <= 1:
            raise DimsError(f"theta: expected a number > 1 with YaRN, got {self.theta!r}")


@named_fields(DimsError)
@attrs.frozen(kw_only=True)
class MLADims(Shown):
    """Dimensions of one Multi-head Latent Attention layer, named as in the model configs.

    Parameters
    ----------
    num_heads : int
        Heads held here (after sharding: of this rank).
    kv_lora_rank : int
        Width of the compressed latent ``kv_c`` (512 in DeepSeek-V3).
    qk_nope_head_dim, qk_rope_head_dim : int
        Columns of a query or key head without and with RoPE (128, 64).
    v_head_dim : int
        Columns of a value head (128).
    rope : RopeSpec
        Rotary embedding; its `dim` equals `qk_rope_head_dim`.
    q_lora_rank : int or None
        Width of the compressed query (1536); None where queries are projected directly.
    rms_norm_eps : float
        Epsilon of the norms on the compressed query and latent.
    softmax_scale : float
        Factor on q.k; by default ``qk_head_dim ** -0.5`` times YaRN's ``softmax_factor``.

    Raises
    ------
    DimsError
        A dimension below 1, an odd rope dimension, or a `rope` of another width.

    Examples
    --------
    >>> dims = MLADims(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ...                rope=RopeSpec(dim=64, interleaved=True))
    >>> dims.qk_head_dim, dims.latent_dim, round(dims.softmax_scale, 7)
    (192, 576, 0.0721688)
    """

    num_heads: int = attrs.field(validator=_count(1))
    kv_lora_rank: int = attrs.field(validator=_count(1))
    qk_nope_head_dim: int = attrs.field(validator=_count(1))
    qk_rope_head_dim: int = attrs.field(validator=_count(2))
    v_head_dim: int = attrs.field(validator=_count(1))
    rope: RopeSpec = attrs.field()
    q_lora_rank: int | None = attrs.field(default=None)
    rms_norm_eps: float = attrs.field(default=1e-6, validator=_positive)
    softmax_scale: float = attrs.field(validator=_positive)

    @softmax_scale.default
    def _default_softmax_scale(self) -> float:
        # Runs before the validators, so it must survive values that they will refuse.
        factor = self.rope.yarn.softmax_factor if isinstance(self.rope, RopeSpec) and self.rope.yarn is not None else 1.0
        parts = (self.qk_nope_head_dim, self.qk_rope_head_dim)
        valid = all(isinstance(part, int) and part > 0 for part in parts)
        return float(sum(parts) ** -0.5 * factor) if valid else 1.0

    @q_lora_rank.validator
    def _check_q_lora_rank(self, _: object, value: int | None) -> None:
        if value is not None:
            check_int("q_lora_rank", value, low=1, error=DimsError)

    @rope.validator
    def _check_rope(self, _: object, value: object) -> None:
        if not isinstance(value, RopeSpec):
            raise DimsError(f"rope: expected a RopeSpec, got {value!r}")

    def __attrs_post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise DimsError(f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}")
        if self.rope.dim != self.qk_rope_head_dim:
            raise DimsError(f"rope: expected dim {self.qk_rope_head_dim} (qk_rope_head_dim), got dim {self.rope.dim}")

    @property
    def qk_head_dim(self) -> int:
        """Columns of a query or key head: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Columns of a cache row: kv_lora_rank + rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim
