"""What the documentation says is run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
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
    "mla.cache.spec",
    "mla.compute.cuda",
    "mla.compute.ipex_load",
    "mla.compute.kernels",
    "mla.compute.merge",
    "mla.compute.rocm_load",
    "mla.compute.rocm_table",
    "mla.compute.rope",
    "mla.compute.select",
    "mla.golden.diff",
    "mla.golden.hashing",
    "mla.golden.replay",
    "mla.hf_cache",
    "mla.metadata.build",
    "mla.metadata.dims",
    "mla.metadata.groups",
    "mla.metadata.indexing",
    "mla.metadata.show",
    "mla.plot",
    "mla.module",
    "mla.pytrees",
    "mla.serialize",
    "mla.state",
}


def test_docstring_examples_hold():
    tried = set()
    for name in MODULES:
        module = importlib.import_module(name)
        result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
        assert result.failed == 0, name
        if result.attempted:
            tried.add(name)
    assert tried >= WITH_EXAMPLES


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
