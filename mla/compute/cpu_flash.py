"""Softmax attention of a batch of equal shapes by the fused operator of torch, where that is the fastest: with AMX.

The operator is the one behind `scaled_dot_product_attention`. It keeps scores in float32 and computes exponentials while they
are in the cache, so it needs neither the guess of a maximum nor a second product. It splits the work into heads of a batch
and blocks of rows, each of which is the work of one thread, so bits depend on nothing else, as long as there are two or more
(a single one would be shared by the threads inside its products). Its products are MKL's, which are fast on processors with
AMX, and several times slower than oneDNN's on others.
"""

from __future__ import annotations

import torch

__all__ = ["FEWEST_BLOCK_ROWS", "attend_flash", "is_fast"]

FEWEST_BLOCK_ROWS = 32
"""Rows of the operator's smallest block: more than that are more than one thread's work."""


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fused operator beats separate products: a property of the processor and the dtype alone."""
    return dtype == torch.bfloat16 and device.type == "cpu" and torch.cpu._is_amx_tile_supported()


def attend_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of a batch.

    Parameters
    ----------
    q : torch.Tensor of shape (num_stacked, num_rows, dim)
        At least two stacked. The last dimension is contiguous, in `k` and `v` too.
    k, v : torch.Tensor of shape (num_stacked, num_keys, dim)
        `v` may be `k` itself.
    softmax_scale : float
        Factor on q.k.
    causal : bool
        Row i sees the keys up to i.
    mask : torch.Tensor of shape (num_stacked, num_rows or 1, num_keys) or None
        Added to the scores: 0, or -inf where a row does not see a key; each row sees at least one.

    Returns
    -------
    out : torch.Tensor of shape (num_stacked, num_rows, dim)
        Divided by the sum of exponentials.
    lse : torch.Tensor of shape (num_stacked, num_rows), float32
        Natural logarithm.
    """
    stacked_k = k.unsqueeze(1)
    stacked_v = stacked_k if v is k else v.unsqueeze(1)
    stacked_mask = None if mask is None else mask.unsqueeze(1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.unsqueeze(1), stacked_k, stacked_v, 0.0, causal, attn_mask=stacked_mask, scale=softmax_scale
    )
    return out.squeeze(1), lse.squeeze(1)
