"""The one family of errors that `mla` raises on purpose.

Every message has the form ``field: expected ..., got ...`` and is raised before anything is written.
"""

from __future__ import annotations

__all__ = ["CacheError", "DimsError", "GoldenError", "KernelError", "MLAError", "MetadataError", "WeightsError"]


class MLAError(ValueError):
    """Base class of the errors of this package.

    Examples
    --------
    >>> from mla import prompt_group
    >>> try:
    ...     prompt_group(-1)
    ... except MLAError as error:
    ...     print(type(error).__name__, isinstance(error, ValueError), error, sep="; ")
    MetadataError; True; query_len: expected an int >= 0, got -1
    """


class DimsError(MLAError):
    """Model dimensions or RoPE numbers that cannot be.

    Examples
    --------
    >>> from mla import RopeSpec
    >>> RopeSpec(dim=63, interleaved=True)
    Traceback (most recent call last):
        ...
    mla.errors.DimsError: dim: expected an even number of rotated columns, got 63
    """


class MetadataError(MLAError):
    """Sequence groups or metadata records that contradict themselves.

    Examples
    --------
    >>> from mla import build_metadata, prompt_group
    >>> build_metadata([prompt_group(5, [7])], block_size=4)
    Traceback (most recent call last):
        ...
    mla.errors.MetadataError: block_ids: expected at least 2 blocks of 4 for the 5 tokens of sequence 0, got 1
    """


class CacheError(MLAError):
    """A latent cache, a slot or a block that does not fit.

    Examples
    --------
    >>> from mla import BlockPool
    >>> BlockPool.empty(num_blocks=2, block_size=4).allocate("a", range(9))
    Traceback (most recent call last):
        ...
    mla.errors.CacheError: free blocks: expected at least 3, got 2
    """


class KernelError(MLAError):
    """Inputs that a kernel cannot take, or a kernel set that does not exist here.

    Examples
    --------
    >>> from mla import kernels_for
    >>> kernels_for("cpu", dtype=torch.int8)
    Traceback (most recent call last):
        ...
    mla.errors.KernelError: dtype: expected float64, float32, bfloat16 or float16, got int8
    """


class GoldenError(MLAError):
    """JSON, a golden case or a bundle that is damaged or does not fit.

    Examples
    --------
    >>> from mla.serialize import from_json
    >>> from_json({"type": "RopeSpec", "dim": 64})
    Traceback (most recent call last):
        ...
    mla.errors.GoldenError: RopeSpec.interleaved: expected a value, got none
    """


class WeightsError(MLAError):
    """Checkpoint tensors that are missing or have the wrong shape.

    Examples
    --------
    >>> from mla import dims_from_config
    >>> dims_from_config({"kv_lora_rank": 512})
    Traceback (most recent call last):
        ...
    mla.errors.WeightsError: config: expected an entry qk_rope_head_dim, got kv_lora_rank
    """
