"""The API reference builds without a dead link, and the texts lead to what exists."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pdoc")

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "build.py"
spec = importlib.util.spec_from_file_location("build_docs", SCRIPT)
build_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_docs)


def test_the_reference_builds_without_dead_links(tmp_path):
    folder = tmp_path / "api"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no dead link" in done.stdout
    pages = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.html")}
    assert {"mla.html", "mla/compute/kernels.html", "mla/metadata/records.html", "mla/cache.html", "mla/plot.html"} <= set(
        pages
    )
    assert not [name for name in pages if "_kernels" in name or "_checks" in name]
    assert 'id="build_metadata"' in pages["mla/metadata/build.html"]
    assert "shape (num_seqs,), int32" in pages["mla/metadata/records.html"]
    here = str(Path(build_docs.importlib.import_module("mla").__path__[0]).parent)
    assert not [name for name, text in pages.items() if here in text], "a page names this machine's folders"


def test_dead_links_of_pages_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here">1</a><a href="b.html#there">2</a><a href="https://x.y">3</a></p>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><a href="a.html#gone">4</a><a href="c.html">5</a></p>')
    assert list(build_docs.dead_links(tmp_path)) == ["b.html: a.html#gone: no such anchor", "b.html: c.html: no such page"]


def test_dead_links_and_names_of_texts_are_found(tmp_path):
    (tmp_path / "t.md").write_text(
        "# A heading, with `code`\n[1](#a-heading-with-code) [2](#gone) [3](t.md) [4](u.md) [5](https://x.y)\n"
        "`mla.compute.prefill` `mla.compute.gone` `mla.gone.gone` `mla.BlockPool.allocate`\n"
    )
    assert list(build_docs.dead_in_text(tmp_path / "t.md")) == [
        "t.md: #gone: no such heading",
        "t.md: u.md: no such file",
        "t.md: `mla.compute.gone`: no such name",
        "t.md: `mla.gone.gone`: no such name",
    ]


def test_the_readme_lists_every_notebook_and_the_theory():
    text = (ROOT / "README.md").read_text()
    assert "(docs/theory.md)" in text
    for path in (ROOT / "examples").glob("[0-9]*.py"):
        assert f"(examples/{path.name})" in text


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_names_in_notebooks_exist(path):
    names = build_docs.NAME.findall(path.read_text())
    assert not [name for name in names if not build_docs.exists(name)]
