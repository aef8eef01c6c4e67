"""The rule by which a late load generator makes a run invalid."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastgen.lab.load.lag import LoopLag, lag_percentiles, why_invalid
from fastgen.lab.records import RequestRecord


def record(lag_s: float = 0.0, ttft_s: float = 0.1, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        request=0,
        num_prompt_tokens=1,
        num_new_tokens=1,
        due_s=1.0,
        sent_s=1.0 + lag_s,
        token_times_s=(1.0 + lag_s + ttft_s,),
        ended_s=2.0,
        error=error,
    )


def test_percentiles_are_values_that_were_measured() -> None:
    records = [record(number / 1000) for number in range(1, 101)]
    lag_s = lag_percentiles(records, [0.5])
    assert {name: round(value, 6) for name, value in lag_s.items()} == {
        "p50": 0.050,
        "p90": 0.090,
        "p99": 0.099,
        "loop_p50": 0.5,
        "loop_p90": 0.5,
        "loop_p99": 0.5,
    }
    assert lag_percentiles([], []) == {}


@pytest.mark.parametrize(
    ("lag_s", "ttft_s", "is_valid"),
    [(0.009, 0.001, True), (0.011, 0.05, False), (0.011, 0.2, True), (0.15, 1.0, False), (0.09, 1.0, True)],
)
@pytest.mark.parametrize("name", ["p99", "loop_p99"])
def test_ten_milliseconds_or_a_tenth_of_the_median_ttft(name: str, lag_s: float, ttft_s: float, is_valid: bool) -> None:
    assert (why_invalid({name: lag_s}, [record(ttft_s=ttft_s)]) is None) == is_valid


def test_without_first_tokens_the_bound_is_ten_milliseconds() -> None:
    reason = why_invalid({"p99": 0.02}, [record(ttft_s=100.0, error="no")])
    assert reason is not None
    assert "20.0 ms late (P99), more than the 10.0 ms" in reason


def test_a_long_stall_counts_for_all_the_ticks_that_it_covers() -> None:
    async def run() -> list[float]:
        lag = LoopLag()
        lag.start()
        await asyncio.sleep(0.05)
        time.sleep(0.5)
        await asyncio.sleep(0.05)
        lag.stop()
        return lag.samples_s

    samples_s = asyncio.run(run())
    assert max(samples_s) >= 0.45
    assert sum(sample >= 0.1 for sample in samples_s) >= 30, "it would be one tick of about ten otherwise"
