"""Golden bundles: those that ship hold, others are recorded, checked and compared; a damaged one gives one clear error."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
import torch
import tqdm
from golden_io import hash_tensor as published_tensor
from golden_io import mixed_hash as published_hash

import mla.golden
from mla import KernelSet, build_metadata, decode_group, golden, kernel_set
from mla.errors import GoldenError
from mla.golden.__main__ import main
from mla.golden.bundle import find_bundles, load_bundle
from mla.golden.case import case_from_json, case_to_json, read_cases
from mla.golden.diff import _values, diff
from mla.golden.hashing import hash_tensor, mixed_hash
from mla.golden.inputs import make_inputs
from mla.golden.machine import provenance_of
from mla.golden.replay import find_kernels
from mla.golden.run import reference_of, run_case
from mla.serialize import dumps

safetensors = importlib.import_module("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file
SHIPPED = {path.name: path for path in find_bundles()}
ONE = "decode_f32_few_heads"
MODULE_NAME = "kernels: expected module:name of a KernelSet (a dotted module, no path)"
FILES = ("case.json", "bundle.json", "expected.safetensors")


def test_public_names_are_frozen():
    assert mla.golden.__all__ == [
        "SHIPPED",
        "Bundle",
        "Gains",
        "GoldenCase",
        "GoldenError",
        "Provenance",
        "Report",
        "Result",
        "Salts",
        "Tolerance",
        "Tolerances",
        "case_from_json",
        "case_to_json",
        "check",
        "check_bundle",
        "diff",
        "find_bundles",
        "load_bundle",
        "read_cases",
        "record",
        "save_bundle",
    ]


# What ships


def test_the_shipped_bundles_are_small_and_cover_what_they_should():
    bundles = [load_bundle(path) for path in SHIPPED.values()]
    assert sum(path.stat().st_size for path in golden.SHIPPED.rglob("*") if path.is_file()) < 2_000_000
    cases = [bundle.case for bundle in bundles]
    for kind in ("decode", "prefill", "chunked_context"):
        dtypes = {case.dtype for case in cases if case.kind == kind}
        assert dtypes >= {torch.float32, torch.bfloat16, torch.float16}
    assert {case.block_size for case in cases} == {1, 16, 64}
    decoding = [case for case in cases if case.kind == "decode"]
    assert {case.dims.num_heads for case in decoding} >= {2, 16, 32}
    assert any((case.dims.kv_lora_rank, case.dims.qk_rope_head_dim) == (512, 64) for case in decoding)
    assert any(case.pad_decodes_to for case in decoding)
    assert any((0, 0) in case.sequences for case in decoding)
    assert any((0, 0) in case.sequences for case in cases if case.kind == "prefill")
    assert {query for case in decoding for query, _ in case.sequences} >= {0, 1, 2, 3, 4}
    chunked = make_inputs(load_bundle(SHIPPED["context_f32_chunks"]).case).metadata.prefill.context_chunks
    assert len(chunked) > 2
    assert all(bundle.recorded_out is not None for bundle in bundles)


def test_the_shipped_bundles_are_those_of_the_case_file():
    cases = {case.name: case for case in read_cases(golden.SHIPPED.parent / "cases.json")}
    assert set(cases) == set(SHIPPED)
    for name, path in SHIPPED.items():
        assert case_to_json(cases[name].placed()) == json.loads((path / "case.json").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_reference_is_the_float64_specification(name):
    bundle = load_bundle(SHIPPED[name])
    out, lse = reference_of(bundle.case, make_inputs(bundle.case))
    torch.testing.assert_close(out, bundle.out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, bundle.lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kernels", ["cpu", "CPU_MLA", "TORCH", "REFERENCE"])
def test_the_shipped_bundles_hold_from_the_command_line(kernels, capsys, tmp_path):
    junit = tmp_path / "junit.xml"
    assert main(["check", "--kernels", kernels, "--junit", str(junit)]) == 0
    out = capsys.readouterr().out
    assert f"{len(SHIPPED)} passed, 0 failed, 0 skipped" in out
    assert all(name in out for name in SHIPPED)
    suite = ET.parse(junit).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (str(len(SHIPPED)), "0", "0")
    assert {case.get("name") for case in suite} == set(SHIPPED)


def test_a_process_of_its_own_checks_without_a_word_on_stderr():
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-m", "mla.golden", "check", "--only", "decode_f32*"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "CPU_MLA: 3 passed, 0 failed, 0 skipped" in done.stdout


# Inputs


def test_the_hash_is_the_one_of_the_other_golden_files():
    assert (mixed_hash(1000, 123).tolist(), mixed_hash(0, 1).tolist()) == (published_hash(1000, 123).tolist(), [])
    assert torch.equal(hash_tensor((3, 5), 77, 0.5).float(), published_tensor((3, 5), 77, 0.5))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_row_is_nan_but_those_of_the_context(name):
    case = load_bundle(SHIPPED[name]).case
    inputs = make_inputs(case)
    cached = sum(context for _, context in case.sequences)
    new = sum(query for query, _ in case.sequences)
    assert int(inputs.latent_cache.isfinite().all(dim=2).sum()) == cached
    assert int(inputs.latent_cache.isnan().all(dim=2).sum()) == case.num_blocks * case.block_size - cached
    assert int(inputs.written_cache().isfinite().all(dim=2).sum()) == cached + new
    assert bool(inputs.q.isfinite().all())


def test_blocks_are_dealt_in_shuffled_order_with_look_ahead():
    case = load_bundle(SHIPPED["decode_f32_few_heads"]).case
    tables = [ids for group in case.groups for ids in group.block_ids]
    assert [len(table) for table in tables] == [-(-(q + c) // 16) + 1 if q + c else 0 for q, c in case.sequences]
    flat = [block for table in tables for block in table]
    assert len(set(flat)) == len(flat) < case.num_blocks
    assert flat != sorted(flat)


# Bits


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Bundles of the shipped cases, recorded here and now."""
    folder = tmp_path_factory.mktemp("recorded")
    assert main(["record", str(golden.SHIPPED.parent / "cases.json"), "--out", str(folder)]) == 0
    return folder


