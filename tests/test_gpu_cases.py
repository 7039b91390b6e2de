"""The list of field cases on GPU memory, overflow and graphs, and the contracts of the kernels, for both sets of NVIDIA GPUs.

Run by hand on a machine with a GPU: ``pytest -m gpu tests/test_gpu_cases.py``. Tests are named by the numbers of the cases.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import random
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch
from batches import Row, row_groups, shuffled_tables, small_dims
from compare import assert_close

from mla import DecodeGraphState, build_metadata, explain, kernel_set, kernels_for, prompt_group
from mla.compute import prefill
from mla.compute.select import KERNEL_SETS
from mla.errors import KernelError
from mla.metadata import DecodeMetadata

DEVICE = "cuda"
BF16 = torch.bfloat16
RANK, ROPE, LATENT = 512, 64, 576
SCALE = 192**-0.5
OUT, LSE = 3e-3, 1e-5
"""Of small batches: the rounding of weights and outputs to bfloat16 is not yet an average."""

ELSEWHERE = {
    12: ("test_cases.py", "test_case_12_"),
    21: ("test_triton_cache.py", "check_edges"),
    24: ("test_state.py", "test_case_24_"),
    26: ("test_state.py", "test_case_26_"),
    37: ("test_gpu.py", "test_a_set_meets_the_reference"),
    42: ("test_gpu.py", "test_a_set_meets_the_reference"),
    45: ("test_triton_prefill.py", "test_batches_on_a_gpu"),
    49: ("test_rocm.py", "test_case_49_"),
    62: ("test_triton_prefill.py", "test_batches_on_a_gpu"),
}
"""Cases on GPU memory, overflow and graphs, and cases whose kernels have tests of their own, by file and name."""


def on_gpu(test):
    """The marks of a test that runs by hand."""
    for mark in (
        pytest.mark.gpu,
        pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
        pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
    ):
        test = mark(test)
    return test


@pytest.fixture(params=["TRITON_MLA", "TRITON_MLA_BALANCED"])
def kernels(request):
    """Both sets; the second is repeatable, but its bits depend on the batch."""
    if request.param not in KERNEL_SETS:
        pytest.skip(f"there is no {request.param}")
    return kernel_set(request.param)


@pytest.fixture
def default():
    """The set whose bits are a sequence's own."""
    return kernel_set("TRITON_MLA")


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """A decoding step: NaN in every slot that no sequence reaches and in rows of q behind the last sequence."""

    q: torch.Tensor
    latent_cache: torch.Tensor
    metadata: DecodeMetadata
    made: list

    @property
    def num_tokens(self):
        return sum(len(q) for q, _ in self.made)


def normal(*shape, seed):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(BF16)


def sequence(length, query_len, num_heads):
    """The queries and keys of a sequence: of nothing but its lengths and the heads."""
    seed = 10_000 * query_len + length
    return normal(query_len, num_heads, LATENT, seed=seed), normal(length, LATENT, seed=seed + 5_000_000)


def step_of(made, *, block_size=16, shuffle=0, pad_to=None, spare_rows=2, poison=torch.nan):
    """A step of these sequences in blocks of random places; padded, and with more rows of q than tokens."""
    rows = [Row(query_len=len(q), context_len=len(keys) - len(q), is_prompt=False) for q, keys in made]
    tables, num_blocks = shuffled_tables(rows, block_size, seed=shuffle)
    metadata = build_metadata(row_groups(rows, tables), block_size=block_size, pad_decodes_to=pad_to)
    cache = torch.full((num_blocks, block_size, LATENT), poison, dtype=BF16, device=DEVICE)
    for (_, keys), table in zip(made, tables, strict=True):
        slots = torch.tensor(table)[:, None] * block_size + torch.arange(block_size)
        cache.view(-1, LATENT)[slots.flatten()[: len(keys)].to(DEVICE)] = keys
    num_heads = made[0][0].shape[1]
    q = torch.full((metadata.num_tokens + spare_rows, num_heads, LATENT), torch.nan, dtype=BF16, device=DEVICE)
    q[: sum(len(x) for x, _ in made)] = torch.cat([x for x, _ in made])
    return Step(q=q, latent_cache=cache, metadata=metadata.decode.to(DEVICE), made=made)


