"""Measures the start up to the first token of a Llama-2-7B shape, with an empty kernel cache and with a filled one.

Each start is a process of its own, with caches of its own for fastgen's kernels and for Triton's launcher. Weights are
drawn on the device, so no reading from disk is included; ``seconds`` are those of the process from start to end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.measuring import Bench, Row, Rows

_PROCESS = "benchmarks.gpu.start_process"


def measure(bench: Bench) -> Rows:
    with tempfile.TemporaryDirectory(prefix="fastgen-start-") as directory:
        for case in ("cold", "warm"):
            yield bench.attempt(case, lambda: start(Path(directory), toy=bench.toy))


def start(directory: Path, *, toy: bool) -> Row:
    """Runs one start with the caches in ``directory``. Raises ``RuntimeError`` with its output where it fails."""
    caches = {"FASTGEN_CACHE": str(directory / "kernels"), "TRITON_CACHE_DIR": str(directory / "triton")}
    command = [sys.executable, "-m", _PROCESS, *(["--toy"] if toy else [])]
    begin = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1])
    return {"seconds": seconds, "seconds_of": json.loads(done.stdout.splitlines()[-1])}
