"""What a check found: one line for each bundle, as a table, as JUnit XML, or as one error."""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import attrs

from mla.errors import GoldenError
from mla.golden.compare import Errors

__all__ = ["Report", "Result"]

NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


@attrs.frozen(kw_only=True)
class Result:
    """One bundle on one kernel set.

    Parameters
    ----------
    bundle : str
        Its name.
    kind, dtype : str
        Of the case, and the dtype that it was run in.
    status : str
        ``"passed"``, ``"failed"`` or ``"skipped"``.
    compared : str
        ``"bits"``, with the numbers of threads, or ``"tolerance"``, with what differs from where it was recorded.
    errors : Errors or None
        Against the float64 reference.
    messages : tuple of str
        Failures with their worst index and what they look like, or why it was skipped.
    seconds : float
        Wall time.

    Examples
    --------
    >>> from mla.golden import check
    >>> result = check("REFERENCE", only="decode_f32_few_heads").results[0]
    >>> result.status, result.dtype, result.errors.out_rel < 1e-6
    ('passed', 'float64', True)
    """

    bundle: str
    kind: str
    dtype: str
    status: str
    compared: str = ""
    errors: Errors | None = None
    messages: tuple[str, ...] = ()
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Report:
    """Results of all bundles on one kernel set; as text it is a table with every failure below.

    Parameters
    ----------
    kernels : str
        Name of the kernel set.
    results : tuple of Result
        In the order of the bundles.

    Examples
    --------
    >>> results = (Result(bundle=s, kind="decode", dtype="float32", status=s) for s in ("passed", "failed"))
    >>> report = Report(kernels="MINE", results=tuple(results))
    >>> report.passed, report.summary
    (False, 'MINE: 1 passed, 1 failed, 0 skipped')
    """

    kernels: str
    results: tuple[Result, ...]

    def _count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether no bundle failed and at least one was run."""
        return self._count("failed") == 0 and self._count("passed") > 0

    @property
    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self._count(status)} {status}" for status in ("passed", "failed", "skipped"))
        none = "; nothing was run" if not self._count("passed") + self._count("failed") else ""
        return f"{self.kernels}: {counts}{none}"

    def __str__(self) -> str:
        rows = [("bundle", "kind", "dtype", "out error", "LSE error", "result", "compared by")]
        for result in self.results:
            numbers = ("-", "-") if result.errors is None else (f"{result.errors.out_rel:.1e}", f"{result.errors.lse_abs:.1e}")
            rows.append((result.bundle, result.kind, result.dtype, *numbers, result.status, result.compared))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        for result in self.results:
            lines += [f"{result.status} {result.bundle}: {message}" for message in result.messages]
        return "\n".join([*lines, self.summary])

    def raise_if_failed(self) -> None:
        """Raise unless `passed`.

        Raises
        ------
        GoldenError
            With the whole table.

        Examples
        --------
        >>> good = Result(bundle="a", kind="decode", dtype="float32", status="passed")
        >>> Report(kernels="MINE", results=(good,)).raise_if_failed()
        >>> try:
        ...     Report(kernels="MINE", results=()).raise_if_failed()
        ... except GoldenError as error:
        ...     print(str(error).splitlines()[-1])
        MINE: 0 passed, 0 failed, 0 skipped; nothing was run
        """
        if not self.passed:
            raise GoldenError(f"kernels: expected {self.kernels} to agree with every bundle, got this:\n{self}")

    def write_junit(self, path: Path | str) -> None:
        """Write the results as JUnit XML, one test case for each bundle.

        Raises
        ------
        GoldenError
            A file that cannot be written.

        Examples
        --------
        >>> import tempfile
        >>> good = Result(bundle="a", kind="decode", dtype="float32", status="passed")
        >>> report = Report(kernels="MINE", results=(good,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.write_junit(Path(folder, "golden.xml"))
        ...     print(Path(folder, "golden.xml").read_text().splitlines()[2])
        <testcase classname="mla.golden.MINE" name="a" time="0.000">
        """
        counts = {"name": "mla.golden", "tests": len(self.results), "errors": 0, "failures": self._count("failed")}
        counts |= {"skipped": self._count("skipped"), "time": f"{sum(result.seconds for result in self.results):.3f}"}
        lines = [
            '<?xml version="1.0" encoding="utf-8"?>',
            f"<testsuites><testsuite {' '.join(f'{name}={quoteattr(str(value))}' for name, value in counts.items())}>",
        ]
        for result in self.results:
            text = NOT_IN_XML.sub("?", "\n".join(result.messages))
            first = quoteattr(text.partition("\n")[0])
            name, owner = quoteattr(result.bundle), quoteattr(f"mla.golden.{NOT_IN_XML.sub('?', self.kernels)}")
            lines.append(f'<testcase classname={owner} name={name} time="{result.seconds:.3f}">')
            if result.status == "failed":
                lines.append(f"<failure message={first}>{escape(text)}</failure>")
            elif result.status == "skipped":
                lines.append(f"<skipped message={first}/>")
            lines.append("</testcase>")
        lines.append("</testsuite></testsuites>")
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as reason:
            raise GoldenError(f"junit: expected a file that can be written, got {reason}") from reason