def steps(shapes, num_heads, **options):
    """A step of sequences of (length, new tokens)."""
    return step_of([sequence(length, query_len, num_heads) for length, query_len in shapes], **options)


def decode(kernels, step, *, plan=None, **changes):
    step = attrs.evolve(step, **changes)
    return kernels.paged_decode(
        step.q, step.latent_cache, step.metadata, kv_lora_rank=RANK, softmax_scale=SCALE, plan=plan
    )  # fmt: skip


def dense(q, keys):
    """Attention over the unpaged keys in float64, the last query aligned with the last key."""
    scores = torch.einsum("thd,ld->thl", q.double(), keys.double()) * SCALE
    hidden = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).triu(1 + len(keys) - len(q))
    scores.masked_fill_(hidden[:, None], -torch.inf)
    return scores.softmax(-1) @ keys[:, :RANK].double(), scores.logsumexp(-1)


def assert_dense(got, step):
    """The rows of every sequence, and empty ones behind them."""
    out, lse = got
    assert out.dtype == BF16
    assert lse.dtype == torch.float32
    want = [torch.cat(parts) for parts in zip(*(dense(q, keys) for q, keys in step.made), strict=True)]
    assert_close(out[: step.num_tokens], want[0], rel=OUT, name="out")
    assert_close(lse[: step.num_tokens], want[1], abs=LSE, name="lse")
    assert_empty(out[step.num_tokens :], lse[step.num_tokens :])


def assert_empty(out, lse):
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def assert_same_bits(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def record(seq_lens, query_lens, table, *, block_size, **changes):
    """A record of any lengths, lengths without keys included; `table` has a row of blocks for each."""
    starts = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (query_lens, seq_lens)]
    tokens = sum(query_lens)
    fields = {
        "query_start_loc": starts[0],
        "seq_start_loc": starts[1],
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "context_lens": torch.zeros(len(seq_lens), dtype=torch.int32),
        "slot_mapping": torch.full((tokens,), -1),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "block_size": block_size,
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "min_num_blocks": int(table.max()) + 1 if table.numel() else 0,
        "block_table": table.to(torch.int32),
    }
    return DecodeMetadata(**fields | changes).to(DEVICE)


@contextmanager
def nan_memory():
    """Memory that torch hands out without filling it holds NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_host_reads():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def watchdog():
    """Kernels that wait for one another could do so for ever: end the process then."""
    faulthandler.dump_traceback_later(150, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def capture(function):
    """A graph of one call and what the call gave; the function has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_cases_tested_elsewhere_are_there():
    for number, (file, name) in ELSEWHERE.items():
        assert f"def {name}" in (Path(__file__).parent / file).read_text(), number


# Bits


BIT_SHAPES = [
    (1, 1), (17, 1), (64, 1), (65, 1), (530, 1), (1100, 1), (4097, 1), (9000, 1), (33_000, 1),
    (3, 3), (40, 3), (700, 3), (4100, 3),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 40, 64, 128])
def test_case_84_bits_do_not_depend_on_batch_padding_or_placement(default, num_heads):
    made = [sequence(length, query_len, num_heads) for length, query_len in BIT_SHAPES]
    ends = list(itertools.accumulate(len(q) for q, _ in made))
    whole = step_of(made)
    want = decode(default, whole)
    assert_dense(want, whole)
    assert_same_bits(decode(default, whole, plan=default.plan(whole.metadata)), want)
    padded = decode(default, step_of(made, shuffle=1, pad_to=len(made) + 5, spare_rows=7))
    assert_same_bits([x[: ends[-1]] for x in padded], [x[: ends[-1]] for x in want])
    for i, end in enumerate(ends):
        rows = slice(end - len(made[i][0]), end)
        alone = decode(default, step_of(made[i : i + 1], shuffle=i, spare_rows=i % 3))
        assert_same_bits([x[: len(made[i][0])] for x in alone], [x[rows] for x in want])
    backwards = decode(default, step_of(made[::-1], shuffle=2))
    order = [ends[-1] - end + j for end, (q, _) in zip(ends, made, strict=True) for j in range(len(q))]
    assert_same_bits([x[order] for x in backwards], [x[: ends[-1]] for x in want])


