"""Runs one part in this process: `python -m benchmarks.gpu.part NAME [--toy]` prints its rows as lines of JSON.

The first line has the machine's current limits. An error ends the part with a line that has its message.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.gpu.measuring import Bench, Row, Rows, clocks, make_bench

# By name, in the order in which they run: the module, and the seconds that it should have.
PARTS: dict[str, tuple[str, float]] = {
    "tests": ("gpu_tests", 150),
    "decode": ("steps", 180),
    "profile": ("step_profile", 60),
    "splitfuse": ("splitfuse", 110),
    "attention": ("attention", 150),
    "elementwise": ("elementwise", 60),
    "start": ("start", 180),
    "transformers": ("transformers_batching", 130),
    "linear": ("few_row_linear", 120),
    "moe": ("moe", 90),
    "sampling": ("sampling", 60),
    "http": ("served", 120),
    "sanitize": ("sanitize", 120),
    "long_tests": ("long_gpu_tests", 300),
}


def run(name: str, *, toy: bool, say: Callable[[Row], None]) -> bool:
    """Runs a part and passes each row to ``say``; returns true if it finished."""
    module, _ = PARTS[name]
    try:
        bench = make_bench(toy=toy)
        say({"limits": asdict(bench.limits), "clocks": None if toy else clocks()})
        for row in _rows(module, bench):
            say(row)
    except ImportError as error:  # an extra is not installed
        say({"case": "all of it", "left_out": f"{error}"})
    except Exception as error:
        say({"case": "the rest of it", "error": f"{type(error).__name__}: {error}"})
        return False
    return True


def _rows(module: str, bench: Bench) -> Rows:
    rows: Rows = importlib.import_module(f"benchmarks.gpu.{module}").measure(bench)
    return rows


def main(arguments: list[str]) -> int:
    ended = run(arguments[0], toy="--toy" in arguments, say=lambda row: print(json.dumps(row), flush=True))
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
