"""Runs NVIDIA's compute-sanitizer over small cases of every kernel: memcheck, racecheck and initcheck.

`python -m benchmarks.gpu.sanitize [TOOL…]` prints what each tool says; as a part of the benchmark it is a row for each
tool. Only reports that name one of fastgen's kernels count: initcheck also reports kernels of libraries.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu.measuring import Bench, Row, Rows

TOOLS = ("memcheck", "racecheck", "initcheck")
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_CASES = "benchmarks.gpu.small_cases"
_REPORT = re.compile(r"^=========\s+at (?:0x\w+ in )?(\w+)", re.MULTILINE)


def sanitizer() -> str:
    """Returns the path of compute-sanitizer. Raises ``ImportError`` where it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        raise ImportError("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    return found


def measure(bench: Bench) -> Rows:
    if bench.toy:
        kernels = run_cases([sys.executable, "-m", _CASES, "--toy"])[1]
        yield {"case": "small cases", "kernels": len(kernels)}
        return
    program = sanitizer()
    for tool in TOOLS:
        yield bench.attempt(tool, partial(checked, program, tool))


def checked(program: str, tool: str) -> Row:
    """Returns the row of a tool. Raises ``RuntimeError`` with the first report on a kernel of fastgen's."""
    said, kernels = run_cases([program, "--tool", tool, sys.executable, "-m", _CASES])
    places = _REPORT.findall(said)
    ours = [place for place in places if place in kernels]
    if ours:
        begin = said.index(ours[0])
        raise RuntimeError(f"{len(ours)} reports, the first: {said[max(0, begin - 200) : begin + 400]}")
    return {"kernels": len(kernels), "reports_on_libraries": len(places)}


def run_cases(command: list[str]) -> tuple[str, set[str]]:
    """Runs the small cases. Returns what was printed, and the names of the kernels that ran."""
    # With torch's cache of memory, a tool would see neither the end of a tensor nor that its memory is new.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    last = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("[")), None)
    if last is None:
        raise RuntimeError(f"the small cases ended with status {done.returncode}: {said[-500:]}")
    return said, set(json.loads(last))


def main(tools: list[str]) -> int:
    program, status = sanitizer(), 0
    for tool in tools or TOOLS:
        try:
            print(f"{tool}: {checked(program, tool)}", flush=True)
        except RuntimeError as error:
            print(f"{tool}: {error}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
