"""Launching a Triton kernel again without what only the first launch needs.

Triton's own call binds the arguments, finds out what each may be specialised for and looks the compiled kernel up: some 30
microseconds on the host, more than a short kernel takes on the device. A `Launcher` does it once for what its key stands for,
and from then on calls the compiled kernel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mla.metadata.records import DecodeMetadata

__all__ = ["OPTIONS", "Launcher", "RowBoxes", "num_processors", "raw_stream", "rows_side_by_side"]

OPTIONS = {"enable_fp_fusion": True}
"""Of every launch: products may be fused with the sum that they go into, Triton's default up to 3.9 and not from 3.10 on."""


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

    __slots__ = ("_compiled", "_constants", "_kernel", "_run", "_values", "takes_addresses")

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._constants = {**constants, **OPTIONS}
        self._values = tuple(value for name, value in self._constants.items() if name in kernel.arg_names)
        self._compiled: Any = None
        self._run: Any = None
        self.takes_addresses = False

    def __call__(self, grid: tuple[int, int, int], stream: int, *args: object) -> None:
        """Launch on `stream`, the current one of the current device; `args` are all parameters but constants, in order.

        Once `takes_addresses` is true, that of a tensor may be given for it, which spares asking the driver about each.
        """
        if self._run is not None:
            compiled = self._compiled
            self._run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *self._values
            )  # no metadata and hooks for profilers
            return
        first = [arg.descriptor() if isinstance(arg, RowBoxes) else arg for arg in args]
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = self._kernel[grid](*first, **self._constants)
        self._run = getattr(self._compiled, "run", None)
        self.takes_addresses = self._run is not None


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
    return 0 if device.type != "cuda" else int(_stream_getter()(device.index))


@functools.cache
def _stream_getter() -> Callable[[int], int]:
    """Triton's own way to the handle: torch's public one makes a stream object first, for 3 microseconds."""
    return importlib.import_module("triton.runtime").driver.active.get_current_stream  # type: ignore[no-any-return]
