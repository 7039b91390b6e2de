"""Dense products: right, and with row bits that do not depend on the other rows or on the threads."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys

import pytest
import torch
from compare import assert_close

from mla import MLADims, RopeSpec
from mla.compute import absorb_query, head_linear, linear, products, project_output

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
KINDS = ("tokens", "heads")


def cancelling(num_rows: int, heads: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Products that are nothing but rounding error: any other order of the sum shows in the bits."""
    generator = torch.Generator().manual_seed(num_rows + depth)
    half = depth // 2
    order = torch.randperm(2 * half, generator=generator)
    x = torch.randn(num_rows, heads, half, generator=generator).to(dtype).repeat(1, 1, 2)[..., order]
    w = torch.randn(heads, columns, half, generator=generator).to(dtype)
    return x, torch.cat([w, -w], dim=2)[..., order].contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_row_bits_depend_on_the_row_alone(dtype, kind, restore_num_threads):
    draw = random.Random(5)
    failed = []
    for _ in range(40):
        num_rows = draw.choice([1, 2, 3, 5, 15, 16, 17, 48, 100, 129, 256, 512, 777, 1008])
        depth = draw.choice([8, 10, 32, 64, 128, 192, 384, 512, 576, 1024, 1536, 2048])
        columns = draw.choice([1, 8, 16, 40, 64, 80, 128, 512, 576, 1536])
        heads = 1 if kind == "tokens" else draw.choice([1, 2, 5, 16])
        if num_rows * depth * columns * heads > 2e8:
            continue
        x, w = cancelling(num_rows, heads, depth, columns, dtype)
        if draw.random() < 0.3:
            w = w.mT.contiguous().mT  # the other layout, which is never the left operand

        def product(rows: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
            return linear(rows[:, 0], w[0]) if kind == "tokens" else head_linear(rows, w.transpose(1, 2))

        first = draw.randrange(num_rows)
        last = min(num_rows, first + draw.choice([1, 2, 3, 16, 20]))
        torch.set_num_threads(draw.choice([1, 2]))
        whole = product(x)[first:last]
        torch.set_num_threads(draw.choice([1, 2]))
        if not torch.equal(whole, product(x[first:last])):
            failed.append((num_rows, depth, columns, heads, first, last))
    assert not failed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_the_side_of_the_weight_do_not_change_bits(dtype, kind, monkeypatch):
    x, w = cancelling(150, 1 if kind == "tokens" else 7, 800, 112, dtype)

    def product():
        return linear(x[:, 0], w[0]) if kind == "tokens" else head_linear(x, w.mT)

    found = []
    for few in (0, 1000):
        monkeypatch.setitem(products.FEW_ROWS, dtype, few)
        for names in ((), ("BLOCK_ROWS", "BLOCK_HEAD_ROWS"), ("BLOCK_COLUMNS", "BLOCK_SUMS"), ("BLOCK_ROWS", "BLOCK_COLUMNS")):
            with monkeypatch.context() as smaller:
                for name in names:
                    smaller.setattr(products, name, 48)
                found.append(product())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
@pytest.mark.parametrize("rank", [24, 400])
def test_gradients_change_no_bits(dtype, num_rows, rank):
    dims = MLADims(
        num_heads=3,
        kv_lora_rank=rank,
        qk_nope_head_dim=20,
        qk_rope_head_dim=4,
        v_head_dim=16,
        rope=RopeSpec(dim=4, interleaved=True),
    )
    generator = torch.Generator().manual_seed(num_rows)
    q, latent = (torch.randn(num_rows, 3, width, generator=generator).to(dtype) for width in (24, rank))
    weight = (torch.randn(3 * 36, rank, generator=generator) * rank**-0.5).to(dtype)
    w_uk, w_uv = weight.double().view(3, 36, rank).split([20, 16], dim=1)
    wanted = {
        absorb_query: lambda x: torch.cat([torch.einsum("thd,hdc->thc", x[..., :20], w_uk), x[..., 20:]], dim=-1),
        project_output: lambda x: torch.einsum("thc,hdc->thd", x, w_uv),
    }
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    for x, (function, expected) in zip((q, latent), wanted.items(), strict=True):
        plain, traced, wide = function(x, weight, dims), x.clone().requires_grad_(), x.double().requires_grad_()
        out, reference = function(traced, weight, dims), expected(wide)
        assert torch.equal(out, plain)
        assert plain.is_contiguous()
        factor = torch.randn(out.shape, generator=generator).to(dtype)
        (gradient,) = torch.autograd.grad(out, traced, factor)
        (wanted_gradient,) = torch.autograd.grad(reference, wide, factor.double())
        if num_rows:
            assert_close(out, reference.detach(), rel=tolerance)
            assert_close(gradient, wanted_gradient, rel=tolerance)


def test_products_can_be_compiled():
    dims = MLADims(
        num_heads=3,
        kv_lora_rank=24,
        qk_nope_head_dim=20,
        qk_rope_head_dim=4,
        v_head_dim=16,
        rope=RopeSpec(dim=4, interleaved=True),
    )
    q, weight = torch.randn(5, 3, 24), torch.randn(3 * 36, 24)

    def there_and_back(q, weight):
        return project_output(absorb_query(q, weight, dims)[..., :24], weight, dims)

    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, weight), there_and_back(q, weight), rel=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "depth", "columns"), [(1, 1, 1), (3, 7, 5), (17, 600, 33), (700, 1000, 20)])
def test_products_are_right(dtype, num_rows, depth, columns):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, 3, depth, generator=generator).to(dtype)
    w = torch.randn(3, depth, columns, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
    assert_close(head_linear(x, w), torch.einsum("thk,hkn->thn", x.double(), w.double()), rel=tolerance)
    expected = x[:, 0].double() @ w[0].double() + bias.double()
    assert_close(linear(x[:, 0], w[0].T, bias), expected, rel=tolerance)


def test_no_rows_give_no_rows():
    assert linear(torch.zeros(0, 8), torch.zeros(5, 8)).shape == (0, 5)
    assert head_linear(torch.zeros(0, 2, 8), torch.zeros(2, 8, 5)).shape == (0, 2, 5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86")
def test_row_bits_hold_with_the_instructions_of_older_processors():
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    chosen = [
        f"{__file__}::test_row_bits_depend_on_the_row_alone[{k}-torch.{d}]" for k in KINDS for d in ("float64", "float32")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
