"""Random requests of every kind against an engine whose KV cache is too small, for as long as one likes.

Requests are drawn from a pool whose answers alone are known. They come, are cancelled and run out of time as the draw
has it, under any priority, on a clock that the steps move on. After each step all owners of blocks and slots agree;
each answer is the one that its request gets alone, or its beginning if the request was ended early; no request waits
for longer than a bounded number of steps; in the end nothing is held.

By itself, ``python -m tests.runtime.soak --requests 20000 --output FILE`` runs all scenarios and writes what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import transformers

import fastgen
from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from fastgen import GenerationOutput, SamplingParams
from fastgen.lab.machine import processor
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from tests.reference import randomise, save
from tests.runtime.checkpoints import VOCAB_SIZE, save_checkpoint, save_tokenizer
from tests.runtime.test_same_answer import num_certain_tokens
from tests.runtime.test_same_answer_cpp import FAMILIES, SIZES

STEP_S = 0.01
# That a request may take from its submission to its end, with as many others as there may be at once.
MOST_STEPS = 2000
MOST_OPEN = 24
KINDS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 9},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02, "n": 3},
    {"temperature": 1.1, "n": 2, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {5: 4.0, 17: -100.0}, "min_new_tokens": 2},
    {"stop": ["a", "th"]},
    {"temperature": 1.0, "stop_token_ids": [7, 9, 30]},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"beam_width": 3, "n": 2, "length_penalty": 0.6},
    {"beam_width": 4, "n": 4, "early_stopping": True, "logprobs": 1},
    {"response_format": {"type": "regex", "pattern": "(cat|dog|the )+"}},
    {"response_format": {"type": "regex", "pattern": "[a-m]{3,9}"}, "temperature": 1.0, "n": 2},
    {"response_format": {"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}, "temperature": 0.8},
]


@dataclass(frozen=True)
class Scenario:
    """A model, and how it is loaded. ``exact`` ones give the same bits beside any requests; others keep to margins."""

    family: str
    load: dict[str, Any]
    exact: bool = True


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario("llama", {"target": "cpp", "max_num_seqs": 8, "token_budget": 40, "block_size": 4}),
    "window": Scenario("mistral", {"target": "cpp", "max_num_seqs": 24, "token_budget": 72, "block_size": 8}),
    "two groups": Scenario(
        "Gemma2", {"target": "cpp", "dtype": "bfloat16", "max_num_seqs": 16, "token_budget": 40, "block_size": 8}
    ),
    "experts": Scenario("Qwen3Moe", {"target": "cpp", "quantize": "int4", "max_num_seqs": 7, "token_budget": 17}),
    "latent": Scenario("DeepseekV3", {"target": "cpp", "max_num_seqs": 8, "token_budget": 33, "block_size": 2}),
    "drafts": Scenario(
        "llama",
        {"target": "cpp", "max_num_seqs": 8, "token_budget": 40, "block_size": 4, "speculative": "ngram"},
    ),
    "drafts within a window": Scenario(
        "mistral",
        {"target": "cpp", "max_num_seqs": 24, "token_budget": 72, "block_size": 8, "speculative": "ngram"},
    ),
    "static": Scenario("llama", {"target": "cpp", "max_num_seqs": 8, "token_budget": 40, "policy": "static"}),
    "dynamic": Scenario("mistral", {"target": "cpp", "max_num_seqs": 16, "token_budget": 60, "policy": "dynamic"}),
    "orca": Scenario("mistral", {"target": "cpp", "max_num_seqs": 16, "token_budget": 60, "policy": "orca"}),
    "prompts first": Scenario("llama", {"target": "cpp", "max_num_seqs": 8, "policy": "prefill_first"}),
    "reference": Scenario("llama", {"target": "torch", "max_num_seqs": 8, "token_budget": 24, "block_size": 4}, False),
}


@dataclass(frozen=True)
class Drawn:
    """A request of the pool, and its answer alone."""

    prompt: list[int]
    sampling: SamplingParams
    alone: GenerationOutput


def make_checkpoint(family: str, directory: Path) -> Path:
    """Tiny, with a vocabulary of some letters."""
    if family in FAMILIES:
        prefix, more = FAMILIES[family]
        config = getattr(transformers, f"{prefix}Config")(**(SIZES | more | {"vocab_size": VOCAB_SIZE}))
        config._experts_implementation = "eager"
        model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager")
        save(randomise(model, seed=3), directory)
    else:
        save_checkpoint(family, directory)
    save_tokenizer(directory)
    return directory


def draw_requests(rng: random.Random, count: int, *, exact: bool) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts of which many begin alike; of what the parameters know, every kind."""
    heads = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (4, 11, 16, 30)]
    kinds = KINDS if exact else [{"ignore_eos": True}, {"ignore_eos": True, "temperature": 0.8}]  # margins are known
    for index in range(count):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.2:
            own = (own[:3] * 10)[: rng.randint(6, 30)]  # repeats itself
        kind = kinds[index % len(kinds)]
        new_tokens = rng.randint(kind.get("min_new_tokens", 1), 16)
        seed = {"seed": rng.randrange(2**40)} if kind.get("temperature") else {}
        head = rng.choice(heads) if rng.random() < 0.6 else []
        yield head + own, SamplingParams(**kind, **seed, max_new_tokens=new_tokens)


