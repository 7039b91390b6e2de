"""The one family of errors that `mla` raises on purpose.

Every message has the form ``field: expected ..., got ...`` and is raised before anything is written.
"""

from __future__ import annotations

__all__ = ["CacheError", "DimsError", "GoldenError", "KernelError", "MLAError", "MetadataError", "WeightsError"]


class MLAError(ValueError):
    """Base class of the errors of this package."""


class DimsError(MLAError):
    """Model dimensions or RoPE numbers that cannot be."""


class MetadataError(MLAError):
    """Sequence groups or metadata records that contradict themselves."""


class CacheError(MLAError):
    """A latent cache, a slot or a block that does not fit."""


class KernelError(MLAError):
    """Inputs that a kernel cannot take, or a kernel set that does not exist here."""


class GoldenError(MLAError):
    """JSON, a golden case or a bundle that is damaged or does not fit."""


class WeightsError(MLAError):
    """Checkpoint tensors that are missing or have the wrong shape."""
