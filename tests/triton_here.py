"""What the installed Triton can do, by its version: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from mla.compute.cuda import OLDEST_TRITON

__all__ = ["HAS_TRITON", "needs_interpreter"]

OLDEST_INTERPRETER = (3, 9)
"""The first release whose interpreter takes numpy 2.4."""


def _version() -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version("triton"))[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


HAS_TRITON = _version() >= OLDEST_TRITON
"""Whether the modules of kernels can be imported."""

needs_interpreter = pytest.mark.skipif(
    _version() < OLDEST_INTERPRETER, reason="needs the interpreter of Triton 3.9 or newer: pip install 'mla[triton]'"
)
