"""Launching a Triton kernel again without what only the first launch needs.

Triton's own call binds the arguments, finds out what each may be specialised for and looks the compiled kernel up: some 30
microseconds on the host, more than a short kernel takes on the device. A `Launcher` does it once for what its key stands for,
and from then on calls the compiled kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mla.metadata.records import DecodeMetadata

__all__ = ["OPTIONS", "Launcher", "RowBoxes", "num_processors", "raw_stream", "rows_side_by_side"]

OPTIONS = {"enable_fp_fusion": True}
"""Of every launch: products may be fused with the sum that they go into, Triton's default up to 3.9 and not from 3.10 on."""

FORMAT_OF_3_6 = "iiiKKppOOOOOO"
"""What Triton 3.6 says that its function in C takes on NVIDIA GPUs before a kernel's own arguments."""

MAX_DESCRIBED = 1024
"""Matrices that a launcher keeps the description of, such as each layer's cache; 1 KB each."""


class RowBoxes:
    """Rows of a matrix as the copy engine reads them, box by box: what a compiled kernel's call wants of a tensor descriptor.

    Parameters
    ----------
    base : torch.Tensor
        In a 16-bit dtype, beginning at a multiple of 16 bytes.
    shape : tuple of (int, int)
        Rows and columns.
    stride : int
        Numbers from one row to the next, a multiple of 8; those of a row lie side by side.
    box : tuple of (int, int)
        Rows and columns of a box.
    """

    __slots__ = ("base", "box", "padding", "shape", "strides")
    round_f32_to_tf32 = False  # that later releases of Triton ask for too

    def __init__(self, base: torch.Tensor, shape: tuple[int, int], stride: int, box: tuple[int, int]) -> None:
        self.base = base
        self.box = box
        self.shape = shape
        self.strides = (stride, 1)
        self.padding = "zero"

    def descriptor(self) -> object:
        """The same as Triton's own record, which the first call is specialised by."""
        gluon = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        layouts = importlib.import_module("triton.experimental.gluon.language")
        layout = layouts.NVMMASharedLayout(128, 16)
        return gluon.TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.box), layout)


class Launcher:
    """A kernel with its constants.

    Every launch must agree with the first in the dtypes of its tensors, in whether tensors begin at multiples of 16 bytes, and
    in all that the kernel is specialised for: keep one launcher for each such case.

    Parameters
    ----------
    kernel : triton.JITFunction
        The kernel.
    constants : mapping
        Its ``constexpr`` parameters in their order, and options of the launch such as ``maxnreg``.
    """

    __slots__ = ("_constants", "_kernel", "_values", "way")
    takes_addresses = False

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._constants = {**constants, **OPTIONS}
        self._values = tuple(value for name, value in self._constants.items() if name in kernel.arg_names)
        self.way: Launcher | _Again = self
        """How to launch: this, through Triton, until the kernel is compiled. Read it once for a launch and its `boxes`."""

    def __call__(self, grid: tuple[int, int, int], stream: int, *args: object) -> None:  # noqa: ARG002  (Triton finds it)
        """Launch on `stream`, the current one of the current device; `args` are all parameters but constants, in order.

        Where `takes_addresses` is true, that of a tensor may be given for it, which spares asking the driver about each.
        """
        first = [arg.descriptor() if isinstance(arg, RowBoxes) else arg for arg in args]
        # Triton's interpreter compiles nothing and returns None.
        compiled = self._kernel[grid](*first, **self._constants)
        if hasattr(compiled, "run"):
            self.way = _Again(compiled, [arg.box for arg in args if isinstance(arg, RowBoxes)], self._values)

    def boxes(self, base: torch.Tensor, shape: tuple[int, int], stride: int, *boxes: tuple[int, int]) -> tuple[object, ...]:
        """What a launch takes for the rows of a matrix, as `RowBoxes` has them, once for each of `boxes`."""
        return tuple([RowBoxes(base, shape, stride, box) for box in boxes])


