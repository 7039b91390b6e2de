"""The shipped bundles on the kernels of other devices: on a GPU, in Triton's interpreter, on AITER's stand-in."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest
import torch
from test_rocm import RELEASES, kernels_of, no_aiter, standin  # noqa: F401  fixtures
from triton_here import needs_interpreter

from mla import golden, kernel_set

INTERPRETED = """
import attrs
from mla import golden, kernel_set

for name in ("TRITON_MLA", "TRITON_MLA_PORTABLE", "TRITON_MLA_BALANCED"):
    kernels = attrs.evolve(kernel_set(name), device_types=("cpu",), route=lambda dims, dtype: "")
    report = golden.check(kernels, only="*_f16_*")  # the interpreter multiplies no bfloat16
    report.raise_if_failed()
    assert [result.status for result in report.results] == ["passed"] * 3
"""


@needs_interpreter
def test_the_triton_sets_hold_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_the_aiter_set_holds_on_the_stand_in(standin, release):  # noqa: F811
    report = golden.check(kernels_of(standin, release))
    assert report.passed, report
    passed = {result.bundle for result in report.results if result.status == "passed"}
    assert passed == {"decode_bf16_deepseek_v3", "prefill_bf16_deepseek_v3"}


@pytest.mark.parametrize("name", ["cuda", "aiter"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_set_without_its_device_or_package_is_one_error(name):
    with pytest.raises(ValueError, match=r"^(device|triton|aiter|amd-aiter)\S*: expected "):
        golden.check(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("name", ["TORCH", "TRITON_MLA", "TRITON_MLA_PORTABLE", "TRITON_MLA_BALANCED"])
def test_the_shipped_bundles_hold_on_a_gpu(name, tmp_path):
    report = golden.check(name, device="cuda")
    assert report.passed, report
    by_status = {result.bundle: result.status for result in report.results}
    takes = {"float64", "float32"} if name == "TORCH" else set()
    for result in report.results:
        expected = "passed" if result.dtype in takes | {"bfloat16", "float16"} else "skipped"
        assert by_status[result.bundle] == expected, report
    if name == "TORCH":  # whose bits are not promised there
        return
    # What a GPU records, the same GPU gives again.
    for bundle in (golden.load_bundle(path) for path in golden.find_bundles()):
        if bundle.case.dtype == torch.bfloat16:
            again = golden.record(bundle.case, name, device="cuda")
            golden.save_bundle(again, tmp_path)
            loaded = golden.load_bundle(tmp_path / bundle.name)
            result = golden.check_bundle(loaded, name, device="cuda")
            assert (result.status, result.compared) == ("passed", "bits"), result
            assert attrs.evolve(loaded.provenance, device="cpu").differences(loaded.provenance) == ["device"]
    assert kernel_set(name).name == report.kernels
