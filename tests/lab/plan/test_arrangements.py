"""Arrangements and their points: which there are, which the SLO allows, and which no other beats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.plan.arrangements import Point, arrangements, broken_limits, mean_record, pareto_front
from fastgen.lab.plan.capacity import Shape
from fastgen.lab.plan.steady import Steady
from fastgen.runtime.step_cost.cost import StepCost
from tests.lab.plan.questions import question

STEADY = Steady(clients=4, ttft_s=0.5, tpot_s=0.02, longest_gap_s=0.1, requests_per_s=2.0, decodes=3.0)
SHAPE = Shape(100, 11)


def test_every_size_that_divides_is_tried() -> None:
    found, refused = arrangements(question("llama-2-13b", "A100-80", num_devices=6, prompt=500, answer=50))
    assert [each.tensor_parallel for each in found] == [1, 2, 4]
    assert refused == []
    found, refused = arrangements(question("llama-2-70b", "A100-80", num_devices=2, prompt=500, answer=50))
    assert [each.tensor_parallel for each in found] == [2]
    assert [each.tensor_parallel for each in refused] == [1]
    assert "matrices of fp16 127.50 GiB" in refused[0].reason


def test_no_more_devices_than_a_machine_links() -> None:
    found, _ = arrangements(question("llama-2-13b", "H200", num_devices=64, prompt=500, answer=50))
    assert [each.tensor_parallel for each in found] == [1, 2, 4, 8]


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tensor_parallel=3: 40 heads cannot be split evenly"):
        arrangements(question("llama-2-13b", "H100", num_devices=8, prompt=500, answer=50, tensor_parallel=3))


def test_a_copy_on_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"tensor_parallel=4: a copy .* so many devices, and there are 2"):
        arrangements(question("llama-2-13b", "H100", num_devices=2, prompt=500, answer=50, tensor_parallel=4))


def test_larger_budgets_are_tried_where_none_is_given() -> None:
    (found,), _ = arrangements(question("llama-2-13b", "A100-80", prompt=500, answer=50, token_budget=None))
    assert sorted(found.capacities) == [256, 512, 1024, 2048, 4096]
    (one,), _ = arrangements(question("llama-2-13b", "A100-80", prompt=500, answer=50, clients=5))
    assert [(point.token_budget, point.steady.clients) for point in one.points] == [(512, 5)]


def test_clients_beyond_the_cache_wait() -> None:
    (found,), _ = arrangements(question("llama-2-13b", "A100-80", prompt=2000, answer=50, clients=500))
    (point,) = found.points
    assert found.capacities[512].concurrent < 500
    assert point.steady.clients == 500
    assert point.steady.e2el_s == pytest.approx(500 / point.steady.requests_per_s)


def test_measured_steps_take_the_place_of_the_datasheet() -> None:
    cost = StepCost.linear(0.5, 0.0)
    (found,), _ = arrangements(question("llama-2-13b", "A100-80", prompt=500, answer=50, measured=cost))
    assert found.roofline is None
    assert found.points[0].steady.tpot_s == pytest.approx(0.5)


def test_the_mean_answer_has_the_mean_figures() -> None:
    record = mean_record(SHAPE, STEADY)
    assert record.ttft_s == 0.5
    assert record.num_generated == 11
    assert record.tpot_s == pytest.approx(0.02)
    assert max(record.gaps_s) == pytest.approx(0.1)
    assert len(mean_record(Shape(100, 1), STEADY).gaps_s) == 0


@pytest.mark.parametrize(
    ("slo", "broken"),
    [
        (SLO(ttft_ms=501, tpot_ms=21), ()),
        (SLO(ttft_ms=499, tpot_ms=21), ("ttft_ms",)),
        (SLO(tpot_ms=19, itl_ms=99), ("tpot_ms", "itl_ms")),
        (SLO(e2el_ms=699), ("e2el_ms",)),
        (SLO(paper_tokens_per_s=4), ("paper_tokens_per_s",)),  # the first token of 100 had to come within 195 ms
        (None, ()),
    ],
)
def test_limits_that_the_means_break(slo: SLO | None, broken: tuple[str, ...]) -> None:
    assert broken_limits(slo, SHAPE, STEADY) == tuple(broken)


def test_the_best_point_is_the_least_that_carries_as_much() -> None:
    """The most good throughput; of those within 1 %, the fewest clients."""
    slo = SLO(ttft_ms=1000)
    (found,), _ = arrangements(question("llama-2-13b", "A100-80", prompt=500, answer=50, slo=slo))
    best = found.best
    assert best is not None
    allowed = [point for point in found.points if point.steady.ttft_s <= 1]
    most = max(point.steady.requests_per_s for point in allowed)
    assert best.steady.requests_per_s >= 0.99 * most
    assert all(
        point.steady.requests_per_s < 0.99 * most for point in allowed if point.steady.clients < best.steady.clients
    )


def test_the_front_is_what_no_other_point_beats() -> None:
    found, _ = arrangements(question("llama-2-13b", "A100-80", num_devices=4, prompt=500, answer=50, token_budget=None))
    points = [point for arrangement in found for point in arrangement.points]
    front = pareto_front(points)
    assert len(front) > 5

    def beats(one: Point, other: Point) -> bool:
        ones = (one.tokens_per_s_per_user, one.tokens_per_s_per_device)
        others = (other.tokens_per_s_per_user, other.tokens_per_s_per_device)
        return all(a >= b for a, b in zip(ones, others, strict=True)) and ones != others

    assert not any(beats(point, kept) for point in points for kept in front)
    speeds = {(kept.tokens_per_s_per_user, kept.tokens_per_s_per_device) for kept in front}
    for point in points:
        equal = (point.tokens_per_s_per_user, point.tokens_per_s_per_device) in speeds
        assert equal or any(beats(kept, point) for kept in front)
    users = [point.tokens_per_s_per_user for point in front]
    assert users == sorted(users, reverse=True)


def test_a_point_says_what_a_device_and_a_user_get() -> None:
    point = Point(4, 512, replace(STEADY, tpot_s=0.025), 60, ())
    assert point.tokens_per_s_per_device == 2.0 * 60 / 4
    assert point.tokens_per_s_per_user == 40
