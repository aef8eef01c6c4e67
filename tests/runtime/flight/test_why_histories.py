"""The account of time over random histories: shares sum to the total, and times equal those of the answers."""

from __future__ import annotations

import math
import random
import statistics
from functools import cache

import pytest

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.flight import step_times
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.step_times import ExpectedTimes, measured_steps
from fastgen.runtime.flight.time_account import Span
from fastgen.runtime.flight.why import Why, why
from fastgen.runtime.flight.why_text import as_text
from tests.fast import cases
from tests.runtime.histories import random_history

SEEDS = cases(range(10), fast=range(5))


@cache  # tests read what it returns, and change nothing
def lived(seed: int, *, beams: bool = False) -> tuple[list[Generation], Recording]:
    history = random_history(
        random.Random(seed), failures=0.05, prefix_caching=seed % 2 == 0, beams=beams, drafts=seed % 3 == 0
    )
    history.live(150)
    return history.generations, history.engine.recorder.recording("m")


@cache
def explained(seed: int, *, beams: bool = False) -> dict[str, Why]:
    """Explains each sequence of a history. That takes longer than the history itself."""
    _, recording = lived(seed, beams=beams)
    return {name: why(recording, name) for name in names(recording)}


def names(recording: Recording) -> list[str]:
    return [f"{arrival.request}.{index}" for arrival in recording.arrivals.values() for index in range(arrival.n)]


def spans(facts: Why) -> list[Span]:
    found = [facts.first_token, facts.other_tokens, facts.worst_gap.span if facts.worst_gap else None]
    return [span for span in found if span is not None]


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_sum_to_the_whole(seed: int) -> None:
    for name, facts in explained(seed, beams=True).items():
        for span in spans(facts):
            assert all(share.seconds > 0 for share in span.shares)
            assert math.isclose(sum(share.seconds for share in span.shares), span.seconds, rel_tol=1e-9, abs_tol=1e-12)
            if span.shares:
                assert sum(span.percentages.values()) == 100
        assert name.split(".")[0] in as_text(facts)


def test_times_are_expected_where_there_are_enough_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _, recording = lived(0)
    steps = [step for step, _ in measured_steps(recording, ())]
    for least, is_known in ((len(steps), True), (len(steps) + 1, False)):
        monkeypatch.setattr(step_times, "_LEAST_STEPS", least)
        times = ExpectedTimes(recording)
        assert (times.of(steps[0]) is not None) == is_known


@pytest.mark.parametrize("seed", SEEDS)
def test_times_are_those_of_the_answers(seed: int) -> None:
    generations, _ = lived(seed)
    for generation in generations:
        queued = []
        for output in generation.output().completions:
            facts = explained(seed)[f"{output.request_id}.{output.index}"]
            metrics = output.metrics
            assert (facts.finish_reason, facts.new_tokens) == (output.finish_reason, len(output.token_ids))
            assert facts.ttft_s == metrics.ttft_s
            assert len(facts.preemptions) == metrics.preemptions
            assert facts.cached_tokens == metrics.cached_tokens
            if metrics.gaps_s:
                assert facts.worst_gap is not None
                assert facts.worst_gap.span.seconds == pytest.approx(max(metrics.gaps_s), rel=1e-12)
                assert facts.median_gap_s == statistics.median(metrics.gaps_s)
            queued.append(facts.queue_s)
        if any(each is not None for each in queued):
            assert min(each for each in queued if each is not None) == generation.output().metrics.queue_s


@pytest.mark.parametrize("seed", SEEDS)
def test_own_and_recomputed_time_recounted_token_by_token(seed: int) -> None:
    """Each token that a step computed for a sequence is worth its part of the step; a token computed before is
    recomputed.
    """
    _, recording = lived(seed)
    for name, facts in explained(seed).items():
        if facts.ttft_s is None:
            continue
        first_s = recording.arrival(name).clock_s + facts.ttft_s
        own = again = 0.0
        seen: set[int] = set()
        admitted = {step.step for step in recording.steps if any(each.sequence == name for each in step.admitted)}
        for step in recording.steps:
            entry = step.entry_of(name)
            if entry is None or step.ran_s is None or step.began_s > first_s:
                continue
            begins_s = step.scheduled_s if step.step in admitted else step.began_s
            a_token_s = (min(step.end_s, first_s) - begins_s) / step.num_tokens
            for position in range(entry.start, entry.start + entry.num_tokens):
                own += a_token_s * (position not in seen)
                again += a_token_s * (position in seen)
                seen.add(position)
        found = dict(facts.first_token.shares)
        assert found.get("own", 0.0) == pytest.approx(own, abs=1e-9)
        assert found.get("recomputing", 0.0) == pytest.approx(again, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_beam_searchs_times_are_those_of_its_answers(seed: int) -> None:
    generations, _ = lived(seed, beams=True)
    for generation in (generation for generation in generations if generation.request.has_beams):
        for output in generation.output().completions:
            facts = explained(seed, beams=True)[f"{output.request_id}.{output.index}"]
            assert (facts.ttft_s, facts.new_tokens) == (output.metrics.ttft_s, len(output.token_ids))
            assert (facts.worst_gap is None) == (not output.metrics.gaps_s)
