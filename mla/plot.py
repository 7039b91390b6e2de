"""Pictures of records: who holds the cache, what each pass over the context gathers, how a decode batch is cut.

Needs matplotlib (``pip install 'mla[plot]'``), which is imported when a picture is drawn. Functions return the axes that they
drew into; they show and save nothing and change no setting. Without `ax` they make a figure of a fitting size through pyplot,
so that notebooks show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from mla._checks import check_instance, check_int, describe
from mla.cache.blocks import BlockPool
from mla.errors import MLAError
from mla.metadata.records import DecodeMetadata, MLAMetadata, PrefillMetadata

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PALETTE", "plot_block_pool", "plot_block_table", "plot_context_chunks", "plot_decode_work"]

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Colours that are told apart with every common kind of colour blindness (Okabe and Ito, "Color Universal Design")."""

FREE, KNOWN, AHEAD = "#FFFFFF", "#D9D9D9", "#EFEFEF"
INK = "#222222"
MAX_NAMES = 14
"""Names in a legend or on an axis at most."""


class _Piece(Protocol):
    @property
    def seq(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def item(self) -> int: ...


@runtime_checkable
class _OffersWork(Protocol):
    def work(self) -> Sequence[_Piece]:
        """Pieces of sequences: `seq`, keys ``begin .. end - 1``, and the `item` that each is worked on in."""


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    try:
        from matplotlib import pyplot as plt
    except ImportError as reason:
        raise MLAError("matplotlib: expected an installed package (pip install 'mla[plot]'), got none") from reason
    if ax is not None:
        return ax
    _, made = plt.subplots(figsize=(width, height), layout="constrained")
    return made


def _colours(count: int) -> list[Any]:
    """One colour for each of `count` things in order: the palette while it lasts, else a scale that grows in lightness."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    from matplotlib import colormaps

    return [colormaps["cividis"](i / (count - 1)) for i in range(count)]


def _ink(colour: Any) -> str:
    """Black or white, whichever is read on the colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#FFFFFF"


def _few(count: int) -> list[int]:
    """At most `MAX_NAMES` of the numbers below `count`, evenly spread from 0."""
    return list(range(0, count, max(1, -(-count // MAX_NAMES))))


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes in points, less what a legend beside them will take."""
    size = ax.get_window_extent()
    scale = 72 / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    return 0.85 * size.width * scale, size.height * scale


def _label(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    colour: Any,
    *,
    width: float,
    height: float = 1.0,
    boxed: bool = False,
    least: float = 5,
) -> None:
    """Write `text` at the middle of a cell of this size in data units, if it fits; in a white box where the cell is mixed."""
    (left, right), (low, high) = sorted(ax.get_xlim()), sorted(ax.get_ylim())
    across, up = _points(ax)
    room_x, room_y = across * width / (right - left), up * height / (high - low)
    size = min(8.0, 0.75 * room_y, 1.4 * room_x / max(len(text), 1))
    if size >= least:
        box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"} if boxed else None
        ink = INK if boxed else _ink(colour)
        ax.text(x, y, text, ha="center", va="center", fontsize=size, color=ink, bbox=box, clip_on=True)


def _legend(ax: Axes, entries: Iterable[tuple[str, Any, str]], title: str = "") -> None:
    """A legend to the right of the axes: name, colour and hatch of each entry."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor=INK, linewidth=0.6, hatch=hatch, label=name) for name, colour, hatch in entries
    ]
    ax.legend(
        handles=handles,
        title=title or None,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )


def _clip(name: object) -> str:
    text = str(name)
    text = text if len(text) <= 16 else f"{text[:15]}..."
    return text.replace("$", r"\$")  # no formula


def _name_rows(ax: Axes, names: Sequence[object], what: str) -> None:
    """One row for each name, the first at the top; of many names only some are written."""
    ax.set_ylim(len(names) - 0.5, -0.5)
    ticks = _few(len(names))
    ax.set_yticks(ticks, [_clip(names[i]) for i in ticks])
    ax.set_ylabel(what)


def _row_height(count: int) -> float:
    """Inches of a figure with so many rows."""
    return min(max(1.9, 0.9 + 0.32 * count), 8.0)


def plot_block_pool(pool: BlockPool, *, ax: Axes | None = None, columns: int = 16) -> Axes:
    """The blocks of a pool in their physical order, coloured by the sequence that holds them.

    A block of several sequences has the colour of the first of them, is hatched and carries their number. Free blocks are
    white, or grey where their tokens are still known and can be found again. The image holds 0 for a free block, 1 for a
    known one and 2 + i for the i-th sequence.

    Parameters
    ----------
    pool : BlockPool
        What to draw.
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.
    columns : int
        Blocks in a row.

    Returns
    -------
    matplotlib.axes.Axes
        The axes drawn into.

    Raises
    ------
    MLAError
        matplotlib is missing, or an argument of another type.

    Examples
    --------
    >>> pool = BlockPool.empty(num_blocks=8, block_size=4).allocate("a", range(9)).allocate("b", range(20, 25))
    >>> plot_block_pool(pool).get_title()
    '5 of 8 blocks held by 2 sequences'
    """
    check_instance("pool", pool, BlockPool, MLAError)
    check_int("columns", columns, low=1, error=MLAError)
    columns = min(columns, pool.num_blocks)
    rows = -(-pool.num_blocks // columns)
    ax = _axes(ax, min(2.5 + 0.36 * columns, 12), _row_height(rows))
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Rectangle

    names = list(pool.sequences)
    colours = [FREE, KNOWN, *_colours(len(names))]
    kind = np.zeros(rows * columns, dtype=np.int64)
    kind[[block for block in pool.free_order if block in pool.digest_of]] = 1
    for i in reversed(range(len(names))):
        kind[list(pool.sequences[names[i]].block_ids)] = 2 + i
    grid = np.ma.masked_array(kind, np.arange(len(kind)) >= pool.num_blocks).reshape(rows, columns)
    edges = np.arange(len(colours) + 1) - 0.5
    ax.imshow(
        grid, cmap=ListedColormap(colours), norm=BoundaryNorm(edges, len(colours)), aspect="auto", interpolation="nearest"
    )
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    if rows <= 64:
        ax.grid(which="minor", color=INK, linewidth=0.4)
    if len(names) > len(PALETTE):  # neighbours on a scale are hard to tell apart
        flat = kind.reshape(rows, columns)
        row, column = np.nonzero(flat[:, 1:] != flat[:, :-1])
        ax.vlines(column + 0.5, row - 0.5, row + 0.5, color="white", linewidth=2)
    last = pool.num_blocks - columns * (rows - 1)  # past it the last row is no part of the pool
    ax.add_patch(Rectangle((last - 0.5, rows - 1.5), columns - last, 1, color="white", linewidth=0, zorder=2.5))
    ax.tick_params(which="minor", length=0)
    ax.set_xticks(_few(columns))
    ticks = _few(rows)
    ax.set_yticks(ticks, [str(i * columns) for i in ticks])
    ax.set_xlabel("block, counted from the row's first")
    ax.set_ylabel("first block")
    shared = [block for block, holders in enumerate(pool.holders) if holders > 1]
    for block in shared:
        y, x = divmod(block, columns)
        colour = colours[kind[block]]
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor=_ink(colour), linewidth=0))
        _label(ax, x, y, str(pool.holders[block]), colour, width=1, boxed=True, least=7)
    entries = [(_clip(names[i]), colours[2 + i], "") for i in _few(len(names))]
    entries += [("shared, by how many", FREE, "///")] if shared else []
    _legend(ax, [*entries, ("free", FREE, ""), ("free, tokens known", KNOWN, "")], "sequence")
    by = f"{len(names)} sequence{'' if len(names) == 1 else 's'}"
    ax.set_title(f"{pool.num_blocks - pool.num_free} of {pool.num_blocks} blocks held by {by}", fontsize=10)
    return ax


def plot_block_table(metadata: MLAMetadata | PrefillMetadata | DecodeMetadata, *, ax: Axes | None = None) -> Axes:
    """The block table of a record: the blocks of each sequence in order, with their numbers, and how far they are filled.

    Bars are what the cache holds of each sequence: its room in grey, the context in blue, the new tokens in orange. A block
    that several sequences name is hatched.

    Parameters
    ----------
    metadata : MLAMetadata or PrefillMetadata or DecodeMetadata
        With block tables; of a whole step the prompts come first.
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes drawn into.

    Raises
    ------
    MLAError
        matplotlib is missing, another kind of record, or one without blocks.

    Examples
    --------
    >>> from mla.metadata import build_metadata, decode_group
    >>> ax = plot_block_table(build_metadata([decode_group(6, [5, 3])], block_size=4))
    >>> [text.get_text() for text in ax.texts]
    ['5', '3']
    """
    parts: list[tuple[str, PrefillMetadata | DecodeMetadata | None]]
    if isinstance(metadata, MLAMetadata):
        parts = [("prefill ", metadata.prefill), ("decode ", metadata.decode)]
    elif isinstance(metadata, (PrefillMetadata, DecodeMetadata)):
        parts = [("", metadata)]
    else:
        raise MLAError(f"metadata: expected MLAMetadata or one of its parts, got {describe(metadata)}")
    names, contexts, lens, tables = [], [], [], []
    for name, part in parts:
        if part is not None:
            if part.block_table is None:
                raise MLAError("metadata: expected a block table, got a profile run")
            names += [f"{name}{i}" for i in range(part.num_seqs)]
            contexts += part.context_lens.tolist()
            lens += part.seq_lens.tolist()
            tables += part.block_table.tolist()
    size, blocks = metadata.block_size, [-(-n // metadata.block_size) for n in lens]
    ax = _axes(ax, min(4.2 + 0.55 * max([1, *blocks]), 12), _row_height(len(lens)))
    from matplotlib.patches import Rectangle

    _name_rows(ax, names, "sequence")
    ax.set_xlim(0, max([1, *blocks]) * size)
    dark, bright, rows = PALETTE[0], PALETTE[1], range(len(lens))
    ax.barh(rows, [n * size for n in blocks], height=0.8, color=AHEAD, label="room")
    ax.barh(rows, contexts, height=0.8, color=dark, label="context")
    ax.barh(rows, [n - c for n, c in zip(lens, contexts, strict=True)], left=contexts, height=0.8, color=bright, label="new")
    used = [(seq, i, tables[seq][i]) for seq in rows for i in range(blocks[seq])]
    holders = Counter(block for _, _, block in used)
    for seq, i, block in used:
        hatch = "///" if holders[block] > 1 else None
        ax.add_patch(Rectangle((i * size, seq - 0.4), size, 0.8, fill=False, edgecolor=INK, linewidth=0.6, hatch=hatch))
        first, end = i * size, (i + 1) * size
        boxed = holders[block] > 1 or first < contexts[seq] < end or first < lens[seq] < end
        colour = dark if contexts[seq] >= end else bright
        _label(ax, (first + end) / 2, seq, str(block), colour, width=size, height=0.8, boxed=boxed)
    entries = [("context", dark, ""), ("new tokens", bright, ""), ("room", AHEAD, "")]
    _legend(ax, [*entries, ("shared block", FREE, "///")] if max(holders.values(), default=0) > 1 else entries)
    ax.set_xlabel(f"position in the sequence (blocks of {size} tokens, with their numbers)")
    return ax


def plot_context_chunks(prefill: PrefillMetadata, *, ax: Axes | None = None) -> Axes:
    """Which cached tokens of which prompt each pass over the context gathers, and the new tokens behind them.

    One bar container for each pass, in order, and one for the new tokens.

    Parameters
    ----------
    prefill : PrefillMetadata
        With ``context_chunks``, or without for prompts alone.
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes drawn into.

    Raises
    ------
    MLAError
        matplotlib is missing, or another kind of record.

    Examples
    --------
    >>> from mla.metadata import build_metadata, prompt_group
    >>> metadata = build_metadata([prompt_group(2, [0, 1, 2], context_len=10)], block_size=4, context_chunk_tokens=4)
    >>> [bars.get_label() for bars in plot_context_chunks(metadata.prefill).containers]
    ['pass 0', 'pass 1', 'pass 2', 'new tokens']
    """
    check_instance("prefill", prefill, PrefillMetadata, MLAError)
    contexts, lens = prefill.context_lens.tolist(), prefill.seq_lens.tolist()
    ax = _axes(ax, 8.5, _row_height(len(lens)))
    _name_rows(ax, range(len(lens)), "prompt")
    ax.set_xlim(0, max([1, *lens]))
    colours = _colours(len(prefill.context_chunks))
    for number, (chunk, colour) in enumerate(zip(prefill.context_chunks, colours, strict=True)):
        sizes = [b - a for a, b in pairwise(chunk.kv_start_loc.tolist())]
        pieces = [
            (chunk.first_seq + i, start, n) for i, (start, n) in enumerate(zip(chunk.starts.tolist(), sizes, strict=True)) if n
        ]
        _bars(ax, pieces, colour, f"pass {number}", str(number))
    news = [(seq, c, n - c) for seq, (c, n) in enumerate(zip(contexts, lens, strict=True)) if n > c]
    _bars(ax, news, AHEAD, "new tokens", "", hatch="....")
    entries = [(f"pass {i}", colours[i], "") for i in _few(len(colours))]
    _legend(ax, [*entries, ("new tokens", AHEAD, "....")])
    ax.set_xlabel("position in the sequence")
    return ax


def _bars(ax: Axes, pieces: Sequence[tuple[int, int, int]], colour: Any, name: str, text: str, *, hatch: str = "") -> None:
    """Bars over (row, first position, length), with a text in each that has room for it."""
    rows, starts, sizes = zip(*pieces, strict=True) if pieces else ((), (), ())
    ax.barh(rows, sizes, left=starts, height=0.8, color=colour, edgecolor=INK, linewidth=0.5, label=name, hatch=hatch)
    for row, start, size in pieces if text else ():
        _label(ax, start + size / 2, row, text, colour, width=size, height=0.8)


def plot_decode_work(plan: object, *, ax: Axes | None = None) -> Axes:
    """How a plan cuts a decode batch: the key range of each piece, coloured by the item that it is worked on in.

    One bar container for each item, in order.

    Parameters
    ----------
    plan : Plan
        One that has ``work()``, as the plans of ``CPU_MLA`` have: ``kernels.plan(metadata.decode)``.
    ax : matplotlib.axes.Axes or None
        Where to draw; None makes a figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes drawn into.

    Raises
    ------
    MLAError
        matplotlib is missing, or a plan that does not say how it cuts.

    Examples
    --------
    >>> from mla.compute import kernels_for
    >>> from mla.metadata import build_metadata, decode_group
    >>> decode = build_metadata([decode_group(600, range(40))], block_size=16).decode
    >>> [int(bar.get_width()) for bar in plot_decode_work(kernels_for("cpu").plan(decode)).containers[0]]
    [320, 280]
    """
    if not isinstance(plan, _OffersWork):
        raise MLAError(f"plan: expected a plan with work(), such as CPU_MLA's, got {describe(plan)}")
    pieces = [(p.item, p.seq, p.begin, p.end - p.begin) for p in plan.work() if p.end > p.begin]
    num_seqs = max([seq for _, seq, _, _ in pieces], default=0) + 1
    num_items = max([item for item, _, _, _ in pieces], default=-1) + 1
    ax = _axes(ax, 8.5, _row_height(num_seqs))
    _name_rows(ax, range(num_seqs), "sequence")
    ax.set_xlim(0, max([1, *[begin + size for _, _, begin, size in pieces]]))
    colours = _colours(num_items)
    for number, colour in enumerate(colours):
        _bars(
            ax,
            [(seq, begin, size) for item, seq, begin, size in pieces if item == number],
            colour,
            f"item {number}",
            str(number),
        )
    _legend(ax, [(f"item {i}", colours[i], "") for i in _few(num_items)])
    ax.set_xlabel("key")
    return ax
