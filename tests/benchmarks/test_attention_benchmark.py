"""The attention benchmark, as far as it runs without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "attention.py"


def run(*arguments: str, interpret: bool, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FASTGEN_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_the_numeric_gate_runs_interpreted(tmp_path: Path) -> None:
    done = run("--toy", interpret=True, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("numeric gate passed")


def test_it_says_what_it_lacks(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.fail("run this where there is no GPU: `-m 'not gpu'` on a machine with one measures instead")
    done = run("--decodes", "2x64", "--prompts", "128", interpret=False, cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU here")
    assert run("--prompts", "many", interpret=False, cache=tmp_path).returncode == 2