@on_gpu
@pytest.mark.parametrize(
    ("num_heads", "block_sizes"), [(16, (1, 64)), (40, (8, 64)), (64, (64,)), (128, (1, 8, 24, 32, 64, 192))]
)
def test_case_03_bits_do_not_depend_on_the_block_size(default, num_heads, block_sizes):
    made = [sequence(length, query_len, num_heads) for length, query_len in BIT_SHAPES]
    want = decode(default, step_of(made, block_size=16))
    for block_size in block_sizes:
        assert_same_bits(decode(default, step_of(made, block_size=block_size, shuffle=block_size)), want)


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_84_a_call_repeats_its_bits(kernels, num_heads):
    step = steps(BIT_SHAPES, num_heads)
    want = decode(kernels, step)
    assert_dense(want, step)
    for _ in range(20):
        assert_same_bits(decode(kernels, step, plan=kernels.plan(step.metadata)), want)


# Shapes


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_05_every_new_token_sees_its_own_number_of_keys(kernels, num_heads):
    shapes = [(16, 3), (17, 3), (4, 4), (130, 3), (1, 1)]
    step = steps(shapes, num_heads)
    _, lse = decode(kernels, attrs.evolve(step, q=torch.zeros_like(step.q)))
    seen = [length - query_len + i + 1 for length, query_len in shapes for i in range(query_len)]
    want = torch.tensor(seen, dtype=torch.float64).log()[:, None].expand(-1, num_heads)  # case 40: base e
    assert_close(lse[: len(seen)], want, abs=1e-6)


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_06_and_44_up_to_eight_new_tokens(kernels, num_heads):
    step = steps([(20, 4), (5, 4), (4, 4), (300, 8), (8, 8), (65, 2), (700, 1), (600, 3)], num_heads)
    assert_dense(decode(kernels, step), step)


@on_gpu
@pytest.mark.parametrize("num_heads", [1, 8, 32])
def test_case_56_and_59_head_counts_between_the_tiles(kernels, num_heads):
    step = steps([(3, 1), (300, 1), (65, 2)], num_heads)
    with nan_memory():
        got = decode(kernels, step)
    assert_dense(got, step)
    assert got[0].shape == (step.q.shape[0], num_heads, RANK)
    assert got[0].is_contiguous()


# Padding and what no index reaches


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_16_and_31_padded_rows_are_empty_and_ragged_queries_packed(kernels, num_heads):
    shapes = [(16, 1), (17, 3), (3, 2)]
    step = steps(shapes, num_heads, pad_to=4)
    with nan_memory():
        got = decode(kernels, step)
    assert step.num_tokens == 6
    assert_dense(got, step)
    if kernels.name == "TRITON_MLA":
        plain = decode(kernels, steps(shapes, num_heads))
        assert_same_bits([x[:6] for x in got], [x[:6] for x in plain])


@on_gpu
@pytest.mark.parametrize("max_seq_len", [64, 131_072])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_17_rows_without_keys_are_written(kernels, num_heads, max_seq_len):
    q, keys = sequence(5, 1, num_heads)
    step = step_of([(q, keys)], pad_to=3, spare_rows=0)
    step = attrs.evolve(step, metadata=attrs.evolve(step.metadata, max_seq_len=max_seq_len))
    assert step.metadata.seq_lens.tolist() == [5, 0, 0]
    with nan_memory():
        got = decode(kernels, step)
    assert_dense(got, step)
    short = attrs.evolve(step.metadata, query_start_loc=torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE))
    with nan_memory():
        assert_same_bits(decode(kernels, step, metadata=short), got)