def test_bundles_recorded_here_hold_bit_for_bit_under_1_and_2_threads(recorded):
    report = golden.check("CPU_MLA", recorded)
    assert report.passed
    assert {result.compared for result in report.results} == {"bits, 1 and 2 threads"}
    assert len(report.results) == len(SHIPPED)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_one_number_of_threads_records_the_other_checks(recorded, threads, restore_num_threads):
    torch.set_num_threads(threads)
    again = [golden.record(load_bundle(path).case) for path in find_bundles(recorded)]
    assert {bundle.provenance.threads for bundle in again} == {threads}
    torch.set_num_threads(3 - threads)
    report = golden.check("CPU_MLA", again, exact="always")
    assert report.passed, report
    assert torch.get_num_threads() == 3 - threads
    for bundle in again:
        first = load_bundle(recorded / bundle.name)
        assert torch.equal(bundle.recorded_out.view(torch.uint8), first.recorded_out.view(torch.uint8))
        assert torch.equal(bundle.recorded_lse.view(torch.uint8), first.recorded_lse.view(torch.uint8))


def test_bits_that_depend_on_the_threads_are_found(recorded):
    right = kernel_set("CPU_MLA")

    def by_threads(*args, **kwargs):
        out, lse = right.paged_decode(*args, **kwargs)
        if torch.get_num_threads() == 2:
            lse.view(torch.int32)[3, 0] ^= 1
        return out, lse

    report = golden.check(attrs.evolve(right, paged_decode=by_threads), recorded, only=ONE)
    assert report.results[0].messages[0].startswith("with 2 threads, lse: 1 of 10 values differ, first at [3, 0]: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [("torch", "1.0"), ("cpu_capability", "none"), ("kernels", "OTHER"), ("cpu", "another"), ("device", "NVIDIA H200")],
)
def test_elsewhere_a_tolerance_decides(recorded, field, value):
    bundle = load_bundle(recorded / ONE)
    bundle = attrs.evolve(bundle, provenance=attrs.evolve(bundle.provenance, **{field: value}))
    changed = attrs.evolve(bundle, recorded_lse=bundle.recorded_lse + 1e-6)
    result = golden.check_bundle(changed, "cpu")
    assert result.status == "passed"
    assert result.compared.startswith(f"tolerance (other {field}")
    assert golden.check_bundle(changed, "cpu", exact="always").status == "failed"
    assert golden.check_bundle(bundle, "cpu", exact="always").status == "passed"


def test_threads_and_the_version_of_the_package_do_not_excuse_other_bits(recorded):
    bundle = load_bundle(recorded / ONE)
    other = attrs.evolve(bundle.provenance, threads=64, mla="0.0.1", triton="1.0")
    assert golden.check_bundle(attrs.evolve(bundle, provenance=other), "cpu").compared == "bits, 1 and 2 threads"


def test_provenance_says_where_it_was_recorded(recorded):
    said = json.loads((recorded / ONE / "bundle.json").read_text())["provenance"]
    assert said["torch"] == torch.__version__
    assert said["kernels"] == "CPU_MLA"
    assert said["cpu_capability"].startswith(torch.backends.cpu.get_cpu_capability())
    assert said == attrs.asdict(provenance_of(kernel_set("CPU_MLA"), torch.device("cpu"))) | {"threads": said["threads"]}


def test_recording_twice_gives_the_same_files(recorded, tmp_path):
    case = load_bundle(recorded / ONE).case
    folder = golden.save_bundle(golden.record(case), tmp_path)
    assert [(folder / file).read_bytes() for file in FILES] == [(recorded / ONE / file).read_bytes() for file in FILES]
    with pytest.raises(GoldenError, match=f"bundle {ONE}: expected no such folder"):
        golden.save_bundle(golden.record(case), tmp_path)
    assert golden.save_bundle(golden.record(case), tmp_path, overwrite=True) == folder


