"""The GPU benchmark, tried on the CPU at tiny shapes: what it reports, when it refuses to, and its bars."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import torch
from golden_io import mixed_hash

from mla import kernel_set

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NUMBER = int | float
FIELDS = {
    "op": str,
    "shape": str,
    "contender": str,
    "dtype": str,
    "heads": int | None,
    "lengths": list | str,
    "block_size": int | None,
    "query_len": int | list | str | None,
    "ms_median": float | None,
    "ms_graph": float | None,
    "of_copy": float | None,
    "of_matmul": float | None,
    "rel_error": float | None,
    "lse_error": float | None,
    "versions": dict,
    "commit": str | None,
    "ceilings": dict,
}
QUICK = ["--device", "cpu", "--sets", "TORCH", "--quick"]


@pytest.fixture
def load(monkeypatch):
    """Import a module of the benchmarks, as the scripts import one another."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the script prints, and its rows, for tiny shapes of everything."""
    path = tmp_path_factory.mktemp("report") / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "bench_gpu_decode.py"), "--device", "cpu", "--quick", "--json", str(path)]
    command += ["--sets", "TORCH,NO_SUCH_SET,TRITON_MLA", "--commit", "abc123", "--bars"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


def test_every_row_has_the_fields_of_a_report(report):
    for row in report[1]:
        for name, kind in FIELDS.items():
            assert isinstance(row[name], kind), (name, row)
        assert row["commit"] == "abc123"
        assert {"torch", "mla", "python", "cpu", "triton"} <= set(row["versions"])
        assert row["ceilings"]["copy_gb_per_s"] > 0
        assert row["ceilings"]["matmul_tflops"] > 0
        assert row["ms_graph"] is None
        assert row["ms_median"] is None or row["ms_median"] >= row["ms_min"] > 0


def test_everything_is_measured_and_what_does_not_exist_is_said(report):
    text, rows = report
    assert "NO_SUCH_SET is skipped: there is no kernel set of this name" in text
    assert "TRITON_MLA is skipped: " in text
    assert "commit abc123" in text
    ops = {row["op"] for row in rows}
    assert ops == {"check", "decode", "under load", "host", "varlen_attention", "write_latent_cache_", "gather_latent_cache"}
    for op in ops:
        assert f"\n{op} " in text
    for row in rows:
        if row["op"] == "decode":
            assert row["of_copy"] == pytest.approx(row["bytes"] / row["ms_median"] / row["ceilings"]["copy_gb_per_s"] / 1e6)
            assert 0 < row["keys_of_copy"] < row["of_copy"]
            assert row["of_matmul"] == pytest.approx(row["flops"] / row["ms_median"] / row["ceilings"]["matmul_tflops"] / 1e9)
        if row["op"] in {"check", "decode", "varlen_attention"}:
            assert 0 < row["rel_error"] < 4e-3
    assert {row["contender"] for row in rows if row["op"] == "varlen_attention"} == {"TORCH", "SDPA with cuDNN"}
    assert {row["part"] for row in rows if row["op"] == "host"} == {"a plan given", "no plan given"}
    assert "not measured" in text


def broken(kernel, wrong):
    """A kernel whose results go through `wrong`."""
    return lambda *args, **kwargs: wrong(*kernel(*args, **kwargs))


def only_last(x, factor):
    """The last row times a factor."""
    return torch.cat([x[:-1], x[-1:] * factor])


WRONG = {
    "output": lambda out, lse: (out * 1.01, lse),
    "LSE": lambda out, lse: (out, lse + 0.1),
    "NaN in the output": lambda out, lse: (out.masked_fill(torch.arange(out.shape[2]) == 5, torch.nan), lse),
    "NaN in the LSE": lambda out, lse: (out, torch.full_like(lse, torch.nan)),
    "one new token": lambda out, lse: (only_last(out, 1.02), lse),
}


@pytest.mark.parametrize(
    ("op", "wrong"),
    [(op, wrong) for op in ("decode", "prefill") for wrong in WRONG if (op, wrong) != ("prefill", "one new token")],
)
def test_nothing_is_reported_while_a_check_fails(load, monkeypatch, tmp_path, capsys, op, wrong):
    bench, kernels = load("bench_gpu_decode"), kernel_set("TORCH")
    name = {"decode": "paged_decode", "prefill": "varlen_attention"}[op]
    changed = attrs.evolve(kernels, **{name: broken(getattr(kernels, name), WRONG[wrong])})
    monkeypatch.setattr(bench, "kernel_set", lambda _: changed)
    path = tmp_path / "gpu.json"
    assert bench.main([*QUICK, "--op", op, "--json", str(path)]) == 1
    said = capsys.readouterr()
    assert "nothing is reported, for a check failed: TORCH" in said.err
    assert not said.out
    assert not path.exists()


def test_a_set_that_does_not_repeat_itself_is_refused(load, monkeypatch, capsys):
    bench, kernels = load("bench_gpu_decode"), kernel_set("TORCH")
    calls = []

    def decode(*args, **kwargs):
        out, lse = kernels.paged_decode(*args, **kwargs)
        calls.append(1)
        return out, lse + 1e-6 * len(calls)

    monkeypatch.setattr(bench, "kernel_set", lambda _: attrs.evolve(kernels, paged_decode=decode))
    assert bench.main([*QUICK, "--op", "decode"]) == 1
    assert "expected the same bits of a second call" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["write_latent_cache_", "gather_latent_cache"])
