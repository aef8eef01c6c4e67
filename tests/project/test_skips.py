"""A test run ends with what it did not test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_of_a_tool(number):
    pytest.skip("a-tool is not installed")

@pytest.mark.skipif(True, reason="another tool: make clients")
def test_of_another():
    pass

def test_of_nothing():
    pass
"""


@pytest.mark.parametrize(
    "processes",
    [pytest.param([], id="alone"), pytest.param(["-n", "2"], id="in processes", marks=pytest.mark.slow)],
)
def test_skipped_tests_stand_in_the_last_lines_with_their_reasons(tmp_path: Path, processes: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *processes, "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, title, first, second, total = done.stdout.strip().splitlines()
    assert "NOT TESTED on this machine: 4 tests were skipped" in title
    assert (first, second) == ("    3 x a-tool is not installed", "    1 x another tool: make clients")
    assert total.startswith("1 passed, 4 skipped")


@pytest.mark.slow
def test_a_run_without_skips_says_nothing_of_them(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_of_nothing():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT TESTED" not in done.stdout
