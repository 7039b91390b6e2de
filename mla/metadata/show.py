"""Records as tables: plain text for terminals, HTML for notebooks.

What a table shows follows from the shapes that a record declares: fields over ``num_seqs`` become columns, cumulative arrays
become the slice that belongs to each sequence, and fields over tokens, keys or pages are cut by those slices.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from mla._checks import dtype_name

__all__ = ["Shown", "Table", "as_html", "as_text", "record_tables", "runs"]

MAX_ROWS = 30
"""Longer tables show their first and last rows."""

MAX_RUNS = 8
"""Runs of numbers in a cell at most."""

SLICED_BY = {"num_tokens": "query_start_loc", "num_kv_tokens": "kv_start_loc", "num_pages": "paged_kv_indptr"}
"""Which cumulative array says where a sequence's elements lie along a dimension."""


@attrs.frozen(kw_only=True)
class Table:
    """A title, the names of the columns, and the rows.

    Parameters
    ----------
    title : str
        One line.
    columns : tuple of str
        None at all for a title alone.
    rows : tuple of tuple
        One cell for each column; shown by ``str``.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[object, ...], ...] = ()

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text; of a long table the first and the last ones, with a row of dots between."""
        rows = [tuple(map(str, row)) for row in self.rows]
        if len(rows) <= MAX_ROWS:
            return rows
        first = MAX_ROWS * 3 // 4
        left_out = len(rows) - MAX_ROWS
        dots = (f"... {left_out} more", *[""] * (len(self.columns) - 1))
        return [*rows[:first], dots, *rows[len(rows) - (MAX_ROWS - first) :]]


