"""Memory that a piece of code holds at a time, counted op by op."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocations"]


class Allocations(TorchDispatchMode):
    """Peak bytes of the storages that operators made and that were alive together, arguments apart; every shape they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.outside = set[int]()
        self.peak, self.shapes = 0, set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self.outside |= given - set(self.alive)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
                storage = tensor.untyped_storage()
                if storage._cdata not in self.outside:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result
