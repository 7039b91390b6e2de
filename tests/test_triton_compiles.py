"""Every kernel that decode and prefill launch on Hopper compiles for it, with the very arguments that the host passes.

No GPU is needed: Triton brings its assembler. Nothing runs; what the kernels compute is tested on a card (``pytest -m gpu``).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import attrs
import pytest
import torch
from batches import Row, row_groups, shuffled_tables
from triton_here import HAS_TRITON

from mla import build_metadata
from mla.compute import triton_decode, triton_hopper, triton_launch, triton_prefill

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install 'mla[triton]'")

SHARED_MEMORY = 232448
"""Bytes of shared memory that a program may have on Hopper."""


@attrs.frozen(kw_only=True)
class Compiled:
    """A kernel, what it was compiled for, and what the assembler says of it."""

    name: str
    constants: dict
    shared: int
    messages: str


def assemble(compiled, folder):
    """What the assembler says of it; of those that Triton brings, one knows the version of the text."""
    import triton

    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    said = []
    for assembler in (Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"):
        command = [str(assembler), "-v", "--gpu-name=sm_90a", str(source), "-o", str(folder / "kernel.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stderr
        said.append(done.stderr)
    raise AssertionError(said)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Launches compile for Hopper and are kept; each kernel with the same constants once."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    kept = {}

    def launch(launcher, grid, stream, *args):
        assert stream == 0
        assert all(0 < size < 2**16 for size in grid[1:])
        assert grid[0] > 0
        key = launcher._kernel.__name__, *launcher._constants.items()
        if key not in kept:
            args = [arg.descriptor() if isinstance(arg, triton_launch.RowBoxes) else arg for arg in args]
            made = launcher._kernel.warmup(*args, grid=grid, **launcher._constants)
            kept[key] = Compiled(
                name=key[0], constants=launcher._constants, shared=made.metadata.shared, messages=assemble(made, tmp_path)
            )

    monkeypatch.setattr(triton_launch.Launcher, "__call__", launch)
    monkeypatch.setattr(triton_hopper, "num_processors", lambda device: 132)
    monkeypatch.setattr(triton_prefill, "num_processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    hopper = triton_decode.DecodeRoute(name="hopper", reason="as asked for")
    monkeypatch.setattr(triton_decode, "decode_route", lambda *kind: hopper)
    monkeypatch.setattr(triton_prefill, "prefill_route", lambda *kind: hopper)
    caches = triton_hopper._kernels, triton_hopper._launchers, triton_hopper._around, triton_prefill._hopper_launcher
    monkeypatch.setattr(driver, "_active", Hopper())
    yield kept
    for cache in caches:
        cache.cache_clear()


def decode(num_seqs, num_heads, block_size, *, query_len=1, dtype=torch.bfloat16, mixed=False):
    rows = [
        Row(query_len=1 if mixed and i == 0 else query_len, context_len=9, is_prompt=False, lookahead=0)
        for i in range(num_seqs)
    ]
    tables, num_blocks = shuffled_tables(rows, block_size, seed=0)
    metadata = build_metadata(row_groups(rows, tables), block_size=block_size).decode
    q = torch.zeros(metadata.num_tokens, num_heads, 576, dtype=dtype)
    cache = torch.zeros(num_blocks, block_size, 576, dtype=dtype)
    for call in (triton_decode.paged_decode, triton_decode.paged_decode_balanced):
        out, lse = call(q, cache, metadata, kv_lora_rank=512, softmax_scale=0.1)
        assert (out.shape, lse.shape) == ((*q.shape[:2], 512), q.shape[:2])


CASES = {
    "few rows, gathered": [{"num_seqs": 7, "num_heads": 8, "block_size": 16, "dtype": torch.float16}],
    "wide": [{"num_seqs": 40, "num_heads": 128, "block_size": 128}],
    "wide, small boxes": [{"num_seqs": 3, "num_heads": 64, "block_size": 8}],
    "wide, gathered": [{"num_seqs": 2, "num_heads": 40, "block_size": 1, "dtype": torch.float16}],
    "both": [{"num_seqs": 40, "num_heads": 16, "block_size": 64, "query_len": 3, "mixed": True}],
}


@pytest.mark.parametrize("kind", CASES)
def test_decode_compiles(kind, compiled):
    """Within shared memory, and with no wait that the assembler must add because sums are touched while they are in flight."""
    for case in CASES[kind]:
        decode(**case)
    names = {made.name for made in compiled.values()}
    attends = {"attend_few", "attend_wide"} if kind == "both" else {"attend_few" if kind.startswith("few") else "attend_wide"}
    assert names == {"plan_shares", "join_parts"} | attends
    for made in compiled.values():
        assert made.shared <= SHARED_MEMORY, made
        assert "wgmma" not in made.messages.lower(), made
        assert "C75" not in made.messages, made


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_compiles(causal, compiled):
    starts = torch.tensor([0, 5], dtype=torch.int32)
    q, k = torch.zeros(5, 2, 192, dtype=torch.bfloat16), torch.zeros(5, 2, 192, dtype=torch.bfloat16)
    triton_prefill.varlen_attention(
        q, k, torch.zeros(5, 2, 128, dtype=torch.bfloat16), query_start_loc=starts, kv_start_loc=starts,
        max_query_len=5, max_kv_len=5, causal=causal, softmax_scale=0.1,
    )  # fmt: skip
    [made] = compiled.values()
    assert made.shared <= SHARED_MEMORY
    assert "C75" not in made.messages, made
