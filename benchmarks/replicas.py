"""Measures what replicas cost beside a single server: throughput and the time to the first token of both, in one run.

``python -m benchmarks.replicas [--models MODELS] [--rounds N] [--output FILE]`` starts two servers in every round,
``fastgen serve`` and ``fastgen serve --replicas 1``. Both have one engine with one thread for kernels; the difference
is the way of requests and tokens between the server and its replica. In a round the two take several turns, one while
the other has no requests, in an order that alternates. Every answer of the one is compared with the other's.

Throughput is that of 32 streams with 64 tokens of prompt and 128 of answer, from the first request to the last answer.
There are as many requests as take the single server five seconds, at least 32. A turn is steady by the same rule as a
round of ``benchmarks.serving``, and the median over at least six steady ones is printed, with the least and the
greatest. The time to the first token is that of single streams to an idle server, one to each in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import fastgen
from benchmarks.cpu.calibration import Calibration
from benchmarks.cpu.evidence import Data, Figure, Lack, evidence
from benchmarks.cpu.models import write_model
from benchmarks.cpu.results import commit, now
from benchmarks.new_file import new_file
from benchmarks.serving import (
    FLAGS,
    KINDS,
    NUM_SINGLE,
    Throughput,
    http_first_token_s,
    http_throughput,
    is_steady_round,
    prompts,
    served,
    shown,
)
from fastgen.lab.machine import processor

NUM_STREAMS = 32
# Turns that each pair of servers takes, and the least seconds of a run.
NUM_TURNS = 5
RUN_S = 5.0
SIDES = {"single": FLAGS, "replicas": (*FLAGS, "--replicas", "1")}


def measure(model: str, entry: Data, calibration: Calibration) -> None:
    """Adds one round to ``entry``. Raises ``RuntimeError`` where answers differ."""
    with served(model, SIDES["single"]) as single, served(model, SIDES["replicas"]) as replicas:
        ports = {"single": single, "replicas": replicas}
        speeds = [throughput(port, model, NUM_STREAMS).tokens_per_s for port in ports.values()]
        num_streams_s = speeds[0] / (NUM_STREAMS * KINDS["long"].num_answer)
        num_requests = NUM_STREAMS * max(1, round(RUN_S * num_streams_s))
        for _ in range(NUM_TURNS):
            sides = list(ports)[:: 1 if len(entry["turns"]) % 2 else -1]
            entry["turns"].append(turn(model, {side: ports[side] for side in sides}, num_requests, calibration))
        entry["first_token_ms"].append(
            [
                [round(1000 * http_first_token_s(port, model, prompt), 2) for port in ports.values()]
                for prompt in prompts(NUM_SINGLE, KINDS["long"].num_prompt)
            ]
        )


def turn(model: str, ports: dict[str, int], num_requests: int, calibration: Calibration) -> Data:
    """Returns one run of each server, in the order of ``ports``."""
    sides: dict[str, Data] = {}
    texts: list[list[str]] = []
    before = calibration.measure()
    for side, port in ports.items():
        measured = throughput(port, model, num_requests)
        after = calibration.measure()
        texts.append(measured.texts)
        sides[side] = {"tokens_per_s": round(measured.tokens_per_s, 1), "before": before, "after": after}
        before = after
    if texts[0] != texts[1]:
        raise RuntimeError("the replica answers otherwise than the single server")
    return {"date": now(), "commit": commit(), "requests": num_requests, "sides": sides}


def throughput(port: int, model: str, num_requests: int) -> Throughput:
    return http_throughput(port, model, num_requests, KINDS["long"], is_stream=True, num_at_a_time=NUM_STREAMS)


def loss(turns: list[Data]) -> Figure | Lack:
    """Returns the percent of the single server's throughput that the replica loses, by the rule of all figures."""
    steady = evidence(turns, is_steady_round, "turns")
    assert steady is not None

    def lost(found: Data) -> float:
        ours, single = (float(found["sides"][side]["tokens_per_s"]) for side in ("replicas", "single"))
        return 100 * (single - ours) / single

    return steady.figure(lost)


def first_token_added_ms(rounds: list[list[list[float]]]) -> list[float]:
    """Returns for each round by how much later first tokens come, as the median over its pairs."""
    return [statistics.median(ours - single for single, ours in pairs) for pairs in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny-llama,llama-110m", help="built-in ones, or of benchmarks.cpu.models")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=new_file)
    arguments = parser.parse_args()
    machine = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    about: Data = {"machine": machine, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "fastgen": fastgen.__version__}
    about |= {"ray": version("ray"), "commit": commit(), "streams": NUM_STREAMS}
    calibration = Calibration(os.cpu_count() or 1)
    entries: list[Data] = []
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.models.split(","):
            model = str(write_model(name, Path(directory))) if name.startswith("llama-") else name
            entry: Data = {"model": name, "turns": [], "first_token_ms": []}
            entries.append(entry)
            for number in range(arguments.rounds):
                measure(model, entry, calibration)
                for each in entry["turns"][-NUM_TURNS:]:
                    speeds = {side: found["tokens_per_s"] for side, found in each["sides"].items()}
                    is_steady = "steady" if is_steady_round(each) else "not steady"
                    print(f"{name} round {number + 1}: {speeds}, {is_steady}", file=sys.stderr, flush=True)
                if arguments.output is not None:  # after every round, so that nothing is lost
                    arguments.output.write_text(json.dumps(about | {"models": entries}, indent=1) + "\n")
            added = first_token_added_ms(entry["first_token_ms"])
            print(
                f"{name}: replicas lose {shown(loss(entry['turns']))}; the first token comes "
                f"{statistics.median(added):.2f} ms later ({min(added):.2f} to {max(added):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
