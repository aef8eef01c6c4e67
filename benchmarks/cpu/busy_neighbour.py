"""Measures what a process that keeps one core busy costs one stream of a whole model.

    python -m benchmarks.cpu.busy_neighbour MODELS/llama-110m --json FILE

One engine decodes one request, alternating between some tokens with the neighbour and some without. Two processes that
want the same core get half of it each, so of ``C`` cores ``C - 1/2`` are left. Work that is bound by cores then takes
at best ``C / (C - 1/2)`` times as long, 1.33 times on two. A pool whose threads wait for one another takes a multiple
of that, unless a thread that runs takes over the work of one that does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.engines.fastgen_llm import OPTIONS
from benchmarks.cpu.neighbour import Neighbour, neighbour_on
from benchmarks.cpu.results import about_this_run
from benchmarks.new_file import new_file
from fastgen.compile.host import device
from fastgen.runtime.engine import Engine

_NUM_PROMPT_TOKENS = 128
_NUM_UNTIMED = 16


def measure(model: Path, weight_format: str, neighbour: Neighbour, num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """Returns the median seconds a token takes, ``alone_s`` and ``beside_s``, and those of every round."""
    dtype, quantize = OPTIONS[weight_format]
    with fastgen.load(model, device="cpu", dtype=dtype, quantize=quantize, kv_cache_memory="512MiB") as llm:
        engine = llm._engine
        assert engine is not None
        num_new = 2 * num_rounds * num_tokens + _NUM_UNTIMED + 1
        generator = random.Random(0)
        prompt = [generator.randrange(300, 31_900) for _ in range(_NUM_PROMPT_TOKENS)]
        sampling = fastgen.SamplingParams(
            max_new_tokens=num_new, min_new_tokens=num_new, temperature=0, ignore_eos=True
        )
        generation = engine.submit(prompt, sampling)
        while len(generation.completions[0].token_ids) < _NUM_UNTIMED:
            engine.step()
        alone, beside = [], []
        for _ in range(num_rounds):
            alone.append(_step_seconds(engine, num_tokens))
            neighbour.resume()
            beside.append(_step_seconds(engine, num_tokens))
            neighbour.pause()
        engine.cancel_all()
    return {
        "format": weight_format,
        "alone_s": statistics.median(alone),
        "beside_s": statistics.median(beside),
        "samples": {"alone_s": alone, "beside_s": beside},
    }


def _step_seconds(engine: Engine, num_tokens: int) -> float:
    start = time.perf_counter()
    for _ in range(num_tokens):
        engine.step()
    return (time.perf_counter() - start) / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--busy-core", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="a round's, with the neighbour and again without")
    parser.add_argument("--json", type=new_file, help="write everything measured to this file")
    options = parser.parse_args()
    here = device.current("cpu")
    about = about_this_run(busy_core=options.busy_core, model=options.model.name)
    with neighbour_on(options.busy_core) as neighbour:
        found = [measure(options.model, each, neighbour, options.rounds, options.tokens) for each in options.formats]
    print(f"{here.name}, {here.num_cores} cores, one of them kept busy")
    print(f"{'format':17}{'alone, ms':>12}{'beside, ms':>12}{'times':>8}")
    for each in found:
        alone, beside = each["alone_s"], each["beside_s"]
        print(f"{each['format']:17}{1e3 * alone:12.2f}{1e3 * beside:12.2f}{beside / alone:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(about | {"formats": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