def draw_pool(directory: Path, scenario: Scenario, rng: random.Random, count: int) -> list[Drawn]:
    """Answers of each request alone, by an engine with room for everything and nothing to hurry it."""
    load = {name: scenario.load[name] for name in ("target", "dtype", "quantize") if name in scenario.load}
    pool = []
    with fastgen.load(directory, prefix_caching=False, max_num_seqs=8, num_threads=1, **load) as llm:
        for prompt, sampling in draw_requests(rng, count, exact=scenario.exact):
            asked = sampling if scenario.exact else replace(sampling, logprobs=llm.spec.vocab_size)
            pool.append(Drawn(prompt, sampling, llm.generate(prompt, asked)))
    return pool


def load_cramped(directory: Path, scenario: Scenario, pool: list[Drawn]) -> LLM:
    """An engine with a cache for little more than the largest request."""
    with fastgen.load(directory, **scenario.load, num_threads=1) as roomy:
        assert roomy._engine is not None
        scheduler = roomy._engine.scheduler
        block_bytes = roomy._engine.runner.kv_cache.size_bytes // roomy.config.num_blocks
        needed = 0
        for drawn in pool:
            num_prompt, sampling = len(drawn.prompt), drawn.sampling
            num_tokens = num_prompt + sampling.max_new_tokens - 1
            needed = max(needed, scheduler.kv.capacity.blocks_needed(num_tokens))
            needed = max(needed, scheduler.forks.blocks_needed(num_prompt, num_tokens, sampling.beam_width))
    num_blocks = 1 + needed + needed // 8  # one is for padding
    return fastgen.load(directory, **scenario.load, num_threads=1, kv_cache_memory=num_blocks * block_bytes)


class Soak:
    """One engine's scenario over ``pool``. ``exact`` as in :class:`Scenario`."""

    def __init__(self, engine: Engine, pool: list[Drawn], rng: random.Random, *, exact: bool):
        self.engine, self.pool, self.rng, self.exact = engine, pool, rng, exact
        self.now_s, self.num_steps, self.longest = 0.0, 0, 0
        self.happened: Counter[str] = Counter()
        self._open: dict[Generation, tuple[Drawn, int]] = {}
        engine.clock = lambda: self.now_s

    def run(self, num_requests: int, report: Callable[[int], None] = lambda count: None) -> None:
        num_submitted = 0
        while num_submitted < num_requests or self._open:
            for _ in range(self.rng.choice((0, 0, 1, 1, 2, 5))):
                if num_submitted < num_requests and len(self._open) < MOST_OPEN:
                    self._submit()
                    num_submitted += 1
            if self._open and self.rng.random() < 0.02:
                self.engine.cancel(self.rng.choice(list(self._open)))
            self.engine.step()
            self.num_steps += 1
            self.now_s += STEP_S
            self.engine.check_integrity()
            self._look_at_finished()
            report(num_submitted)
        pool = self.engine.scheduler.kv.pool
        assert not self.engine.has_work
        assert pool.num_free == pool.capacity, f"{pool.capacity - pool.num_free} blocks leaked"

    def _submit(self) -> None:
        drawn = self.rng.choice(self.pool)
        changes: dict[str, Any] = {"priority": self.rng.choice((0, 0, 0, -1, 2))}
        if self.rng.random() < 0.03:
            changes["timeout_s"] = self.rng.choice((0.0, 0.05, 0.3)) + STEP_S / 2
        generation = self.engine.submit(drawn.prompt, replace(drawn.sampling, **changes))
        self._open[generation] = (drawn, self.num_steps)

    def _look_at_finished(self) -> None:
        for generation, (drawn, since) in list(self._open.items()):
            waited = self.num_steps - since
            if generation.finished:
                del self._open[generation]
                self.longest = max(self.longest, waited)
                self._check(generation.output(), drawn)
            else:
                assert waited <= MOST_STEPS, f"{generation.request} starves: {waited} steps"

    def _check(self, output: GenerationOutput, drawn: Drawn) -> None:
        cut = [each.finish_reason for each in output.completions if each.finish_reason in ("cancelled", "timeout")]
        self.happened["requests"] += 1
        self.happened[cut[0] if cut else "finished"] += 1
        self.happened["tokens"] += sum(len(each.token_ids) for each in output.completions)
        self.happened["preemptions"] += sum(each.metrics.preemptions for each in output.completions)
        self.happened["cached tokens"] += output.metrics.cached_tokens
        self.happened["accepted drafts"] += sum(each.metrics.accepted_drafts for each in output.completions)
        self.happened["beam searches"] += drawn.sampling.beam_width > 1
        self.happened["constrained"] += drawn.sampling.response_format is not None
        self.happened["several completions"] += drawn.sampling.n > 1
        pairs = list(zip(output.completions, drawn.alone.completions, strict=True))
        if cut:
            if drawn.sampling.beam_width == 1:  # the best beams so far need not be the beginnings of the best
                for one, other in pairs:
                    count = len(one.token_ids) if self.exact else num_certain_tokens(other, drawn.sampling)
                    assert one.token_ids[:count] == other.token_ids[: min(count, len(one.token_ids))], drawn
        elif self.exact:
            assert [_facts(one) for one, _ in pairs] == [_facts(other) for _, other in pairs], drawn
        else:
            for one, other in pairs:
                count = num_certain_tokens(other, drawn.sampling)
                assert one.token_ids[:count] == other.token_ids[:count], drawn


