"""Benchmarks that hold bounds: they run here with those bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


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
