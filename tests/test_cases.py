"""The list of field cases: failures that users of MLA attention met elsewhere, each with its small case, by number."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from allocations import Allocations
from batches import small_dims
from compare import LSE_ABS, OUT_REL, assert_close

import mla.compute.select
from mla import (
    CacheError,
    DimsError,
    KernelError,
    KernelSet,
    LatentCacheSpec,
    MetadataError,
    MLADims,
    MLAWeights,
    RopeSpec,
    SequenceGroup,
    YarnSpec,
    build_metadata,
    decode_group,
    dims_from_config,
    explain,
    kernel_set,
    kernels_for,
    mla_attention,
    prompt_group,
    rope_table,
    validate_metadata_values,
)
from mla.cache import allocate_latent_cache, gather_latent_cache, write_latent_cache_
from mla.compute import apply_rope, cuda, merge_attn_states, prefill, split_kv_b_proj
from mla.errors import MLAError
from mla.metadata import DecodeMetadata, PagedKV, context_workspace_tokens

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
CPU = kernels_for("cpu")
DIMS = small_dims()

NUMBERS = {
    1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 23, 24, 26, 28, 29, 30, 31, 33, 34, 35, 37, 38, 40, 42, 44,
    45, 46, 47, 48, 49, 51, 52, 54, 55, 56, 58, 59, 61, 62, 63, 64, 65, 67, 68, 70, 71, 73, 74, 75, 76, 78, 79, 81, 82, 84, 86,
    87, 88, 90, 91, 92, 93, 95, 96, 97,
}  # fmt: skip
"""Every number of the list."""

NOT_HERE = {
    11: "buffers of a captured graph: tests/test_state.py",
    18: "buffers of a captured graph: tests/test_state.py",
    20: "buffers of a captured graph: tests/test_state.py; the fp8 half waits for that cache",
    24: "buffers of a captured graph: tests/test_state.py",
    26: "buffers of a captured graph: tests/test_state.py",
    28: "buffers of a captured graph: tests/test_state.py",
    30: "buffers of a captured graph: tests/test_state.py",
    49: "AITER: tests/test_rocm.py",
    58: "AITER: tests/test_rocm.py; the fp8 half waits for that cache",
    59: "AITER: tests/test_rocm.py",
    65: "AITER: tests/test_rocm.py",
    67: "the fp8 cache",
    68: "the fp8 cache",
    70: "the fp8 cache",
    71: "the fp8 cache",
    87: "IPEX: tests/test_ipex.py",
    88: "AITER: tests/test_rocm.py",
    93: "AITER: tests/test_rocm.py",
}
"""Cases whose subject has tests of its own, or none here."""


@attrs.frozen(kw_only=True, eq=False)
class Sequence:
    """One sequence: all its latent rows, and the queries of its last tokens."""

    rows: torch.Tensor
    q: torch.Tensor
    is_prompt: bool

    @property
    def context_len(self) -> int:
        return len(self.rows) - len(self.q)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sequence(
    length: int, query_len: int = 1, *, prompt: bool = False, dims: MLADims = DIMS, dtype: torch.dtype = F32
) -> Sequence:
    """Values that depend on nothing but the lengths and the dimensions, so that batch mates do not matter."""
    rows = normal(length, dims.latent_dim, seed=length).to(dtype)
    q = normal(length, dims.num_heads, dims.qk_head_dim, seed=1000 + length).to(dtype)
    return Sequence(rows=rows, q=q[length - query_len :], is_prompt=prompt)


def up_projection(dims: MLADims = DIMS, dtype: torch.dtype = F32) -> torch.Tensor:
    rows = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    return (normal(rows, dims.kv_lora_rank, seed=7) * dims.kv_lora_rank**-0.5).to(dtype)


def groups_of(sequences: list[Sequence], tables: list[Any]) -> list[SequenceGroup]:
    return [
        SequenceGroup(is_prompt=s.is_prompt, query_lens=(len(s.q),), context_lens=(s.context_len,), block_ids=(table,))
        for s, table in zip(sequences, tables, strict=True)
    ]


def attend(
    sequences: list[Sequence],
    *,
    block_size: int = 16,
    dims: MLADims = DIMS,
    kernels: KernelSet = CPU,
    shuffle: int = 0,
    workspace: torch.Tensor | None = None,
    **build: Any,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and LSE of each sequence; blocks lie in random order, slots that hold nothing are NaN, padding last."""
    counts = [-(-len(s.rows) // block_size) for s in sequences]
    num_blocks = sum(counts) + 2
    order = np.random.default_rng(shuffle).permutation(num_blocks)
    tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    metadata = build_metadata(groups_of(sequences, tables), block_size=block_size, **build)
    dtype = sequences[0].rows.dtype
    cache = torch.full((num_blocks, block_size, dims.latent_dim), torch.nan, dtype=dtype)
    for s, table in zip(sequences, tables, strict=True):
        blocks = torch.full((len(table) * block_size, dims.latent_dim), torch.nan, dtype=dtype)
        blocks[: s.context_len] = s.rows[: s.context_len]
        cache[torch.from_numpy(table)] = blocks.view(-1, block_size, dims.latent_dim)
    missing = metadata.num_tokens - sum(len(s.q) for s in sequences)
    new = torch.cat(
        [*(s.rows[s.context_len :] for s in sequences), torch.full((missing, dims.latent_dim), torch.nan, dtype=dtype)]
    )
    q = torch.cat([*(s.q for s in sequences), torch.full((missing, *sequences[0].q.shape[1:]), torch.nan, dtype=dtype)])
    out, lse = mla.attend(
        q,
        *new.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1),
        cache,
        metadata,
        kv_b_proj=up_projection(dims, dtype),
        dims=dims,
        kernels=kernels,
        workspace=workspace,
    )
    sizes = [*(len(s.q) for s in sequences), missing]
    return list(zip(out.split(sizes), lse.split(sizes), strict=True))


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over a masked matrix in float64, the last query aligned with the last key."""
    scores = torch.einsum("thd,lhd->htl", q.double(), k.double()) * scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("htl,lhe->the", scores.softmax(-1), v.double()), torch.logsumexp(scores, -1).T


def dense(s: Sequence, dims: MLADims = DIMS) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on the unpaged latent with keys and values made from it."""
    rows = s.rows.double()
    up = up_projection(dims, s.rows.dtype).double().view(dims.num_heads, -1, dims.kv_lora_rank)
    made = torch.einsum("lc,hdc->lhd", rows[:, : dims.kv_lora_rank], up)
    k_nope, v = made.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=2)
    k_pe = rows[:, None, dims.kv_lora_rank :].expand(-1, dims.num_heads, -1)
    return softmax_attention(s.q, torch.cat([k_nope, k_pe], dim=2), v, dims.softmax_scale)


