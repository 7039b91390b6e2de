"""What the documentation says is run."""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
import torch
from triton_here import HAS_TRITON

import mla

README = Path(__file__).parent.parent / "README.md"
MODULES = [
    mla.__name__,
    *(info.name for info in pkgutil.walk_packages(mla.__path__, "mla.") if HAS_TRITON or not info.name.endswith("_kernels")),
]
WITH_EXAMPLES = {
    "mla.cache.blocks",
    "mla.cache.paged",
    "mla.cache.spec",
    "mla.compute.absorb",
    "mla.compute.attention",
    "mla.compute.cuda",
    "mla.compute.ipex_load",
    "mla.compute.kernels",
    "mla.compute.merge",
    "mla.compute.operators",
    "mla.compute.products",
    "mla.compute.rocm_load",
    "mla.compute.rocm_table",
    "mla.compute.rope",
    "mla.compute.select",
    "mla.errors",
    "mla.golden.bundle",
    "mla.golden.case",
    "mla.golden.diff",
    "mla.golden.hashing",
    "mla.golden.replay",
    "mla.golden.report",
    "mla.hf",
    "mla.hf_cache",
    "mla.layer",
    "mla.loading",
    "mla.metadata.advance",
    "mla.metadata.build",
    "mla.metadata.dims",
    "mla.metadata.groups",
    "mla.metadata.indexing",
    "mla.metadata.records",
    "mla.metadata.show",
    "mla.metadata.validate",
    "mla.module",
    "mla.plot",
    "mla.pytrees",
    "mla.serialize",
    "mla.state",
    "mla.weights",
}
NEEDS = {"mla.golden": "safetensors", "mla.hf": "transformers", "mla.loading": "safetensors", "mla.plot": "matplotlib"}
PUBLIC = (
    "mla",
    "mla.cache",
    "mla.compute",
    "mla.golden",
    "mla.hf",
    "mla.metadata",
    "mla.module",
    "mla.plot",
    "mla.pytrees",
    "mla.serialize",
)
NOT_SHOWN: set[str] = set()  # full names that need no example, each with its reason; none does so far


def can_run(name):
    """Whether the packages are here that a module's examples take."""
    needed = (package for start, package in NEEDS.items() if f"{name}.".startswith(f"{start}."))
    return all(importlib.util.find_spec(package) is not None for package in needed)


def test_docstring_examples_hold():
    tried = set()
    for name in filter(can_run, MODULES):
        module = importlib.import_module(name)
        result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
        assert result.failed == 0, name
        if result.attempted:
            tried.add(name)
    assert tried >= set(filter(can_run, WITH_EXAMPLES))


def full_name(value):
    return f"{value.__module__}.{value.__qualname__}"


def public_objects():
    """Functions and classes that are exported, and the methods and properties that such a class defines, by their full name."""
    found = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for value in (getattr(module, exported) for exported in module.__all__):
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            found[full_name(value)] = value
            for member, inner in vars(value).items() if inspect.isclass(value) else ():
                unbound = inner.__func__ if isinstance(inner, (classmethod, staticmethod)) else inner
                if not member.startswith("_") and (isinstance(unbound, property) or inspect.isroutine(unbound)):
                    found[f"{full_name(value)}.{member}"] = unbound
    return found


@functools.cache
def examples():
    """The lines of all examples that are run, by the full name of what they stand under."""
    finder = doctest.DocTestFinder()
    tests = (test for name in MODULES for test in finder.find(importlib.import_module(name)))
    return {test.name: "".join(example.source for example in test.examples) for test in tests if test.examples}


def test_every_public_function_class_and_method_has_an_example():
    public = public_objects()
    wanted = {name for name, value in public.items() if not isinstance(value, property)}
    assert len(wanted) > 80
    assert sorted(wanted - set(examples()) - NOT_SHOWN) == []
    assert wanted - set(examples()) >= NOT_SHOWN


def test_every_public_property_is_used_in_an_example_of_its_class():
    properties = [name for name, value in public_objects().items() if isinstance(value, property)]
    assert len(properties) > 20
    unused = []
    for name in properties:
        owner, _, member = name.rpartition(".")
        lines = "".join(text for where, text in examples().items() if f"{where}.".startswith(f"{owner}."))
        if not re.search(rf"\.{member}\b", lines):
            unused.append(name)
    assert unused == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
def test_the_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 6
    if importlib.util.find_spec("transformers") is None:
        blocks = [block for block in blocks if "from transformers" not in block]
    names: dict[str, object] = {}
    with torch.compiler.set_stance("default" if shutil.which("g++") else "force_eager"):
        for block in blocks:
            exec(block, names)
            assert names["out"].shape == (1, 16, 128)
            assert names["lse"].isfinite().all()
    assert names["q"].grad.isfinite().all()
    assert names["q"].grad.any()
    assert names["token"].shape == (1, 256)
    assert all(parameter.grad.any() for parameter in names["attention"].parameters())


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_readme_commands_exist(command):
    makefile = (README.parent / "Makefile").read_text()
    assert command in README.read_text()
    assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)