def test_a_bundle_without_bits_is_checked_within_tolerance(tmp_path):
    case = load_bundle(SHIPPED[ONE]).case
    folder = golden.save_bundle(golden.record(case, bits=False), tmp_path)
    assert set(load_file(folder / "expected.safetensors")) == {"reference.out", "reference.lse"}
    result = golden.check_bundle(load_bundle(folder), "cpu")
    assert (result.status, result.compared) == ("passed", "tolerance (no bits in this dtype)")
    with pytest.raises(GoldenError, match="exact: expected a bundle with recorded bits in float32"):
        golden.check_bundle(load_bundle(folder), "cpu", exact="always")


def test_a_wrong_kernel_records_nothing(tmp_path):
    right = kernel_set("CPU_MLA")

    def base_2(*args, **kwargs):
        out, lse = right.paged_decode(*args, **kwargs)
        return out, lse / math.log(2)

    with pytest.raises(GoldenError, match=f"case {ONE}: expected results of MINE to keep, got lse: .*base 2"):
        golden.record(load_bundle(SHIPPED[ONE]).case, attrs.evolve(right, name="MINE", paged_decode=base_2))
    with pytest.raises(GoldenError, match=f"case {ONE}: expected one that REFERENCE runs, got .*dtype: expected float64"):
        golden.record(load_bundle(SHIPPED[ONE]).case, "REFERENCE")


# Kernel sets


def test_what_a_set_does_not_run_is_skipped_and_all_skipped_is_no_success():
    half = attrs.evolve(kernel_set("CPU_MLA"), name="HALF", dtypes=(torch.float16,))
    report = golden.check(half)
    by_status = {s: {r.dtype for r in report.results if r.status == s} for s in ("passed", "skipped")}
    assert by_status == {"passed": {"float16"}, "skipped": {"float32", "bfloat16", "float64"}}
    assert report.passed
    assert "skipped decode_f32_few_heads: HALF does not run: dtype: expected float16, got float32" in str(report)
    nothing = golden.check(half, only="*f32*")
    assert not nothing.passed
    assert "nothing was run" in str(nothing)
    with pytest.raises(GoldenError, match="kernels: expected HALF to agree with every bundle"):
        nothing.raise_if_failed()
    report.raise_if_failed()