class _Again:
    """A compiled kernel with its constants; it is called as a `Launcher` is.

    What the copy engine is told of a matrix depends on its address and on the numbers of `boxes` only, so it is kept by these.
    """

    __slots__ = ("_compiled", "_described", "_encode", "_handles", "_run", "_values")
    takes_addresses = True

    def __init__(self, compiled: Any, boxes: list[tuple[int, int]], values: tuple[object, ...]) -> None:
        self._compiled = compiled  # which unloads its code when it goes
        self._values = values
        self._encode: Callable[[RowBoxes], list[object]] | None
        self._run, self._handles, self._encode = _function_in_c(compiled, boxes) or (compiled.run, _handles(compiled), None)
        self._described: dict[tuple[object, ...], tuple[object, ...]] = {}

    def __call__(self, grid: tuple[int, int, int], stream: int, *args: object) -> None:
        self._run(*grid, stream, *self._handles, *args, *self._values)

    def boxes(self, base: torch.Tensor, shape: tuple[int, int], stride: int, *boxes: tuple[int, int]) -> tuple[object, ...]:
        """As `Launcher.boxes`; where boxes are encoded here, each becomes several arguments."""
        if self._encode is None:
            return tuple([RowBoxes(base, shape, stride, box) for box in boxes])
        key = base.data_ptr(), shape, stride, boxes
        found = self._described.get(key)
        if found is None:
            if len(self._described) >= MAX_DESCRIBED:
                self._described.clear()
            found = tuple([x for box in boxes for x in self._encode(RowBoxes(base, shape, stride, box))])
            self._described[key] = found
        return found


def _handles(compiled: Any) -> tuple[object, ...]:
    """What a compiled kernel's call takes between the stream and the arguments: no metadata and hooks for profilers."""
    return compiled.function, compiled.packed_metadata, None, None, None


def _function_in_c(compiled: Any, boxes: list[tuple[int, int]]) -> tuple[Any, tuple[object, ...], Any] | None:
    """The function that a compiled kernel's call ends in, what it takes before the arguments, and how boxes are encoded.

    The call itself, in Triton 3.6, encodes every box again and copies the arguments twice on the way: 8 microseconds. None
    where the call is another (it has this format in no later release, and on no other device), where the kernel needs memory
    of Triton's own, and where boxes are not encoded: those launches go through the call.
    """
    launcher = compiled.run
    module = sys.modules.get(type(launcher).__module__)
    if getattr(module, "_BASE_ARGS_FORMAT", None) != FORMAT_OF_3_6 or type(launcher).__name__ != "CudaLauncher":
        return None
    function: Any = launcher.launch
    of_boxes: Any = []
    if inspect.isfunction(function):  # the one in C lies within, because of boxes
        found = inspect.getclosurevars(function).nonlocals
        function, of_boxes = found.get("launcher"), found.get("tensordesc_meta")
    known = dict(zip(boxes, of_boxes or [], strict=False))
    needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
    if needs_memory or not callable(function) or None in known.values() or [known.get(box) for box in boxes] != of_boxes:
        return None
    handle, *others = _handles(compiled)
    before = handle, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *others  # no memory of Triton's own
    return function, before, lambda rows: module.make_tensordesc_arg(rows, known[rows.box])  # type: ignore[union-attr]


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in Triton's interpreter a few programs, so that each walks several work items."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 3


def rows_side_by_side(metadata: DecodeMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block table, query starts and sequence lengths as the kernels read them: copied where numbers are apart."""
    table = metadata.block_table if metadata.block_table.stride(1) == 1 else metadata.block_table.contiguous()
    return table, metadata.query_start_loc.contiguous(), metadata.seq_lens.contiguous()


def raw_stream(device: torch.device) -> int:
    """The handle of a CUDA device's current stream, as a compiled kernel's call wants it; 0 without such a device."""
    return _stream_getter(device)()


@functools.cache
def _stream_getter(device: torch.device) -> Callable[[], int]:
    """Triton's own way to the handle: torch's public one makes a stream object first, for 3 microseconds."""
    if device.type != "cuda":
        return int
    return functools.partial(importlib.import_module("triton.runtime").driver.active.get_current_stream, device.index)
