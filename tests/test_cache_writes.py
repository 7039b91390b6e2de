"""Cache writes on the CPU copy bits, whatever widths, layouts and alignment, and refuse before they write."""

from __future__ import annotations

import pytest
import torch

from mla.cache import gather_latent_cache, write_latent_cache_
from mla.cache.paged import WORD
from mla.errors import CacheError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
WIDTHS = ((512, 64), (24, 8), (14, 6), (7, 1))


def any_bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """NaNs of all payloads, denormals and both zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    integer = INTEGERS[dtype.itemsize]
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=integer).view(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(INTEGERS[x.itemsize])


def cache_at(offset: int, latent_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """40 blocks of 4 rows that begin `offset` elements after an aligned address."""
    return any_bits(offset + 160 * latent_dim, dtype=dtype, seed=1)[offset:].view(40, 4, latent_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("layout", ["apart", "columns of one tensor", "every other row", "shifted", "transposed"])
def test_writes_copy_bits(dtype, widths, offset, layout):
    rank, rest = widths
    cache = cache_at(offset, rank + rest, dtype)
    slots = torch.randperm(160, generator=torch.Generator().manual_seed(2))[:50]
    slots[[0, 7, 49]] = -1
    values = any_bits(50, rank + rest, dtype=dtype, seed=3)
    kv_c, k_pe = values[:, :rank], values[:, rank:]
    if layout == "apart":
        kv_c, k_pe = kv_c.clone(), k_pe.clone()
    elif layout == "every other row":
        kv_c, k_pe = (torch.stack([x, -x], dim=1)[:, 0] for x in (kv_c, k_pe))
    elif layout == "shifted":
        kv_c, k_pe = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (kv_c, k_pe))
    elif layout == "transposed":
        kv_c, k_pe = (x.t().contiguous().t() for x in (kv_c, k_pe))
    expected = bits(cache).view(160, -1).clone()
    kept = slots >= 0
    expected[slots[kept]] = bits(values)[kept]
    write_latent_cache_(cache, kv_c, k_pe, slots)
    assert torch.equal(bits(cache).view(160, -1), expected)
    out = torch.empty(60, rank + rest, dtype=dtype)
    gathered = gather_latent_cache(cache, slots[kept], out=out)
    assert torch.equal(bits(gathered), bits(values)[kept])
    write_latent_cache_(cache, kv_c, k_pe, torch.full_like(slots, -1))
    assert torch.equal(bits(cache).view(160, -1), expected)


def test_wide_elements_are_used_where_they_fit(monkeypatch):
    seen = []
    real = torch.Tensor.index_put_
    monkeypatch.setattr(torch.Tensor, "index_put_", lambda x, *args: (seen.append(x.dtype), real(x, *args))[1])
    for rank, rest, offset in ((512, 64, 0), (512, 63, 0), (512, 64, 1)):
        cache = cache_at(offset, rank + rest, torch.bfloat16)
        write_latent_cache_(cache, torch.ones(1, rank).bfloat16(), torch.ones(1, rest).bfloat16(), torch.tensor([3]))
    assert seen == [WORD, WORD, *[torch.bfloat16] * 4]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([5, 3, 9, 3], r"slot_mapping: expected every slot once, got slot 3 twice"),
        ([5, -1, -1, 5], r"slot_mapping: expected every slot once, got slot 5 twice"),
        ([0, 1, 2, 160], r"slot_mapping: expected slots in -1\.\.159, got 160"),
        ([0, 1, -2, 2], r"slot_mapping: expected slots in -1\.\.159, got -2"),
        ([-(2**63), 1, 2, 3], r"slot_mapping: expected slots in -1\.\.159, got -9223372036854775808"),
        ([2**63 - 1, 1, 2, 3], r"slot_mapping: expected slots in -1\.\.159, got 9223372036854775807"),
    ],
)
def test_nothing_is_written_where_a_slot_is_refused(slots, message):
    cache = cache_at(0, 32, torch.bfloat16)
    before = bits(cache).clone()
    values = torch.ones(4, 32, dtype=torch.bfloat16)
    with pytest.raises(CacheError, match=message):
        write_latent_cache_(cache, values[:, :24], values[:, 24:], torch.tensor(slots))
    assert torch.equal(bits(cache), before)
