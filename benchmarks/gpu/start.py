"""Measures the start up to the first token of a Llama-2-7B shape, with a filled kernel cache and with an empty one.

Each start is a process of its own. The one with a filled cache takes this machine's, which a start before it fills; it
comes first, since kernels may have been built beforehand, and the other one builds them all. That one has caches of its
own for fastgen's kernels and for Triton's launcher. Weights are drawn on the device, so no reading from disk is
included; ``seconds`` are those of the process from start to end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.gpu.measuring import Bench, Row, Rows

_PROCESS = "benchmarks.gpu.start_process"


def measure(bench: Bench) -> Rows:
    yield bench.attempt("filling", lambda: start({}, toy=bench.toy))
    yield bench.attempt("warm", lambda: start({}, toy=bench.toy))
    with tempfile.TemporaryDirectory(prefix="fastgen-start-") as directory:
        caches = {"FASTGEN_CACHE": f"{directory}/kernels", "TRITON_CACHE_DIR": f"{directory}/triton"}
        yield bench.attempt("cold", lambda: start(caches, toy=bench.toy))


def start(caches: dict[str, str], *, toy: bool) -> Row:
    """Runs one start with these directories for caches. Raises ``RuntimeError`` with its output where it fails."""
    command = [sys.executable, "-m", _PROCESS, *(["--toy"] if toy else [])]
    begin = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1])
    return {"seconds": seconds, "seconds_of": json.loads(done.stdout.splitlines()[-1])}