def test_a_wrong_write_or_gather_is_refused(load, monkeypatch, capsys, name):
    bench, kernels = load("bench_gpu_decode"), kernel_set("TORCH")

    def wrong(latent_cache, *args, **kwargs):
        result = getattr(kernels, name)(latent_cache, *args, **kwargs)
        (latent_cache if result is None else result).view(-1)[-3:] = 7.0
        if result is None:
            latent_cache.fill_(7.0)

    monkeypatch.setattr(bench, "kernel_set", lambda _: attrs.evolve(kernels, **{name: wrong}))
    assert bench.main([*QUICK, "--op", "cache"]) == 1
    assert f"TORCH {name}: expected the very rows" in capsys.readouterr().err


def test_nothing_to_measure_is_an_error(load, capsys):
    bench = load("bench_gpu_decode")
    assert bench.main([*QUICK, "--shapes", "no such shape"]) == 1
    assert "no shape has such a name" in capsys.readouterr().err
    assert bench.main(["--device", "cpu", "--quick", "--sets", "NO_SUCH_SET"]) == 1
    assert "none of these kernel sets" in capsys.readouterr().err
    for argv in (["--rounds", "0"], ["--op", "other"], ["--compile-jobs", "-1"]):
        with pytest.raises(SystemExit) as refused:
            bench.main(argv)
        assert refused.value.code == 2


def test_shapes_are_chosen_by_name_and_every_class_is_compiled_once(load, monkeypatch, capsys):
    bench = load("bench_gpu_decode")
    assert bench.main([*QUICK, "--op", "decode", "--shapes", "new 3"]) == 0
    text = capsys.readouterr().out
    assert "B2 H2 L48 new 3" in text
    assert "B3 H2 ragged" not in text
    seen = []
    monkeypatch.setattr(bench, "first_calls", lambda settings, shapes: seen.append((settings, {x.name for x in shapes})))
    for i in range(2):
        assert bench.main([*QUICK, "--first-calls", f"{i}/2"]) == 0
    settings = seen[0][0]
    called = [*load("gpu_measure").checked_shapes(settings), *load("gpu_measure").decode_shapes(settings)]
    for name in {kernels.name for settings, _ in seen for kernels in settings.sets}:
        shared_out = [names for settings, names in seen if settings.sets[0].name == name]
        assert sorted(x for names in shared_out for x in names) == sorted(shape.name for shape in called)