def test_kernel_sets_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text("from mla import kernel_set\nMINE, OTHER = kernel_set('TORCH'), 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_kernels("my_kernels:MINE") is kernel_set("TORCH")
    assert find_kernels("cpu") is find_kernels(kernel_set("CPU_MLA"))
    with pytest.raises(GoldenError, match="kernels: expected KernelSet, got int 3"):
        find_kernels("my_kernels:OTHER")
    with pytest.raises(GoldenError, match=f"^{re.escape(MODULE_NAME)}, got no module 'no_such'$"):
        find_kernels("no_such:MINE")
    with pytest.raises(GoldenError, match=f"^{re.escape(MODULE_NAME)}, got module 'my_kernels' without 'mine'$"):
        find_kernels("my_kernels:mine")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("def mine(:\n", "SyntaxError in the import of 'bad_kernels': "),
        ("1 / 0\n", "ZeroDivisionError in the import of 'bad_kernels': division by zero"),
        ("raise SystemExit(0)\n", "SystemExit in the import of 'bad_kernels': 0"),
        ("raise ValueError('two\\nlines')\n", "ValueError in the import of 'bad_kernels': two lines"),
        ("None.x\n", "AttributeError in the import of 'bad_kernels': 'NoneType' object has no attribute 'x'"),
        ("import no_such_package.part\n", "no module 'no_such_package' in the import of 'bad_kernels'"),
        ("from mla import no_such\n", "ImportError in the import of 'bad_kernels': cannot import name 'no_such'"),
    ],
)
def test_a_module_that_cannot_be_imported_ends_with_status_2_and_one_line(text, got, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_kernels.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "--kernels", "bad_kernels:mine"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {MODULE_NAME}, got {got}")
    assert captured.err.count("\n") == 1


def test_names_that_bundles_have_are_listed():
    bundles = [load_bundle(path) for path in SHIPPED.values()]
    with pytest.raises(GoldenError, match=re.escape(f"only: expected the name of a bundle ({', '.join(SHIPPED)}), got 'zzz'")):
        golden.check("cpu", only="zzz")
    with pytest.raises(GoldenError, match=r"prefill_f32_ragged, and 16 more\), got 'zzz', which none has"):
        golden.check("cpu", bundles * 2, only="zzz")
    with pytest.raises(GoldenError, match=r"only: expected the name of a bundle \(there is none\), got '\*'"):
        golden.check("cpu", [])


def test_a_set_gets_the_pages_that_it_asks_for():
    right = kernel_set("CPU_MLA")
    seen = []

    def paged(q, latent_cache, metadata, **kwargs):
        seen.append(metadata.paged_kv_of(1).page_size)
        return right.paged_decode(q, latent_cache, metadata, **kwargs)

    assert golden.check(attrs.evolve(right, paged_decode=paged, page_size=1), only=ONE).passed
    assert set(seen) == {1}


def test_inputs_of_a_run_are_not_changed():
    case = load_bundle(SHIPPED[ONE]).case
    inputs, again = make_inputs(case), make_inputs(case)
    right = kernel_set("CPU_MLA")

    def in_place(q, latent_cache, *args, **kwargs):
        out, lse = right.paged_decode(q, latent_cache, *args, **kwargs)
        q.zero_()
        latent_cache.zero_()
        return out, lse

    run_case(case, inputs, attrs.evolve(right, paged_decode=in_place))
    assert torch.equal(inputs.q, again.q)
    assert torch.equal(inputs.latent_cache.nan_to_num(), again.latent_cache.nan_to_num())


def test_every_input_that_a_kernel_changes_is_named():
    right = kernel_set("CPU_MLA")

    def messages(only, **changes):
        (result,) = golden.check(attrs.evolve(right, **changes), only=only, exact="never").results
        assert result.status == "failed"
        return result.messages

    def decode(q, latent_cache, metadata, **kwargs):
        results = right.paged_decode(q, latent_cache, metadata, **kwargs)
        q.zero_()
        latent_cache[1, 2, 3] = 7
        metadata.seq_lens[0] += 1
        return results

    found = messages(ONE, paged_decode=decode)
    left = "expected the input to be left as it was, got"
    assert len(found) == 3, found
    assert re.match(rf"q: {left} \d+ of \d+ values changed by paged_decode, first at \[0, 0, 0\]: .*, got 0$", found[0])
    assert re.match(rf"latent_cache: {left} 1 of \d+ values changed by paged_decode, first at \[1, 2, 3\]: .*, got 7", found[1])
    assert re.match(rf"metadata: {left} a change by a kernel: decode.seq_lens: 1 of ", found[2])

    def write(latent_cache, kv_c, k_pe, slot_mapping):
        right.write_latent_cache_(latent_cache, kv_c, k_pe, slot_mapping)
        k_pe.zero_()

    (found,) = messages(ONE, write_latent_cache_=write)
    assert re.match(rf"k_pe: {left} \d+ of \d+ values changed by write_latent_cache_, ", found)

    def gather(latent_cache, slots, *, out):
        rows = right.gather_latent_cache(latent_cache, slots, out=out).clone()
        latent_cache.zero_()
        return rows

    found = messages("context_f32_chunks", gather_latent_cache=gather)
    text = rf"latent_cache: {left} \d+ of \d+ values changed by varlen_attention or gather_latent_cache, "
    assert any(re.match(text, message) for message in found)
    assert not any("write_latent_cache_" in message for message in found)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda out, lse: out, "Tensor"),
        (lambda out, lse: (out, lse, None), "tuple of 3"),
        (lambda out, lse: None, "NoneType"),
    ],
)
@pytest.mark.parametrize(("only", "function"), [(ONE, "paged_decode"), ("context_f32_chunks", "varlen_attention")])
def test_a_kernel_that_returns_no_pair_is_named(only, function, change, got):
    right = kernel_set("CPU_MLA")

    def wrong(*args, **kwargs):
        return change(*getattr(right, function)(*args, **kwargs))

    (result,) = golden.check(attrs.evolve(right, **{function: wrong}), only=only, exact="never").results
    assert result.messages == (f"{function}: expected (out, lse), got {got}",)


# Command line


@pytest.fixture
def broken_kernels(tmp_path, monkeypatch):
    """A module with a set whose LSE has base 2."""
    (tmp_path / "broken_kernels.py").write_text(
        "import attrs, math\nfrom mla import kernel_set\nright = kernel_set('CPU_MLA')\n"
        "def wrong(*args, **kwargs):\n    out, lse = right.paged_decode(*args, **kwargs)\n    return out, lse / math.log(2)\n"
        "MINE = attrs.evolve(right, name='MINE <&>\\x01', paged_decode=wrong)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "broken_kernels:MINE"


def test_a_failure_ends_with_status_1_a_table_and_junit(broken_kernels, tmp_path, capsys):
    junit = tmp_path / "junit.xml"
    assert main(["check", "--kernels", broken_kernels, "--junit", str(junit)]) == 1
    out = capsys.readouterr().out
    decoding = [name for name in SHIPPED if name.startswith("decode")]
    assert f"{len(SHIPPED) - len(decoding)} passed, {len(decoding)} failed, 0 skipped" in out
    row = next(line for line in out.splitlines() if line.startswith(ONE))
    assert " failed " in row
    assert re.search(rf"failed {ONE}: lse: absolute error \S+ \(limit \S+\); worst at \[4, \d\]: expected \S+, got \S+", out)
    assert f"failed {ONE}: LSE is the expected one divided by ln 2: base 2?" in out
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite.get("failures") == str(len(decoding))
    failed = {case.get("name"): case.find("failure").text for case in suite if case.find("failure") is not None}
    assert set(failed) == set(decoding)
    assert "base 2?" in failed[ONE]
    assert suite[0].get("classname") == "mla.golden.MINE <&>?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "no_such_folder"], "folder: expected a folder of bundles, got no_such_folder"),
        (["check", "--only", "nothing*"], "only: expected the name of a bundle (context_bf16_one_chunk, context_"),
        (["check", "--kernels", "NOTHING"], "kernels: expected one of cpu, ipex, aiter, cuda, CPU_MLA, "),
        (["check", "--kernels", "../t2/my_kernels:mine"], f"{MODULE_NAME}, got '../t2/my_kernels:mine'"),
        (["check", "--kernels", "/my_kernels.py:mine"], f"{MODULE_NAME}, got '/my_kernels.py:mine'"),
        (["check", "--kernels", "my_kernels:"], f"{MODULE_NAME}, got 'my_kernels:'"),
        (["check", "--kernels", "nomod:x"], f"{MODULE_NAME}, got no module 'nomod'"),
        (["check", "--device", "nowhere"], "device: expected a device of torch"),
        (["check", "--device", "xpu"], "device: expected a device that this torch can use, got xpu"),
        (["record", "no_such.json", "--out", "x"], "no_such.json: expected a file that can be read"),
        (["diff", "no_such.json", "no_such.json"], "first: expected a file that can be read"),
    ],
)
def test_input_that_cannot_be_used_ends_with_status_2_and_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_long_check_shows_a_bar(monkeypatch, capsys):
    plain = tqdm.tqdm
    monkeypatch.setattr(tqdm, "tqdm", lambda *args, **kwargs: plain(*args, **{**kwargs, "delay": 0, "mininterval": 0}))
    assert golden.check("cpu", only="decode_f32*", progress=True).passed
    assert "golden bundles" in capsys.readouterr().err
    assert golden.check("cpu", only="decode_f32*").passed
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert golden.check("cpu", only="decode_f32*", progress=True).passed
    assert capsys.readouterr().err == ""


