"""Importing does nothing but define names; the names are these; their docstrings say what the code checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from triton_here import HAS_TRITON

import mla
import mla.compute.rope
import mla.metadata.records
import mla.weights
from mla._checks import TensorSpec, dtype_name
from mla.errors import MLAError

PUBLIC_NAMES = {
    "mla": [
        "BlockPool",
        "CacheError",
        "DecodeGraphState",
        "DimsError",
        "KernelError",
        "KernelSet",
        "LatentCacheSpec",
        "MLAAttention",
        "MLADims",
        "MLAError",
        "MLAMetadata",
        "MLAWeights",
        "MetadataError",
        "RopeSpec",
        "RopeTable",
        "SequenceGroup",
        "WeightsError",
        "YarnSpec",
        "allocate_latent_cache",
        "attend",
        "build_metadata",
        "decode_group",
        "dims_from_config",
        "explain",
        "kernel_set",
        "kernels_for",
        "load_weights",
        "mla_attention",
        "prompt_group",
        "register_pytrees",
        "rope_table",
        "validate_metadata_values",
        "weights_from_state_dict",
    ],
    "mla.metadata": [
        "ContextChunk",
        "DecodeMetadata",
        "MLADims",
        "MLAMetadata",
        "PagedKV",
        "PrefillMetadata",
        "RopeSpec",
        "SequenceGroup",
        "YarnSpec",
        "advance_step",
        "build_metadata",
        "context_workspace_tokens",
        "decode_group",
        "prompt_group",
        "validate_metadata_values",
    ],
    "mla.cache": [
        "BlockPool",
        "LatentCacheSpec",
        "SequenceBlocks",
        "allocate_latent_cache",
        "copy_blocks_",
        "gather_latent_cache",
        "swap_blocks_",
        "write_latent_cache_",
    ],
    "mla.compute": [
        "GatherLatentCache",
        "KernelSet",
        "PagedDecode",
        "RopeTable",
        "VarlenAttention",
        "WriteLatentCache",
        "absorb_query",
        "apply_rope",
        "as_operators",
        "decode",
        "expand_latent",
        "explain",
        "head_linear",
        "kernel_set",
        "kernels_for",
        "linear",
        "merge_attn_states",
        "prefill",
        "prefill_workspace_bytes",
        "project_output",
        "rope_table",
        "split_kv_b_proj",
    ],
}
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(mla.__path__, "mla.")
    if HAS_TRITON or not found.name.endswith("_kernels")  # those are Triton's own, imported at their first launch
]

INERT = """
import os
import sys
from collections.abc import MutableMapping

import attrs
import numpy
import torch


class Watched(MutableMapping):
    def __init__(self, inside):
        self.inside, self.read = inside, []

    def __getitem__(self, name):
        self.read.append(name)
        return self.inside[name]

    def __setitem__(self, name, value):
        self.read.append(name)
        self.inside[name] = value

    def __delitem__(self, name):
        self.read.append(name)
        del self.inside[name]

    def __iter__(self):
        self.read.append("all names")
        return iter(self.inside)

    def __len__(self):
        return len(self.inside)


def settings():
    return {
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic warnings": torch.is_deterministic_algorithms_warn_only_enabled(),
        "uninitialised memory": torch.utils.deterministic.fill_uninitialized_memory,
        "matmul precision": torch.get_float32_matmul_precision(),
        "denormals": torch.tensor(1e-40).mul(1).item() != 0,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "mkldnn": torch.backends.mkldnn.flags,
        "random state": torch.get_rng_state().sum().item(),
        "numpy errors": numpy.geterr(),
        "CUDA": torch.cuda.is_initialized(),
    }


before, known = settings(), set(sys.modules)
os.environ = Watched(os.environ)
import mla

