"""Checking and measuring paged decode on a GPU: time, the host's share, and what a plan costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import gpu_shapes as shapes
import rows
import torch
from cpu_shapes import RANK, SCALE, DecodeInputs, describe_lengths, named
from gpu_rows import WORST_ROW, limits_of, make_row
from gpu_timing import Ceilings, Clock, host_ms, matmul, measure_ceilings
from rows import CheckError, Row

from mla.compute import KernelSet
from mla.compute.contracts import Plan
from mla.compute.triton_hopper import HopperPlan
from mla.compute.triton_launch import raw_stream

STARTED = time.perf_counter()
DRAWS = 8
"""Sequences, over draws of the queries, that an error is an average over."""
PORTABLE = "TRITON_MLA_PORTABLE"
L2_BYTES = 2**26
"""Keys of fewer than twice as many bytes partly stay in the second-level cache from one replay to the next."""

__all__ = [
    "Settings",
    "case_of",
    "check_decode",
    "checked_shapes",
    "decode_shapes",
    "first_calls",
    "is_measured",
    "measure_decode",
    "measure_host",
    "measure_plan",
    "measure_under_load",
    "progress",
]


@attrs.frozen(kw_only=True, eq=False)
class Settings:
    """What a run was asked for.

    Parameters
    ----------
    sets : tuple of KernelSet
        All of them are held to their limits.
    clock : Clock
        Where and how calls are timed.
    quick : bool
        Tiny shapes.
    shape : str
        Only shapes whose name contains it.
    about : mapping
        `versions` and `commit` of every row.
    ceilings : list of Ceilings
        Measured in the course of the run.
    """

    sets: tuple[KernelSet, ...]
    clock: Clock
    quick: bool
    shape: str
    about: Mapping[str, Any]
    ceilings: list[Ceilings] = attrs.field(factory=list)

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.clock.device

    def measure_ceilings(self) -> None:
        """Once more: the chip is not as fast all the time."""
        self.ceilings.append(measure_ceilings(self.clock))


def progress(text: str) -> None:
    """Say how far the run is."""
    print(f"{time.perf_counter() - STARTED:5.0f} s: {text}", file=sys.stderr, flush=True)


def case_of(op: str, shape: str, dtype: torch.dtype, lengths: Sequence[int], settings: Settings, **more: Any) -> dict[str, Any]:
    """The fields that all contenders of a case share."""
    return {
        "op": op,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "lengths": describe_lengths(lengths),
        **settings.about,
        **more,
    }


def _decode_case(op: str, shape: shapes.GpuShape, settings: Settings, **more: Any) -> dict[str, Any]:
    return case_of(
        op,
        shape.name,
        shape.dtype,
        shape.lengths,
        settings,
        heads=shape.heads,
        block_size=shape.block_size,
        query_len=shape.query_len,
        query_scale=shape.query_scale,
        **more,
    )


def decode_shapes(settings: Settings) -> list[shapes.GpuShape]:
    """The shapes to measure."""
    return named(shapes.QUICK_DECODE if settings.quick else shapes.DECODE, settings.shape)


def checked_shapes(settings: Settings) -> list[shapes.GpuShape]:
    """What is only compared with float64: odd lengths for every kernel that is measured, and larger scores."""
    measured = decode_shapes(settings)
    odd = {shapes.kernel_class(shape): shapes.odd_shape(shape, quick=settings.quick) for shape in measured}
    return [*odd.values(), *named(shapes.QUICK_CHECKED if settings.quick else shapes.CHECKED, settings.shape)]


def is_measured(kernels: KernelSet, shape: shapes.GpuShape) -> bool:
    """Whether a set takes part: the portable kernel on Hopper only where there are figures of others to compare with."""
    return kernels.name != PORTABLE or shape.name in shapes.FEW_SHAPES or shape.query_scale > 1


def _call(
    kernels: KernelSet, inputs: DecodeInputs, plan: Plan | None, q: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.paged_decode(
        inputs.q if q is None else q,
        inputs.latent_cache,
        inputs.metadata,
        kv_lora_rank=RANK,
        softmax_scale=SCALE,
        plan=plan,
    )


@attrs.define(kw_only=True)
class PlannedCall:
    """A layer's call with the step's plan: one that was made before, and in a graph one that the graph makes first.

    Parameters
    ----------
    kernels : KernelSet
        Whose call it is.
    inputs : DecodeInputs
        Its arguments.
    plan : Plan or None
        Made before.
    """

    kernels: KernelSet
    inputs: DecodeInputs
    plan: Plan | None
    _captured: Plan | None = None

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run it."""
        if self.plan is None or self.inputs.q.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return _call(self.kernels, self.inputs, self.plan)
        if self._captured is None:
            self._captured = self.kernels.make_plan(self.inputs.metadata)
        return _call(self.kernels, self.inputs, self._captured)