@on_gpu
@pytest.mark.parametrize("spare_rows", [0, 3])
@pytest.mark.parametrize("seq_lens", [[0], [0, 0], [0, 1], [3, 0, 0, 40], []])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_19_length_zero_and_an_empty_batch(kernels, num_heads, seq_lens, spare_rows):
    count = len(seq_lens)
    cache = torch.full((4, 16, LATENT), torch.nan, dtype=BF16, device=DEVICE)
    cache.view(-1, LATENT)[:40] = normal(40, LATENT, seed=3)
    table = torch.arange(3).expand(count, 3).contiguous()
    q = normal(count + spare_rows, num_heads, LATENT, seed=4)
    for longest in (max(seq_lens, default=0), 48):  # its own, and a capacity
        metadata = record(seq_lens, [1] * count, table, block_size=16, max_seq_len=longest)
        with nan_memory():
            out, lse = kernels.paged_decode(q, cache, metadata, kv_lora_rank=RANK, softmax_scale=SCALE)
        assert out.shape == (count + spare_rows, num_heads, RANK)
        assert lse.shape == (count + spare_rows, num_heads)
        for i, length in enumerate([*seq_lens, *[0] * spare_rows]):
            if length:
                want, want_lse = dense(q[i : i + 1], cache.view(-1, LATENT)[:length])
                assert_close(out[i : i + 1], want, rel=OUT)
                assert_close(lse[i : i + 1], want_lse, abs=LSE)
            else:
                assert_empty(out[i], lse[i])


@on_gpu
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_23_what_no_index_reaches_does_not_matter(kernels, num_heads, poison):
    shapes = [(17, 1), (63, 1), (129, 3), (1, 1), (4097, 1)]
    clean = decode(kernels, steps(shapes, num_heads, poison=0.0))
    for block_size in (16, 64):
        step = steps(shapes, num_heads, block_size=block_size, poison=poison)
        got = decode(kernels, step)
        assert_dense(got, step)
        if block_size == 16:
            assert_same_bits(got, clean)


# Memory and overflow


@pytest.fixture(scope="module")
def large_cache():
    """8.6 GB of NaN: element offsets pass 2^31 and 2^32 before its end."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    rows = 116_520 * 64
    assert rows * LATENT > 2**32
    return torch.full((rows, LATENT), torch.nan, dtype=BF16, device=DEVICE)


@on_gpu
@pytest.mark.xdist_group("much memory")
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_46_and_47_offsets_past_32_bits(kernels, num_heads, block_size, large_cache):
    length = 200
    num_blocks = len(large_cache) // block_size
    count = -(-length // block_size)
    places = [3, num_blocks - 1, num_blocks // 2 + 5, *range(num_blocks - 3, num_blocks - 3 - 2 * count, -2)][:count]
    slots = (torch.tensor(places)[:, None] * block_size + torch.arange(block_size)).flatten()[:length].to(DEVICE)
    q, keys = sequence(length, 1, num_heads)
    large_cache[slots] = keys
    metadata = build_metadata(
        row_groups([Row(query_len=1, context_len=length - 1, is_prompt=False)], [places]), block_size=block_size
    ).decode.to(DEVICE)
    step = Step(q=q, latent_cache=large_cache.view(-1, block_size, LATENT), metadata=metadata, made=[(q, keys)])
    try:
        assert_dense(decode(kernels, step), step)
    finally:
        large_cache[slots] = torch.nan


@on_gpu
@pytest.mark.xdist_group("much memory")
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_48_query_rows_past_31_bits(kernels, num_heads):
    """Very many sequences of one key, whose output is that key's latent, and one of 40 keys at the end."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    edge = 2**31 // (num_heads * LATENT)
    count = edge + 70
    cache = normal(3, 16, LATENT, seed=1)
    keys = cache.view(-1, LATENT)[:40]
    q = torch.empty(count, num_heads, LATENT, dtype=BF16, device=DEVICE).normal_()
    table = torch.zeros(count, 3, dtype=torch.int32)
    table[-1] = torch.arange(3)
    metadata = record([1] * (count - 1) + [40], [1] * count, table, block_size=16, min_num_blocks=3)
    out, lse = kernels.paged_decode(q, cache, metadata, kv_lora_rank=RANK, softmax_scale=SCALE)
    torch.cuda.synchronize()
    assert bool((out[:-1] == keys[0, :RANK]).all())
    for token in (0, 1, edge - 1, edge, edge + 1, count - 2):
        assert_close(lse[token], q[token].double() @ keys[0].double() * SCALE, abs=LSE)
    want, want_lse = dense(q[-1:], keys)
    assert_close(out[-1:], want, rel=OUT)
    assert_close(lse[-1:], want_lse, abs=LSE)