def _facts(output: GenerationOutput) -> tuple[Any, ...]:
    facts = (output.token_ids, output.text, output.finish_reason, output.error, output.logprobs, output.prompt_logprobs)
    return (*facts, output.score)


def run_scenario(
    name: str, directory: Path, *, num_requests: int, pool_size: int, seed: int, talk: bool
) -> dict[str, Any]:
    """Runs a scenario and returns what happened."""
    scenario, rng = SCENARIOS[name], random.Random(f"{name} {seed}")
    model = make_checkpoint(scenario.family, directory / name.replace(" ", "-"))
    pool = draw_pool(model, scenario, rng, pool_size)

    def report(count: int) -> None:
        if talk and soak.num_steps % 2000 == 0:
            print(f"{name}: {count:,} of {num_requests:,} requests, {soak.num_steps:,} steps", flush=True)

    start = time.perf_counter()
    with load_cramped(model, scenario, pool) as llm:
        assert llm._engine is not None
        soak = Soak(llm._engine, pool, rng, exact=scenario.exact)
        soak.run(num_requests, report)
        statistics = llm.metrics()
        blocks = llm.config.num_blocks - 1
    seconds = round(time.perf_counter() - start, 1)
    about = {"family": scenario.family, "load": scenario.load, "kv_blocks": blocks, "distinct_requests": pool_size}
    happened = {key.replace(" ", "_"): count for key, count in sorted(soak.happened.items())}
    evictions = statistics.prefix_cache_evictions_total
    steps = {"steps": soak.num_steps, "longest_wait_steps": soak.longest, "prefix_cache_evictions": evictions}
    return about | happened | steps | {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="over all scenarios")
    parser.add_argument("--pool", type=int, default=300, help="distinct requests of a scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=new_file, help="a JSON file")
    given = parser.parse_args()
    about: dict[str, Any] = {
        "what": "random requests, a KV cache too small for comfort, every answer checked: tests/runtime/soak.py",
        "date": datetime.now(UTC).date().isoformat(),
        "fastgen": fastgen.__version__,
        "commit": commit(),
        "machine": {"processor": processor(), "cores": os.cpu_count()},
    }
    share = -(-given.requests // len(SCENARIOS))
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in SCENARIOS:
            sizes = {"num_requests": share, "pool_size": given.pool, "seed": given.seed}
            found[name] = run_scenario(name, Path(directory), **sizes, talk=True)
            print(f"{name}: {found[name]}", flush=True)
    about |= {"requests": share * len(SCENARIOS), "seed": given.seed, "kinds_of_requests": KINDS}
    if given.output is not None:
        given.output.write_text(json.dumps(about | {"scenarios": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
