"""Pictures show what the records hold, and stay readable with many sequences."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import attrs
import pytest

pytest.importorskip("matplotlib")

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from mla import BlockPool, MLAError, build_metadata, decode_group, kernel_set, plot, prompt_group
from mla.plot import PALETTE, plot_block_pool, plot_block_table, plot_context_chunks, plot_decode_work

CPU = kernel_set("CPU_MLA")


def test_public_names_are_frozen():
    assert plot.__all__ == ["PALETTE", "plot_block_pool", "plot_block_table", "plot_context_chunks", "plot_decode_work"]


@pytest.fixture(autouse=True)
def agg():
    backend = mpl.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


def small_pool():
    pool = BlockPool.empty(num_blocks=22, block_size=4)
    pool = pool.allocate("a", range(13)).mark_computed("a").allocate("b", [*range(8), 90, 91], lookahead=6)
    return pool.allocate("c", range(100, 112)).mark_computed("c").free("c").allocate("d", [5, 6, 7])


def many_sequences():
    pool = BlockPool.empty(num_blocks=1500, block_size=4).allocate("first", range(64)).mark_computed("first")
    for i in range(60):
        pool = pool.allocate(f"a request with a long name, number {i}", [*range(16 * (i % 5)), *[1000 + i] * (1 + 7 * i % 83)])
    return pool


def prompts():
    lengths = [(6, 40), (9, 3), (4, 0), (1, 22), (12, 7)]
    groups = [prompt_group(n, list(range(20 * i, 20 * i + 15)), context_len=c) for i, (n, c) in enumerate(lengths)]
    return build_metadata(groups, block_size=4, context_chunk_tokens=8, context_workspace_tokens=16).prefill


def decodes(**options):
    lengths = [(18, 1), (300, 1), (1024, 2), (2100, 1), (513, 2), (1, 1), (2100, 1)]
    groups = [decode_group(n, list(range(200 * i, 200 * i + 140)), query_len=q) for i, (n, q) in enumerate(lengths)]
    return build_metadata(groups, block_size=16, **options).decode


def cells(ax):
    (image,) = ax.images
    return Counter(image.get_array().compressed().tolist())


def hatched(ax):
    return [p for p in ax.patches if isinstance(p, Rectangle) and p.get_hatch() == "///"]


def bars(container):
    """(row, first, end) of each bar."""
    return [(round(b.get_y() + b.get_height() / 2), b.get_x(), b.get_x() + b.get_width()) for b in container]


def legend_names(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def overlapping(ax):
    """Pairs of texts of the axes and its legend that cover one another."""
    figure = ax.get_figure(root=True)
    figure.canvas.draw()
    texts = [*ax.texts, *ax.get_yticklabels(), *ax.get_xticklabels(), ax.title, ax.xaxis.label, ax.yaxis.label]
    texts += ax.get_legend().get_texts()
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text() and t.get_visible()]
    assert len(boxes) > 4
    return [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)], [
        name for name, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
    ]


def test_the_pool_has_a_cell_for_every_block():
    pool = small_pool()
    ax = plot_block_pool(pool, columns=8)
    own = {name: set(pool[name].block_ids) for name in pool.sequences}
    known = sum(block in pool.digest_of for block in pool.free_order)
    assert cells(ax) == {
        0: pool.num_free - known,
        1: known,
        2: len(own["a"]),
        3: len(own["b"] - own["a"]),
        4: len(own["d"]),
    }
    assert known == 3
    assert ax.images[0].get_array().shape == (3, 8)
    assert ax.images[0].get_array().mask.sum() == 2
    assert {(p.get_x() + 0.5, p.get_y() + 0.5) for p in hatched(ax)} == {(b % 8, b // 8) for b in own["a"] & own["b"]}
    assert [t.get_text() for t in ax.texts] == ["2", "2"]
    assert legend_names(ax)[:3] == ["a", "b", "d"]
    assert ax.get_title() == f"{22 - pool.num_free} of 22 blocks held by 3 sequences"


def test_a_pool_of_one_block_and_an_empty_pool_are_drawn():
    assert cells(plot_block_pool(BlockPool.empty(num_blocks=1, block_size=4))) == {0: 1}
    assert cells(plot_block_pool(BlockPool.empty(num_blocks=1, block_size=4).allocate("a", [1]))) == {2: 1}


def test_the_block_table_has_a_bar_for_every_part_of_a_sequence():
    groups = [prompt_group(6, [0, 1, 7, 8], context_len=8), prompt_group(7, [9, 10]), decode_group(14, [0, 1, 2, 3])]
    ax = plot_block_table(build_metadata(groups, block_size=4))
    room, context, new = ax.containers
    assert bars(room) == [(0, 0, 16), (1, 0, 8), (2, 0, 16)]
    assert bars(context) == [(0, 0, 8), (1, 0, 0), (2, 0, 13)]
    assert bars(new) == [(0, 8, 14), (1, 0, 7), (2, 13, 14)]
    assert [t.get_text() for t in ax.texts] == ["0", "1", "7", "8", "9", "10", "0", "1", "2", "3"]
    assert {(p.get_x(), p.get_y() + 0.4) for p in hatched(ax)} == {(0, 0), (4, 0), (0, 2), (4, 2)}
    assert [t.get_text() for t in ax.get_yticklabels()] == ["prefill 0", "prefill 1", "decode 0"]


def test_the_passes_gather_every_cached_token_once():
    prefill = prompts()
    ax = plot_context_chunks(prefill)
    *passes, new = ax.containers
    assert len(passes) == len(prefill.context_chunks)
    seen = Counter()
    for container, chunk in zip(passes, prefill.context_chunks, strict=True):
        slots = []
        for row, first, end in bars(container):
            positions = np.arange(first, end, dtype=int)
            seen.update((row, p) for p in positions.tolist())
            blocks = prefill.block_table[row].numpy()
            slots += (blocks[positions // 4] * 4 + positions % 4).tolist()
        assert slots == chunk.slots.tolist()
    assert seen == {(row, p): 1 for row, context in enumerate([40, 3, 0, 22, 7]) for p in range(context)}
    assert bars(new) == [(0, 40, 46), (1, 3, 12), (2, 0, 4), (3, 22, 23), (4, 7, 19)]


@pytest.mark.parametrize("padded", [7, 9])
def test_the_pieces_of_a_decode_batch_cover_every_key_once(padded):
    decode = decodes(pad_decodes_to=padded)
    plan = CPU.plan(decode)
    ax = plot_decode_work(plan)
    assert len(ax.containers) == sum(len(group.items) for group in plan.groups)
    seen = Counter((row, key) for c in ax.containers for row, first, end in bars(c) for key in range(int(first), int(end)))
    assert seen == {(row, key): 1 for row, n in enumerate(decode.seq_lens.tolist()) for key in range(n)}


def test_the_pieces_read_the_blocks_of_their_sequence():
    """What `work` says of a piece is what the plan's own indices gather."""
    decode = decodes()
    plan = CPU.plan(decode)
    by_item = {}
    for piece in plan.work():
        by_item.setdefault(piece.item, set()).add((piece.seq, piece.begin, piece.end))
    for number, item in enumerate(item for group in plan.groups for item in group.items):
        units = item.units.view(item.num_pieces, -1).tolist()
        blocks = decode.block_table.tolist()
        firsts = Counter(row[0] for row in units)
        expected = Counter(
            (blocks[seq][begin // 16] * 16 + begin % 16) // plan.unit for seq, begin, end in by_item[number] if end > begin
        )
        assert expected - firsts == Counter()
        assert sum(end > begin for _, begin, end in by_item[number]) == expected.total()


@pytest.mark.parametrize("kind", ["pool", "table", "chunks", "work"])
def test_many_sequences_stay_readable(kind):
    if kind == "pool":
        ax = plot_block_pool(many_sequences(), columns=48)
    elif kind == "table":
        groups = [decode_group(1 + 37 * i % 400, list(range(1000 * i, 1000 * i + 30))) for i in range(60)]
        ax = plot_block_table(build_metadata(groups, block_size=16))
    elif kind == "chunks":
        groups = [prompt_group(1 + i, list(range(100 * i, 100 * i + 99)), context_len=29 * i % 1300) for i in range(60)]
        ax = plot_context_chunks(build_metadata(groups, block_size=16, context_chunk_tokens=256).prefill)
    else:
        groups = [decode_group(1 + 97 * i % 3000, list(range(200 * i, 200 * i + 199))) for i in range(60)]
        ax = plot_decode_work(CPU.plan(build_metadata(groups, block_size=16).decode))
    covered, outside = overlapping(ax)
    assert not covered
    assert not outside


def test_few_sequences_have_no_overlaps_either():
    assert overlapping(plot_block_pool(small_pool())) == ([], [])
    assert overlapping(plot_block_table(prompts())) == ([], [])
    assert overlapping(plot_context_chunks(prompts())) == ([], [])
    assert overlapping(plot_decode_work(CPU.plan(decodes()))) == ([], [])


def test_the_overlap_test_sees_overlaps():
    ax = plot_block_pool(small_pool())
    ax.text(0.0, 0.0, "over a number")
    covered, _ = overlapping(ax)
    assert covered


def test_names_are_no_formulas_and_long_ones_are_clipped():
    pool = BlockPool.empty(num_blocks=8, block_size=4)
    for name in (r"$\frac{1}{0$", "x" * 300, "_hidden"):
        pool = pool.allocate(name, [len(name)])
    ax = plot_block_pool(pool)
    ax.get_figure(root=True).canvas.draw()
    names = legend_names(ax)
    assert names[0] == r"\$\frac{1}{0\$"
    assert len(names[1]) == 18
    assert names[2] == "_hidden"


def test_nothing_is_shown_and_no_setting_changes(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("show() was called"))
    before = dict(mpl.rcParams)
    for draw in (
        lambda ax: plot_block_pool(small_pool(), ax=ax),
        lambda ax: plot_block_table(prompts(), ax=ax),
        lambda ax: plot_context_chunks(prompts(), ax=ax),
        lambda ax: plot_decode_work(CPU.plan(decodes()), ax=ax),
    ):
        _, given = plt.subplots()
        figures = plt.get_fignums()
        assert draw(given) is given
        assert plt.get_fignums() == figures
        assert draw(None) is not given
    assert dict(mpl.rcParams) == before


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", severity 1.
DICHROMACIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(rgb, matrix):
    """CIE Lab of sRGB colours as an eye with this dichromacy sees them."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = (np.cbrt((np.clip(linear @ np.transpose(matrix), 0, 1) @ XYZ.T) / XYZ.sum(1))).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("kind", DICHROMACIES)
def test_colours_are_told_apart_with_every_dichromacy(kind):
    seen = lab(np.array([to_rgb(colour) for colour in PALETTE]), DICHROMACIES[kind])
    distances = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)]
    assert min(distances) > 9  # about 2 is a just noticeable difference


def test_red_and_green_would_not_be_told_apart():
    seen = lab(np.array([to_rgb("#AA3311"), to_rgb("#557700")]), DICHROMACIES["deuteranopia"])
    plain = lab(np.array([to_rgb("#AA3311"), to_rgb("#557700")]), DICHROMACIES["none"])
    assert np.linalg.norm(seen[0] - seen[1]) < np.linalg.norm(plain[0] - plain[1]) / 3


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_block_pool("pool"), r"pool: expected BlockPool, got str 'pool'"),
        (lambda: plot_block_pool(small_pool(), columns=0), r"columns: expected an int >= 1, got 0"),
        (lambda: plot_block_table(3), r"metadata: expected MLAMetadata or one of its parts, got int 3"),
        (
            lambda: plot_block_table(build_metadata([prompt_group(3)], block_size=4)),
            r"metadata: expected a block table, got a prof",
        ),
        (lambda: plot_context_chunks(None), r"prefill: expected PrefillMetadata, got None"),
        (lambda: plot_decode_work(None), r"plan: expected a plan with work\(\), such as CPU_MLA's, got None"),
        (lambda: plot_decode_work(decodes()), r"plan: expected a plan with work\(\), such as CPU_MLA's, got DecodeMetadata"),
    ],
    ids=["pool", "columns", "table", "profile_run", "chunks", "no_plan", "no_work"],
)
def test_wrong_arguments_are_named(draw, message):
    with pytest.raises(MLAError, match=message):
        draw()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MLAError, match=r"matplotlib: expected an installed package \(pip install 'mla\[plot\]'\), got none"):
        plot_block_pool(small_pool())


def test_a_plan_of_your_own_is_drawn():
    @attrs.frozen
    class Piece:
        seq: int
        begin: int
        end: int
        item: int

    class Plan:
        def work(self):
            return [Piece(0, 0, 10, 0), Piece(1, 0, 5, 0), Piece(1, 5, 9, 1), Piece(2, 3, 3, 1)]

    ax = plot_decode_work(Plan())
    assert [bars(c) for c in ax.containers] == [[(0, 0, 10), (1, 0, 5)], [(1, 5, 9)]]
