"""Checking and measuring prefill, cache writes and gathers on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import cpu_shapes
import gpu_shapes as shapes
import rows
import torch
import torch.nn.functional as F
from cpu_shapes import LATENT, RANK, SCALE, PrefillInputs, PrefillShape, named
from gpu_measure import Settings, case_of, progress
from gpu_rows import limits_of, make_row
from rows import CheckError, Row
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla.compute import KernelSet

__all__ = ["measure_cache", "measure_prefill"]

SDPA = "SDPA with cuDNN"
DTYPE = torch.bfloat16


def _varlen(kernels: KernelSet, inputs: PrefillInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.varlen_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        query_start_loc=inputs.query_start_loc,
        kv_start_loc=inputs.kv_start_loc,
        max_query_len=max(inputs.shape.query_lens),
        max_kv_len=max(inputs.shape.kv_lens),
        causal=inputs.shape.causal,
        softmax_scale=SCALE,
    )


def _sdpa(inputs: PrefillInputs) -> Callable[[], torch.Tensor] | None:
    """Torch's attention over (sequence, head, token), values as narrow as they are; None unless all lengths are equal."""
    shape = inputs.shape
    if len({*shape.query_lens}) > 1 or not shape.causal:
        return None
    q, k, v = (
        x.view(len(shape.query_lens), -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)
    )
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)


def measure_prefill(settings: Settings) -> list[Row]:
    """`varlen_attention` beside SDPA; no graphs, as the calls are long."""
    found: list[Row] = []
    sets = _sets(settings)
    wanted = named(shapes.QUICK_PREFILL if settings.quick else shapes.PREFILL, settings.shape)
    for i, shape in enumerate(wanted):
        if i == 0:
            settings.measure_ceilings()
        progress(f"prefill {shape.name}")
        found += _measure_prompts(shape, sets, settings)
    if wanted:
        settings.measure_ceilings()
    return found


def _sets(settings: Settings) -> list[KernelSet]:
    """Without those that differ from another in decode alone."""
    others = [kernels for kernels in settings.sets if not kernels.name.endswith(("_BALANCED", "_PORTABLE"))]
    return others or list(settings.sets[:1])


def _measure_prompts(shape: PrefillShape, sets: list[KernelSet], settings: Settings) -> list[Row]:
    inputs = cpu_shapes.prefill_inputs(shape, DTYPE, device=settings.device)
    heads = cpu_shapes.checked_heads(shape.heads, shape.flops, most_flops=4e11)
    want = inputs.float64(heads)
    functions: dict[str, Callable[[], object]] = {}
    errors: dict[str, dict[str, float | None]] = {}
    for kernels in sets:
        functions[kernels.name] = partial(_varlen, kernels, inputs)
        out, lse = _varlen(kernels, inputs)
        rel_error, lse_error = rows.errors(out[:, heads], lse[:, heads], want)
        out_rel, lse_abs = limits_of(kernels.name, "varlen_attention", DTYPE)
        rows.check(f"{kernels.name} {shape.name}", DTYPE, rel_error, lse_error, out_rel=out_rel, lse_abs=lse_abs)
        errors[kernels.name] = {"rel_error": rel_error, "lse_error": lse_error}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if settings.clock.on_gpu else nullcontext():
        peer = _sdpa(inputs)
        if peer is not None:
            try:
                out = peer().transpose(1, 2).reshape(inputs.q.shape[0], shape.heads, -1)
                functions[SDPA] = peer
                errors[SDPA] = {"rel_error": rows.errors(out[:, heads], None, (want[0], None))[0]}
            except RuntimeError as error:
                print(f"{SDPA} does not take {shape.name}: {str(error).splitlines()[0]}")
        times = settings.clock.alternate(functions, graphs=False)
    case = case_of(
        "varlen_attention",
        shape.name,
        DTYPE,
        shape.kv_lens,
        settings,
        heads=shape.heads,
        query_len=cpu_shapes.describe_lengths(shape.query_lens),
        flops=shape.flops,
        checked_heads=len(heads),
    )
    return [
        make_row(case, name, times[name], note=f"{shape.flops / times[name].ms_median / 1e9:.0f} TFLOP/s", **errors[name])
        for name in functions
    ]


def measure_cache(settings: Settings) -> list[Row]:
    """Writes and gathers of rows at random slots, beside a copy of as many bytes; they are exact or not reported."""
    written, gathered = (64, 96) if settings.quick else (8192, 65536)
    settings.measure_ceilings()
    generator = torch.Generator(device=settings.device).manual_seed(0)
    block_size = 16 if settings.quick else 64
    num_blocks = 2 * gathered // block_size
    found: list[Row] = []
    for op, count in (("write_latent_cache_", written), ("gather_latent_cache", gathered)):
        if settings.shape not in f"T{count}":
            continue
        progress(f"{op} T{count}")
        cache = torch.full((num_blocks, block_size, LATENT), torch.nan, dtype=DTYPE, device=settings.device)
        slots = torch.randperm(num_blocks * block_size, generator=generator, device=settings.device)[:count]
        rows_of = torch.randn(count, LATENT, generator=generator, device=settings.device).to(DTYPE)
        out = torch.empty_like(rows_of)
        functions: dict[str, Callable[[], object]] = {}
        for kernels in _sets(settings):
            if op == "write_latent_cache_":
                parts = rows_of[:, :RANK].contiguous(), rows_of[:, RANK:].contiguous()
                functions[kernels.name] = partial(kernels.write_latent_cache_, cache, *parts, slots)
                functions[kernels.name]()
                _check_equal(kernels, op, cache.view(-1, LATENT)[slots], rows_of)
            else:
                cache.view(-1, LATENT)[slots] = rows_of
                functions[kernels.name] = partial(kernels.gather_latent_cache, cache, slots, out=out.fill_(torch.nan))
                functions[kernels.name]()
                _check_equal(kernels, op, out, rows_of)
        target = torch.empty_like(rows_of)
        functions["copy"] = partial(target.copy_, rows_of)
        times = settings.clock.alternate(functions)
        moved = 2 * rows_of.nbytes
        case = case_of(op, f"T{count}", DTYPE, (count,), settings, block_size=block_size, bytes=moved, l2_warm=True)
        for name, taken in times.items():
            note = f"{moved / (taken.ms_graph or taken.ms_median) / 1e6:.0f} GB/s{' in a graph' if taken.ms_graph else ''}"
            found.append(make_row(case, name, taken, note=note, rel_error=0.0))
    settings.measure_ceilings()
    return found


def _check_equal(kernels: KernelSet, op: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        wrong = int((got != want).any(dim=1).sum())
        raise CheckError(f"{kernels.name} {op}: expected the very rows, got {wrong} others")
