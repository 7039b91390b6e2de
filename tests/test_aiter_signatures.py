"""Every call of the adapter binds to AITER's signatures, read from its source: committed for six releases, and of a wheel."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import attrs
import pytest
import torch
from read_aiter_signatures import as_signature, read_signatures

from mla import KernelSet, build_metadata, decode_group
from mla.compute import rocm

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "aiter_signatures.json").read_text())
OF_PYPI = "0.1.7.post2.dev18"
WHEEL = os.environ.get("MLA_AITER_WHEEL")


@pytest.fixture
def standin(monkeypatch):
    monkeypatch.syspath_prepend(HERE / "aiter_standin")
    module = importlib.import_module("aiter")
    yield module
    module.close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def recorded_calls(standin, release: str) -> list[tuple[str, tuple, dict]]:
    """The positions and keywords of every call that decode and prefill make over the stand-in of a release."""
    standin.use_release(release)
    made = []

    def record(name, function):
        def call(*args, **kwargs):
            made.append((name, args, kwargs))
            return function(*args, **kwargs)

        call.__signature__ = getattr(function, "__signature__", None)
        if call.__signature__ is None:
            del call.__signature__
        return call

    standin.mla.mla_decode_fwd = record("mla_decode_fwd", standin.mla.mla_decode_fwd)
    for name in ("flash_attn_varlen_func", "mla_decode_stage1_asm_fwd"):
        setattr(standin, name, record(name, getattr(standin, name)))
    run(attrs.evolve(rocm.make_kernel_set(arch="gfx942"), device_types=("cpu",)))
    return made


def run(kernels: KernelSet) -> None:
    metadata = build_metadata([decode_group(5, [1], query_len=2)], block_size=16, page_sizes=(1,)).decode
    cache = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
    q = torch.zeros(2, 4, 576, dtype=torch.bfloat16)
    kernels.paged_decode(q, cache, metadata, kv_lora_rank=512, softmax_scale=0.1)
    k, starts = torch.zeros(3, 4, 192, dtype=torch.bfloat16), torch.tensor([0, 3], dtype=torch.int32)
    kernels.varlen_attention(
        k, k, k[..., :128], query_start_loc=starts, kv_start_loc=starts, max_query_len=3, max_kv_len=3, causal=True,
        softmax_scale=0.1,
    )  # fmt: skip


def assert_binds(calls, signatures) -> None:
    stable = {"mla_decode_fwd": 8, "flash_attn_varlen_func": 7}
    names = set()
    for name, args, kwargs in calls:
        names.add(name)
        bound = as_signature(signatures[name]).bind(*args, **kwargs)
        if name in stable:
            assert len(args) == stable[name]
            assert "sm_scale" in kwargs or "softmax_scale" in kwargs
        else:
            # By position to the last one given: each value under the name that it is meant for.
            assert bound.arguments["softmax_scale"] == 0.1
            assert bound.arguments["output"].shape == (*bound.arguments["Q"].shape[:2], 512)
            assert bound.arguments["splitData"].shape[:2] == bound.arguments["splitLse"].shape[:2] == (2, 16)
            assert bound.arguments["splitData"].shape[3] == 512
            assert bound.arguments["max_seqlen_q"] == 1
            assert all(value is None for key, value in bound.arguments.items() if key.startswith(("work_", "lse")))
    assert len(names) == 2


@pytest.mark.parametrize("release", GOLDEN)
def test_every_call_binds(standin, release):
    assert_binds(recorded_calls(standin, release), GOLDEN[release])


@pytest.mark.parametrize("release", GOLDEN)
def test_the_stand_in_has_the_signatures_of_the_sources(standin, release):
    written = {
        "mla_decode_fwd": standin.DECODE,
        "flash_attn_varlen_func": standin.VARLEN,
        "mla_decode_stage1_asm_fwd": standin.STAGE_1,
    }
    for name, by_release in written.items():
        scope: dict = {}
        exec(f"def f({by_release[release]}): pass", scope)
        code = scope["f"].__code__
        assert list(code.co_varnames) == [p["name"] for p in GOLDEN[release][name]]
        assert len(scope["f"].__defaults__ or ()) == sum("default" in p for p in GOLDEN[release][name])


@pytest.mark.skipif(not WHEEL, reason="MLA_AITER_WHEEL names no wheel of amd-aiter")
def test_a_wheel_has_the_signatures_of_the_golden(standin):
    found = read_signatures(Path(str(WHEEL)))
    assert found == GOLDEN[OF_PYPI]
    assert_binds(recorded_calls(standin, OF_PYPI), found)


def test_the_reader_reads(tmp_path):
    for path, text in {
        "aiter/mla.py": "def mla_decode_fwd(q, o, *, a=1): pass\n",
        "aiter/ops/mha.py": "def flash_attn_varlen_func(q, k=(-1, -1)): pass\n",
        "aiter/ops/attention.py": "@wrapped\ndef mla_decode_stage1_asm_fwd(Q: int) -> None: ...\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    with pytest.raises(SystemExit, match="mla_decode_fwd: expected plain parameters"):
        read_signatures(tmp_path)
    (tmp_path / "aiter/mla.py").write_text("def mla_decode_fwd(q, o): pass\n")
    assert read_signatures(tmp_path)["flash_attn_varlen_func"] == [{"name": "q"}, {"name": "k", "default": "(-1, -1)"}]
    with pytest.raises(TypeError, match="missing a required argument"):
        as_signature(read_signatures(tmp_path)["mla_decode_fwd"]).bind(1)