def first_calls(settings: Settings, wanted: Sequence[shapes.GpuShape]) -> None:
    """Compile what these shapes need, and leave it in the cache of compiled kernels."""
    for shape in wanted:
        inputs = shapes.decode_inputs(shape, settings.device)
        for kernels in settings.sets:
            if is_measured(kernels, shape):
                _call(kernels, inputs, kernels.plan(inputs.metadata))
    settings.clock.wait()


def check_decode(settings: Settings) -> dict[tuple[str, str], dict[str, float]]:
    """Compare every set with float64 at every shape, before anything is measured.

    Returns
    -------
    dict
        By shape and set: `rel_error`, `lse_error`, and `worst_row`, the largest relative error of a new token.

    Raises
    ------
    CheckError
        Naming the first result beyond its limits, or a second call with other bits.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for shape in [*checked_shapes(settings), *decode_shapes(settings)]:
        sets = [kernels for kernels in settings.sets if is_measured(kernels, shape)]
        if not sets:
            continue
        progress(f"check {shape.name}")
        sums: dict[str, list[float]] = {kernels.name: [0.0, 0.0, 0.0] for kernels in sets}
        size = 0.0
        for draw in range(max(1, DRAWS // len(shape.lengths))):
            inputs = shapes.decode_inputs(shape, settings.device, draw)
            want, want_lse = inputs.float64()
            size += float(want.square().sum())
            for kernels in sets:
                difference, worst, lse_error = _errors(kernels, inputs, want, want_lse)
                total = sums[kernels.name]
                total[:] = total[0] + difference, max(total[1], worst), max(total[2], lse_error)
        for kernels in sets:
            difference, worst, lse_error = sums[kernels.name]
            rel_error = (difference / size) ** 0.5
            found[shape.name, kernels.name] = {"rel_error": rel_error, "lse_error": lse_error, "worst_row": worst}
            out_rel, lse_abs = limits_of(kernels.name, "decode", shape.dtype, shape.query_scale)
            what = f"{kernels.name} {shape.name}"
            rows.check(what, shape.dtype, rel_error, lse_error, out_rel=out_rel, lse_abs=lse_abs)
            rows.check(f"{what}, one new token", shape.dtype, worst, None, out_rel=WORST_ROW * out_rel)
    return found


def _errors(kernels: KernelSet, inputs: DecodeInputs, want: torch.Tensor, want_lse: torch.Tensor) -> tuple[float, float, float]:
    """Squared norm of the output's error, the worst relative error of a new token, and that of the LSE."""
    plan = kernels.plan(inputs.metadata)
    out, lse = _call(kernels, inputs, plan)
    again = _call(kernels, inputs, plan)
    if not (torch.equal(out, again[0]) and torch.equal(lse, again[1])):
        raise CheckError(f"{kernels.name} {inputs.shape.name}: expected the same bits of a second call, got others")
    difference = (out.double() - want).flatten(1).norm(dim=1)
    rel_error, lse_error = rows.errors(out, lse, (want, want_lse))
    worst = float((difference / want.flatten(1).norm(dim=1)).max())
    # `errors` gives infinity where anything is not finite, and a comparison with it fails; a sum of NaN would too.
    return float(difference.square().sum()) if rel_error < torch.inf else torch.inf, worst, float(lse_error)


def checked_rows(settings: Settings, errors: Mapping[tuple[str, str], Mapping[str, float]]) -> list[Row]:
    """Rows of what was only compared with float64: odd lengths and larger scores."""
    return [
        make_row(_decode_case("check", shape, settings), name, None, **found)
        for shape in checked_shapes(settings)
        for (of_shape, name), found in errors.items()
        if of_shape == shape.name
    ]


def measure_decode(settings: Settings) -> list[Row]:
    """Every set at every shape, checked before; a plan is made before, as it serves all layers of a step."""
    errors = check_decode(settings)
    found = checked_rows(settings, errors)
    for i, shape in enumerate(decode_shapes(settings)):
        sets = [kernels for kernels in settings.sets if is_measured(kernels, shape)]
        if not sets:
            continue
        if i % 8 == 0:
            settings.measure_ceilings()
        progress(f"decode {shape.name}")
        inputs = shapes.decode_inputs(shape, settings.device)
        functions = {
            kernels.name: PlannedCall(kernels=kernels, inputs=inputs, plan=kernels.plan(inputs.metadata)) for kernels in sets
        }
        times = settings.clock.alternate(functions)
        work = {"bytes": shape.bytes, "key_bytes": shape.key_bytes, "flops": shape.flops}
        case = _decode_case("decode", shape, settings, l2_warm=shape.key_bytes < 2 * L2_BYTES, **work)
        found += [make_row(case, name, times[name], **errors[shape.name, name]) for name in functions]
        del inputs, functions
        if settings.clock.on_gpu:
            torch.cuda.empty_cache()
    settings.measure_ceilings()
    return found