def as_text(tables: Iterable[Table]) -> str:
    """The tables one below the other, columns of numbers aligned to the right.

    Examples
    --------
    >>> print(as_text([Table(title="two", columns=("a", "name"), rows=((1, "x"), (20, "y")))]))
    two
       a  name
       1  x
      20  y
    """
    lines = []
    for table in tables:
        lines.append(table.title)
        if not table.columns:
            continue
        cells = [table.columns, *table.cells()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
        right = [all(isinstance(row[i], (int, float)) for row in table.rows) for i in range(len(table.columns))]
        for row in cells:
            aligned = [f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(row, widths, right, strict=True)]
            lines.append(("  " + "  ".join(aligned)).rstrip())
    return "\n".join(lines)


def as_html(tables: Iterable[Table]) -> str:
    """The tables as HTML without styles or scripts; every text is escaped.

    Examples
    --------
    >>> as_html([Table(title="a < b", columns=("n",), rows=((1,),))])
    '<table><caption>a &lt; b</caption><thead><tr><th>n</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    parts = []
    for table in tables:
        title = html.escape(table.title)
        if not table.columns:
            parts.append(f"<p>{title}</p>")
            continue
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in table.cells())
        parts.append(f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return "\n".join(parts)


class Shown:
    """Base of records that print as tables; ``repr`` stays as attrs makes it.

    Printing reads values, so it waits for the record's device.
    """

    __slots__ = ()

    def _tables(self) -> list[Table]:
        return record_tables(self)

    def __str__(self) -> str:
        return as_text(self._tables())

    def _repr_html_(self) -> str:
        return as_html(self._tables())


def runs(values: Sequence[int]) -> str:
    """Numbers in order, those that follow one another as ``first..last``; long lists are cut.

    Examples
    --------
    >>> runs([4, 5, 6, 2, 9, 10])
    '4..6, 2, 9, 10'
    """
    found: list[list[int]] = []
    for value in values:
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}..{b}" for a, b in found]
    if len(texts) > MAX_RUNS:
        texts[MAX_RUNS - 1 :] = [f"... ({len(values)} in all)"]
    return ", ".join(texts)


def record_tables(record: Any, name: str = "") -> list[Table]:
    """The tables of an attrs record: its numbers in the title, its sequences as rows, then the records inside it.

    Parameters
    ----------
    record : attrs instance
        Tensor fields are those declared with `mla._checks.tensor`.
    name : str
        What the record is called in the one that holds it.
    """
    fields = attrs.fields(type(record))
    tensors = {f.name: (f.metadata["tensor"].shape, getattr(record, f.name)) for f in fields if "tensor" in f.metadata}
    others = {f.name: getattr(record, f.name) for f in fields if "tensor" not in f.metadata}
    inner = [(key, value) for key, value in others.items() if attrs.has(type(value))]
    for key, value in others.items():
        if isinstance(value, tuple):
            inner += [(f"{key}[{i}]", item) for i, item in enumerate(value) if attrs.has(type(item))]
    plain = {key: value for key, value in others.items() if isinstance(value, (bool, int, float, str)) or value is None}
    title = f"{name}: {type(record).__name__}" if name else type(record).__name__
    if not tensors:
        return [Table(title=title, columns=("field", "value"), rows=tuple(_field_rows(record, "")))]
    counts = [f"{value} {key.removeprefix('num_')}" for key, value in _properties(record).items() if key.startswith("num_")]
    numbers = [f"{key} {value}" for key, value in plain.items() if value is not None and not isinstance(value, bool)]
    flags = [key for key, value in plain.items() if value is True]
    title = f"{title}: {', '.join([*counts, *numbers, *flags])}"
    held = {key: (shape, value) for key, (shape, value) in tensors.items() if value is not None}
    tables = [_sequence_table(record, title, held)]
    for key, value in inner:
        tables += record_tables(value, key)
    return tables


def _properties(record: Any) -> dict[str, object]:
    members = inspect.getmembers_static(type(record), lambda member: isinstance(member, property))
    return {name: getattr(record, name) for name, _ in members if not name.startswith("_")}


def _field_rows(record: Any, prefix: str) -> Iterable[tuple[str, object]]:
    """The fields of a record without tensors, those of inner records after their holder's name, then what follows from them."""
    for field in attrs.fields(type(record)):
        value = getattr(record, field.name)
        if attrs.has(type(value)):
            yield from _field_rows(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _rounded(value)
    for name, value in _properties(record).items():
        yield f"{prefix}{name}", _rounded(value)


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _is_readable(value: torch.Tensor) -> bool:
    """Whether a tensor has values and may be read now: not so on the meta device, in a trace, or while a graph is captured."""
    if type(value) is not torch.Tensor or value.is_meta:
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def _sequence_table(record: Any, title: str, tensors: dict[str, tuple[str, torch.Tensor]]) -> Table:
    """One row for each sequence; a record over tokens alone has no rows, its parts have them."""
    if not all(_is_readable(value) for _, value in tensors.values()):
        facts = ((key, shape, tuple(v.shape), dtype_name(v.dtype), v.device) for key, (shape, v) in tensors.items())
        return Table(title=title, columns=("field", "declared", "shape", "dtype", "device"), rows=tuple(facts))
    values: dict[str, list[Any]] = {key: value.tolist() for key, (_, value) in tensors.items()}
    starts = {key for key, (shape, _) in tensors.items() if shape == "(num_seqs + 1,)"}
    if not starts:
        return Table(title=title)
    count = len(values[min(starts)]) - 1
    columns: dict[str, list[object]] = {}
    for key, (shape, _) in tensors.items():
        first = shape.strip("()").split(",", maxsplit=1)[0]
        if key in starts:
            columns[key] = [f"{a}:{b}" for a, b in pairwise(values[key])]
        elif first in SLICED_BY:
            columns[key] = [runs(values[key][a:b]) for a, b in pairwise(values[SLICED_BY[first]])]
        elif key == "block_table":
            columns[key] = [_blocks(row, n, record.block_size) for row, n in zip(values[key], values["seq_lens"], strict=True)]
        else:
            columns[key] = list(values[key])
    rows = [(i, *(column[i] for column in columns.values())) for i in range(count)]
    return Table(title=title, columns=("seq", *columns), rows=tuple(rows))


def _blocks(row: list[int], seq_len: int, block_size: int) -> str:
    """The blocks in use, then, after a bar, those ahead; the zeros at the end are taken for padding."""
    used = -(-seq_len // block_size)
    ahead = row[used:]
    while ahead and ahead[-1] == 0:
        ahead = ahead[:-1]
    return runs(row[:used]) + (f" | {runs(ahead)}" if ahead else "")