read = os.environ.read
os.environ = os.environ.inside
assert not read, f"environment: {read}"
changed = {name: (value, settings()[name]) for name, value in before.items() if settings()[name] != value}
assert not changed, f"settings: {changed}"
fresh = {name.partition(".")[0] for name in set(sys.modules) - known}
optional = fresh & {"aiter", "intel_extension_for_pytorch", "triton", "transformers", "safetensors", "vllm"}
assert not optional, f"imports: {optional}"
assert not torch.cuda.is_initialized()
assert "mla" in fresh
"""


def test_import_changes_and_reads_nothing() -> None:
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", INERT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_names_are_frozen(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ == PUBLIC_NAMES[name]
    assert all(hasattr(module, public) for public in PUBLIC_NAMES[name])


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_of_a_module_exists(module: ModuleType) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


RECORDS = [
    value
    for module in (mla.metadata.records, mla.weights, mla.compute.rope)
    for value in (getattr(module, name) for name in module.__all__)
    if attrs.has(value)
]
FIELD_LINE = re.compile(r"^    (?P<names>\w+(?:, \w+)*) : torch\.Tensor(?: or None)? of shape (?P<rest>\(.+)$", re.MULTILINE)
# Two dtypes that the class checks itself, since a declaration holds one or none.
OWN_DTYPES = {("RopeTable", "cos"): "float32 or float64", ("RopeTable", "sin"): "float32 or float64"}


def shape_and_dtype(text: str) -> tuple[str, str]:
    """``(a * (b + c), d), int32`` taken apart at the bracket that closes the shape."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: i + 1], text[i + 1 :].removeprefix(",").strip()
    return text, ""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_docstring_shapes_are_the_declared_ones(record: type) -> None:
    written = {
        name: shape_and_dtype(line["rest"])
        for line in FIELD_LINE.finditer(record.__doc__ or "")
        for name in line["names"].split(", ")
    }
    declared = {}
    for field in attrs.fields(record):
        spec = field.metadata.get("tensor")
        if isinstance(spec, TensorSpec):
            dtype = "" if spec.dtype is None else dtype_name(spec.dtype)
            declared[field.name] = (spec.shape, OWN_DTYPES.get((record.__name__, field.name), dtype))
    assert written == declared
    assert declared or record.__name__ == "MLAMetadata"


def test_the_shape_grammar_is_read() -> None:
    assert shape_and_dtype("(num_heads * (a + b), c), int32") == ("(num_heads * (a + b), c)", "int32")
    assert shape_and_dtype("(n,)") == ("(n,)", "")
    assert {record.__name__ for record in RECORDS} >= {"PagedKV", "ContextChunk", "MLAWeights", "RopeTable"}


def public_definitions() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions, classes and methods: where they stand, and their syntax."""
    for module in MODULES:
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name not in module.__all__:
                continue
            yield f"{module.__name__}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{module.__name__}.{node.name}.{inner.name}", inner


def definitions_that_raise() -> set[str]:
    """Names of functions and classes of the package that raise errors of the family, themselves or through a plain call.

    Calls of methods are not followed, so the set is a lower bound.
    """
    bodies: dict[str, ast.AST] = {}
    for module in MODULES:
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        bodies |= {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = {name for name, value in vars(mla.errors).items() if isinstance(value, type) and issubclass(value, MLAError)}
    while True:
        grown = found | {name for name, body in bodies.items() if raises(body, found)}
        if grown == found:
            return found - set(vars(mla.errors))
        found = grown


def raises(body: ast.AST, raising: set[str]) -> bool:
    if isinstance(body, ast.ClassDef):
        # A class raises when it is made; its other methods answer for themselves.
        made = [node for node in body.body if not isinstance(node, ast.FunctionDef) or is_part_of_making(node)]
        return any(raises(node, raising) for node in made)
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in raising)
        for node in ast.walk(body)
    )


def is_part_of_making(method: ast.FunctionDef) -> bool:
    return method.name == "__attrs_post_init__" or any(".validator" in ast.unparse(d) for d in method.decorator_list)


RAISING = definitions_that_raise()


@pytest.mark.parametrize("node", [pytest.param(node, id=where) for where, node in public_definitions()])
def test_docstrings_say_what_is_raised(node: ast.FunctionDef | ast.ClassDef) -> None:
    text = ast.get_docstring(node)
    assert text, "a public name without a docstring"
    if raises(node, RAISING):
        assert "\nRaises\n------\n" in text
