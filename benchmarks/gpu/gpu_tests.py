"""The tests that are marked `gpu`, each a row. Only the files that have some are collected."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.measuring import Bench, Row, Rows

ROOT = Path(__file__).parents[2]


def measure(bench: Bench) -> Rows:
    yield from run(files_of(ROOT / "tests"), "gpu")


def files_of(tests: Path) -> list[Path]:
    return sorted(file for file in tests.rglob("test_*.py") if "mark.gpu" in file.read_text(encoding="utf-8"))


def run(files: list[Path], mark: str) -> Rows:
    """Raises ``RuntimeError`` where pytest does not come as far as running any."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        options = ["-q", "-m", mark, "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        # tuning would build some hundred kernels more for models that nobody runs again
        environment = {**os.environ, "TRITON_INTERPRET": "0", "FASTGEN_AUTOTUNE": "0"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
        yield from map(_row, ElementTree.parse(report).iter("testcase"))


def _row(test: ElementTree.Element) -> Row:
    row: Row = {"case": f"{test.get('classname')}.{test.get('name')}", "seconds": float(test.get("time") or 0)}
    wrong = next((each for each in test if each.tag in ("failure", "error", "skipped")), None)
    return row if wrong is None else {**row, "error": f"{wrong.tag}: {wrong.get('message')}"}