def measure_under_load(settings: Settings) -> list[Row]:
    """Shapes that the matmul rate bounds, and a matmul before and after each, called for 0.3 seconds without a rest."""
    names = shapes.QUICK_LOADED if settings.quick else shapes.LOADED
    found: list[Row] = []
    product, flops = matmul(128 if settings.quick else 8192, settings.device)
    for shape in [shape for shape in decode_shapes(settings) if shape.name in names]:
        progress(f"under load {shape.name}")
        inputs = shapes.decode_inputs(shape, settings.device)
        rates = [flops / settings.clock.under_load(product).ms_median / 1e9]
        for kernels in settings.sets:
            if kernels.name != PORTABLE:
                call = PlannedCall(kernels=kernels, inputs=inputs, plan=kernels.plan(inputs.metadata))
                times = settings.clock.under_load(call)
                rates.append(flops / settings.clock.under_load(product).ms_median / 1e9)
                rate = sum(rates[-2:]) / 2
                case = _decode_case("under load", shape, settings, flops=shape.flops, matmul_tflops=rate)
                note = f"{shape.flops / times.ms_median / 1e9:.0f} TFLOP/s beside a matmul's {rate:.0f}"
                found.append(make_row(case, kernels.name, times, note=note))
    return found


def measure_host(settings: Settings) -> list[Row]:
    """What an eager call costs the host: of a tiny shape, with a plan made before and without one."""
    found = []
    for heads in (2,) if settings.quick else (16, 128):
        shape = shapes.GpuShape(name=f"B1 H{heads} L64", heads=heads, lengths=(64,), block_size=16 if settings.quick else 64)
        if settings.shape not in shape.name:
            continue
        progress(f"host {shape.name}")
        inputs = shapes.decode_inputs(shape, settings.device)
        for kernels in settings.sets:
            plan = kernels.plan(inputs.metadata)
            calls: dict[str, Callable[[], object]] = {"a plan given": partial(_call, kernels, inputs, plan)} if plan else {}
            calls["no plan given"] = partial(_call, kernels, inputs, None)
            for what, call in calls.items():
                times = host_ms(call, settings.clock, calls=20 if settings.quick else 200)
                case = _decode_case("host", shape, settings)
                found.append(make_row(case, kernels.name, times, part=what, note=f"{1e3 * times.ms_median:.1f} us, {what}"))
    return found


PLAN_BATCHES = (1, 32, 128, 512, 1024)


def measure_plan(settings: Settings) -> list[Row]:
    """What making a plan takes in a graph, of plans alone.

    A set whose plans are made by the device is asked for what its first call with a plan would launch.
    """
    found: list[Row] = []
    if not settings.clock.on_gpu:
        return found
    for heads in (16, 128):
        for batch in PLAN_BATCHES:
            lengths = shapes.ragged(batch, 128, salt=3)
            shape = shapes.GpuShape(name=f"B{batch} H{heads} plan", heads=heads, lengths=lengths)
            if settings.shape not in shape.name:
                continue
            inputs = shapes.decode_inputs(shape, settings.device)
            functions: dict[str, Callable[[], object]] = {
                kernels.name: partial(_plan, kernels, inputs)
                for kernels in settings.sets
                if kernels.make_plan(inputs.metadata) is not None and kernels.name != PORTABLE
            }
            if not functions:
                continue
            progress(f"plan {shape.name}")
            for name, times in settings.clock.alternate(functions, eager_calls=False).items():
                case = _decode_case("plan", shape, settings, batch=batch)
                note = f"{1e3 * times.ms_graph:.1f} us"
                found.append(make_row(case, name, None, ms_graph=times.ms_graph, note=note))
    return found


def _plan(kernels: KernelSet, inputs: DecodeInputs) -> None:
    """A plan, and what the first call that it is given to would launch for it."""
    plan = kernels.make_plan(inputs.metadata)
    if isinstance(plan, HopperPlan):
        plan.shares(inputs.q, raw_stream(inputs.q.device))