# Differences


def test_two_metadata_records_are_compared_field_by_field(tmp_path, capsys):
    first, second = (build_metadata([decode_group(n, [7, 2])], block_size=16, page_sizes=p) for n, p in ((20, (1,)), (21, ())))
    lines = diff(first, second)
    assert "decode.max_seq_len: 20 in the first, 21 in the second" in lines
    assert "decode.seq_lens: 1 of 1 values differ, first at [0]: 20 in the first, 21 in the second" in lines
    assert any(
        line.startswith("decode.paged_kv[0]: {") and line.endswith(" in the first, nothing in the second") for line in lines
    )
    assert not any(line.startswith("decode.block_table") for line in lines)
    assert diff(first, first) == []
    for name, record in (("a", first), ("b", second)):
        (tmp_path / f"{name}.json").write_text(dumps(record))
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_a_table_of_another_shape_is_a_difference():
    tables = [build_metadata([decode_group(20, ids)], block_size=16).decode for ids in ([7, 2], [7, 2, 5])]
    assert "block_table: shape [1, 2] in the first, [1, 3] in the second" in diff(*tables)


def test_true_is_not_one():
    first, second = ({"type": "x", "a": 1, "b": [1, 2]}, {"type": "x", "a": True, "b": [1, 2.0]})
    assert _values("", first, second) == [
        "a: 1 in the first, true in the second",
        "b: 1 of 2 values differ, first at [1]: 2 in the first, 2.0 in the second",
    ]


def test_two_bundles_are_compared_field_by_field(recorded):
    bundle = load_bundle(recorded / ONE)
    assert diff(recorded / ONE, bundle) == []
    lse = bundle.recorded_lse.clone()
    lse.view(torch.int32)[2, 1] ^= 1
    other = attrs.evolve(
        bundle,
        case=attrs.evolve(bundle.case, salts=attrs.evolve(bundle.case.salts, q=7)),
        provenance=attrs.evolve(bundle.provenance, threads=9),
        recorded_lse=lse,
        recorded_out=None,
    )
    lines = diff(bundle, other)
    assert lines[0] == f"case.salts.q: {bundle.case.salts.q} in the first, 7 in the second"
    assert lines[1].startswith("provenance.threads: ")
    assert lines[2] == "recorded_out: there in the first, not in the second"
    assert lines[3].startswith("recorded_lse: 1 of 10 values differ, first at [2, 1]: first has ")
    assert len(lines) == 4
    with pytest.raises(GoldenError, match="first, second: expected two bundles or two records"):
        diff(bundle, bundle.case.dims)


# Damage


@pytest.fixture
def bundle_copy(tmp_path):
    """A shipped bundle to be damaged."""
    return Path(shutil.copytree(SHIPPED[ONE], tmp_path / "bundles" / ONE))


def refused(folder: Path, message: str) -> None:
    """Loading the folder gives one error of one line that says so."""
    with pytest.raises(GoldenError, match=rf"^bundle {folder.name}: {message}") as caught:
        load_bundle(folder)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def edit(folder: Path, file: str, change) -> None:
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_or_empty_file_is_refused(bundle_copy, file):
    whole = (bundle_copy / file).read_bytes()
    for size in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 3):
        (bundle_copy / file).write_bytes(whole[:size])
        refused(bundle_copy, rf"{file}: expected ")
    (bundle_copy / file).unlink()
    refused(bundle_copy, rf"{file}: expected a file that can be read")


