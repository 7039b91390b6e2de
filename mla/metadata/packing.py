"""Many small index arrays, one copy to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["HostBuffer", "Ticket"]

Ticket = tuple[int, npt.NDArray[Any]]
_ALIGNMENT = 16  # bytes; kernels load whole vectors from the start of an index array


class HostBuffer:
    """Collects numpy arrays, moves them to the device in one copy, and hands out views of it.

    On the CPU nothing moves: the arrays themselves become tensors.
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._end = 0
        self._moved: torch.Tensor | None = None

    def add(self, array: npt.NDArray[Any]) -> Ticket:
        """Reserve a place; `take` turns the returned ticket into a tensor."""
        ticket = (self._end, array)
        self._arrays.append(array)
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return ticket

    def move(self, device: torch.device) -> None:
        """One host-to-device copy of everything that was added."""
        if device.type != "cpu":
            self._moved = torch.from_numpy(self.pack()).to(device)

    def pack(self) -> npt.NDArray[np.uint8]:
        """Everything that was added, in one array of bytes."""
        host = np.empty(self._end, np.uint8)
        end = 0
        for array in self._arrays:
            host[end : end + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return host

    def take(self, ticket: Ticket) -> torch.Tensor:
        """The tensor of one `add`."""
        start, array = ticket
        if self._moved is None:
            return torch.from_numpy(array)
        dtype = torch.int64 if array.dtype == np.int64 else torch.int32
        return self._moved[start : start + array.nbytes].view(dtype).view(array.shape)
