"""Golden folder as an option, golden cases as parameters, and the thread count as it was."""

from pathlib import Path

import pytest
import torch
from golden_io import GOLDEN_DIR, metadata_cases, state_cases

FILE_KINDS = ("decode", "prefill", "layer", "merge", "fp8_dequant")


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
    if "workspace_case" in wanted:
        cases = state_cases(folder, "workspace")
        metafunc.parametrize("workspace_case", cases, ids=[f"workspace_{i}" for i in range(len(cases))])
    for kind in FILE_KINDS:
        if f"{kind}_file" in wanted:
            metafunc.parametrize(f"{kind}_file", sorted(folder.glob(f"{kind}_*.npz")), ids=lambda path: path.stem)


@pytest.fixture
def restore_num_threads():
    """Undo `torch.set_num_threads` after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