@pytest.mark.parametrize("file", FILES)
def test_random_damage_gives_an_error_or_numbers(bundle_copy, file):
    whole = (bundle_copy / file).read_bytes()
    for seed in range(40):
        pick = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[pick.randrange(min(len(whole), 400))] = pick.randrange(256)
        (bundle_copy / file).write_bytes(bytes(damaged))
        try:
            loaded = load_bundle(bundle_copy)
        except GoldenError:
            continue
        assert loaded.out.shape == loaded.case.out_shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("reference.lse"), r"expected.safetensors: expected tensors \[.*'reference.lse'"),
        (lambda t: t.pop("recorded.lse"), "expected.safetensors: expected tensors"),
        (lambda t: t.update(more=torch.zeros(1)), r"expected.safetensors: expected tensors .*, got \['more'"),
        (
            lambda t: t.update({"reference.out": torch.zeros(5, 2, 31).double()}),
            r".*expected reference.out of \(5, 2, 32\) float64",
        ),
        (lambda t: t.update({"reference.out": torch.zeros(0, 2, 32).double()}), r".*, got \(0, 2, 32\) float64"),
        (
            lambda t: t.update({"recorded.out": torch.zeros(5, 2, 32).half()}),
            r".*recorded.out of \(5, 2, 32\) float32, got .* float16",
        ),
        (lambda t: t.update({"recorded.out": torch.zeros(5, 2, 32).int()}), r".*, got \(5, 2, 32\) I32"),
        (lambda t: t["reference.lse"].fill_(math.nan), "expected.safetensors: expected numbers in reference.out"),
    ],
)
def test_other_tensors_are_refused(bundle_copy, change, message):
    tensors = load_file(bundle_copy / "expected.safetensors")
    change(tensors)
    save_file(tensors, bundle_copy / "expected.safetensors")
    refused(bundle_copy, message)


@pytest.mark.parametrize(
    "header",
    [
        {"reference.out": {"dtype": "F64", "shape": [10**9, 10**9], "data_offsets": [0, 8 * 10**18]}},
        {"reference.out": {"dtype": "F64", "shape": [5, 2, 32], "data_offsets": [0, 10**12]}},
        {"reference.out": {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]}},
        {"reference.out": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 8]}},
        {"__metadata__": {"a": "b"}},
    ],
)
def test_a_header_that_lies_is_refused(bundle_copy, header):
    text = json.dumps(header).encode()
    (bundle_copy / "expected.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    refused(bundle_copy, "expected.safetensors: expected ")


def test_a_header_as_long_as_the_world_is_refused(bundle_copy):
    (bundle_copy / "expected.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(bundle_copy, "expected.safetensors: expected a safetensors file")


def test_a_pickle_is_no_bundle(bundle_copy):
    torch.save({"reference.out": torch.zeros(1)}, bundle_copy / "expected.safetensors")
    refused(bundle_copy, "expected.safetensors: expected a safetensors file")


def put(path, value):
    """A change of JSON data: the value at a path of keys."""

    def change(data):
        *way, last = path
        for key in way:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "case.json",
            put(["name"], "../other"),
            "name: expected at most 80 letters",
        ),
        ("case.json", put(["name"], "/etc/passwd"), "name: expected at most 80 letters"),
        ("case.json", put(["name"], "other"), f"case.json.name: expected '{ONE}', the name of its folder, got 'other'"),
        ("case.json", put(["kind"], "train"), "kind: expected one of decode, prefill, chunked_context, got 'train'"),
        ("case.json", put(["kind"], "prefill"), r"groups\[0\]: expected prompts for kind prefill"),
        ("case.json", put(["code"], "import os"), "case.json: expected fields of name, .*, got code"),
        ("case.json", put(["dims", "num_heads"], 10**15), "dims, groups, num_blocks: expected at most 33554432 numbers"),
        ("case.json", put(["dims", "kv_lora_rank"], 2**62), "dims, groups, num_blocks: expected at most 33554432 numbers"),
        ("case.json", put(["dims", "kv_lora_rank"], 2**64), "case.json.dims.kv_lora_rank: expected an integer of 64 bits"),
        ("case.json", put(["num_blocks"], 10**12), "num_blocks: expected an int in 1..1048576"),
        ("case.json", put(["num_blocks"], 1), r"block_ids: expected blocks in 0\.\.0"),
        ("case.json", put(["block_size"], 10**9), "block_size: expected an int in 1..1048576"),
        ("case.json", put(["block_size"], 2**20), "dims, groups, num_blocks: expected at most 33554432 numbers"),
        (
            "case.json",
            put(["groups", 2, "context_lens"], [10**12]),
            "context_lens of sequence 2: expected an int in 0..1048576",
        ),
        ("case.json", put(["groups", 2, "context_lens"], [10**6]), "dims, groups.*: expected at most"),
        ("case.json", put(["groups", 2, "query_lens"], [-1]), "query_lens of sequence 2: expected an int in 0..1048576"),
        ("case.json", put(["groups", 2, "block_ids"], [[10**15]]), r"block_ids: expected blocks in 0\.\."),
        ("case.json", put(["groups", 2, "block_ids"], [[-1, 0, 1]]), r"block_ids: expected blocks in 0\.\..*, got -1"),
        ("case.json", put(["groups"], []), "groups: expected at least one sequence group"),
        ("case.json", put(["dtype"], "int4"), "case.json.dtype: expected one of float64, .*, got int4"),
        ("case.json", put(["salts", "q"], 2**32), "q: expected an int in 0..4294967295"),
        ("case.json", put(["gains", "q"], 3.0), "q: expected a power of two, got 3.0"),
        ("case.json", put(["gains", "q"], 2.0**11), "q: expected a power of two in"),
        ("case.json", put(["pad_decodes_to"], 10**7), "pad_decodes_to: expected an int in 1..1048576"),
        ("case.json", put(["groups", 2, "block_ids"], [[1]]), "block_ids: expected at least 3 blocks of 16 for the 33 tokens"),
        ("case.json", put(["groups", 0, "sliding_window"], 4), "sliding_window: expected None"),
        (
            "case.json",
            put(["groups", 0, "seq_lens"], [9]),
            "seq_lens: expected context 0 \\+ query 1 = 1 for sequence 0, got 9",
        ),
        ("case.json", put(["pad_decodes_to"], 2**20), "dims, groups, num_blocks: expected at most 33554432 numbers"),
        ("case.json", put(["groups", 2, "block_ids"], [[1] * 10**7]), "dims, groups, num_blocks: expected at most 33554432"),
        ("case.json", put(["pad_decodes_to"], 3), "pad_decodes_to: expected at least 6 rows, got 3"),
        ("bundle.json", put(["format"], 2), "bundle.json.format: expected 1, got 2"),
        ("bundle.json", put(["expected"], "/etc/passwd"), "bundle.json: expected fields of .*, got expected"),
        ("bundle.json", put(["tolerances", "float32", "out_rel"], 0.0), "out_rel: expected a finite number > 0, got 0.0"),
        ("bundle.json", put(["tolerances", "float8"], {}), "bundle.json.tolerances: expected fields of .*, got float8"),
        ("bundle.json", put(["provenance", "threads"], "two"), "bundle.json.provenance.threads: expected an integer"),
    ],
    ids=map(str, range(35)),
)
def test_other_json_is_refused(bundle_copy, file, change, message):
    edit(bundle_copy, file, change)
    refused(bundle_copy, rf"\S*{message}")