def assert_dense(got: tuple[torch.Tensor, torch.Tensor], s: Sequence, dims: MLADims = DIMS) -> None:
    out, lse = dense(s, dims)
    assert_close(got[0], out, rel=OUT_REL[s.rows.dtype])
    assert_close(got[1], lse, abs=LSE_ABS[s.rows.dtype])


def assert_same_bits(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def assert_empty(got: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert got[0].numel()
    assert bool((got[0] == 0).all())
    assert bool((got[1] == -torch.inf).all())


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def decode_record(seq_lens: list[int], query_lens: list[int]) -> DecodeMetadata:
    """A record of any lengths at all, block i for sequence i."""
    tokens, rows = sum(query_lens), len(seq_lens)
    return DecodeMetadata(
        query_start_loc=int32(0, *np.cumsum(query_lens).tolist()),
        seq_start_loc=int32(0, *np.cumsum(seq_lens).tolist()),
        seq_lens=int32(*seq_lens),
        context_lens=torch.zeros(rows, dtype=torch.int32),
        slot_mapping=torch.full((tokens,), -1),
        positions=torch.zeros(tokens, dtype=torch.int64),
        block_size=4,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        min_num_blocks=rows,
        block_table=torch.arange(rows, dtype=torch.int32)[:, None],
    )


@pytest.fixture(autouse=True)
def one_thread(restore_num_threads: None) -> None:
    """The cases are small: waking a second thread costs more than it saves."""
    torch.set_num_threads(1)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Memory that torch hands out without filling it holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def run_script(text: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Metadata and paging


def test_case_01_a_page_of_16_tokens_is_never_passed_through() -> None:
    decode = build_metadata([decode_group(20, [3, 1])], block_size=16, page_sizes=(1, 16)).decode
    paged = decode.paged_kv_of(1)
    assert paged.paged_kv_indices.tolist() == [*range(48, 64), 16, 17, 18, 19]
    assert paged.paged_kv_last_page_lens.tolist() == [1]
    assert decode.paged_kv_of(16).paged_kv_indices.tolist() == [3, 1]
    assert decode.paged_kv_of(16).paged_kv_last_page_lens.tolist() == [4]
    with pytest.raises(KernelError, match=re.escape("metadata: expected paged_kv of page size 1 for CPU_MLA, got [16]")):
        attend([sequence(20)], kernels=attrs.evolve(CPU, page_size=1), page_sizes=(16,))


def test_case_02_blocks_become_tokens_cut_at_the_length() -> None:
    paged = build_metadata([decode_group(10, [0, 2, 4])], block_size=4, page_sizes=(1,)).decode.paged_kv_of(1)
    assert paged.paged_kv_indices.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17]
    groups = [decode_group(5, [1, 2, 4]), decode_group(3, [3, 5, 0])]
    paged = build_metadata(groups, block_size=2, page_sizes=(1,)).decode.paged_kv_of(1)
    assert paged.paged_kv_indices.tolist() == [2, 3, 4, 5, 8, 6, 7, 10]
    assert paged.paged_kv_indptr.tolist() == [0, 5, 8]


@pytest.mark.parametrize("s", [sequence(70), sequence(70, 4), sequence(54, 21, prompt=True)], ids=["one", "four", "prompt"])
def test_case_03_the_block_size_does_not_change_bits(s: Sequence) -> None:
    expected = attend([s], block_size=16)[0]
    for block_size in (1, 64):
        assert_same_bits(attend([s], block_size=block_size, shuffle=block_size)[0], expected)


def test_case_05_more_query_rows_than_table_rows() -> None:
    sequences = [sequence(16, 3), sequence(17, 3)]
    for s, got in zip(sequences, attend(sequences), strict=False):
        assert_dense(got, s)
    zero = [attrs.evolve(s, q=torch.zeros_like(s.q)) for s in sequences]
    for s, (_, lse) in zip(zero, attend(zero), strict=False):
        length = len(s.rows)
        seen = torch.tensor([length - 2.0, length - 1.0, length])[:, None].expand(-1, DIMS.num_heads)
        assert_close(lse, seen.log(), abs=LSE_ABS[F32])


@pytest.mark.parametrize("lengths", [[20, 5], [4]])
def test_case_06_four_new_tokens_are_causal(lengths: list[int]) -> None:
    dims = small_dims(16)
    sequences = [sequence(length, 4, dims=dims) for length in lengths]
    for s, got in zip(sequences, attend(sequences, dims=dims), strict=False):
        assert_dense(got, s, dims)


def test_case_07_a_mixed_order_is_refused_with_its_index() -> None:
    def group(query_len: int, block: int, *, is_prompt: bool) -> SequenceGroup:
        return SequenceGroup(is_prompt=is_prompt, query_lens=(query_len,), context_lens=(8,), block_ids=((block,),))

    for threshold, index in ((1, 1), (2, 3)):
        groups = [group(n, i, is_prompt=n > threshold) for i, n in enumerate([1, 2, 1, 5])]
        with pytest.raises(
            MetadataError, match=re.escape(f"groups: expected prompts before decoding sequences, got prompt groups[{index}]")
        ):
            build_metadata(groups, block_size=16)
        metadata = build_metadata(sorted(groups, key=lambda g: not g.is_prompt), block_size=16)
        assert metadata.num_prefill_tokens == sum(n for n in (1, 2, 1, 5) if n > threshold)
        assert metadata.num_prefill_tokens + metadata.num_decode_tokens == 9


def test_case_08_a_cached_prefix_needs_no_flag() -> None:
    whole, last = sequence(20, 20, prompt=True), sequence(20, 4, prompt=True)
    (out, lse), (part_out, part_lse) = attend([whole])[0], attend([last])[0]
    assert_close(part_out, out[16:], rel=OUT_REL[F32])
    assert_close(part_lse, lse[16:], abs=LSE_ABS[F32])
    assert_dense((part_out, part_lse), last)


def test_case_10_index_arrays_of_different_batches_are_refused() -> None:
    good = build_metadata([decode_group(5, [3, 4]), decode_group(3, [5])], block_size=4, page_sizes=(1,))
    paged = good.decode.paged_kv_of(1)
    with pytest.raises(
        MetadataError, match=r"paged_kv_last_page_lens: expected shape \(num_seqs,\) with num_seqs=0, got \(2,\)"
    ):
        attrs.evolve(paged, paged_kv_indptr=int32(0))
    three = attrs.evolve(paged, paged_kv_indptr=int32(0, 5, 8, 8), paged_kv_last_page_lens=int32(1, 1, 0))
    with pytest.raises(
        MetadataError, match=r"paged_kv_last_page_lens \(page_size 1\): expected .* with num_seqs=2, got \(3,\)"
    ):
        attrs.evolve(good.decode, paged_kv=(three,))
    for indptr in ((1, 5, 8), (0, 9, 8), (0, 5, 9)):
        spoilt = attrs.evolve(good.decode, paged_kv=(attrs.evolve(paged, paged_kv_indptr=int32(*indptr)),))
        with pytest.raises(MetadataError, match="paged_kv_indptr: expected"):
            validate_metadata_values(attrs.evolve(good, decode=spoilt))
    missing = attrs.evolve(good.decode, paged_kv=(attrs.evolve(paged, paged_kv_indices=paged.paged_kv_indices[:7]),))
    with pytest.raises(MetadataError, match="paged_kv_indices: expected 8 pages, got 7"):
        validate_metadata_values(attrs.evolve(good, decode=missing))


@pytest.mark.parametrize("shape", [(2, 1), (2, 1, 1)])
def test_case_12_lengths_of_another_rank_are_refused_with_their_shape(shape: tuple[int, ...]) -> None:
    decode = build_metadata([decode_group(5, [3, 4]), decode_group(3, [5])], block_size=4).decode
    for device in ("cpu", "meta"):
        part = decode.to(device)
        with pytest.raises(MetadataError, match=re.escape(f"seq_lens: expected shape (num_seqs,), got {shape}")):
            attrs.evolve(part, seq_lens=part.seq_lens.view(shape))


@pytest.mark.parametrize(
    ("device", "num_heads", "dtype", "expected"),
    [
        ("cpu", 1, F32, "CPU_MLA"),
        ("cpu", 16, F64, "CPU_MLA"),
        ("cpu:0", 32, F16, "CPU_MLA"),
        (torch.device("cpu"), 128, BF16, "CPU_MLA"),
        ("cpu", 16, torch.int8, "dtype: expected float64, float32, bfloat16 or float16, got int8"),
        ("cpu", 16, torch.float8_e4m3fn, "dtype: expected float64, float32, bfloat16 or float16, got float8_e4m3fn"),
        ("meta", 16, BF16, "device: expected .*cpu.*, got 'meta'"),
        ("xpu", 16, BF16, "device: expected .*cpu.*, got 'xpu'"),
    ],
)
def test_case_13_the_chooser_gives_one_set_or_a_named_refusal(
    device: Any, num_heads: int, dtype: torch.dtype, expected: str
) -> None:
    dims = small_dims(num_heads)
    if expected in mla.compute.select.KERNEL_SETS:
        chosen = kernels_for(device, dims=dims, dtype=dtype)
        assert chosen is kernel_set(expected)
        assert explain(chosen, dims=dims, dtype=dtype).startswith(f"{expected} runs with {num_heads} heads")
    else:
        with pytest.raises(KernelError, match=expected):
            kernels_for(device, dims=dims, dtype=dtype)


def test_case_15_storage_and_kernel_block_sizes_are_separate() -> None:
    seen: dict[str, Any] = {}

    def paged_decode(q: torch.Tensor, latent_cache: torch.Tensor, metadata: DecodeMetadata, **rest: Any) -> Any:
        seen["shape"], seen["indices"] = latent_cache.shape, metadata.paged_kv_of(1).paged_kv_indices
        return CPU.paged_decode(q, latent_cache, metadata, **rest)

    kernels = attrs.evolve(CPU, page_size=1, paged_decode=paged_decode)
    s = sequence(20)
    got = attend([s], kernels=kernels, page_sizes=(1,))[0]
    assert_same_bits(got, attend([s])[0])
    assert seen["shape"][1] == 16
    assert seen["indices"].shape == (20,)
    assert build_metadata([decode_group(20, [3, 1])], block_size=16).decode.paged_kv == ()


# Padding


def test_case_16_a_padded_row_is_empty_and_changes_no_other() -> None:
    sequences = [sequence(16), sequence(17), sequence(3)]
    *rows, padding = attend(sequences, pad_decodes_to=4)
    assert_empty(padding)
    for got, expected in zip(rows, attend(sequences), strict=False):
        assert_same_bits(got, expected)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("max_seq_len", [64, 131072])
def test_case_17_rows_without_keys_are_written(max_seq_len: int) -> None:
    cache = torch.full((3, 8, 20), torch.nan)
    cache[0, :5] = normal(5, 20, seed=1).float()
    decode = build_metadata([decode_group(5, [0])], block_size=8, pad_decodes_to=3).decode
    decode = attrs.evolve(decode, max_seq_len=max_seq_len)
    assert decode.seq_lens.tolist() == [5, 0, 0]
    q = normal(3, 2, 20, seed=2).float()
    out, lse = CPU.paged_decode(q, cache, decode, kv_lora_rank=16, softmax_scale=0.2)
    assert_empty((out[1:], lse[1:]))
    assert out[0].isfinite().all()
    short = attrs.evolve(decode_record([5, 0, 0], [1, 1, 1]), max_seq_len=max_seq_len, block_size=8)
    assert_same_bits(CPU.paged_decode(q, cache, short, kv_lora_rank=16, softmax_scale=0.2), (out, lse))


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("seq_lens", [[0], [0, 0], [0, 1], []])
def test_case_19_length_zero_and_an_empty_batch(seq_lens: list[int]) -> None:
    num_heads, rows = 2, len(seq_lens)
    cache = torch.full((max(rows, 1), 4, 576), torch.nan)
    cache[:, 0] = normal(max(rows, 1), 576, seed=3).float()
    record = decode_record(seq_lens, [1] * rows)
    out, lse = CPU.paged_decode(
        normal(rows, num_heads, 576, seed=4).float(), cache, record, kv_lora_rank=512, softmax_scale=0.1
    )
    assert out.shape == (rows, num_heads, 512)
    assert lse.shape == (rows, num_heads)
    for i, length in enumerate(seq_lens):
        if length:
            assert torch.equal(out[i], cache[i, 0, :512].expand(num_heads, -1))
        else:
            assert_empty((out[i], lse[i]))
    out, lse = prompts_without_keys(seq_lens)
    assert_empty((out, lse))


def prompts_without_keys(seq_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of sequences whose keys are none at all, and one row that belongs to no sequence."""
    queries = int32(*range(len(seq_lens) + 1))
    return CPU.varlen_attention(
        torch.ones(len(seq_lens) + 1, 2, 24),
        torch.ones(0, 2, 24),
        torch.ones(0, 2, 16),
        query_start_loc=queries,
        kv_start_loc=torch.zeros_like(queries),
        max_query_len=1,
        max_kv_len=0,
        causal=True,
        softmax_scale=0.2,
    )


def test_case_21_padded_tokens_write_nothing() -> None:
    cache = normal(3, 16, 20, seed=5).float()
    before = cache.clone()
    rows = torch.full((3, 20), torch.nan)
    rows[1] = 1.5
    write_latent_cache_(cache, rows[:, :14], rows[:, 14:], torch.tensor([-1, 37, -1]))
    assert bool((cache.view(-1, 20)[37] == 1.5).all())
    untouched = torch.arange(48) != 37
    assert torch.equal(cache.view(-1, 20)[untouched], before.view(-1, 20)[untouched])


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_case_23_what_is_left_in_the_last_page_does_not_matter(dtype: torch.dtype) -> None:
    # `attend` fills every slot that holds no token with NaN: here slots 1..15 of the second page.
    decode, prompt = sequence(17, dtype=dtype), sequence(19, 2, prompt=True, dtype=dtype)
    workspace = torch.full((40, DIMS.latent_dim), torch.nan, dtype=dtype)
    got = attend([prompt, decode], workspace=workspace)
    for (out, lse), s in zip(got, (prompt, decode), strict=False):
        expected, expected_lse = dense(s)
        # Absorbing and projecting round twice more than the kernel that the tolerance is for.
        assert_close(out, expected, rel=3 * OUT_REL[dtype])
        assert_close(lse, expected_lse, abs=3 * LSE_ABS[dtype])


def test_case_29_cumulative_arrays_repeat_their_last_value() -> None:
    groups = [decode_group(5, [0]), decode_group(7, [1])]
    decode = build_metadata(groups, block_size=16, page_sizes=(1,), pad_decodes_to=4).decode
    assert decode.paged_kv_of(1).paged_kv_indptr.tolist() == [0, 5, 12, 12, 12]
    assert decode.seq_start_loc.tolist() == [0, 5, 12, 12, 12]
    assert decode.query_start_loc.tolist() == [0, 1, 2, 2, 2]


@pytest.mark.usefixtures("nan_memory")
def test_case_31_ragged_queries_come_back_packed() -> None:
    sequences = [sequence(9, 1), sequence(21, 3), sequence(6, 2)]
    *rows, padding = attend(sequences, pad_decodes_to=5)
    assert sum(len(out) for out, _ in rows) == 6
    assert padding[0].shape[0] == 2 * 3
    assert_empty(padding)
    for s, got in zip(sequences, rows, strict=True):
        assert_dense(got, s)


def test_case_33_padding_is_length_0_and_slot_minus_1_for_every_kernel() -> None:
    metadata = build_metadata([decode_group(5, [2, 4])], block_size=4, page_sizes=(1, 2), pad_decodes_to=3)
    decode = metadata.decode
    validate_metadata_values(metadata)
    assert decode.seq_lens.tolist() == [5, 0, 0]
    assert decode.context_lens.tolist() == [4, 0, 0]
    assert decode.slot_mapping.tolist() == [16, -1, -1]
    assert decode.block_table.tolist() == [[2, 4], [0, 0], [0, 0]]
    assert [paged.paged_kv_last_page_lens.tolist() for paged in decode.paged_kv] == [[1, 0, 0], [1, 0, 0]]
    for name in ("CPU_MLA", "TORCH", "REFERENCE"):
        *_, padding = attend([sequence(5, dtype=F64)], kernels=kernel_set(name), pad_decodes_to=3)
        assert padding[0].shape[0] == 2
        assert_empty(padding)


# Numerics, LSE and merging


def test_case_34_merging_two_empty_sides_gives_an_empty_one() -> None:
    nothing = torch.full((2, 3), -torch.inf)
    poison, x, x_lse = torch.full((2, 3, 5), torch.nan), normal(2, 3, 5, seed=6).float(), normal(2, 3, seed=7).float()
    assert_empty(merge_attn_states(poison, nothing, poison, nothing))
    assert_same_bits(merge_attn_states(poison, nothing, x, x_lse), (x, x_lse))
    assert_same_bits(merge_attn_states(x, x_lse, poison, nothing), (x, x_lse))


def test_case_35_plus_infinity_is_empty_too() -> None:
    nothing = torch.full((2, 3), torch.inf)
    poison, x, x_lse = torch.full((2, 3, 5), torch.nan), normal(2, 3, 5, seed=6).float(), normal(2, 3, seed=7).float()
    assert_empty(merge_attn_states(poison, nothing, poison, nothing))
    assert_empty(merge_attn_states(poison, nothing, poison, -nothing))
    assert_same_bits(merge_attn_states(poison, nothing, x, x_lse), (x, x_lse))
    assert_same_bits(merge_attn_states(x, x_lse, poison, nothing), (x, x_lse))


@pytest.mark.usefixtures("nan_memory")
def test_case_37_prompts_with_fewer_chunks_than_the_longest() -> None:
    sequences = [sequence(length, 3, prompt=True) for length in (43, 11, 3)]
    assert [s.context_len for s in sequences] == [40, 8, 0]
    together = attend(sequences, context_chunk_tokens=16, context_workspace_tokens=64)
    for s, got in zip(sequences, together, strict=False):
        assert_same_bits(got, attend([s], context_chunk_tokens=16)[0])
        assert_dense(got, s)
    shares = attend(sequences, context_workspace_tokens=32, chunk_policy="equal_shares")
    for s, got in zip(sequences, shares, strict=False):
        assert_dense(got, s)


@pytest.mark.parametrize("chunk", [16, 4096])
@pytest.mark.parametrize("steps", [[100], [64, 36], [*[16] * 6, 4], [1] * 100], ids=["100", "64+36", "16x6+4", "1x100"])
def test_case_38_a_prompt_in_pieces(steps: list[int], chunk: int) -> None:
    s = sequence(100, 100, prompt=True)
    assert sum(steps) == 100
    cache = torch.full((9, 16, DIMS.latent_dim), torch.nan)
    table, done, outs, lses = [8, 2, 5, 0, 7, 1, 4], 0, [], []
    for step in steps:
        new = slice(done, done + step)
        metadata = build_metadata([prompt_group(step, table, context_len=done)], block_size=16, context_chunk_tokens=chunk)
        out, lse = mla.attend(
            s.q[new],
            *s.rows[new].split([DIMS.kv_lora_rank, DIMS.qk_rope_head_dim], dim=1),
            cache,
            metadata,
            kv_b_proj=up_projection(),
            dims=DIMS,
            kernels=CPU,
        )
        outs.append(out)
        lses.append(lse)
        done += step
    assert_dense((torch.cat(outs), torch.cat(lses)), s)


def test_case_40_the_lse_has_base_e_on_every_path() -> None:
    # Sums 2 and 8 with values 0 and 1: 0.8; 0.723 where exp2 meets a natural LSE, 0.881 where exp meets one of base 2.
    lse = [torch.full((1, 1), math.log(z)) for z in (2.0, 8.0)]
    out, merged = merge_attn_states(torch.zeros(1, 1, 1), lse[0], torch.ones(1, 1, 1), lse[1])
    assert out.item() == pytest.approx(0.8, abs=1e-6)
    assert merged.item() == pytest.approx(math.log(10.0), abs=1e-6)

    paths = {
        "decode": sequence(33),
        "several tokens": sequence(33, 3),
        "prompt": sequence(33, 33, prompt=True),
        "chunked context": sequence(45, 5, prompt=True),
    }
    for s in paths.values():
        _, got = attend([s], context_chunk_tokens=16)[0]
        assert_close(got, dense(s)[1], abs=LSE_ABS[F32])
    q, k = normal(4, 2, 24, seed=8).float(), normal(9, 2, 24, seed=9).float()
    for causal in (True, False):
        _, got = CPU.varlen_attention(
            q,
            k,
            torch.ones(9, 2, 16),
            query_start_loc=int32(0, 4),
            kv_start_loc=int32(0, 9),
            max_query_len=4,
            max_kv_len=9,
            causal=causal,
            softmax_scale=0.2,
        )
        scores = torch.einsum("thd,lhd->thl", q.double(), k.double()) * 0.2
        if causal:
            scores = scores.masked_fill(~torch.ones(4, 9, dtype=torch.bool).tril(5)[:, None], -torch.inf)
        assert_close(got, torch.logsumexp(scores, -1), abs=LSE_ABS[F32])


def test_case_42_the_lse_of_one_piece_is_that_of_four() -> None:
    s = sequence(69, 5, prompt=True)
    one, four = (attend([s], context_chunk_tokens=chunk)[0] for chunk in (64, 16))
    assert_close(four[1], one[1], abs=1e-4)
    assert_dense(four, s)
    half, whole = (
        build_metadata([prompt_group(5, range(5), context_len=64)], block_size=16, context_chunk_tokens=n) for n in (16, 64)
    )
    assert (len(half.prefill.context_chunks), len(whole.prefill.context_chunks)) == (4, 1)


@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
def test_case_44_up_to_eight_new_tokens(query_len: int) -> None:
    lengths = [300, 8, 65]
    rows = [normal(n, 576, seed=n).to(BF16) for n in lengths]
    q = [normal(query_len, 16, 576, seed=50 + n).to(BF16) for n in lengths]
    cache = torch.full((9, 64, 576), torch.nan, dtype=BF16)
    tables = [[7, 1, 4, 0, 3], [8], [2, 5]]
    for table, row in zip(tables, rows, strict=True):
        for i, block in enumerate(row.split(64)):
            cache[table[i], : len(block)] = block
    groups = [decode_group(n, table, query_len=query_len) for n, table in zip(lengths, tables, strict=True)]
    metadata = build_metadata(groups, block_size=64).decode
    out, lse = CPU.paged_decode(torch.cat(q), cache, metadata, kv_lora_rank=512, softmax_scale=576**-0.5)
    for i, (row, query) in enumerate(zip(rows, q, strict=True)):
        keys = row[:, None].expand(-1, 16, -1)
        expected = softmax_attention(query, keys, keys[..., :512], 576**-0.5)
        tokens = slice(i * query_len, (i + 1) * query_len)
        assert_close(out[tokens], expected[0], rel=OUT_REL[BF16])
        assert_close(lse[tokens], expected[1], abs=LSE_ABS[BF16])


def test_case_45_causal_is_aligned_at_the_end() -> None:
    out, lse = CPU.varlen_attention(
        torch.zeros(2, 1, 4),
        torch.ones(5, 1, 4),
        torch.arange(5.0).view(5, 1, 1),
        query_start_loc=int32(0, 2),
        kv_start_loc=int32(0, 5),
        max_query_len=2,
        max_kv_len=5,
        causal=True,
        softmax_scale=1.0,
    )
    assert_close(out.flatten(), torch.tensor([1.5, 2.0]), abs=1e-6)
    assert_close(lse.flatten(), torch.tensor([4.0, 5.0]).log(), abs=1e-6)


# Memory


@pytest.fixture(scope="module")
def large_cache() -> torch.Tensor:
    """4.3 GB of addresses, of which a test touches a few pages: element offsets pass 2**31 at block 233,017."""
    return torch.empty(233_100, 16, 576, dtype=BF16)


def fill(cache: torch.Tensor, block: int) -> torch.Tensor:
    cache[block] = normal(16, 576, seed=block).to(BF16)
    return cache[block].clone()


def test_case_46_the_last_block_of_a_large_pool_is_read(large_cache: torch.Tensor) -> None:
    rows = fill(large_cache, 233_099)[:9]
    metadata = build_metadata([decode_group(9, [233_099])], block_size=16).decode
    q = normal(1, 2, 576, seed=11).to(BF16)
    out, lse = CPU.paged_decode(q, large_cache, metadata, kv_lora_rank=512, softmax_scale=0.05)
    keys = rows[:, None].expand(-1, 2, -1)
    expected = softmax_attention(q, keys, keys[..., :512], 0.05)
    assert bool((out != 0).any())
    assert_close(out, expected[0], rel=OUT_REL[BF16])
    assert_close(lse, expected[1], abs=LSE_ABS[BF16])


def test_case_47_offsets_past_2_31(large_cache: torch.Tensor) -> None:
    assert 233_050 * 16 * 576 > 2**31
    first, second = fill(large_cache, 3), fill(large_cache, 233_050)
    metadata = build_metadata([decode_group(20, [3, 233_050])], block_size=16).decode
    q = normal(1, 2, 576, seed=12).to(BF16)
    out, lse = CPU.paged_decode(q, large_cache, metadata, kv_lora_rank=512, softmax_scale=0.05)
    keys = torch.cat([first, second[:4]])[:, None].expand(-1, 2, -1)
    expected = softmax_attention(q, keys, keys[..., :512], 0.05)
    assert_close(out, expected[0], rel=OUT_REL[BF16])
    assert_close(lse, expected[1], abs=LSE_ABS[BF16])


def test_case_48_a_gather_far_into_the_cache(large_cache: torch.Tensor) -> None:
    slot = 3_728_300
    metadata = build_metadata([prompt_group(1, [3, slot // 16], context_len=16 + slot % 16)], block_size=16)
    assert metadata.slot_mapping.tolist() == [slot]
    assert metadata.prefill.context_chunks[0].slots.dtype == torch.int64
    row = normal(1, 576, seed=13).to(BF16)
    write_latent_cache_(large_cache, row[:, :512], row[:, 512:], metadata.slot_mapping)
    gathered = gather_latent_cache(large_cache, torch.tensor([48, slot]), out=torch.full((2, 576), torch.nan, dtype=BF16))
    assert torch.equal(gathered[1:], row)
    assert torch.equal(gathered[0], large_cache[3, 0])


def test_case_51_the_workspace_holds_a_block_of_every_sequence() -> None:
    assert context_workspace_tokens(max_model_len=131_072, max_num_seqs=1024, block_size=128) >= 131_072
    for block_size in (1, 16, 64, 128):
        assert context_workspace_tokens(max_model_len=1, max_num_seqs=1024, block_size=block_size) >= 1024 * block_size
    with pytest.raises(MetadataError, match=r"limit: expected at least 262144 .*, got 131072"):
        context_workspace_tokens(max_model_len=131_072, max_num_seqs=1024, block_size=256)


def allocations_of_prefill(query_len: int, context_len: int, chunk: int) -> Allocations:
    metadata = build_metadata(
        [prompt_group(query_len, range(-(-(context_len + query_len) // 64)), context_len=context_len)],
        block_size=64,
        context_chunk_tokens=chunk,
    ).prefill
    cache = torch.zeros(-(-(context_len + query_len) // 64), 64, DIMS.latent_dim)
    with Allocations() as seen:
        prefill(
            torch.ones(query_len, DIMS.num_heads, DIMS.qk_head_dim),
            torch.ones(query_len, DIMS.kv_lora_rank),
            torch.ones(query_len, DIMS.qk_rope_head_dim),
            cache,
            metadata,
            kv_b_proj=up_projection(),
            dims=DIMS,
            kernels=CPU,
        )
    return seen


@pytest.mark.usefixtures("no_kept_scratch")
def test_case_52_memory_follows_the_chunk_and_not_the_context() -> None:
    chunked, at_once = (allocations_of_prefill(8, 4096, chunk) for chunk in (512, 4096))
    assert 0 < chunked.peak < at_once.peak / 2
    assert allocations_of_prefill(8, 8192, 512).peak == chunked.peak
    length = 2048
    shapes = allocations_of_prefill(length, 0, 512).shapes
    assert any(length in shape for shape in shapes)
    assert not [shape for shape in shapes if sum(size >= length for size in shape) >= 2]


def test_case_54_a_block_is_one_row_per_token() -> None:
    spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=16, dtype=BF16)
    assert spec.bytes_per_block == 18_432
    assert allocate_latent_cache(spec, 3).nbytes == 3 * 18_432
    assert spec.blocks_that_fit(10 * 18_432 + 1, num_layers=2) == 5


# Head counts and shapes


def test_case_55_head_counts_are_checked_when_the_set_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_heads in (1, 16, 32, 128):
        assert kernels_for("cpu", dims=small_dims(num_heads)) is CPU

    def objection(dims: MLADims) -> str | None:
        return None if dims.num_heads in (16, 128) else f"num_heads: expected 16 or 128, got {dims.num_heads}"

    picky = attrs.evolve(CPU, objection=objection)
    monkeypatch.setitem(mla.compute.select.KERNEL_SETS, "CPU_MLA", lambda: picky)
    assert kernels_for("cpu", dims=small_dims(16)) is picky
    for refused in (
        lambda: kernels_for("cpu", dims=small_dims(32)),
        lambda: attend([sequence(5, dims=small_dims(32))], dims=small_dims(32), kernels=picky),
    ):
        with pytest.raises(KernelError, match=r"^num_heads: expected 16 or 128, got 32$"):
            refused()
    assert explain(picky, dims=small_dims(32)) == "CPU_MLA does not run: num_heads: expected 16 or 128, got 32"


@pytest.mark.parametrize("num_heads", [1, 4, 8])
def test_case_56_few_heads(num_heads: int) -> None:
    rows, q = normal(21, 576, seed=14).float(), normal(2, num_heads, 576, seed=15).float()
    cache = torch.full((2, 16, 576), torch.nan)
    cache.view(32, 576)[:21] = rows
    metadata = build_metadata([decode_group(21, [0, 1], query_len=2)], block_size=16).decode
    out, lse = CPU.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=0.05)
    keys = rows[:, None].expand(-1, num_heads, -1)
    expected = softmax_attention(q, keys, keys[..., :512], 0.05)
    assert out.shape == (2, num_heads, 512)
    assert out.is_contiguous()
    assert_close(out, expected[0], rel=OUT_REL[F32])
    assert_close(lse, expected[1], abs=LSE_ABS[F32])


def test_case_61_another_width_than_that_of_deepseek() -> None:
    dims = small_dims(4, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=48)
    assert kernels_for("cpu", dims=dims) is CPU
    sequences = [sequence(35, 5, prompt=True, dims=dims), sequence(40, dims=dims)]
    for s, got in zip(sequences, attend(sequences, dims=dims), strict=False):
        assert_dense(got, s, dims)


def test_case_62_values_are_narrower_than_keys() -> None:
    tokens = 37
    q, k, v = (normal(tokens, 16, width, seed=width + i).float() for i, width in enumerate((192, 192, 128)))
    lengths = {
        "query_start_loc": int32(0, tokens),
        "kv_start_loc": int32(0, tokens),
        "max_query_len": tokens,
        "max_kv_len": tokens,
    }
    out, lse = CPU.varlen_attention(q, k, v, **lengths, causal=True, softmax_scale=192**-0.5)
    assert out.shape == (tokens, 16, 128)
    expected = softmax_attention(q, k, v, 192**-0.5)
    assert_close(out, expected[0], rel=OUT_REL[F32])
    assert_close(lse, expected[1], abs=LSE_ABS[F32])
    padded, _ = CPU.varlen_attention(q, k, torch.nn.functional.pad(v, (0, 64)), **lengths, causal=True, softmax_scale=192**-0.5)
    assert_close(padded[..., :128], out, rel=OUT_REL[F32])
    assert bool((padded[..., 128:] == 0).all())


def test_case_63_an_odd_rope_dim_is_refused_by_the_record() -> None:
    with pytest.raises(DimsError, match=r"dim: expected an even number of rotated columns, got 7") as info:
        RopeSpec(dim=7, interleaved=True)
    assert isinstance(info.value, ValueError)
    with pytest.raises(DimsError, match="qk_rope_head_dim: expected an even number, got 7"):
        attrs.evolve(DIMS, qk_rope_head_dim=7)


@pytest.mark.parametrize("shape", [(2, 5, 16, 1, 22), (5, 16, 1, 22), (80, 22)])
def test_case_64_the_cache_has_three_dimensions(shape: tuple[int, ...]) -> None:
    spec = LatentCacheSpec(kv_lora_rank=512, qk_rope_head_dim=64, block_size=16, dtype=BF16)
    assert spec.shape(5) == (5, 16, 576)
    row = torch.ones(1, 22)
    with pytest.raises(
        CacheError, match=re.escape(f"latent_cache: expected shape (num_blocks, block_size, latent_dim), got {shape}")
    ):
        write_latent_cache_(torch.zeros(shape), row[:, :16], row[:, 16:], torch.tensor([0]))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_case_73_dtypes_of_the_cache(dtype: torch.dtype) -> None:
    rows, q = normal(19, 144, seed=16).to(dtype), normal(1, 4, 144, seed=17).to(dtype)
    cache = torch.full((2, 16, 144), torch.nan, dtype=dtype)
    write_latent_cache_(cache, rows[:, :128], rows[:, 128:], torch.arange(19))
    assert torch.equal(cache.view(32, 144)[:19], rows)
    metadata = build_metadata([decode_group(19, [0, 1])], block_size=16).decode
    out, lse = CPU.paged_decode(q, cache, metadata, kv_lora_rank=128, softmax_scale=0.1)
    keys = rows[:, None].expand(-1, 4, -1)
    expected = softmax_attention(q, keys, keys[..., :128], 0.1)
    assert out.dtype == dtype
    assert_close(out, expected[0], rel=OUT_REL[dtype])
    assert_close(lse, expected[1], abs=LSE_ABS[dtype])


# RoPE, scale and weights


def deepseek_dims(**changes: Any) -> MLADims:
    sizes = {"num_heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return MLADims(**{**sizes, "rope": RopeSpec(dim=64, interleaved=True), **changes})


def yarn_dims(**changes: Any) -> MLADims:
    yarn = YarnSpec(factor=40.0, original_max_position_embeddings=4096, **changes)
    return deepseek_dims(rope=RopeSpec(dim=64, interleaved=True, yarn=yarn))


def scales_seen(dims: MLADims, base: KernelSet) -> set[float]:
    """The scales that a kernel set is called with by chunked prefill and decode."""
    seen: set[float] = set()

    def watch(kernel: Any) -> Any:
        def watched(*args: Any, softmax_scale: float, **rest: Any) -> Any:
            seen.add(softmax_scale)
            return kernel(*args, softmax_scale=softmax_scale, **rest)

        return watched

    kernels = attrs.evolve(base, paged_decode=watch(base.paged_decode), varlen_attention=watch(base.varlen_attention))
    sequences = [sequence(6, 2, prompt=True, dims=dims, dtype=F64), sequence(3, dims=dims, dtype=F64)]
    got = attend(sequences, dims=dims, kernels=kernels)
    for s, result in zip(sequences, got, strict=False):
        assert_dense(result, s, dims)
    return seen


def test_case_74_the_scale_is_that_of_the_head_and_not_of_the_cache_row() -> None:
    dims = deepseek_dims()
    assert dims.softmax_scale == pytest.approx(0.0721688, abs=5e-8)
    assert dims.softmax_scale != pytest.approx(0.0416667, abs=1e-4)
    assert scales_seen(dims, CPU) == {dims.softmax_scale}


@pytest.mark.parametrize(("mscale_all_dim", "scale"), [(1.0, 0.135234), (0.707, 0.114721)])
def test_case_75_mscale_squared_is_in_the_scale(mscale_all_dim: float, scale: float) -> None:
    dims = yarn_dims(mscale_all_dim=mscale_all_dim)
    assert dims.softmax_scale == pytest.approx(scale, abs=5e-7)
    assert scales_seen(dims, CPU) == {dims.softmax_scale}


def test_case_76_mscale_is_not_mscale_all_dim() -> None:
    dims = yarn_dims(mscale=0.5, mscale_all_dim=1.0)
    assert dims.softmax_scale == pytest.approx(0.135234, abs=5e-7)
    half, full = (0.1 * m * math.log(40.0) + 1.0 for m in (0.5, 1.0))
    assert dims.rope.yarn.rotation_factor == pytest.approx(half / full, rel=1e-12)
    table = rope_table(dims.rope, 2, dtype=F64)
    assert_close(table.cos[0], torch.full((32,), half / full, dtype=F64), abs=1e-12)


def test_case_78_every_kernel_set_is_given_the_same_scale() -> None:
    dims = yarn_dims(mscale_all_dim=1.0)
    for name in ("CPU_MLA", "TORCH", "REFERENCE"):
        assert scales_seen(dims, kernel_set(name)) == {dims.softmax_scale}


def test_case_79_pairs_interleaved_or_in_halves() -> None:
    positions = torch.tensor([5, 2, 90])
    pairs, halves = (rope_table(RopeSpec(dim=8, interleaved=flag), 128, dtype=F64) for flag in (True, False))
    q, k = normal(3, 8, seed=18), normal(3, 8, seed=19)

    def scores(q: torch.Tensor, k: torch.Tensor, q_table: Any, k_table: Any) -> torch.Tensor:
        return apply_rope(q, positions, q_table) @ apply_rope(k, positions, k_table).T

    deinterleave = [0, 2, 4, 6, 1, 3, 5, 7]
    expected = scores(q, k, pairs, pairs)
    assert_close(scores(q[:, deinterleave], k[:, deinterleave], halves, halves), expected, abs=1e-12)
    assert not torch.allclose(scores(q, k, pairs, halves), expected, atol=1e-2)
    assert not torch.allclose(apply_rope(k, positions, pairs), apply_rope(k, positions, halves), atol=1e-2)

    dims = small_dims()
    metadata = build_metadata([decode_group(3, [0])], block_size=4)
    cache = torch.zeros(1, 4, dims.latent_dim)
    for flag in (True, False):
        own = attrs.evolve(dims, rope=RopeSpec(dim=dims.qk_rope_head_dim, interleaved=not flag))
        other = rope_table(RopeSpec(dim=dims.qk_rope_head_dim, interleaved=flag), 8)
        with pytest.raises(KernelError, match=f"rope_table: expected interleaved={not flag} .*, got interleaved={flag}"):
            mla_attention(torch.ones(1, 12), weights_of(own), cache, metadata, other, CPU)
    assert bool((cache == 0).all())


def weights_of(dims: MLADims) -> MLAWeights:
    width = 12
    return MLAWeights(
        dims=dims,
        kv_a_proj_with_mqa=normal(dims.latent_dim, width, seed=20).float(),
        kv_a_layernorm=torch.ones(dims.kv_lora_rank),
        kv_b_proj=up_projection(dims),
        o_proj=normal(width, dims.num_heads * dims.v_head_dim, seed=21).float(),
        q_proj=normal(dims.num_heads * dims.qk_head_dim, width, seed=22).float(),
    )


def test_case_81_queries_without_compression() -> None:
    config = {
        "num_attention_heads": 3,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
        "q_lora_rank": None,
    }
    dims = dims_from_config(config)
    assert dims.q_lora_rank is None
    metadata = build_metadata([decode_group(1, [0])], block_size=4)
    cache = torch.zeros(1, 4, dims.latent_dim)
    out, lse = mla_attention(torch.ones(1, 12), weights_of(dims), cache, metadata, rope_table(dims.rope, 8), CPU)
    assert out.shape == (1, 12)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_case_82_the_up_projection_in_two(dtype: torch.dtype) -> None:
    dims = deepseek_dims(num_heads=16, v_head_dim=96)
    w_uk, w_uv = split_kv_b_proj(up_projection(dims, dtype), dims)
    assert w_uk.shape == (16, 128, 512)
    assert w_uv.shape == (16, 512, 96)
    assert w_uk.dtype == w_uv.dtype == dtype
    per_head = up_projection(dims, dtype).view(16, 128 + 96, 512)
    assert torch.equal(w_uk, per_head[:, :128])
    assert torch.equal(w_uv, per_head[:, 128:].transpose(1, 2))
    same = split_kv_b_proj(up_projection(deepseek_dims(num_heads=16), dtype), deepseek_dims(num_heads=16))
    assert (same[0].shape, same[1].shape) == ((16, 128, 512), (16, 512, 128))
    if dtype != BF16:
        s = sequence(9, 2, dims=dims, dtype=dtype)
        assert_dense(attend([s], dims=dims)[0], s, dims)


# Determinism


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_case_84_batch_mates_do_not_change_bits(dtype: torch.dtype) -> None:
    s = sequence(300, dtype=dtype)
    alone = attend([s])[0]
    assert_same_bits(attend([s], shuffle=5)[0], alone)
    mates = [sequence(n, dtype=dtype) for n in (1, 17, 299, 1024, 63, 512)]
    assert_same_bits(attend([*mates[:3], s, *mates[3:]], shuffle=9)[3], alone)


def test_case_86_prefill_and_decode_agree_to_tolerance() -> None:
    prompt, decode = sequence(50, 3, prompt=True), sequence(50, 3)
    (out, lse), (other_out, other_lse) = attend([prompt])[0], attend([decode])[0]
    assert_close(out, other_out, rel=OUT_REL[F32])
    assert_close(lse, other_lse, abs=LSE_ABS[F32])


# Interfaces and installation

BOTH_PATHS = """
import sys
{before}
import torch
import mla

dims = mla.MLADims(
    num_heads=2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
    rope=mla.RopeSpec(dim=4, interleaved=True),
)
metadata = mla.build_metadata([mla.prompt_group(3, [1, 2], context_len=4), mla.decode_group(5, [3, 4])], block_size=4)
numbers = torch.arange(1.0, 401.0).sin()
out, lse = mla.attend(
    numbers[:80].view(4, 2, 10), numbers[:32].view(4, 8), numbers[:16].view(4, 4),
    numbers[:240].view(5, 4, 12).clone(), metadata,
    kv_b_proj=numbers[:256].view(32, 8), dims=dims, kernels=mla.kernels_for("cpu"),
)
assert out.isfinite().all() and lse.isfinite().all()
{after}
print(out.numpy().tobytes().hex(), lse.numpy().tobytes().hex())
"""


@pytest.fixture(scope="module")
def plain_result() -> str:
    """Bits of both paths in a process of its own."""
    return run_script(BOTH_PATHS.format(before="", after=""))


def test_case_90_no_environment_variable_changes_a_result(plain_result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = [sequence(40, 4, prompt=True), sequence(33)]
    before = attend(s)
    names = (
        "VLLM_ROCM_USE_AITER",
        "VLLM_ROCM_USE_AITER_MLA",
        "VLLM_ATTENTION_BACKEND",
        "SGLANG_USE_AITER",
        "SGLANG_AITER_MLA_PERSIST",
        "AITER_MLA",
        "MLA_KERNELS",
        "MLA_DEVICE",
        "FLASH_MLA_DISABLE",
    )
    for name in names:
        monkeypatch.setenv(name, "1")
    assert kernels_for("cpu") is CPU
    for got, expected in zip(attend(s), before, strict=True):
        assert_same_bits(got, expected)
    assert run_script(BOTH_PATHS.format(before="", after=""), **dict.fromkeys(names, "1")) == plain_result


@pytest.mark.parametrize("record", [MLADims, MLAWeights, DecodeMetadata, PagedKV, SequenceGroup])
def test_case_91_an_unknown_field_is_refused_with_the_list_of_fields(record: type) -> None:
    with pytest.raises(MLAError) as info:
        record(rotary_emb=None)
    assert "rotary_emb" in str(info.value)
    assert all(field.name in str(info.value) for field in attrs.fields(record))


def test_case_92_aiter_is_never_imported(plain_result: str, tmp_path: Path) -> None:
    for name in ("aiter", "amd_aiter"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('aiter was imported')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    script = BOTH_PATHS.format(before="", after="assert 'aiter' not in sys.modules and 'amd_aiter' not in sys.modules")
    assert run_script(script, PYTHONPATH=path) == plain_result


def test_case_95_nothing_is_missing_without_ipex(plain_result: str) -> None:
    block = "sys.modules['intel_extension_for_pytorch'] = None"
    assert run_script(BOTH_PATHS.format(before=block, after="")) == plain_result


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_case_96_sixteen_heads_and_seventeen_keys(dtype: torch.dtype) -> None:
    rows, q = normal(17, 576, seed=23).to(dtype), normal(1, 16, 576, seed=24).to(dtype)
    cache = torch.full((3, 16, 576), torch.nan, dtype=dtype)
    cache[2], cache[0, 0] = rows[:16], rows[16]
    metadata = build_metadata([decode_group(17, [2, 0])], block_size=16).decode
    out, lse = CPU.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=192**-0.5)
    keys = rows[:, None].expand(-1, 16, -1)
    expected = softmax_attention(q, keys, keys[..., :512], 192**-0.5)
    assert_close(out, expected[0], rel=OUT_REL[dtype])
    assert_close(lse, expected[1], abs=LSE_ABS[dtype])


def test_case_97_a_device_gets_its_own_set_or_none() -> None:
    names = [
        "CPU_MLA", "CPU_MLA_IPEX", "TORCH", "REFERENCE", "ROCM_AITER_MLA",
        "TRITON_MLA", "TRITON_MLA_BALANCED", "TRITON_MLA_PORTABLE",
    ]  # fmt: skip
    assert list(mla.compute.select.KERNEL_SETS) == names
    assert kernels_for("cpu") is kernel_set("CPU_MLA")
    assert kernel_set("CPU_MLA").device_types == ("cpu",)
    for absent in ("xpu", "mps", "meta"):
        with pytest.raises(KernelError, match=f"device: expected .*, got '{absent}'; kernel_set\\('TORCH'\\) runs"):
            kernels_for(absent)


def test_case_97_an_nvidia_gpu_gets_triton_if_it_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_installed_triton", lambda: "3.6.0")
    kernels = kernels_for("cuda", dtype=BF16)  # this torch has no HIP
    assert kernels.name == "TRITON_MLA"
    assert kernels.device_types == ("cuda",)
    assert explain(kernels, dtype=torch.float64).startswith("TRITON_MLA does not run: dtype: expected bfloat16 or float16")
    for version, got in ((None, "no package of that name"), ("3.5.1", "3.5.1")):
        monkeypatch.setattr(cuda, "_installed_triton", lambda version=version: version)
        with pytest.raises(KernelError, match=f"device: expected TRITON_MLA for cuda, or kernel_set.*got triton: .*{got}"):
            kernels_for("cuda")


def test_cases_tested_elsewhere_are_there() -> None:
    for number, reason in NOT_HERE.items():
        for name in re.findall(r"tests/(\w+\.py)", reason):
            assert f"def test_case_{number}_" in (Path(__file__).parent / name).read_text(), number


def test_every_number_of_the_list_is_here_or_has_a_reason() -> None:
    tested = {int(found[1]) for name in globals() if (found := re.match(r"test_case_(\d+)_", name))}
    assert not tested & set(NOT_HERE)
    assert tested | set(NOT_HERE) == NUMBERS
