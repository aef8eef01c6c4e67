"""Measures what replicas cost beside a single server: throughput and the time to the first token of both, in one run.

``python -m benchmarks.replicas [--models MODELS] [--rounds N] [--output FILE]`` starts two servers in every round,
``fastgen serve`` and ``fastgen serve --replicas 1``, which take turns while the other has no requests. Both have one
engine with one thread for kernels; the difference is the way of requests through Ray Serve, and of tokens through the
replica. Every answer of the one is compared with the other's.

Throughput is that of 32 streams with 64 tokens of prompt and 128 of answer, from the first request to the last answer.
The time to the first token is that of single streams to an idle server, one to each in turn. Rounds are steady by the
same rule as those of ``benchmarks.serving``, and the median over at least six steady ones is printed, with the least
and the greatest.
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
from benchmarks.scheduler import processor
from benchmarks.serving import (
    FLAGS,
    KINDS,
    NUM_SINGLE,
    http_first_token_s,
    http_throughput,
    is_steady_round,
    prompts,
    served,
    shown,
)

NUM_STREAMS = 32
NUM_REQUESTS = 96
SIDES = {"single": FLAGS, "replicas": (*FLAGS, "--replicas", "1")}


def measure(model: str, number: int, calibration: Calibration) -> Data:
    """Returns round ``number``. Raises ``RuntimeError`` where answers differ."""
    kind = KINDS["long"]
    found: Data = {"date": now(), "commit": commit(), "sides": {}}
    texts: dict[str, list[str]] = {}
    with served(model, SIDES["single"]) as single, served(model, SIDES["replicas"]) as replicas:
        ports = {"single": single, "replicas": replicas}
        before = calibration.measure()
        for side in list(ports)[:: 1 if number % 2 else -1]:
            measured = http_throughput(
                ports[side], model, NUM_REQUESTS, kind, is_stream=True, num_at_a_time=NUM_STREAMS
            )
            after = calibration.measure()
            texts[side] = measured.texts
            tokens_per_s = round(measured.tokens_per_s, 1)
            found["sides"][side] = {"tokens_per_s": tokens_per_s, "before": before, "after": after}
            before = after
        found["first_token_ms"] = [
            [round(1000 * http_first_token_s(port, model, prompt), 2) for port in ports.values()]
            for prompt in prompts(NUM_SINGLE, kind.num_prompt)
        ]
    if texts["single"] != texts["replicas"]:
        raise RuntimeError("the replica answers otherwise than the single server")
    return found


def loss(rounds: list[Data]) -> Figure | Lack:
    """Returns the percent of the single server's throughput that the replica loses, by the rule of all figures."""
    steady = evidence(rounds, is_steady_round, "rounds")
    assert steady is not None

    def lost(found: Data) -> float:
        ours, single = (float(found["sides"][side]["tokens_per_s"]) for side in ("replicas", "single"))
        return 100 * (single - ours) / single

    return steady.figure(lost)


def first_token_added_ms(rounds: list[Data]) -> list[float]:
    """Returns for each round by how much later first tokens come, as the median over pairs."""
    return [statistics.median(ours - single for single, ours in found["first_token_ms"]) for found in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny-llama,llama-110m", help="built-in ones, or of benchmarks.cpu.models")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    machine = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    about = {"machine": machine, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "fastgen": fastgen.__version__}
    about |= {"ray": version("ray"), "commit": commit(), "streams": NUM_STREAMS, "requests": NUM_REQUESTS}
    calibration = Calibration(os.cpu_count() or 1)
    entries: list[Data] = []
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.models.split(","):
            model = str(write_model(name, Path(directory))) if name.startswith("llama-") else name
            rounds: list[Data] = []
            entries.append({"model": name, "rounds": rounds})
            for number in range(arguments.rounds):
                rounds.append(measure(model, number, calibration))
                speeds = {side: each["tokens_per_s"] for side, each in rounds[-1]["sides"].items()}
                print(f"{name} round {number + 1}: {speeds}", file=sys.stderr, flush=True)
                if arguments.output is not None:  # after every round, so that nothing is lost
                    arguments.output.write_text(json.dumps(about | {"models": entries}, indent=1) + "\n")
            added = first_token_added_ms(rounds)
            print(
                f"{name}: replicas lose {shown(loss(rounds))}; the first token comes {statistics.median(added):.2f} ms "
                f"later ({min(added):.2f} to {max(added):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