@on_gpu
def test_case_52_memory_follows_the_chunk_and_not_the_context(kernels):
    dims = small_dims(16, kv_lora_rank=RANK, qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128)
    cache = normal(200, 64, LATENT, seed=2)
    kv_b_proj = RANK**-0.5 * normal(16 * 256, RANK, seed=3)

    def peak(context_len, chunk):
        group = prompt_group(8, range(-(-(context_len + 8) // 64)), context_len=context_len)
        metadata = build_metadata([group], block_size=64, context_chunk_tokens=chunk, device=DEVICE).prefill
        inputs = [normal(8, *shape, seed=4) for shape in ((16, 192), (RANK,), (ROPE,))]
        for _ in range(2):  # the first call compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            prefill(*inputs, cache, metadata, kv_b_proj=kv_b_proj, dims=dims, kernels=kernels)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.inference_mode():
        chunked, at_once = peak(4096, 512), peak(4096, 4096)
        assert 0 < chunked < at_once / 2
        assert peak(8192, 512) <= chunked * 1.01


@on_gpu
def test_memory_does_not_grow(kernels):
    made = [steps([(300, 1)] * count, num_heads) for count, num_heads in ((1, 16), (40, 16), (5, 128))]

    def call_all():
        for step in made:
            fresh = attrs.evolve(step.metadata)
            plan = kernels.plan(fresh)
            for _ in range(2):
                decode(kernels, step, metadata=fresh, plan=plan)
            decode(kernels, step)

    for _ in range(3):
        call_all()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(100):
        call_all()
    torch.cuda.synchronize()
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


# Inputs of other layouts, and refusals


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_strided_queries(kernels, num_heads):
    step = steps([(17, 1), (300, 3), (4100, 1)], num_heads)
    want = decode(kernels, step)
    apart = torch.full((len(step.q), num_heads + 3, LATENT + 24), torch.nan, dtype=BF16, device=DEVICE)
    odd = torch.full((len(step.q), num_heads, LATENT + 1), torch.nan, dtype=BF16, device=DEVICE)
    shifted = torch.full((step.q.numel() + 1,), torch.nan, dtype=BF16, device=DEVICE)
    views = (
        apart[:, 2 : 2 + num_heads, 8 : 8 + LATENT],
        odd[..., :LATENT],
        shifted[1:].view(step.q.shape),
        step.q.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        step.q.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for view in views:
        view.copy_(step.q)
        assert_same_bits(decode(kernels, step, q=view), want)


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_tables_of_other_strides_and_caches_at_odd_addresses(kernels, num_heads):
    step = steps([(17, 1), (300, 1), (1000, 1)], num_heads)
    want = decode(kernels, step)
    rows, columns = step.metadata.block_table.shape
    wide = torch.full((rows, columns + 5), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, :columns] = step.metadata.block_table
    assert_same_bits(decode(kernels, step, metadata=attrs.evolve(step.metadata, block_table=wide[:, :columns])), want)
    shifted = torch.empty(step.latent_cache.numel() + 1, dtype=BF16, device=DEVICE)[1:].view(step.latent_cache.shape)
    shifted.copy_(step.latent_cache)
    try:
        got = decode(kernels, step, latent_cache=shifted)
    except KernelError as error:
        assert str(error).startswith("latent_cache: expected")  # noqa: PT017  (either is right)
    else:
        assert_same_bits(got, want)


@on_gpu
def test_what_does_not_fit_is_refused(kernels):
    step = steps([(17, 1), (300, 1)], 16)
    for changes, message in (
        ({"latent_cache": step.latent_cache[:2]}, r"latent_cache: expected at least \d+ blocks, got 2"),
        ({"q": step.q[:1]}, "q: expected at least 2 tokens, got 1"),
        ({"q": step.q[..., :570]}, "q: expected latent_dim 576 as in the cache, got 570"),
        ({"latent_cache": step.latent_cache.view(-1, 8, LATENT)}, "latent_cache: expected blocks of 16 tokens, got 8"),
        ({"latent_cache": step.latent_cache.cpu()}, "latent_cache: expected device cuda"),
        ({"metadata": step.metadata.to("cpu")}, "metadata: expected device cuda"),
        ({"plan": object()}, "plan: expected"),
    ):
        with pytest.raises(KernelError, match=f"^{message}"):
            decode(kernels, step, **changes)
    other = kernels.plan(attrs.evolve(step.metadata))
    if other is not None:
        with pytest.raises(KernelError, match=r"^plan: expected"):
            decode(kernels, step, plan=other)


@on_gpu
def test_case_97_a_gpu_gets_the_set_that_keeps_bits():
    dims = small_dims(16, kv_lora_rank=RANK, qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128)
    chosen = kernels_for(DEVICE, dims=dims, dtype=BF16)
    assert chosen.name == "TRITON_MLA"
    assert explain(chosen, dims=dims, dtype=BF16).startswith("TRITON_MLA runs with 16 heads")
    assert "does not run" in explain(chosen, dtype=torch.float64)


# Graphs and streams


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_30_nothing_is_read_on_the_host(kernels, num_heads):
    step = steps([(17, 1), (300, 3), (4100, 1)], num_heads)
    state = DecodeGraphState(max_num_seqs=4, max_seq_len=5000, block_size=16, num_blocks=400, query_len=3, device=DEVICE)
    with state.capture():
        captured = state.metadata_for(4).decode
    tables = [range(10), range(20, 50)]
    rows = [Row(query_len=3, context_len=n, is_prompt=False) for n in (100, 400)]
    batch = build_metadata(row_groups(rows, tables), block_size=16).pin_memory()
    cache = normal(400, 16, LATENT, seed=5)
    q = normal(12, num_heads, LATENT, seed=6)
    new = normal(12, LATENT, seed=7)

    def run():
        plan = kernels.plan(step.metadata)
        results = [*decode(kernels, step, plan=plan), *decode(kernels, step, plan=plan), *decode(kernels, step)]
        state.load_(batch)
        for _ in range(2):
            kernels.write_latent_cache_(cache, new[:, :RANK], new[:, RANK:], captured.slot_mapping)
            results += kernels.paged_decode(q, cache, captured, kv_lora_rank=RANK, softmax_scale=SCALE)
            state.advance_()
        return results

    want = run()
    assert want[-1][:6].isfinite().all()
    with no_host_reads():
        got = run()
    assert_same_bits(got, want)


def random_step(rng, *, max_seqs, query_len, max_seq_len, num_blocks, block_size):
    """A batch of random lengths in random blocks."""
    lens = [rng.randint(query_len, rng.choice([40, 2000, max_seq_len])) for _ in range(rng.randint(1, max_seqs))]
    news = [rng.randint(1, query_len) for _ in lens]
    rows = [Row(query_len=n, context_len=length - n, is_prompt=False) for length, n in zip(lens, news, strict=True)]
    counts = [-(-length // block_size) for length in lens]
    order = rng.sample(range(num_blocks), sum(counts))
    ends = itertools.accumulate(counts)
    tables = [order[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return build_metadata(row_groups(rows, tables), block_size=block_size)


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_case_11_18_20_and_28_a_graph_replays_200_changing_batches(kernels, num_heads):
    """Two layers with one plan, after a write of the new rows; eager calls on a copy of the cache have the same bits."""
    rng, size, options = random.Random(num_heads), 12, {"kv_lora_rank": RANK, "softmax_scale": SCALE}
    shape = {"max_seqs": size, "query_len": 2, "max_seq_len": 8000, "num_blocks": 6100, "block_size": 16}
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    state = DecodeGraphState(
        max_num_seqs=size, max_seq_len=8000, block_size=16, num_blocks=6100, query_len=2, device=DEVICE
    )  # fmt: skip
    cache = normal(6100, 16, LATENT, seed=1)
    before = cache.clone()
    q = torch.zeros(2 * size, num_heads, LATENT, dtype=BF16, device=DEVICE)
    new = torch.zeros(2 * size, LATENT, dtype=BF16, device=DEVICE)

    def layers(q, new, cache, metadata):
        kernels.write_latent_cache_(cache, new[:, :RANK], new[:, RANK:], metadata.slot_mapping)
        plan = kernels.plan(metadata)
        first = kernels.paged_decode(q, cache, metadata, plan=plan, **options)
        return *first, *kernels.paged_decode(-q, cache, metadata, plan=plan, **options)

    with state.capture():
        captured = state.metadata_for(size).decode
        addresses = [x.data_ptr() for x in (captured.seq_lens, captured.block_table, captured.slot_mapping)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layers(q, new, cache, captured)
        torch.cuda.current_stream().wait_stream(stream)
        graph, results = capture(lambda: layers(q, new, cache, captured))
    assert torch.equal(cache, before), "the warm-up wrote into the cache"
    eager_cache = before
    for number in range(200):
        batch = random_step(rng, **shape)
        q.normal_(generator=generator)
        new.normal_(generator=generator)
        state.load_(batch)
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        count = batch.num_tokens
        want = layers(q[:count], new[:count], eager_cache, batch.decode.to(DEVICE))
        torch.cuda.synchronize()
        for i, (x, y) in enumerate(zip(results, want, strict=True)):
            assert bool((x[count:] == (-torch.inf if i % 2 else 0)).all()), number
            if kernels.name == "TRITON_MLA":
                assert torch.equal(x[:count], y), number
            elif i % 2:
                assert_close(x[:count], y, abs=2 * LSE)
            else:
                assert_close(x[:count], y, rel=2 * OUT)
    assert torch.equal(cache, eager_cache)
    assert addresses == [x.data_ptr() for x in (captured.seq_lens, captured.block_table, captured.slot_mapping)]


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_what_a_graph_uses_is_kept(kernels, num_heads):
    """A later and larger call, freed memory and other tensors in it change nothing that the graph reads or writes."""
    step = steps([(700, 1), (5000, 1), (40, 2)], num_heads)
    want = decode(kernels, step)
    graph, got = capture(lambda: decode(kernels, step))
    graph.replay()
    assert_same_bits(got, want)
    decode(kernels, steps([(3000, 3)] * 60, num_heads))
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((2**24,), torch.nan, device=DEVICE) for _ in range(40)]
    junk += [torch.full((n,), torch.nan, device=DEVICE) for n in range(100, 100_000, 1000)]
    for x in got:
        x.fill_(torch.nan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(got, want)
    assert all(bool(x.isnan().all()) for x in junk)


@on_gpu
@pytest.mark.parametrize("shares_plans", [False, True])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_several_streams_at_once(kernels, num_heads, shares_plans):
    """Other batches side by side, one of them replayed, on streams of their own: the bits of calls one after the other."""
    made = [
        steps([(9000, 1), (300, 2), (64, 1)], num_heads),
        steps([(2000, 1)] * 20, num_heads, shuffle=1),
        steps([(33_000, 1)], num_heads, shuffle=2),
    ]
    want = [decode(kernels, step) for step in made]
    plans = [kernels.plan(step.metadata) if shares_plans else None for step in made]
    graph, replayed = capture(lambda: decode(kernels, made[0]))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(20):
        for i, stream in enumerate(streams[:3]):
            with torch.cuda.stream(stream):
                found.append((i, decode(kernels, made[i], plan=plans[i])))
        with torch.cuda.stream(streams[3]):
            graph.replay()
    torch.cuda.synchronize()
    for i, got in found:
        assert_same_bits(got, want[i])
    assert_same_bits(replayed, want[0])


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_a_plan_made_before_serves_several_graphs(kernels, num_heads):
    """Each graph is whole: the second replays without the first, and an eager call follows."""
    step = steps([(700, 1), (5000, 1), (40, 2)], num_heads)
    want = decode(kernels, step)
    plan = kernels.plan(step.metadata)
    captured = [capture(lambda: decode(kernels, step, plan=plan)) for _ in range(2)]
    for graph, got in reversed(captured):
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, want)
    assert_same_bits(decode(kernels, step, plan=plan), want)
