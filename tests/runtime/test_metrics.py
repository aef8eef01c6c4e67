"""An engine's counters, recounted from its answers and its schedules."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from fastgen.runtime.metrics import REQUEST_BOUNDS_S, STEP_BOUNDS_S, Histogram
from fastgen.runtime.requests.request import SequenceStatus
from tests.runtime.histories import History, random_history


def recount(values: list[float], bounds: tuple[float, ...]) -> tuple[int, ...]:
    edges = [float("-inf"), *bounds, float("inf")]
    return tuple(sum(low < value <= high for value in values) for low, high in pairwise(edges))


def same(found: Histogram, values: list[float], bounds: tuple[float, ...]) -> bool:
    assert found.bounds == bounds
    return found.counts == recount(values, bounds) and found.sum == pytest.approx(sum(values))


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_the_answers_and_the_schedules(seed: int) -> None:
    history = random_history(
        random.Random(seed), failures=0.05, prefix_caching=seed % 2 == 0, beams=True, drafts=seed % 3 == 0
    )
    history.live(150)
    found = history.engine.metrics.snapshot()
    answers = [output for generation in history.generations for output in generation.output().completions]
    steps = history.engine.recorder.recording("m").steps
    ran = [step for step in steps if step.ended_s is not None]

    assert found.requests_total == len(history.generations)
    assert found.sequences_finished_total == Counter(output.finish_reason for output in answers)
    assert found.prompt_tokens_total == sum(len(each.request.prompt_ids) for each in history.generations)
    assert found.generation_tokens_total == sum(len(output.token_ids) for output in answers)
    assert found.computed_tokens_total == sum(step.num_tokens for step in ran)
    assert found.padding_tokens_total == sum(step.size - step.num_tokens for step in ran)
    sequences = [seq for each in history.generations for seq in each.request.sequences]  # beams that gave none too
    assert found.preemptions_total == sum(seq.num_preemptions for seq in sequences)
    assert found.prefix_cache_lookup_tokens_total >= found.prefix_cache_hit_tokens_total
    assert found.prefix_cache_hit_tokens_total >= sum(output.metrics.cached_tokens for output in answers)

    ttfts = [output.metrics.ttft_s for output in answers if output.metrics.ttft_s is not None]
    assert same(found.ttft_seconds, ttfts, REQUEST_BOUNDS_S)
    assert same(found.gap_seconds, [gap for output in answers for gap in output.metrics.gaps_s], STEP_BOUNDS_S)
    scheduled = {int(entry.sequence.split(".")[0]) for step in steps for entry in step.entries}
    queues = [each.output().metrics.queue_s for each in history.generations if each.request.request_id in scheduled]
    assert same(found.queue_seconds, queues, REQUEST_BOUNDS_S)
    assert found.request_seconds.count == len(history.generations)
    for size, histogram in found.step_seconds.items():
        assert same(histogram, [s.end_s - s.began_s for s in ran if s.size == size], STEP_BOUNDS_S)
    assert sum(histogram.count for histogram in found.step_seconds.values()) == len(ran)


def test_histograms_tell_short_steps_and_long_waits_apart() -> None:
    assert (STEP_BOUNDS_S[0], STEP_BOUNDS_S[-1]) == (2**-13, 8)
    assert (REQUEST_BOUNDS_S[0], REQUEST_BOUNDS_S[-1]) == (2**-10, 1024)


def test_gauges_are_of_the_moment() -> None:
    history = History(random.Random(0), num_blocks=21, token_budget=8, max_num_seqs=2, prefix_caching=True)
    before = history.engine.metrics.snapshot()
    assert (before.sequences_running, before.sequences_waiting, before.kv_blocks, before.kv_blocks_held) == (
        0,
        0,
        20,
        0,
    )
    for _ in range(4):
        history.submit(8, max_new_tokens=9, ignore_eos=True)
    history.step()
    during = history.engine.metrics.snapshot()
    assert (during.sequences_running, during.sequences_waiting, during.kv_blocks_held) == (1, 3, 2)
    assert (during.requests_running, during.requests_waiting) == (1, 3)
    history.finish()
    after = history.engine.metrics.snapshot()
    assert (after.sequences_running, after.sequences_waiting, after.kv_blocks_held) == (0, 0, 0)
    assert after.kv_blocks_cached == history.engine.scheduler.kv.pool.num_cached > 0
    assert during.requests_total == 4, "a snapshot does not move on"


def test_requests_are_counted_once_however_many_sequences_they_have() -> None:
    history = History(random.Random(0), num_blocks=60, token_budget=16, max_num_seqs=3, prefix_caching=True)
    history.submit(4, max_new_tokens=9, ignore_eos=True, n=2)
    for _ in range(3):
        history.submit(4, max_new_tokens=9, ignore_eos=True, n=3)
    seen = set()
    while history.engine.has_work:
        found = history.engine.metrics.snapshot()
        statuses = [{seq.status for seq in each.request.sequences} for each in history.generations if not each.finished]
        num_running = sum(SequenceStatus.RUNNING in of for of in statuses)
        assert (found.requests_running, found.requests_waiting) == (num_running, len(statuses) - num_running)
        seen.add((found.requests_running, found.sequences_running))
        history.step()
    assert {(0, 0), (3, 3), (2, 3)} <= seen, "slots of different requests, and two of one"


def test_quantiles_are_bounds_that_enough_values_stay_below() -> None:
    histogram = Histogram(bounds=(1.0, 2.0, 4.0), counts=(5, 3, 1, 1), sum=20.0)
    assert (histogram.count, histogram.mean) == (10, 2.0)
    found = [histogram.quantile(share) for share in (0.0, 0.5, 0.51, 0.8, 0.9, 0.91, 1.0)]
    assert found == [1.0, 1.0, 2.0, 2.0, 4.0, float("inf"), float("inf")]
    empty = Histogram(bounds=(1.0,), counts=(0, 0), sum=0.0)
    assert (empty.mean, empty.quantile(0.5)) == (None, None)
