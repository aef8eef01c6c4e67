"""Measures where the processor time of a request goes, in a single server and in one replica behind a server.

``python -m benchmarks.processor_time --output FILE`` starts both servers of ``benchmarks.replicas`` in every round and
sends them the same streams in turns. The time of each process is what Linux counts for its threads, so other work on
the machine adds little to it. It also measures what all processes take while nothing is asked. With
``--ray-defaults`` Ray's processes have the settings that Ray gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.cpu.evidence import Data
from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from benchmarks.replicas import NUM_STREAMS, SIDES, throughput
from benchmarks.serving import served
from fastgen.lab.machine import processor

MODEL, NUM_REQUESTS, NUM_TURNS, IDLE_S = "tiny-llama", 256, 4, 10.0
# Parts of command lines that tell processes apart, in the order in which they are looked for. All others are Ray's.
NAMES = {
    "fastgen.serving.engine.process": "engine",
    "replicas.ingress_process": "server",
    "ServeReplica:fastgen:Replicas": "replica's actor",
    "ServeReplica:fastgen:Ingress": "ingress",
    "fastgen serve": "command",
}
RAY_DEFAULTS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "100",
    "RAY_enable_metrics_collection": "1",
}


def processor_ms() -> Counter[str]:
    """Returns the milliseconds that the processes which this one has started have taken so far, by name."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, left = Counter[str](), [os.getpid()]
    while left:
        for child in children.get(left.pop(), ()):
            left.append(child)
            with suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                name = next((name for part, name in NAMES.items() if part in command), "Ray")
                for thread in Path(f"/proc/{child}/task").glob("*/schedstat"):
                    found[name] += int(thread.read_text().split()[0]) / 1e6  # type: ignore[assignment]
    return found


def measure(side: str) -> Data:
    """Returns the milliseconds of a request in each process, turn by turn, and those of a second without requests."""
    turns = []
    with served(MODEL, SIDES[side]) as port:
        throughput(port, MODEL, NUM_STREAMS)
        for _ in range(NUM_TURNS):
            before = processor_ms()
            throughput(port, MODEL, NUM_REQUESTS)
            turns.append(_per(before, NUM_REQUESTS))
        before = processor_ms()
        time.sleep(IDLE_S)
        idle = _per(before, IDLE_S)
    return {"ms_per_request": turns, "idle_ms_per_s": idle}


def _per(before: Counter[str], number: float) -> dict[str, float]:
    return {name: round((ms - before[name]) / number, 3) for name, ms in processor_ms().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ray-defaults", action="store_true")
    parser.add_argument("--output", type=new_file, required=True)
    arguments = parser.parse_args()
    if arguments.ray_defaults:
        os.environ.update(RAY_DEFAULTS)
    machine = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    content = {
        "machine": machine,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "model": MODEL,
        "streams": NUM_STREAMS,
        "ray_defaults": arguments.ray_defaults,
        "rounds": [],
    }
    for _ in range(arguments.rounds):
        content["rounds"].append({side: measure(side) for side in SIDES})
        print(content["rounds"][-1], file=sys.stderr, flush=True)
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
