"""Decoding with and without what few steps need: ``python -m benchmarks.cpu.ablations MODELS --json FILE``.

One process loads a model once and decodes the same requests in turns, each turn once in every arm:

- ``all``: as shipped.
- ``no early start``: the next step of steady decodes does not start before the host has looked at the last tokens.
- ``no steady decodes``: every step is built from its schedule.

Turns alternate which arm is first. All arms must give the same tokens. A turn keeps the mean seconds of a decode step
in each arm. The printed ratio is the median over turns of an arm's seconds over those of ``all``: above 1, the arm is
slower, and what it lacks is worth having.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.engines.fastgen_llm import OPTIONS
from benchmarks.cpu.models import SHAPES, write_model
from benchmarks.cpu.results import Results
from benchmarks.cpu.whole_model import list_of
from fastgen.compile.host import device
from fastgen.runtime.engine import Engine
from fastgen.runtime.step.steady_decodes import SteadyDecodes

ARMS = ("all", "no early start", "no steady decodes")
BUILTIN = "tiny-llama"
FORMATS = ("fp32", "int8", "int4")
NUM_REQUESTS = (1, 4)
# Steps that pass before the next ones start early.
NUM_UNTIMED = 40


class Arms:
    """Switches one engine between the arms."""

    def __init__(self, engine: Engine):
        self._runner, steady = engine.runner, engine.runner.steady
        assert steady is not None, "steps are steady on the cpp target only"
        self._steady: SteadyDecodes = steady
        self._early = steady.early

    def switch(self, arm: str) -> None:
        self._steady.forget()
        self._steady.early = None if arm == "no early start" else self._early
        self._runner.steady = None if arm == "no steady decodes" else self._steady


def decode(engine: Engine, num_requests: int, num_timed: int) -> tuple[float, list[list[int]]]:
    """Returns the mean seconds of a step with ``num_requests`` decodes, and the answers."""
    generator = random.Random(0)
    num_new = NUM_UNTIMED + num_timed + 1
    sampling = fastgen.SamplingParams(max_new_tokens=num_new, min_new_tokens=num_new, temperature=0, ignore_eos=True)
    generations = [
        engine.submit([generator.randrange(20, 250) for _ in range(16)], sampling) for _ in range(num_requests)
    ]
    seconds = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.mean(seconds[-num_timed:]), [each.output().token_ids for each in generations]


def measure(llm: fastgen.LLM, num_requests: int, num_timed: int, turn: int) -> dict[str, float]:
    """Returns the mean seconds of a step in each arm. Raises ``SystemExit`` if the arms give different tokens."""
    engine = llm._engine
    assert engine is not None
    arms, found = Arms(engine), {}
    answers: list[list[list[int]]] = []
    for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
        arms.switch(arm)
        found[arm], tokens = decode(engine, num_requests, num_timed)
        answers.append(tokens)
    arms.switch("all")
    if any(each != answers[0] for each in answers):
        raise SystemExit("the arms do not give the same tokens")
    return {arm: found[arm] for arm in ARMS}


def ratios(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Returns for each arm the median over turns of its seconds over those of ``all``."""
    return {arm: statistics.median(turn["step_s"][arm] / turn["step_s"]["all"] for turn in turns) for arm in ARMS[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the directory of random models; what is missing is written there")
    parser.add_argument("--json", type=Path, required=True, help="the file of results; an existing one is continued")
    parser.add_argument("--names", type=list_of((BUILTIN, *SHAPES)), default=[BUILTIN, "llama-110m"])
    parser.add_argument("--formats", type=list_of(FORMATS), default=list(FORMATS))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of a turn in each arm")
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    options = parser.parse_args()
    results = Results(options.json, options.num_threads)
    for name in options.names:
        model = name if name == BUILTIN else str(write_model(name, options.models))
        for weight_format in options.formats:
            dtype, quantize = OPTIONS[weight_format]
            with fastgen.load(
                model,
                target="cpp",
                dtype=dtype,
                quantize=quantize,
                num_threads=options.num_threads,
                token_budget=256,
                max_num_seqs=8,
                max_model_len=512,
                kv_cache_memory="256MiB",
                prefix_caching=False,
            ) as llm:
                for num_requests in NUM_REQUESTS:
                    key = {"model": name, "format": weight_format, "requests": num_requests}
                    for turn in range(results.num_turns(**key), options.turns):
                        step_s = measure(llm, num_requests, options.steps, turn)
                        results.add("turns", **key, turn=turn, step_s=step_s)
                    turns = [turn for turn in results.data["turns"] if key.items() <= turn.items()]
                    found = ", ".join(f"{arm} {ratio:.3f}" for arm, ratio in ratios(turns).items())
                    print(f"{name}, {weight_format}, {num_requests} requests, {len(turns)} turns: {found}", flush=True)


if __name__ == "__main__":
    main()