def test_a_run_that_is_cut_short_leaves_what_it_has_measured(load, monkeypatch, tmp_path):
    bench, path = load("bench_gpu_decode"), tmp_path / "gpu.json"

    def cut_short(settings):
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.OPS, "decode", (*bench.OPS["decode"][:1], cut_short))
    with pytest.raises(KeyboardInterrupt):
        bench.main([*QUICK, "--op", "decode", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert {row["op"] for row in rows} == {"check", "decode"}
    assert all(row["of_matmul"] > 0 for row in rows if row["op"] == "decode")


def test_first_calls_run_and_processes_are_started(load, capsys):
    bench = load("bench_gpu_decode")
    assert bench.main([*QUICK, "--first-calls", "0/1"]) == 0
    assert bench.main([*QUICK, "--op", "decode", "--shapes", "float16", "--compile-jobs", "1"]) == 0
    assert "B1 H3 L20 float16" in capsys.readouterr().out


class Graph:
    """Of a stand-in of torch.cuda in which a capture runs what it captures."""

    made: ClassVar[list[Graph]] = []

    def __init__(self):
        self.replays = 0
        Graph.made.append(self)

    def replay(self):
        self.replays += 1


class Event:
    """An event of the host's clock."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture
def as_on_a_gpu(load, monkeypatch):
    """The paths of a GPU, taken on the CPU: events, graphs, plans."""
    bench, timing, measure = load("bench_gpu_decode"), load("gpu_timing"), load("gpu_measure")
    monkeypatch.setattr(timing.Clock, "on_gpu", True)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(Graph, "made", [])
    for name, value in (("Event", Event), ("CUDAGraph", Graph), ("graph", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    ceilings = timing.Ceilings(copy_gb_per_s=50.0, matmul_tflops=1.0)
    monkeypatch.setattr(measure, "measure_ceilings", lambda _: ceilings)
    monkeypatch.setattr(measure, "PLAN_BATCHES", (1, 5))
    return bench


def test_graphs_plans_and_events(as_on_a_gpu, tmp_path):
    path = tmp_path / "gpu.json"
    assert as_on_a_gpu.main([*QUICK, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    for row in rows:
        if row["op"] in {"decode", "write_latent_cache_", "gather_latent_cache"}:
            assert row["ms_graph"] > 0
            assert row["of_copy_graph"] > 0
            assert row["l2_warm"]
    plans = {(row["heads"], row["batch"]) for row in rows if row["op"] == "plan"}
    assert plans == {(heads, batch) for heads in (16, 128) for batch in (1, 5)}
    assert Graph.made
    assert all(graph.replays >= 2 * 7 for graph in Graph.made)


def test_the_clock_counts_every_round_and_flushes_before_eager_calls(load, as_on_a_gpu, monkeypatch):
    timing, seen = load("gpu_timing"), []
    clock = timing.Clock(device=torch.device("cpu"), rounds=2, pause=0.0, budget_ms=1e-9, most_calls=50)
    monkeypatch.setattr(clock._flush.__class__, "zero_", lambda self: seen.append("flush"))
    times = clock.alternate({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")})
    assert set(times) == {"a", "b"}
    assert all(0 < x.ms_min <= x.ms_median for x in times.values())
    assert all(x.ms_graph > 0 for x in times.values())
    captured = 4  # at least, of each
    assert seen[: 2 * 9] == ["flush", "a"] * 9
    assert seen[-2 * 10 :] == ["flush", "a"] * 5 + ["flush", "b"] * 5
    assert seen.count("flush") == 2 * (4 + 5) + 2 * 2 * 5
    assert seen.count("a") >= 9 + captured + 2 * 5


def test_the_shapes_are_those_that_the_bars_speak_of(load):
    shapes, bars = load("gpu_shapes"), load("gpu_bars")
    names = [shape.name for shape in shapes.DECODE]
    assert len(set(names)) == len(names)
    assert {*bars.EQUAL_16, *bars.LARGE_128, *bars.SMALL_128} <= set(names)
    assert set(names) >= shapes.FEW_SHAPES
    assert shapes.ragged(5, 100, salt=9) == tuple(1 + int(h) % 100 for h in mixed_hash(5, 9))
    lengths = shapes.ragged(64, 16384)
    assert len(lengths) == 64
    assert 1 <= min(lengths) < 1000
    assert 15000 < max(lengths) <= 16384
    assert sum(lengths) / 64 == pytest.approx(8192, rel=0.15)


def test_useful_work_is_counted_by_hand(load):
    shape = load("gpu_shapes").GpuShape(name="", heads=3, lengths=(5, 4), query_len=2)
    assert shape.flops == 2 * 3 * 1088 * (4 + 5 + 3 + 4)
    assert shape.key_bytes == 9 * 1152
    assert shape.bytes == 9 * 1152 + 2 * 2 * 3 * (576 + 512) * 2


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_nothing_reaches_what_is_nan(load, block_size):
    shapes = load("gpu_shapes")
    shape = shapes.GpuShape(name="", heads=2, lengths=(40, 64, 1, 7), block_size=block_size, query_len=1)
    inputs = shapes.decode_inputs(shape, torch.device("cpu"))
    rows = torch.cat([inputs.rows(seq) for seq in range(4)])
    assert rows.isfinite().all()
    assert int(inputs.latent_cache.isfinite().all(2).sum()) == len(rows) == 112
    assert inputs.latent_cache[0].isnan().all()
    other = shapes.decode_inputs(shape, torch.device("cpu"), draw=1)
    assert not torch.equal(inputs.q, other.q)
    reference = kernel_set("REFERENCE")
    scale = load("cpu_shapes").SCALE
    want = reference.paged_decode(
        inputs.q.double(), inputs.latent_cache.double(), inputs.metadata, kv_lora_rank=512, softmax_scale=scale
    )
    for x, y in zip(inputs.float64(), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_the_limits_of_a_gpu(load):
    rows = load("gpu_rows")
    for name in ("TRITON_MLA", "TRITON_MLA_BALANCED"):
        for dtype in (torch.bfloat16, torch.float16):
            assert rows.limits_of(name, "decode", dtype) == (2.0e-3, 1e-5)
            assert rows.limits_of(name, "decode", dtype, 8.0) == (2.0e-3, 5e-5)
    assert rows.limits_of("TORCH", "decode", torch.bfloat16) == (4e-3, 5e-3)


def test_rates_are_over_the_medians_of_the_run(load):
    rows, timing = load("gpu_rows"), load("gpu_timing")
    measured = [timing.Ceilings(copy_gb_per_s=a, matmul_tflops=b) for a, b in ((4000, 720), (4300, 650), (4400, 700))]
    middle = rows.rate_of_run(measured)
    assert (middle.copy_gb_per_s, middle.matmul_tflops) == (4300, 700)
    [row] = rows.add_rates([row_of("a", ms_median=1.0, ms_graph=0.5, bytes=43e8, key_bytes=21.5e8, flops=7e11)], middle)
    shares = [row[f"{name}{suffix}"] for name in ("of_copy", "keys_of_copy", "of_matmul") for suffix in ("", "_graph")]
    assert shares == pytest.approx([1.0, 2.0, 0.5, 1.0, 1.0, 2.0])
    [row] = rows.add_rates([row_of("a", ms_median=1.0, flops=6e11, matmul_tflops=600.0)], middle)
    assert row["of_matmul"] == pytest.approx(1.0), "a row's own ceiling counts"


def row_of(shape, contender="TRITON_MLA_BALANCED", op="decode", **fields):
    """A row as the bars read it."""
    return {"op": op, "shape": shape, "contender": contender, "ms_median": None, "ms_graph": None} | fields


def verdict(load, found, what):
    """Whether the bar of this text holds."""
    [bar] = [bar for bar in load("gpu_bars").bars_of(found) if bar.what == what]
    return bar.holds


@pytest.mark.parametrize(
    ("what", "good", "bad"),
    [
        (
            "balanced, B128 H16 L8192, share of the copy rate",
            [row_of("B128 H16 L8192", keys_of_copy=0.88)],
            [row_of("B128 H16 L8192", keys_of_copy=0.87)],
        ),
        (
            "balanced, B128 H64 L8192, share of the copy rate",
            [row_of("B128 H64 L8192", keys_of_copy=0.93)],
            [row_of("B128 H64 L8192", keys_of_copy=0.91)],
        ),
        (
            "balanced, B64 H128 ragged, of the matmul rate in short bursts",
            [row_of("B64 H128 ragged", of_matmul=0.75)],
            [row_of("B64 H128 ragged", of_matmul=0.74)],
        ),
        (
            "balanced, B128 H128 L8192, of the matmul rate under lasting load",
            [row_of("B128 H128 L8192", op="under load", of_matmul=0.85)],
            [row_of("B128 H128 L8192", op="under load", of_matmul=0.84)],
        ),
        (
            "balanced, B1 H16 L65536, microseconds in a graph",
            [row_of("B1 H16 L65536", ms_graph=0.035)],
            [row_of("B1 H16 L65536", ms_graph=0.036)],
        ),
        (
            "balanced, B128 H128 L4096, blocks of 1 over blocks of 64",
            [row_of("B128 H128 L4096", ms_median=1.0), row_of("B128 H128 L4096 bs1", ms_median=1.09)],
            [row_of("B128 H128 L4096", ms_median=1.0), row_of("B128 H128 L4096 bs1", ms_median=1.11)],
        ),
        (
            "default over balanced, B32 H16 L16384, eager",
            [row_of("B32 H16 L16384", ms_median=1.0), row_of("B32 H16 L16384", "TRITON_MLA", ms_median=1.03)],
            [row_of("B32 H16 L16384", ms_median=1.0), row_of("B32 H16 L16384", "TRITON_MLA", ms_median=1.05)],
        ),
        (
            "default over balanced, B1 H128 L65536, in a graph",
            [row_of("B1 H128 L65536", ms_graph=1.0), row_of("B1 H128 L65536", "TRITON_MLA", ms_graph=2.4)],
            [row_of("B1 H128 L65536", ms_graph=1.0), row_of("B1 H128 L65536", "TRITON_MLA", ms_graph=2.6)],
        ),
        (
            "default, B128 H16 L4096, three new tokens over one",
            [
                row_of("B128 H16 L4096", "TRITON_MLA", ms_median=1.0),
                row_of("B128 H16 L4096 new 3", "TRITON_MLA", ms_median=1.1),
            ],
            [
                row_of("B128 H16 L4096", "TRITON_MLA", ms_median=1.0),
                row_of("B128 H16 L4096 new 3", "TRITON_MLA", ms_median=1.2),
            ],
        ),
        (
            "default, plan of 1024 at 16 heads, microseconds",
            [row_of("B1024 H16 plan", "TRITON_MLA", op="plan", ms_graph=0.004)],
            [row_of("B1024 H16 plan", "TRITON_MLA", op="plan", ms_graph=0.0041)],
        ),
        (
            "default, 128 heads, host microseconds of a call",
            [row_of("B1 H128 L64", "TRITON_MLA", op="host", ms_median=0.04, part="a plan given")],
            [row_of("B1 H128 L64", "TRITON_MLA", op="host", ms_median=0.041, part="a plan given")],
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bar_holds_or_not(load, what, good, bad):
    assert verdict(load, good, what) is True
    assert verdict(load, bad, what) is False
    assert verdict(load, [], what) is None


def test_the_report_of_the_bars(load):
    bars = load("gpu_bars")
    found = bars.bars_of([row_of("B1 H16 L65536", ms_graph=0.036), row_of("B1 H128 L65536", ms_graph=0.05)])
    assert [bar.what for bar in bars.misses(found)] == ["balanced, B1 H16 L65536, microseconds in a graph"]
    text = bars.report(found)
    assert "36 <= 35: MISSES" in text
    assert "50 <= 52: holds" in text
    assert text.endswith(f"1 hold, 1 miss, {len(found) - 2} not measured")


def test_a_missed_bar_is_an_exit_code_of_its_own(load, monkeypatch, capsys):
    bench, bars = load("bench_gpu_decode"), load("gpu_bars")
    missed = bars.Bar(what="something", value=2.0, sense="<=", limit=1.0)
    monkeypatch.setattr(bench, "bars_of", lambda _: [missed])
    assert bench.main([*QUICK, "--op", "cache", "--bars"]) == 3
    assert bench.main([*QUICK, "--op", "cache"]) == 0
    assert "something" in capsys.readouterr().out


def test_the_commit_is_read_where_there_is_one(load, tmp_path):
    commit_of = load("gpu_rows").commit_of
    assert commit_of(tmp_path) is None


def test_every_path_is_run_and_a_wrong_one_is_told(load, monkeypatch, capsys):
    """The script for compute-sanitizer, over a set that stands in."""
    sanitize, kernels = load("sanitize_gpu"), kernel_set("TORCH")
    options = ["--device", "cpu", "--quick", "--sets", "TORCH,NO_SUCH_SET"]
    assert sanitize.main(options) == 0
    text = capsys.readouterr().out
    assert "NO_SUCH_SET is skipped" in text
    assert "23 paths, 0 wrong" in text
    for path in ("decode, few rows", "64 rows", "three new tokens", "several launches", "hopper, causal", "portable", "cache"):
        assert path in text
    changed = {
        "paged_decode": broken(kernels.paged_decode, lambda out, lse: (out.index_fill(0, torch.tensor(0), 7.0), lse)),
        "varlen_attention": broken(kernels.varlen_attention, lambda out, lse: (out * 1.01, lse)),
        "write_latent_cache_": lambda cache, *_: cache.fill_(1.0),
    }
    monkeypatch.setattr(sanitize, "kernel_set", lambda _: attrs.evolve(kernels, **changed))
    assert sanitize.main(options) == 1
    assert "23 paths, 23 wrong" in capsys.readouterr().out
    assert sanitize.main([*options, "--only", "no such path"]) == 1


def test_rows_behind_the_last_sequence_are_checked_to_be_empty(load, monkeypatch, capsys):
    sanitize, kernels = load("sanitize_gpu"), kernel_set("TORCH")
    changed = broken(kernels.paged_decode, lambda out, lse: (torch.cat([out[:-1], out[:1]]), lse))
    monkeypatch.setattr(sanitize, "kernel_set", lambda _: attrs.evolve(kernels, paged_decode=changed))
    assert sanitize.main(["--device", "cpu", "--quick", "--sets", "TORCH", "--only", "decode, 64 rows"]) == 1
    assert "inf WRONG" in capsys.readouterr().out
