"""Runs the tests of Triton kernels on the GPU, with a row for each: those marked `gpu`, and those marked `kernels`,
which run interpreted elsewhere. Only files that have such tests are collected. A toy only collects them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.measuring import Bench, Rows

ROOT = Path(__file__).parents[2]
_MOST_PROCESSES = 8  # each has a context on the GPU and builds kernels

MARKS = "gpu or (kernels and not slow)"
_SIGNS = ("mark.gpu", "mark.kernels", "triton_kernels")  # the last is a fixture, which marks its tests


def measure(bench: Bench, marks: str = MARKS) -> Rows:
    files = files_of(ROOT / "tests")
    if bench.toy:
        yield {"case": "collected", "tests": num_collected(files, marks)}
    else:
        yield from run(files, marks, "--device", "cuda")


def files_of(tests: Path) -> list[Path]:
    found = sorted(tests.rglob("test_*.py"))
    return [file for file in found if any(sign in file.read_text(encoding="utf-8") for sign in _SIGNS)]


def num_collected(files: list[Path], marks: str) -> int:
    """Returns how many tests would run. Raises ``RuntimeError`` where they cannot be collected."""
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--device", "cuda", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return sum("::" in line for line in done.stdout.splitlines())


def run(files: list[Path], marks: str, *more: str) -> Rows:
    """Yields rows as the tests end. Raises ``RuntimeError`` where pytest fails before it runs any.

    Where pytest-xdist is installed, several processes run them, since most of their time goes to building kernels.
    """
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "-p", "benchmarks.gpu.gpu_test_rows"]
    if importlib.util.find_spec("xdist"):
        options += ["-n", str(min(_MOST_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *options, *more, *map(str, files)]
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
