"""Measuring decode, prefill, chunked context, cache writes and absorption on the CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import cpu_shapes as shapes
import torch
from cpu_contenders import Contender, decode_contenders, prefill_contenders
from rows import Row, check, errors, make_row
from timing import Budget, Times, alternate, gflops, matmul, peak_bytes

from mla import MLADims, build_metadata, prompt_group
from mla.compute import KernelSet, absorb_query, expand_latent, prefill, prefill_workspace_bytes, project_output
from mla.compute import split_kv_b_proj as split_weight
from mla.metadata import PrefillMetadata

STARTED = time.perf_counter()

__all__ = ["Settings", "case_of", "measure_context", "measure_decode", "measure_prefill", "measure_write"]


@attrs.frozen(kw_only=True, eq=False)
class Settings:
    """What a run was asked for; the first kernel set is ours, and the only one that is held to tolerances.

    Decode, prefill and context measure the shapes whose name contains `shape`.
    """

    sets: tuple[KernelSet, ...]
    peer: str | None
    threads: int
    budget: Budget
    quick: bool
    shape: str
    versions: dict[str, str]

    @property
    def ours(self) -> KernelSet:
        """What the others are compared with."""
        return self.sets[0]


def case_of(
    op: str, shape: str, dtype: torch.dtype, heads: int | None, lengths: Sequence[int], settings: Settings, **more: Any
) -> dict[str, Any]:
    """The fields that all contenders of a case share."""
    case = {
        "op": op,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "heads": heads,
        "lengths": shapes.describe_lengths(lengths),
        "block_size": shapes.BLOCK_SIZE,
        "threads": settings.threads,
        "query_scale": 1.0,
        "query_len": 1,
        "versions": settings.versions,
    } | more
    print(
        f"{time.perf_counter() - STARTED:5.0f} s: {op} {shape} {case['dtype']} x{case['query_scale']:g}",
        file=sys.stderr,
        flush=True,
    )
    return case


def _checked(
    case: dict[str, Any],
    contender: Contender,
    dtype: torch.dtype,
    want: tuple[torch.Tensor, torch.Tensor],
    heads: Sequence[int],
    settings: Settings,
) -> dict[str, Any]:
    """The errors of a contender as fields of its row; ours have to be small enough."""
    out, lse = contender.run()
    if len(heads) < out.shape[1]:
        out, lse = out[:, heads], None if lse is None else lse[:, heads]
    rel_error, lse_error = errors(out, lse, want)
    if contender.name == settings.ours.name:
        check(f"{case['op']} {case['shape']} {dtype} x{case['query_scale']:g}", dtype, rel_error, lse_error)
    return {"rel_error": rel_error, "lse_error": lse_error, "variant": contender.variant or None}


def measure(
    case: dict[str, Any],
    dtype: torch.dtype,
    contenders: Sequence[Contender],
    want: tuple[torch.Tensor, torch.Tensor],
    settings: Settings,
    *,
    flops: int,
    heads: Sequence[int],
) -> list[Row]:
    """Check every contender, time them in turns; the first is ours."""
    fields = {x.name: _checked(case, x, dtype, want, heads, settings) for x in contenders}
    times = alternate({"matmul": matmul(dtype)} | {x.name: x.run for x in contenders}, settings.budget)
    ours = times[contenders[0].name]
    case |= {"flops": flops, "matmul_gflops": gflops(times["matmul"]), "checked_heads": len(heads)}
    rows = []
    for name, more in fields.items():
        ratio = {} if name == contenders[0].name else {"ratio": times[name].ms_median / ours.ms_median}
        rows.append(make_row(case, name, times[name], **ratio, **more))
    return rows


def _decode_cases(settings: Settings) -> list[tuple[shapes.DecodeShape, torch.dtype, float]]:
    """bf16 with unit and three times larger queries, fp32 and some fp16 for one new token."""
    bf16, fp32, fp16 = torch.bfloat16, torch.float32, torch.float16
    if settings.quick:
        return [(shape, dtype, 1.0) for shape in shapes.QUICK_DECODE for dtype in (bf16, fp32)]
    cases = []
    for shape in shapes.named(shapes.DECODE, settings.shape):
        cases += [(shape, bf16, 1.0), (shape, bf16, 3.0)]
        if shape.query_len == 1:
            cases.append((shape, fp32, 1.0))
        if shape.name in {"H16 L1024", "H128 L4096"}:
            cases.append((shape, fp16, 1.0))
    return cases


def measure_decode(settings: Settings) -> list[Row]:
    """Paged decode, with a plan; the plan; and sinks, whose accuracy alone counts."""
    rows = _sinks(settings)
    for shape, dtype, scale in _decode_cases(settings):
        inputs = shapes.decode_inputs(shape, dtype, scale)
        more = {"query_scale": scale, "query_len": shape.query_len}
        case = case_of("decode", shape.name, dtype, shape.heads, shape.lengths, settings, **more)
        contenders = decode_contenders(inputs, settings.sets, settings.peer)
        rows += measure(case, dtype, contenders, inputs.float64(), settings, flops=shape.flops, heads=range(shape.heads))
        if (dtype, scale) == (torch.bfloat16, 1.0):
            plan = partial(settings.ours.plan, inputs.metadata)
            case = case_of("plan", shape.name, dtype, shape.heads, shape.lengths, settings, **more)
            rows.append(make_row(case, settings.ours.name, alternate({"plan": plan}, settings.budget)["plan"]))
    return rows


def _sinks(settings: Settings) -> list[Row]:
    """One key far above the rest, where a shift that was guessed would overflow or lose everything else."""
    rows = []
    for shape in shapes.QUICK_DECODE[:1] if settings.quick else shapes.named(shapes.DECODE[:3], settings.shape):
        for logits in (20, 60, 120):
            inputs = shapes.decode_inputs(shape, torch.bfloat16)
            shapes.add_sink(inputs, logits)
            name = f"{shape.name} sink {logits}"
            case = case_of("decode with a sink", name, torch.bfloat16, shape.heads, shape.lengths, settings)
            want = inputs.float64()
            for contender in decode_contenders(inputs, settings.sets, settings.peer, sdpa=False):
                fields = _checked(case, contender, torch.bfloat16, want, range(shape.heads), settings)
                rows.append(make_row(case, contender.name, None, **fields))
    return rows


def measure_prefill(settings: Settings) -> list[Row]:
    """Ragged prompts, causal, and one chunk of context."""
    rows = []
    for shape in shapes.named(shapes.QUICK_PREFILL if settings.quick else shapes.PREFILL, settings.shape):
        for dtype, scale in ((torch.bfloat16, 1.0), (torch.bfloat16, 3.0), (torch.float32, 1.0)):
            inputs = shapes.prefill_inputs(shape, dtype, scale)
            more = {"query_scale": scale, "query_len": shapes.describe_lengths(shape.query_lens)}
            case = case_of("prefill", shape.name, dtype, shape.heads, shape.kv_lens, settings, block_size=None, **more)
            heads = shapes.checked_heads(shape.heads, shape.flops)
            contenders = prefill_contenders(inputs, settings.sets)
            rows += measure(case, dtype, contenders, inputs.float64(heads), settings, flops=shape.flops, heads=heads)
    return rows


@attrs.frozen(kw_only=True, eq=False)
class _Context:
    """New tokens of one prompt over a cached context."""

    dims: MLADims
    metadata: PrefillMetadata
    q: torch.Tensor
    new: torch.Tensor
    latent_cache: torch.Tensor
    kv_b_proj: torch.Tensor

    def chunked(self, kernels: KernelSet) -> tuple[torch.Tensor, torch.Tensor]:
        rank = self.dims.kv_lora_rank
        return prefill(
            self.q, self.new[:, :rank], self.new[:, rank:], self.latent_cache, self.metadata,
            kv_b_proj=self.kv_b_proj, dims=self.dims, kernels=kernels,
        )  # fmt: skip

    def keys(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([self.latent_cache.view(-1, shapes.LATENT).index_select(0, slots), self.new])
        return expand_latent(rows[:, : self.dims.kv_lora_rank], rows[:, self.dims.kv_lora_rank :], self.kv_b_proj, self.dims)

    def one_pass(self, kernels: KernelSet, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys at once."""
        k, v = self.keys(slots)
        starts = [torch.tensor([0, n], dtype=torch.int32) for n in (len(self.q), len(k))]
        return kernels.varlen_attention(
            self.q, k, v, query_start_loc=starts[0], kv_start_loc=starts[1], max_query_len=len(self.q), max_kv_len=len(k),
            causal=True, softmax_scale=self.dims.softmax_scale,
        )  # fmt: skip


