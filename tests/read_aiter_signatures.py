"""Signatures of AITER's functions, read from its Python source without importing it.

``python read_aiter_signatures.py WHEEL`` prints them as JSON; WHEEL is a wheel or an unpacked folder of amd-aiter.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from pathlib import Path

FUNCTIONS = {
    "mla_decode_fwd": "aiter/mla.py",
    "flash_attn_varlen_func": "aiter/ops/mha.py",
    "mla_decode_stage1_asm_fwd": "aiter/ops/attention.py",
}
"""Each function that the adapter calls, and the file that defines it."""


def read_source(where: Path, name: str) -> str:
    if where.is_dir():
        return (where / name).read_text()
    with zipfile.ZipFile(where) as archive:
        return archive.read(name).decode()


def parameters(source: str, function: str) -> list[dict[str, str]]:
    """Names in order, each with its default as source where it has one."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function]
    if len(nodes) != 1:
        raise SystemExit(f"{function}: expected one definition, got {len(nodes)}")
    arguments = nodes[0].args
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs or arguments.kwonlyargs:
        raise SystemExit(f"{function}: expected plain parameters, got {ast.unparse(arguments)}")
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    return [
        {"name": argument.arg} if default is None else {"name": argument.arg, "default": ast.unparse(default)}
        for argument, default in zip(arguments.args, [*missing, *arguments.defaults], strict=True)
    ]


def read_signatures(where: Path) -> dict[str, list[dict[str, str]]]:
    """The parameters of every function in `FUNCTIONS`."""
    return {function: parameters(read_source(where, path), function) for function, path in FUNCTIONS.items()}


def as_signature(written: list[dict[str, str]]) -> inspect.Signature:
    """A signature that calls can be bound to; defaults stay text."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(p["name"], kind, default=p.get("default", inspect.Parameter.empty)) for p in written]
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(json.dumps(read_signatures(Path(sys.argv[1])), indent=1))
