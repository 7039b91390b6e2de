"""Every path of the GPU kernels once, at the smallest shapes that take it, for NVIDIA's compute-sanitizer.

    python3 benchmarks/sanitize_gpu.py               # compiles, so that the runs below spend their time on kernels
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/sanitize_gpu.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python3 benchmarks/sanitize_gpu.py
    compute-sanitizer --tool synccheck --error-exitcode 9 python3 benchmarks/sanitize_gpu.py --only decode

Without torch's caching every tensor is an allocation of its own, so that memcheck sees what lies beside it; graphs are then
left out, as they need torch's own pool. A line is printed for each path, with its error against float64, which the host
computes. The exit code is 1 if one is too large, and 9 if the sanitizer found something.

The batches are so small that a processor gets one tile of keys: every sequence is cut everywhere, carried on by the next
program and joined.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TypeVar

import attrs
import cpu_shapes
import gpu_shapes
import rows
import torch
from cpu_shapes import LATENT, RANK, SCALE, DecodeInputs, PrefillInputs, PrefillShape
from gpu_shapes import GpuShape

from mla.compute import KernelSet, kernel_set
from mla.compute.select import KERNEL_SETS

SETS = ("TRITON_MLA", "TRITON_MLA_BALANCED", "TRITON_MLA_PORTABLE")
LENGTHS = (4500, 65, 130, 3)
OUT_REL = 4e-3
Inputs = TypeVar("Inputs", DecodeInputs, PrefillInputs)
CodePath = tuple[str, Callable[[], float]]
"""What is run, and a function that runs it and gives the relative error."""


def _decode_shapes(*, quick: bool) -> list[tuple[str, GpuShape]]:
    """The kernels of decode by rows of a sequence, and how they load keys by block size."""
    lengths = (70, 3) if quick else LENGTHS
    cases = [
        *((f"few rows, blocks of {size}", 16, 1, size, torch.bfloat16) for size in (64, 16, 1)),
        ("few rows, 8 heads, float16", 8, 1, 64, torch.float16),
        ("64 rows", 64, 1, 64, torch.bfloat16),
        ("64 rows, 40 heads, blocks of 16", 40, 1, 16, torch.bfloat16),
        *((f"two tiles of 64 rows, blocks of {size}", 128, 1, size, torch.bfloat16) for size in (64, 32, 16, 8, 1)),
        ("two tiles of 64 rows, float16", 128, 1, 64, torch.float16),
        ("three new tokens", 16, 3, 64, torch.bfloat16),
        ("three new tokens, two tiles of 64 rows", 40, 3, 16, torch.bfloat16),
    ]
    found = [
        (name, GpuShape(name=name, heads=heads, lengths=lengths, query_len=new, block_size=size, dtype=dtype))
        for name, heads, new, size, dtype in cases
    ]
    # Several warps of the plan, each thread with several sequences.
    for name, heads in (("few rows", 16), ("two tiles of 64 rows", 128)):
        lengths = (9, 70) * (2 if quick else 300)
        found.append((f"many sequences, {name}", GpuShape(name=name, heads=heads, lengths=lengths)))
    return found


def _decode(kernels: KernelSet, shape: GpuShape, device: torch.device, how: str = "") -> float:
    """The error of a call with rows of q behind the last sequence, which have to be empty."""
    inputs = gpu_shapes.decode_inputs(shape, device)
    q = torch.cat([inputs.q, torch.full_like(inputs.q[:2], torch.nan)])
    plan = None if how == "graph" else kernels.plan(inputs.metadata)
    call = partial(
        kernels.paged_decode, q, inputs.latent_cache, inputs.metadata, kv_lora_rank=RANK, softmax_scale=SCALE, plan=plan
    )
    out, lse = call()
    if how == "graph":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = call()
        for _ in range(2):
            graph.replay()
    elif plan is not None:
        out, lse = call()  # the second layer of a plan
    count = len(inputs.q)
    if bool(out[count:].any()) or bool((lse[count:] != -torch.inf).any()):
        return torch.inf
    return rows.errors(out[:count].cpu(), lse[:count].cpu(), _on_host(inputs).float64())[0]


def _on_host(inputs: Inputs) -> Inputs:
    """The same inputs, so that the sanitizer has no more kernels to watch than ours."""
    fields = {field.name: getattr(inputs, field.name) for field in attrs.fields(type(inputs))}
    return attrs.evolve(inputs, **{name: value.to("cpu") for name, value in fields.items() if hasattr(value, "to")})


@contextmanager
def _changed(changes: Sequence[tuple[str, str, object]]) -> Iterator[None]:
    """Attributes of modules set for a while, where the modules have them."""
    before = []
    for name, attribute, value in changes:
        module = import_module(name)
        if hasattr(module, attribute):
            before.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)


def _in_several_launches(kernels: KernelSet, shape: GpuShape, device: torch.device) -> float:
    """Two sequences at a time, as batches of more than 1024 go."""
    modules = ("mla.compute.triton_hopper", "mla.compute.triton_portable", "mla.compute.triton_plan")
    with _changed([(name, "MAX_SEQS", 2) for name in modules]):
        return _decode(kernels, shape, device)


def _prefill(kernels: KernelSet, shape: PrefillShape, device: torch.device, route: str) -> float:
    inputs = cpu_shapes.prefill_inputs(shape, torch.bfloat16, device=device)
    module = import_module("mla.compute.triton_prefill")
    own = module.prefill_route(torch.bfloat16, cpu_shapes.QK_DIM, cpu_shapes.V_DIM, device)
    chosen = module.PrefillRoute(name=route if own.name == "hopper" else own.name, reason="asked for")
    with _changed([("mla.compute.triton_prefill", "prefill_route", lambda *_: chosen)]):
        out, lse = kernels.varlen_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            query_start_loc=inputs.query_start_loc,
            kv_start_loc=inputs.kv_start_loc,
            max_query_len=max(shape.query_lens),
            max_kv_len=max(shape.kv_lens),
            causal=shape.causal,
            softmax_scale=SCALE,
        )
    return rows.errors(out.cpu(), lse.cpu(), _on_host(inputs).float64(range(shape.heads)))[0]


def _cache(kernels: KernelSet, device: torch.device) -> float:
    """A write with slots outside of the cache, and a gather with conversion."""
    cache = torch.zeros(5, 16, LATENT, dtype=torch.bfloat16, device=device)
    new = torch.randn(7, LATENT, device=device).to(torch.bfloat16)
    outside = (-1, 80) if device.type == "cuda" else (-1, -1)  # refused by value on the CPU
    slots = torch.tensor([79, 0, outside[0], 33, outside[1], 17, 16], device=device)
    kernels.write_latent_cache_(cache, new[:, :RANK], new[:, RANK:], slots)
    kept = torch.tensor([0, 1, 3, 5, 6], device=device)
    out = torch.full((9, LATENT), torch.nan, device=device)
    got = kernels.gather_latent_cache(cache, slots[kept], out=out)
    right = torch.equal(got, new[kept].float()) and int((cache.view(-1, LATENT) != 0).any(1).sum()) == len(kept)
    return 0.0 if right else torch.inf


def paths_of(kernels: KernelSet, device: torch.device, *, quick: bool) -> list[CodePath]:
    """What a set has; prefill and the cache belong to the default set and are the same in the others."""
    shapes = dict(_decode_shapes(quick=quick))
    found: list[CodePath] = [(f"decode, {name}", partial(_decode, kernels, shape, device)) for name, shape in shapes.items()]
    for name in ("few rows, blocks of 64", "two tiles of 64 rows, blocks of 64"):
        found.append((f"decode, several launches, {name}", partial(_in_several_launches, kernels, shapes[name], device)))
        if device.type == "cuda" and not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            found.append((f"decode, in a graph, {name}", partial(_decode, kernels, shapes[name], device, "graph")))
    if kernels.name.endswith(("_BALANCED", "_PORTABLE")):
        return found
    prompts = [
        PrefillShape(name="causal", heads=3, query_lens=(150, 1, 20)),
        PrefillShape(name="over a context", heads=3, query_lens=(150, 1), context_len=200),
    ]
    for route in ("hopper", "portable"):
        found += [(f"prefill, {route}, {x.name}", partial(_prefill, kernels, x, device, route)) for x in prompts]
    return [*found, ("cache, write and gather", partial(_cache, kernels, device))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every path and say which are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), metavar="NAMES")
    parser.add_argument("--only", default="", metavar="TEXT", help="paths whose line contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="shorter sequences, to try the script")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    wrong = count = 0
    with torch.inference_mode():
        for name in args.sets.split(","):
            if name not in KERNEL_SETS:
                print(f"{name} is skipped: there is no kernel set of this name")
                continue
            for path, run in paths_of(kernel_set(name), device, quick=args.quick):
                line = f"{name}: {path}"
                if args.only not in line:
                    continue
                print(line, end=" ", flush=True)
                error = run()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                count += 1
                wrong += not error <= OUT_REL
                print(f"{error:.1e}{'' if error <= OUT_REL else ' WRONG'}", flush=True)
    print(f"{count} paths, {wrong} wrong")
    return int(wrong > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
