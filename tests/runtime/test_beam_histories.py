"""Beams and several completions over random histories: a cache too small for comfort, cancelled requests, lost steps.

All owners' integrity is checked after each act, and every answer is the one that the request gets alone.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.forks import Forks
from fastgen.runtime.scheduling.running_set import RunningSet
from fastgen.runtime.scheduling.waiting_queue import WaitingQueue
from tests.runtime.remembering_device import VOCAB_SIZE, LostStepError, alone, build_engine, drawn_by


def drawn_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    shared = drawn_by([rng.randrange(2)], 99)
    prompt = [shared.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
    fields: dict[str, Any] = {"max_new_tokens": rng.randint(1, 12)}
    kind = rng.random()
    if kind < 0.5:
        width = rng.randint(2, 5)
        fields |= {
            "beam_width": width,
            "n": rng.randint(1, width),
            "length_penalty": rng.choice([1.0, 0.0, -1.0, 2.0]),
            "early_stopping": rng.choice([False, True, "never"]),
        }
    elif kind < 0.8:
        fields["n"] = rng.randint(2, 9)
    return prompt, SamplingParams(**fields)


def drawn_cache(rng: random.Random, requests: list[tuple[list[int], SamplingParams]], budget: int) -> KVCacheManager:
    """Little more than the largest of the requests needs to be served at all."""
    windows, block_size = rng.choice([(None,), (None,), (None, None), (7,), (None, 5)]), rng.choice([1, 2, 4])

    def cache(num_blocks: int) -> KVCacheManager:
        return KVCacheManager(num_blocks, block_size, windows, max_chunk=budget, prefix_caching=rng.random() < 0.7)

    large = cache(2)
    needed = 0
    for prompt, sampling in requests:
        num_tokens = len(prompt) + sampling.max_new_tokens - 1
        needed = max(needed, large.capacity.blocks_needed(num_tokens))
        forks = Forks(large, RunningSet(1), WaitingQueue())
        needed = max(needed, forks.blocks_needed(len(prompt), num_tokens, sampling.beam_width))
    return cache(1 + needed + rng.randint(0, needed // 2))


def history(seed: int) -> Counter[str]:
    """One history, checked all along; returns how often things happened."""
    rng = random.Random(seed)
    requests = [drawn_request(rng) for _ in range(rng.randint(2, 12))]
    max_num_seqs = rng.randint(5, 16)
    token_budget = max_num_seqs + rng.randint(0, 12)
    kv = drawn_cache(rng, requests, token_budget)
    engine = build_engine(
        kv, token_budget=token_budget, max_num_seqs=max_num_seqs, loses_step=lambda: rng.random() < 0.02
    )
    happened: Counter[str] = Counter()
    generations: list[Generation] = []
    cancelled = set()
    while len(generations) < len(requests) or engine.has_work:
        if len(generations) < len(requests) and rng.random() < 0.7:
            generations.append(engine.submit(*requests[len(generations)]))
        elif rng.random() < 0.02 and generations:
            generation = rng.choice(generations)
            if not generation.finished:
                cancelled.add(generation)
            engine.cancel(generation)
        else:
            with suppress(LostStepError):
                engine.step()
            happened["steps"] += 1
        engine.check_integrity()
        assert happened["steps"] < 3000, "some request starves"
    assert kv.pool.num_free == kv.pool.capacity
    for generation, request in zip(generations, requests, strict=True):
        given = generation.output().completions
        if generation not in cancelled:
            assert [(each.token_ids, each.score) for each in given] == alone(*request), request
        kind = "beams" if generation.request.has_beams else "others"
        happened[f"preempted {kind}"] += any(each.metrics.preemptions for each in given)
        happened["error"] += any(each.finish_reason == "error" for each in given)
        happened["cancelled"] += generation in cancelled
    return happened


def test_every_answer_is_the_one_a_request_gets_alone() -> None:
    happened = sum((history(seed) for seed in range(30)), Counter())
    assert all(happened[each] for each in ("preempted beams", "preempted others", "cancelled", "error")), happened


@pytest.mark.slow
def test_every_answer_over_many_histories() -> None:
    sum((history(seed) for seed in range(1000, 3000)), Counter())
