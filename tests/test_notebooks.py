"""The notebooks run as plain scripts, check themselves, and leave their figures; their format is jupytext's."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib import image

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = {path.stem: path for path in sorted(EXAMPLES.glob("[0-9]*.py"))}
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
SECONDS = 60  # twice what a notebook may take on two free cores: the machine may be busy


def cells(text):
    """(kind, source) of each cell."""
    head, *rest = CELL.split(text)
    assert head == "", "something before the first cell"
    return [("markdown" if mark else "code", source) for mark, source in zip(rest[::2], rest[1::2], strict=True)]


def figure_names(text):
    return re.findall(r'^ *keep\(.*, "(\w+)"\)$', text, re.MULTILINE)


def run(path, tmp_path, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("MLA_FIGURES", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env={**clean, "MPLBACKEND": "Agg", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def test_there_are_nine():
    assert [name[:3] for name in NOTEBOOKS] == [f"{i:02d}_" for i in range(1, 10)]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_leaves_its_figures(name, tmp_path):
    folder = tmp_path / "figures"
    done = run(NOTEBOOKS[name], tmp_path, MLA_FIGURES=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = figure_names(NOTEBOOKS[name].read_text())
    assert expected
    assert {path.name for path in folder.iterdir()} == {f"{figure}.png" for figure in expected}
    for figure in expected:
        pixels = image.imread(folder / f"{figure}.png")
        assert min(pixels.shape[:2]) >= 150
        assert len({tuple(colour) for colour in pixels.reshape(-1, pixels.shape[2])[::7]}) > 3, "an empty figure"
    if name.startswith("06"):
        skipped = re.search(r"^graph capture skipped: needs an NVIDIA GPU, and .+$", done.stdout, re.MULTILINE)
        assert bool(skipped) != torch.cuda.is_available()


def test_a_figure_is_written_only_when_asked(tmp_path):
    done = run(NOTEBOOKS["02_metadata"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("01_what_mla_saves", "out_absorbed = project_output(", "out_absorbed = 1.001 * project_output("),
        ("02_metadata", "+ position % BLOCK_SIZE", "+ (position + 1) % BLOCK_SIZE"),
        ("03_chunked_prefill", "causal=False", "causal=True"),
        ("04_scheduler", "query_start_loc[1:].long() - 1", "query_start_loc[:-1].long()"),
        ("07_own_kernel", "(high - higher).exp()", "(higher - high).exp()"),
    ],
    ids=["absorption", "slots", "context", "scheduler", "kernel"],
)
def test_a_notebook_notices_a_mistake(name, right, wrong, tmp_path):
    text = NOTEBOOKS[name].read_text()
    assert right in text
    changed = tmp_path / f"{name}.py"
    changed.write_text(text.replace(right, wrong))
    for helper in EXAMPLES.glob("[a-z]*.py"):
        (tmp_path / helper.name).write_text(helper.read_text())
    done = run(changed, tmp_path)
    assert done.returncode == 1
    assert "Error" in done.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_format_is_percent_cells(name):
    text = NOTEBOOKS[name].read_text()
    parsed = cells(text)
    assert parsed[0][0] == "markdown"
    assert parsed[0][1].startswith("# # ")
    for kind, source in parsed:
        if kind == "markdown":
            assert all(line.startswith("#") for line in source.splitlines() if line), source
        else:
            ast.parse(source)  # every cell is whole
    assert len(re.findall(r"^ *assert ", text, re.MULTILINE)) >= 4
    # Each figure has a caption in the next cell, numbered in order.
    captions = []
    for (_, source), (kind, following) in pairwise(parsed):
        if figure_names(source):
            assert kind == "markdown"
            captions += re.findall(r"^# \*Figure (\d+)\. ", following, re.MULTILINE)
    assert captions == [str(i + 1) for i in range(len(figure_names(text)))]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_jupytext_reads_the_same_cells(name):
    jupytext = pytest.importorskip("jupytext", reason="needs jupytext: pip install 'mla[notebooks]'")
    text = NOTEBOOKS[name].read_text()
    notebook = jupytext.reads(text, fmt="py:percent")
    assert [cell.cell_type for cell in notebook.cells] == [kind for kind, _ in cells(text)]
    for cell, (kind, source) in zip(notebook.cells, cells(text), strict=True):
        plain = source if kind == "code" else re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        assert cell.source == plain.strip("\n")
