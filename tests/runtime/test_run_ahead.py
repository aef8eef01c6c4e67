"""Steps launched before the tokens of the steps before them are known: random histories give the answers that requests
get alone, the forward pass takes each token that the host does not know from the device, and a replay decides alike.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.flight.replay import first_difference
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.drafts import NgramDrafter
from tests.draws import number
from tests.runtime.histories import random_policy
from tests.runtime.remembering_device import AheadDevice, LostStepError, alone, build_engine
from tests.runtime.test_beam_histories import drawn_cache, drawn_request


class StepFailedError(Exception):
    """The error of a launch or a transfer that fails."""


def history(
    seed: int,
    *,
    error: type[BaseException] | None = None,
    max_recorded: int | None = None,
    postponed_share: float = 0.0,
    runs_ahead: bool = True,
) -> Counter[str]:
    """One history, checked all along; returns how often things happened. Now and then a part of a step raises
    ``error``. The recorder keeps ``max_recorded`` steps. A ``postponed_share`` of the tokens come a step later."""
    rng = random.Random(seed)
    requests = [drawn_request(rng) for _ in range(rng.randint(2, 14))]
    requests = [(prompt, replace(sampling, priority=rng.choice([0, 0, 1]))) for prompt, sampling in requests]
    max_num_seqs = rng.randint(5, 16)
    token_budget = max_num_seqs + rng.randint(0, 12)
    kv = drawn_cache(rng, requests, token_budget)
    engine = build_engine(
        kv,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        loses_step=lambda: error is not None and rng.random() < 0.02,
        postpones=lambda: postponed_share > 0 and rng.random() < postponed_share,
        runs_ahead=runs_ahead,
        policy=random_policy(rng),
        drafter=NgramDrafter(3) if rng.random() < 0.3 else None,
    )
    if max_recorded is not None:
        engine.recorder.max_steps = max_recorded
    device = engine.runner
    assert isinstance(device, AheadDevice) is runs_ahead
    if isinstance(device, AheadDevice):
        device.device.error = error or LostStepError
    happened: Counter[str] = Counter()
    generations: list[Generation] = []
    cancelled = set()
    while len(generations) < len(requests) or engine.has_work:
        act = rng.random()
        if len(generations) < len(requests) and act < 0.4:
            generations.append(engine.submit(*requests[len(generations)]))
        elif act > 0.98 and generations:
            generation = rng.choice(generations)
            if not generation.finished:
                cancelled.add(generation)
            engine.cancel(generation)
        else:
            with suppress(LostStepError):
                engine.step()
        engine.check_integrity()
    for generation, (prompt, sampling) in zip(generations, requests, strict=True):
        outputs = generation.output().completions
        expected = alone(prompt, sampling)
        has_failed = any(error is not None and error.__name__ in (output.error or "") for output in outputs)
        if generation not in cancelled and not has_failed:
            assert [(output.token_ids, output.score) for output in outputs] == expected
        elif sampling.beam_width == 1:
            for output, (token_ids, _) in zip(outputs, expected, strict=True):
                assert output.token_ids == token_ids[: len(output.token_ids)]
        happened["failed"] += has_failed
        happened["preemptions"] += sum(output.metrics.preemptions for output in outputs)
        happened["accepted drafts"] += sum(output.metrics.accepted_drafts for output in outputs)
    assert kv.pool.num_free == kv.pool.capacity
    recording = engine.recorder.recording("m")
    if error is not LostStepError:
        assert first_difference(recording) is None
    if error is None:
        happened["held back"] += sum(len(step.held_back or ()) for step in recording.steps)
        if postponed_share:
            happened["postponed"] += sum(len(step.postponed) for step in recording.steps)
        happened["steps"] += len(recording.steps)
    if isinstance(device, AheadDevice):
        happened["ahead"] += device.num_ahead
        happened["taken"] += device.num_taken
        happened["unused"] += device.num_unused
    happened["cancelled"] += len(cancelled)
    return happened


MANY = [range(first, first + 500) for first in range(30, 1530, 500)]


@pytest.mark.parametrize("seeds", [range(30), *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in MANY)])
def test_answers_are_those_of_each_alone(seeds: range) -> None:
    happened = sum(map(history, seeds), Counter[str]())
    assert not happened.pop("failed", 0)
    assert min(happened.values()) >= 5, happened
    assert happened["ahead"] > 0.5 * happened["steps"]


def test_a_sequence_that_ends_by_its_length_has_no_row_in_the_step_ahead() -> None:
    """It is held back at its last token, since the next step would compute a row for it in vain."""
    kv = KVCacheManager(40, 4, (None,), max_chunk=16)
    engine = build_engine(kv, token_budget=16, max_num_seqs=4, runs_ahead=True)
    for num_tokens in (1, 2, 5, 9):
        engine.submit([3, 4, 5], SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    while engine.has_work:
        engine.step()
    device = engine.runner
    assert isinstance(device, AheadDevice)
    assert device.num_ahead >= 7
    assert device.num_unused == 0
    steps = engine.recorder.recording("m").steps
    assert sum(len(step.held_back or ()) for step in steps) == 3  # at the very end nothing is launched


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_answers_are_the_same_where_tokens_are_postponed(runs_ahead: bool) -> None:
    happened, num_histories = Counter[str](), number(40, in_short=20)
    for seed in range(num_histories):
        happened += history(seed, postponed_share=0.3 if seed % 2 else 0.9, runs_ahead=runs_ahead)
    assert happened["postponed"] > 12 * num_histories
    assert not happened["failed"]
    assert happened["preemptions"] > 0.5 * num_histories


def test_a_ring_that_wrapped_is_replayed() -> None:
    happened = sum((history(seed, max_recorded=24) for seed in range(60, 80)), Counter[str]())
    assert happened["ahead"] > 100
    assert happened["held back"] > 20


def test_lost_steps_are_made_again() -> None:
    happened = sum((history(seed, error=LostStepError) for seed in range(30, 45)), Counter[str]())
    assert happened["ahead"] > 50
    assert not happened["failed"]


def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    happened = sum((history(seed, error=StepFailedError) for seed in range(50, 65)), Counter[str]())
    assert happened["ahead"] > 50
    assert happened["failed"] > 5