def _context(heads: int, new: int, context_len: int, dtype: torch.dtype, chunk: int) -> tuple[_Context, torch.Tensor]:
    """Inputs over shuffled blocks, and the slots of the context in order."""
    generator = torch.Generator().manual_seed(0)
    size, dims = shapes.BLOCK_SIZE, shapes.dims_of(heads)
    blocks = torch.randperm(-(-(context_len + new) // size), generator=generator)
    group = prompt_group(new, blocks.tolist(), context_len=context_len)
    metadata = build_metadata([group], block_size=size, context_chunk_tokens=chunk).prefill
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:context_len]
    cache = torch.full((len(blocks), size, shapes.LATENT), torch.nan, dtype=dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    cache.view(-1, shapes.LATENT)[slots] = normal(context_len, shapes.LATENT).to(dtype)
    inputs = _Context(
        dims=dims,
        metadata=metadata,
        q=normal(new, heads, dims.qk_head_dim).to(dtype),
        new=normal(new, shapes.LATENT).to(dtype),
        latent_cache=cache,
        kv_b_proj=(shapes.RANK**-0.5 * normal(heads * (dims.qk_nope_head_dim + dims.v_head_dim), shapes.RANK)).to(dtype),
    )
    return inputs, slots


def measure_context(settings: Settings) -> list[Row]:
    """Chunked prefill over a growing context: time against one pass over all keys, and the peak of memory.

    Operations include making keys and values from the latents. Memory is all that torch's allocator gives, the kernel's own
    and the results included.
    """
    dtype, rows, shortest = torch.bfloat16, [], None
    heads, new, chunk, lengths = (2, 32, 64, (64, 160)) if settings.quick else (16, 2048, 4096, (4096, 16384, 65536))
    for context_len in lengths:
        name = f"H{heads} T{new} over {context_len}"
        if settings.shape not in name:
            continue
        case = case_of("context", name, dtype, heads, (context_len + new,), settings, query_len=new)
        inputs, slots = _context(heads, new, context_len, dtype, chunk)
        ours = partial(inputs.chunked, settings.ours)
        contenders = [
            Contender(name=settings.ours.name, run=ours),
            Contender(name="one pass", run=partial(inputs.one_pass, settings.ours, slots)),
        ]
        # Both make keys and values by the same rounded products; what is checked is the attention over them.
        checked = shapes.checked_heads(heads, 640 * heads * new * context_len)
        keys, values = (x[:, checked] for x in inputs.keys(slots))
        want = shapes.attend_float64(inputs.q[:, checked], keys, values, causal=True)
        peak = peak_bytes(ours)
        shortest = shortest or peak
        promised = prefill_workspace_bytes(
            inputs.dims, num_query_tokens=new, context_chunk_tokens=chunk, dtype=dtype, kernels=settings.ours
        )
        pairs = new * context_len + new * (new + 1) // 2
        flops = 2 * heads * (320 * pairs + 256 * shapes.RANK * (context_len + new))
        found = measure(case, dtype, contenders, want, settings, flops=flops, heads=checked)
        found[0] |= {
            "peak_bytes": peak,
            "promised_bytes": promised,
            "peak_of_promised": peak / promised,
            "peak_of_shortest": peak / shortest,
            "note": f"peak {peak / 2**20:.0f} MiB of {promised / 2**20:.0f} promised",
        }
        rows += found
    return rows


def _against_copy(
    case: dict[str, Any],
    run: Callable[[], object],
    moved: int,
    rel_error: float,
    dtype: torch.dtype,
    settings: Settings,
    flops: int | None = None,
) -> list[Row]:
    """Ours and a copy that reads and writes as many bytes."""
    source = torch.ones(moved // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    functions = {"ours": run, "copy": partial(target.copy_, source), "matmul": matmul(dtype)}
    times = alternate(functions, settings.budget)
    ours, copy = times["ours"], times["copy"]
    check(f"{case['op']} {case['shape']} {dtype}", dtype, rel_error, None)
    work = {} if flops is None else {"flops": flops, "matmul_gflops": gflops(times["matmul"])}

    def speed(taken: Times) -> dict[str, Any]:
        gb_per_s = moved / taken.ms_median / 1e6
        return {"gb_per_s": gb_per_s, "note": f"{gb_per_s:.1f} GB/s"}

    return [
        make_row(case, settings.ours.name, ours, rel_error=rel_error, **work, **speed(ours)),
        make_row(case, "copy", copy, ratio=copy.ms_median / ours.ms_median, **speed(copy)),
    ]


def measure_write(settings: Settings) -> list[Row]:
    """Cache writes and both halves of absorption against a copy of as many bytes, read and written alike."""
    dtype, rows = torch.bfloat16, []
    generator = torch.Generator().manual_seed(0)
    counts = (1, 32) if settings.quick else (1, 32, 512, 2048)
    for n in counts:
        cache = torch.full((4 * max(counts) // shapes.BLOCK_SIZE + 1, shapes.BLOCK_SIZE, shapes.LATENT), torch.nan, dtype=dtype)
        slots = torch.randperm(cache.shape[0] * shapes.BLOCK_SIZE, generator=generator)[:n]
        latent = torch.randn(n, shapes.LATENT, generator=generator).to(dtype)
        run = partial(
            settings.ours.write_latent_cache_, cache, latent[:, : shapes.RANK].clone(), latent[:, shapes.RANK :].clone(), slots
        )
        run()
        rel_error, _ = errors(cache.view(-1, shapes.LATENT)[slots], None, (latent.double(), None))
        case = case_of("write_latent_cache_", f"T{n}", dtype, None, (n,), settings, query_len=n)
        rows += _against_copy(case, run, 2 * latent.nbytes, rel_error, dtype, settings)
    for heads in (2,) if settings.quick else (16, 128):
        for n in counts if heads < 128 else counts[:-1]:
            rows += _absorption(heads, n, dtype, settings)
    return rows


def _absorption(heads: int, n: int, dtype: torch.dtype, settings: Settings) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    dims = shapes.dims_of(heads)
    weight = (shapes.RANK**-0.5 * torch.randn(heads * 256, shapes.RANK, generator=generator)).to(dtype)
    w_uk, w_uv = (x.double() for x in split_weight(weight, dims))
    q = torch.randn(n, heads, dims.qk_head_dim, generator=generator).to(dtype)
    latent = torch.randn(n, heads, shapes.RANK, generator=generator).to(dtype)
    nope, pe = q.double().split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], -1)
    wanted = {
        "absorb_query": (absorb_query, q, torch.cat([torch.einsum("thd,hdc->thc", nope, w_uk), pe], -1)),
        "project_output": (project_output, latent, torch.einsum("thc,hcd->thd", latent.double(), w_uv)),
    }
    rows = []
    for op, (function, x, want) in wanted.items():
        run = partial(function, x, weight, dims)
        rel_error, _ = errors(run(), None, (want, None))
        case = case_of(op, f"H{heads} T{n}", dtype, heads, (n,), settings, query_len=n, block_size=None)
        moved = x.nbytes + weight.nbytes // 2 + want.numel() * dtype.itemsize
        rows += _against_copy(case, run, moved, rel_error, dtype, settings, 2 * n * heads * 128 * shapes.RANK)
    return rows
