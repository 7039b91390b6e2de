"""docs/devices.md shows what `explain` says on each device: here it says the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_rocm import deepseek_dims, kernels_of, no_aiter, standin  # noqa: F401  fixtures
from test_triton_decode import a_gpu_of  # noqa: F401  fixture

from mla import explain, kernel_set
from mla.compute import cuda, ipex, ipex_load, rocm

PAGE = Path(__file__).parent.parent / "docs" / "devices.md"
BF16 = torch.bfloat16


def said(kernels, num_heads=128):
    return explain(kernels, dims=deepseek_dims(num_heads), dtype=BF16)


@pytest.fixture(scope="module")
def page():
    """The sentences of the page: quotes, each on one line when unfolded."""
    quotes = re.findall(r"^> .*(?:\n> .*)*", PAGE.read_text(), re.MULTILINE)
    return {" ".join(line.removeprefix("> ") for line in quote.splitlines()) for quote in quotes}


def test_any_device(page):
    for name in ("CPU_MLA", "TORCH", "REFERENCE"):
        assert said(kernel_set(name)) in page
    assert explain(kernel_set("CPU_MLA"), dtype=torch.int8) in page


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_nvidia(page, monkeypatch, a_gpu_of, capability):  # noqa: F811
    monkeypatch.setattr(cuda, "_installed_triton", lambda: "3.6.0")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    a_gpu_of(*capability)
    for name, num_heads in (("TRITON_MLA", 16), ("TRITON_MLA", 128), ("TRITON_MLA_BALANCED", 16)):
        if capability == (9, 0) or (name, num_heads) == ("TRITON_MLA", 16):
            assert said(kernel_set(name), num_heads) in page


def test_amd(page, standin):  # noqa: F811
    kernels = kernels_of(standin, "0.1.20")
    assert said(kernels, 16) in page
    assert said(kernels, 20) in page
    assert rocm.explain_decode(16, release="0.1.0") in page


@pytest.mark.parametrize("has_instructions", [True, False])
def test_ipex(page, monkeypatch, has_instructions):
    monkeypatch.setattr(ipex_load, "has_avx512_bf16", lambda: has_instructions)
    nothing = print
    installed = ipex_load.Installed(
        flash_attention=nothing, decode_attention=nothing, varlen_attention=nothing, varlen_parameters=(), release="2.8.0+cpu"
    )
    assert said(ipex.kernel_set_of(installed)) in page
