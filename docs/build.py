"""Build the API reference with pdoc, and look for dead links in it and in the texts.

    python docs/build.py build/docs

Exit code 1 and a list where a link leads nowhere. Links to other sites are not followed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
TEXTS = (ROOT / "README.md", ROOT / "docs" / "theory.md", ROOT / "docs" / "devices.md", ROOT / "CHANGELOG.md")
TO_PRIVATE = re.compile(r'<a href="[^"]*#_[A-Za-z][^"]*"[^>]*>(.*?)</a>', re.DOTALL)
NAME = re.compile(r"`(mla(?:\.\w+)+)`")


class Page(HTMLParser):
    """Where a page leads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ``href`` and ``id``."""
        for name, value in attrs:
            if name == "href" and tag == "a" and value:
                self.links.append(value)
            elif name in {"id", "name"} and value:
                self.anchors.add(value)


def modules() -> list[str]:
    """The package's modules; private ones and those in the language of Triton are left out.

    pdoc takes a submodule that has the name of a public function of its package by itself.
    """
    import mla  # noqa: PLC0415  (what is installed when the script runs)

    names = ["mla"]
    for info in pkgutil.walk_packages(mla.__path__, "mla."):
        package, _, name = info.name.rpartition(".")
        if not name.startswith("_") and not name.endswith("_kernels") and name not in importlib.import_module(package).__all__:
            names.append(info.name)
    return names


def build(folder: Path) -> None:
    """Write the reference, a page for each module."""
    import pdoc  # noqa: PLC0415  (only who builds needs it)
    import pdoc.render  # noqa: PLC0415

    pdoc.render.configure(docformat="numpy", math=False, show_source=True)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):  # pdoc takes a folder of the package's name for the package
        pdoc.pdoc(*modules(), output_directory=folder)
    for path in folder.rglob("*.html"):  # private bases have no entries to lead to
        path.write_text(TO_PRIVATE.sub(r"\1", path.read_text()))
    here = str(Path(importlib.import_module("mla").__path__[0]).parent)
    for path in (*folder.rglob("*.html"), folder / "search.js"):  # a constant may be a path of this machine
        path.write_text(path.read_text().replace(here, "..."))


def dead_links(folder: Path) -> Iterator[str]:
    """Links within the reference whose page or anchor does not exist."""
    pages = {path.resolve(): Page(path.read_text()) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target not in pages:
                yield f"{path.relative_to(folder.resolve())}: {link}: no such page"
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(folder.resolve())}: {link}: no such anchor"


def headings(text: str) -> set[str]:
    """Anchors that GitHub gives the headings of a text."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_in_text(path: Path) -> Iterator[str]:
    """Links of a Markdown text to files or headings that do not exist, and names of the package that do not."""
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = path.parent / parts.path if parts.path else path
        if not target.exists():
            yield f"{path.name}: {link}: no such file"
        elif parts.fragment and parts.fragment not in headings(target.read_text()):
            yield f"{path.name}: {link}: no such heading"
    yield from (f"{path.name}: `{name}`: no such name" for name in NAME.findall(text) if not exists(name))


def exists(name: str) -> bool:
    """Whether a dotted name is a module or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def main() -> int:
    """Build and check; 1 if a link is dead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    build(folder)
    dead = [*dead_links(folder), *(line for path in TEXTS for line in dead_in_text(path))]
    sys.stdout.write(
        "".join(f"{line}\n" for line in dead) or f"{folder}: {len(list(folder.rglob('*.html')))} pages, no dead link\n"
    )
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
