"""Golden folder as an option, golden cases as parameters, and the thread count as it was."""

from pathlib import Path

import pytest
import torch
from golden_io import GOLDEN_DIR, metadata_cases, section_cases

from mla.compute import cpu_decode, cpu_prefill, cpu_stack

FILE_KINDS = ("decode", "prefill", "layer", "merge", "fp8_dequant")
SECTIONS = {
    "workspace_case": ("state.json", "workspace"),
    "alloc_case": ("state.json", "metadata_alloc"),
    "capture_case": ("state.json", "capture"),
    "replay_case": ("state.json", "replay"),
    "lifecycle_fact": ("state.json", "lifecycle"),
    "op_case": ("advance_step.json", "op"),
    "step_case": ("advance_step.json", "metadata"),
}


def pytest_addoption(parser):
    parser.addoption(
        "--golden-dir",
        type=Path,
        default=GOLDEN_DIR,
        metavar="DIR",
        help="folder of golden files that run through the golden tests (default: tests/golden)",
    )


def pytest_configure(config):
    folder = config.getoption("golden_dir")
    if not any(folder.glob("*.npz")) and not any(folder.glob("*.json")):
        raise pytest.UsageError(f"--golden-dir: expected a folder with golden .npz or .json files, got {folder}")


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden_dir")
    wanted = metafunc.fixturenames
    if "metadata_case" in wanted:
        metafunc.parametrize("metadata_case", metadata_cases(folder), ids=lambda case: case["id"])
    for name, (file, section) in SECTIONS.items():
        if name in wanted:
            cases = section_cases(folder, file, section)
            ids = [case.get("id", f"{section}_{i}") for i, case in enumerate(cases)]
            metafunc.parametrize(name, cases, ids=ids)
    for kind in FILE_KINDS:
        if f"{kind}_file" in wanted:
            metafunc.parametrize(f"{kind}_file", sorted(folder.glob(f"{kind}_*.npz")), ids=lambda path: path.stem)


@pytest.fixture
def restore_num_threads():
    """Undo `torch.set_num_threads` after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["fused", "products"])
def bfloat16_way(request, monkeypatch):
    """Both ways in which the CPU kernels may compute bfloat16: which of them a processor takes is a matter of speed."""
    for module in (cpu_decode, cpu_prefill):
        monkeypatch.setattr(module, "is_fast", lambda dtype, _: dtype == torch.bfloat16 and request.param == "fused")


@pytest.fixture
def no_kept_scratch(monkeypatch):
    """Every call takes its scratch memory anew, so that allocations are those of a first call."""
    monkeypatch.setattr(cpu_stack, "KEPT_BYTES", 0)
    cpu_stack.borrow_workspace(torch.device("cpu"))
