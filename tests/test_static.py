"""Formatting, types and layers of the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mla

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable

COMMANDS = {
    "ruff check": [PYTHON, "-m", "ruff", "check", "."],
    "ruff format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "mypy": [PYTHON, "-m", "mypy"],
    "import-linter": [str(Path(PYTHON).parent / "lint-imports")],
}


@pytest.mark.skipif(not (ROOT / "mla").is_dir(), reason="only the installed package is here")
@pytest.mark.parametrize("name", COMMANDS)
def test_source_tree_is_clean(name):
    done = subprocess.run(COMMANDS[name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_is_too_long():
    long = {path.name: lines for path in (ROOT / "mla").rglob("*.py") if (lines := len(path.read_text().splitlines())) > 420}
    assert not long


def test_the_tested_package_is_the_installed_one():
    where = Path(mla.__file__)
    if "PYTEST_SOURCE_TREE" not in os.environ:  # set it to test an editable install
        assert ROOT / "mla" not in where.parents, f"the tests ran against {where}; `make test` runs them against the wheel"
