"""The pytest plugin of mla: a fixture `golden` that tests a kernel set of your own against golden bundles.

It stands beside the package, so that pytest loads neither torch nor `mla` before a test asks for the fixture.

    def test_my_kernels(golden):
        golden.check(my_kernel_set)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from mla import KernelSet
    from mla.golden import Bundle, Report

__all__ = ["Golden", "golden", "pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--mla-golden-dir``."""
    parser.getgroup("mla").addoption(
        "--mla-golden-dir",
        type=Path,
        metavar="DIR",
        help="folder of golden bundles for the fixture golden (default: those of the package)",
    )


class Golden:
    """What the fixture `golden` gives.

    Parameters
    ----------
    folder : Path or None
        Of the bundles; None takes those of the package.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    @property
    def bundles(self) -> list[Bundle]:
        """All bundles of the folder."""
        from mla.golden import find_bundles, load_bundle

        return [load_bundle(folder) for folder in find_bundles(self.folder)]

    def check(
        self,
        kernels: KernelSet | str,
        *,
        only: str = "*",
        device: torch.device | str | None = None,
        exact: str = "auto",
    ) -> Report:
        """Fail the test, with a table, unless the kernel set agrees with every bundle that it can run.

        Parameters
        ----------
        kernels : KernelSet or str
            Yours, or the name of one of the package.
        only : str
            Names that are checked, with ``*`` and ``?``.
        device : torch.device or str or None
            Where it runs; None takes the set's own.
        exact : str
            See `mla.golden.check_bundle`.

        Returns
        -------
        Report
            Of a check that passed.
        """
        __tracebackhide__ = True
        from mla.golden import check

        report = check(kernels, self.folder, only=only, device=device, exact=exact)
        if not report.passed:
            passed, skipped = (sum(r.status == status for r in report.results) for status in ("passed", "skipped"))
            first = f"{report.kernels}: {passed} of {len(report.results)} bundles passed"
            pytest.fail(f"{first}{f', {skipped} skipped' if skipped else ''}\n{report}", pytrace=False)
        return report


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """Golden bundles: ``golden.check(my_kernel_set)``, ``golden.bundles``."""
    return Golden(request.config.getoption("mla_golden_dir"))
