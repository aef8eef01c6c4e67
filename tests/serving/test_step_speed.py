"""The time of steps by their size, as admission learns it from an engine's counters."""

from __future__ import annotations

import math

import pytest

from fastgen.runtime.metrics import Histogram
from fastgen.serving.admission.step_speed import StepSpeed


def learned(*snapshots: dict[int, tuple[int, float]]) -> StepSpeed:
    """Returns what snapshots teach that come once a second: numbers and seconds of steps by size."""
    speed = StepSpeed()
    for now_s, snapshot in enumerate(snapshots):
        steps = {
            size: Histogram(bounds=(1.0,), counts=(count, 0), sum=sum_s) for size, (count, sum_s) in snapshot.items()
        }
        speed.observe(steps, now_s)
    return speed


def test_steps_weigh_less_by_a_factor_of_e_after_ten_seconds_of_steps() -> None:
    speed = learned({8: (100, 10.0)}, {8: (150, 20.0)})  # 0.1 s each, then 0.2 s
    assert speed.step_s(8) == pytest.approx((10 / math.e + 10) / (100 / math.e + 50))


def test_the_time_of_larger_steps_is_known_up_to_four_times_the_largest() -> None:
    speed = learned({1: (10, 0.1), 8: (10, 0.8)})
    assert speed.most_tokens == 32
    assert speed.step_s(32) == pytest.approx(0.32)
    assert StepSpeed().most_tokens == 0