@pytest.mark.parametrize("file", ["case.json", "bundle.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": NaN}', '{"format": 1e999}', "null", "[]", '{"a": 1, "a": 2}', "\x00"]
)
def test_hostile_json_is_refused(bundle_copy, file, text):
    (bundle_copy / file).write_text(text)
    refused(bundle_copy, rf"{file}\S*: expected ")


@pytest.mark.parametrize("file", FILES)
def test_links_out_of_the_folder_are_refused(bundle_copy, tmp_path, file):
    secret = tmp_path / "secret"
    shutil.copy(bundle_copy / file, secret)
    (bundle_copy / file).unlink()
    (bundle_copy / file).symlink_to(secret)
    refused(bundle_copy, f"{file}: expected a file inside of its folder, got a link that leads out of it")
    (bundle_copy / file).unlink()
    (bundle_copy / file).symlink_to(bundle_copy / file)
    refused(bundle_copy, f"{file}: expected a file that can be read")
    (bundle_copy / file).unlink()
    (bundle_copy / file).mkdir()
    refused(bundle_copy, f"{file}: expected a regular file")


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_or_a_huge_file_is_refused_unread(bundle_copy, file):
    (bundle_copy / file).unlink()
    os.mkfifo(bundle_copy / file)
    refused(bundle_copy, f"{file}: expected a regular file")
    (bundle_copy / file).unlink()
    with (bundle_copy / file).open("wb") as sparse:
        sparse.truncate(2**40)
    refused(bundle_copy, f"{file}: expected at most 268435456 bytes, got {2**40}")


def test_a_linked_bundle_is_refused_in_a_folder(bundle_copy, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "other"
    shutil.copytree(bundle_copy, elsewhere)
    (bundle_copy.parent / "other").symlink_to(elsewhere)
    with pytest.raises(GoldenError, match=r"bundle other: expected a folder inside of .*, got a link that leads out of it"):
        golden.check("cpu", bundle_copy.parent)
    with pytest.raises(GoldenError, match="folder: expected at least one bundle in"):
        find_bundles(tmp_path)


def test_one_damaged_bundle_stops_the_command_with_one_line(bundle_copy, capsys):
    (bundle_copy / "case.json").write_text("{")
    assert main(["check", str(bundle_copy.parent)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: bundle {ONE}: case.json: expected JSON, got")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", 'cases.json: expected {"cases": [...]}'),
        ('{"cases": {}}', 'cases.json: expected {"cases": [...]}'),
        ('{"cases": [3]}', "cases[0]: expected an object with the fields of GoldenCase, got 3"),
        ('{"cases": [{"name": "x"}]}', "cases[0].kind: expected a value, got none"),
    ],
)
def test_a_case_file_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "cases.json").write_text(text)
    with pytest.raises(GoldenError, match=re.escape(message)):
        read_cases(tmp_path / "cases.json")


