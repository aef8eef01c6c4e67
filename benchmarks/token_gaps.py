"""Measures how a long prompt changes the gaps between tokens of running streams, with and without ``itl_target_ms``.

``python -m benchmarks.token_gaps [--model MODEL] [--rounds N] [--output FILE]`` runs streams on a real model; then a
prompt arrives. Each run records the gaps of the streams before the prompt and while it was computed, and how long that
took. In a round each target has one run, and so has an engine without one, so that a change of the machine's speed
affects all. What other virtual machines took of the processor meanwhile is recorded, too. The text does not matter: by
default the model has random weights and takes prompts of 60,000 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from fastgen.lab.machine import processor

# Each stream has so many tokens before the prompt comes, so that the model of step times has seen decodes.
WARM_UP_TOKENS = 60


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(1000 * share) - 1]


def stolen_s() -> float | None:
    """Returns the processor time that other virtual machines have taken from this one, summed over its cores, or
    ``None`` where the system does not report it.
    """
    try:
        times = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    return int(times[8]) / os.sysconf("SC_CLK_TCK")


def make_model(directory: Path) -> Path:
    """Writes a random Llama of 4 layers, 256 features and 65,536 positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=65_536,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def run(
    model: str | Path, *, itl_target_ms: float | None, num_streams: int, num_prompt: int, **options: Any
) -> dict[str, Any]:
    """Returns the figures of one run, in milliseconds and seconds."""
    rng = random.Random(0)
    with fastgen.load(model, max_num_seqs=num_streams + 1, itl_target_ms=itl_target_ms, **options) as llm:
        limit = llm.config.max_model_len
        num_prompt = min(num_prompt, limit - 1)

        def prompt(length: int) -> list[int]:
            return [rng.randrange(10, llm.spec.vocab_size) for _ in range(length)]

        # Sizes of steps that were never run are recorded first, so that it is not this that is measured.
        llm.generate(prompt(min(num_prompt, 4 * llm.config.token_budget)), max_new_tokens=1)
        streams = [llm.stream(prompt(32), max_new_tokens=limit - 32, ignore_eos=True) for _ in range(num_streams)]
        for _ in range(WARM_UP_TOKENS):  # the others run along
            next(streams[0])
        stolen_before_s = stolen_s()
        came_s = time.perf_counter()
        long = llm.stream(prompt(num_prompt), max_new_tokens=1, ignore_eos=True)
        next(long)
        done_s = time.perf_counter()
        stolen_after_s = stolen_s()
        next(streams[0])
        before, during = [], []
        for stream in streams:
            (completion,) = stream._generation.completions
            for earlier, later in zip(completion.token_times_s, completion.token_times_s[1:], strict=False):
                if earlier > came_s - 5 and later <= came_s:
                    before.append(1000 * (later - earlier))
                elif later > came_s and earlier < done_s:
                    during.append(1000 * (later - earlier))
            stream.close()
        p99_ms = percentile(during, 0.99)
        return {
            "itl_target_ms": itl_target_ms,
            "num_streams": num_streams,
            "prompt_tokens": num_prompt,
            "prompt_s": round(done_s - came_s, 3),
            "stolen_s": None if stolen_before_s is None else round((stolen_after_s or 0.0) - stolen_before_s, 2),
            "p50_before_ms": round(percentile(before, 0.5), 3),
            "p99_before_ms": round(percentile(before, 0.99), 3),
            "p50_ms": round(percentile(during, 0.5), 3),
            "p99_ms": round(p99_ms, 3),
            "max_ms": round(max(during), 3),
            "num_gaps": len(during),
            "p99_of_target": None if itl_target_ms is None else round(p99_ms / itl_target_ms, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=60_000, help="cut to what the model takes")
    parser.add_argument("--targets", type=float, nargs="+", default=[20.0, 30.0, 40.0], help="milliseconds")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6, help="runs of each target, and without one")
    parser.add_argument("--output", type=new_file)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "model": arguments.model or "random Llama, 4 layers of 256, 65,536 positions",
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or make_model(Path(directory))
        for number, itl_target_ms in itertools.product(range(1, arguments.rounds + 1), (None, *arguments.targets)):
            figures = run(
                model,
                itl_target_ms=itl_target_ms,
                num_streams=arguments.streams,
                num_prompt=arguments.prompt,
                token_budget=arguments.token_budget,
            )
            found["runs"].append({"round": number, **figures})
            print(json.dumps(found["runs"][-1]), flush=True)
            if arguments.output is not None:  # after every run, so that nothing is lost
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
