"""Intervals, compared with formulas, with a plain bootstrap, and with what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from fastgen.lab.metrics import intervals
from fastgen.lab.metrics.intervals import latency_intervals, rate_intervals, wilson
from fastgen.lab.metrics.percentiles import percentile, samples_needed
from fastgen.lab.metrics.samples import Samples, samples


def drawn_samples(num_requests: int, num_values: int, seed: int) -> Samples:
    """Returns values that are alike within a request."""
    draw = np.random.default_rng(seed)
    return samples(
        draw.exponential(1, draw.integers(1, num_values, endpoint=True)) + draw.normal() for _ in range(num_requests)
    )


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilsons_interval_is_that_of_the_literature(count: int, total: int, expected: tuple[float, float]) -> None:
    assert wilson(count, total) == pytest.approx(expected, abs=1e-4)
    low, high = wilson(total - count, total) or (0, 0)
    assert (1 - high, 1 - low) == pytest.approx(expected, abs=1e-4)


def test_wilsons_interval_of_nothing_is_none() -> None:
    assert wilson(0, 0) is None


def test_each_resample_has_the_statistics_of_the_values_that_it_repeats() -> None:
    found = drawn_samples(40, 8, seed=1)
    order = np.argsort(found.values, kind="stable")
    values, owners = found.values[order], found.owners[order]
    drawn = next(intervals._drawn_requests(found.num_requests, seed=0))
    assert drawn.shape == (intervals.NUM_RESAMPLES, 40)
    percents = (50, 90, 95, 99, 99.9)
    got = intervals._percentiles(values, owners, drawn, drawn @ np.bincount(owners), percents)
    for row in range(0, len(drawn), 37):
        repeated = np.repeat(values, drawn[row, owners].astype(int))
        assert [one[row] for one in got] == pytest.approx(np.percentile(repeated, percents))


def test_latency_intervals_are_the_middle_of_a_plain_bootstrap_by_request() -> None:
    found = drawn_samples(30, 6, seed=2)
    drawn = next(intervals._drawn_requests(found.num_requests, seed=5)).astype(int)
    plain = []
    for row in drawn:
        repeated = np.repeat(found.values, row[found.owners])
        plain.append([repeated.mean(), repeated.std(), *np.percentile(repeated, (50, 90))])
    expected = np.percentile(plain, (2.5, 97.5), axis=0).T
    assert np.array(latency_intervals(found, (50, 90), seed=5)) == pytest.approx(expected)


def test_requests_stay_together() -> None:
    draw = np.random.default_rng(0)
    values = [np.full(50, draw.normal()) for _ in range(40)]
    together = latency_intervals(samples(values), ())
    apart = latency_intervals(samples((one,) for each in values for one in each), ())
    assert together is not None
    assert apart is not None
    (low, high), (low_apart, high_apart) = together[0], apart[0]
    assert high - low > 4 * (high_apart - low_apart), "50 equal gaps of one answer are no 50 observations"


def test_the_interval_of_a_mean_contains_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        found = latency_intervals(samples((one,) for one in draw.exponential(1, 100)), (), seed=seed)
        assert found is not None
        hits += found[0][0] <= 1 <= found[0][1]
    assert 0.88 < hits / 200 < 0.99


def test_few_requests_have_no_interval() -> None:
    assert latency_intervals(drawn_samples(intervals.MIN_REQUESTS - 1, 5, seed=0), (50,)) is None
    assert latency_intervals(drawn_samples(intervals.MIN_REQUESTS, 5, seed=0), (50,)) is not None
    assert latency_intervals(samples([]), ()) is None


def test_memory_is_bounded_and_the_result_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drawn_samples(50, 3, seed=4)
    at_once = latency_intervals(found, (50, 99))
    monkeypatch.setattr(intervals, "_BATCH", 50 * 7)
    assert next(intervals._drawn_requests(50, 0)).shape == (7, 50)
    assert np.array(latency_intervals(found, (50, 99))) == pytest.approx(np.array(at_once))


def test_a_rate_contains_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        waits = np.random.default_rng(seed).exponential(0.5, 400)
        found = rate_intervals(np.ones((1, 400)), waits, block=20, seed=seed)
        assert found is not None
        hits += found[0][0] <= 2 <= found[0][1]
    assert 0.85 < hits / 200 < 0.99


def test_answers_that_end_together_widen_the_interval_of_a_rate() -> None:
    draw = np.random.default_rng(0)
    waits = np.zeros((50, 8))
    waits[:, 0] = draw.exponential(4, 50)
    in_blocks = rate_intervals(np.ones((1, 400)), waits.ravel(), block=20)
    one_by_one = rate_intervals(np.ones((1, 400)), waits.ravel(), block=1)
    assert in_blocks is not None
    assert one_by_one is not None
    assert in_blocks[0][0] < 2 < in_blocks[0][1]
    assert rate_intervals(np.ones((1, 79)), np.ones(79), block=20) is None, "fewer than four blocks"
    assert rate_intervals(np.ones((1, 100)), np.zeros(100), block=20) is None


@pytest.mark.parametrize(("percent", "needed"), [(50, 10), (90, 50), (95, 100), (99, 500), (99.9, 5000), (10, 50)])
def test_a_percentile_needs_five_samples_beyond_it(percent: float, needed: int) -> None:
    assert samples_needed(percent) == needed
    values = np.arange(needed, dtype=float)
    assert percentile(values, percent) == np.percentile(values, percent)
    assert percentile(values[1:], percent) is None