def test_two_cases_of_one_name_are_refused(tmp_path):
    case = case_to_json(load_bundle(SHIPPED[ONE]).case)
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [case, {**case, "name": ONE.upper()}]}))
    with pytest.raises(GoldenError, match=r"cases\[1\].name: expected a name of its own"):
        read_cases(tmp_path / "cases.json")
    assert case_to_json(case_from_json(case)) == case


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(GoldenError, match=r"safetensors: expected the package \(pip install 'mla\[golden\]'\), got"):
        load_bundle(SHIPPED[ONE])


# The pytest plugin

HAS_ENTRY_POINT = any(point.value == "pytest_mla" for point in importlib.metadata.entry_points(group="pytest11"))

USER_TESTS = """
import math
import attrs
from mla import kernel_set

right = kernel_set("CPU_MLA")

def wrong(*args, **kwargs):
    out, lse = right.paged_decode(*args, **kwargs)
    return out, lse / math.log(2)

def test_right(golden):
    assert len(golden.check(right).results) == len(golden.bundles)

def test_name(golden):
    golden.check("cpu", only="decode*")

def test_wrong(golden):
    golden.check(attrs.evolve(right, name="MINE", paged_decode=wrong))
"""


def run_pytest(folder: Path, *arguments: str) -> str:
    """Output of a user's own test run, with the plugin that stands beside the package: an editable install copies it."""
    beside = str(Path(mla.golden.__file__).parents[2])
    path = os.pathsep.join(filter(None, [beside, os.environ.get("PYTHONPATH")]))
    plugin = [] if HAS_ENTRY_POINT else ["-p", "pytest_mla"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *plugin, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_fixture_tests_kernels_in_one_line(tmp_path, bundle_copy):
    (tmp_path / "test_mine.py").write_text(USER_TESTS)
    out = run_pytest(tmp_path, "-q", "test_mine.py")
    assert "1 failed, 2 passed" in out, out
    assert "LSE is the expected one divided by ln 2: base 2?" in out
    assert "Traceback" not in out
    decoding = sum(name.startswith("decode") for name in SHIPPED)
    summary = f"Failed: MINE: {len(SHIPPED) - decoding} of {len(SHIPPED)} bundles passed"
    assert re.search(rf"^FAILED test_mine.py::test_wrong - {re.escape(summary)}$", out, re.MULTILINE), out
    out = run_pytest(tmp_path, "-q", f"--mla-golden-dir={bundle_copy.parent}", "test_mine.py")
    assert "1 failed, 2 passed" in out, out
    assert "MINE: 0 passed, 1 failed, 0 skipped" in out


def test_the_plugin_loads_neither_torch_nor_the_package(tmp_path):
    (tmp_path / "test_inert.py").write_text(
        "import sys\n\ndef test_inert():\n    assert 'pytest_mla' in sys.modules\n"
        "    assert not {'torch', 'mla', 'safetensors', 'tqdm'} & set(sys.modules)\n"
    )
    out = run_pytest(tmp_path, "-q", "test_inert.py")
    assert "1 passed" in out, out


def test_a_kernel_set_of_ones_own_needs_two_functions():
    """What the README shows, as a set that names nothing of this package's but the prompts' kernel."""

    def paged_decode(q, latent_cache, metadata, *, kv_lora_rank, softmax_scale, plan=None):
        out, lse = q.new_zeros(*q.shape[:2], kv_lora_rank), q.new_full(q.shape[:2], -torch.inf)
        starts = metadata.query_start_loc.tolist()
        for seq, (first, last) in enumerate(pairwise(starts)):
            rows = latent_cache[metadata.block_table[seq]].flatten(0, 1)
            for t in range(first, last):
                keys = rows[: metadata.seq_lens[seq] - (last - 1 - t)]
                scores = softmax_scale * q[t] @ keys.T
                lse[t], out[t] = scores.logsumexp(-1), scores.softmax(-1) @ keys[:, :kv_lora_rank]
        return out, lse

    mine = KernelSet(
        name="MINE",
        device_types=("cpu",),
        dtypes=(torch.float32,),
        paged_decode=paged_decode,
        varlen_attention=kernel_set("TORCH").varlen_attention,
    )
    report = golden.check(mine)
    assert report.passed, report
    assert {r.dtype for r in report.results if r.status == "passed"} == {"float32"}


@pytest.mark.parametrize(("folder", "release"), [
    (Path(__file__).parent / "bundles_torch28", "2.8."),
    (Path(mla.golden.__file__).parent / "bundles", "2.13."),
])  # fmt: skip
def test_bundles_of_both_torch_releases_hold_under_this_one(folder, release):
    """The suite runs under both: a bundle of either is checked under the other, by tolerance."""
    bundles = [load_bundle(path) for path in find_bundles(folder)]
    assert len(bundles) >= 4
    assert all(bundle.provenance.torch.startswith(release) for bundle in bundles)
    report = golden.check("CPU_MLA", folder)
    assert report.passed
    if not torch.__version__.startswith(release):
        assert all(re.match(r"tolerance \(other torch\b", result.compared) for result in report.results)
