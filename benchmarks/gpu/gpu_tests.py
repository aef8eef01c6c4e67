"""Runs the tests that are marked `gpu`, with a row for each. Only files that have such tests are collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.measuring import Bench, Rows

ROOT = Path(__file__).parents[2]


def measure(bench: Bench) -> Rows:
    yield from run(files_of(ROOT / "tests"), "gpu")


def files_of(tests: Path) -> list[Path]:
    return sorted(file for file in tests.rglob("test_*.py") if "mark.gpu" in file.read_text(encoding="utf-8"))


def run(files: list[Path], mark: str) -> Rows:
    """Yields rows as the tests end. Raises ``RuntimeError`` where pytest fails before it runs any."""
    options = ["-q", "-m", mark, "-p", "no:cacheprovider", "-p", "benchmarks.gpu.gpu_test_rows"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    # tuning would build some hundred kernels more for models that run only here
    environment = {**os.environ, "TRITON_INTERPRET": "0", "FASTGEN_AUTOTUNE": "0"}
    pipe, said = subprocess.PIPE, []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            try:
                yield json.loads(line)
            except ValueError:
                said.append(line)
    if tests.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with status {tests.returncode}: {''.join(said)[-500:]}")
