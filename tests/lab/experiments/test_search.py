"""Search: the answer is an interval around the true limit, decided by Wilson's interval."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.experiments.search import Found, TooFewRequestsError, search
from fastgen.lab.experiments.shortfall import shortfalls
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.intervals import wilson
from fastgen.lab.records import Run
from tests.lab.experiments.made_runs import record, run

TTFT = SLO(ttft_ms=200)


class Machine:
    """Answers in time as long as the level is at most ``limit``; above it, only a drawn share is."""

    def __init__(self, limit: float, *, share_above: float = 0.3, share_below: float = 1.0, num: int = 100):
        self.limit, self.above, self.below, self.num = limit, share_above, share_below, num
        self.asked: list[tuple[float, int]] = []

    def __call__(self, level: float, repeat: int) -> Run:
        self.asked.append((level, repeat))
        draw = random.Random(f"{level} {repeat}")
        share = self.below if level <= self.limit else self.above
        return run([record(n, ttft_s=0.1 if draw.random() < share else 0.9) for n in range(self.num)])


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 31, 100, 1000])
@pytest.mark.parametrize("start", [1, 5, 64])
def test_clients_are_found_exactly(limit: int, start: int) -> None:
    machine = Machine(limit)
    found = search(machine, TTFT, start=start)
    assert (found.kept, found.missed) == (limit, limit + 1)
    assert len(machine.asked) <= 30
    assert len(set(machine.asked)) == len(machine.asked), "no level is measured twice with the same requests"
    assert not found.shortfalls


@pytest.mark.parametrize("limit", [0.02, 0.7, 3.3, 41.0])
def test_rates_are_found_within_the_resolution(limit: float) -> None:
    found = search(Machine(limit), TTFT, start=1.0, is_integer=False, resolution=0.05)
    assert found.kept is not None
    assert found.missed is not None
    assert found.kept <= limit < found.missed
    assert found.missed <= found.kept * 1.05


def test_wilson_decides_and_undecided_levels_are_measured_again() -> None:
    # 20 requests are too few to show 90 %: Wilson's interval of 20 of 20 begins at 84 %.
    machine = Machine(3, num=20)
    found = search(machine, TTFT)
    assert (found.kept, found.missed) == (3, 4)
    for level in found.levels:
        assert level.interval == wilson(level.num_good, level.num_requests)
        assert level.num_requests == 20 * len(level.runs)
    assert {len(level.runs) for level in found.levels if level.verdict == "kept"} == {2}


def test_levels_that_stay_undecided_lie_inside_the_answer() -> None:
    def slope(level: float, repeat: int) -> Run:
        num_good = 100 if level <= 10 else 90 if level <= 20 else 50
        return run([record(n, ttft_s=0.1 if n < num_good else 0.9) for n in range(100)])

    found = search(slope, TTFT, max_repeats=2)
    assert (found.kept, found.missed) == (10, 21)
    undecided = [level.value for level in found.levels if level.verdict == "undecided"]
    assert undecided
    assert all(found.kept < value < found.missed for value in undecided)


def test_an_slo_that_cannot_be_kept_says_by_how_much() -> None:
    def slow(level: float, repeat: int) -> Run:
        return run([record(n, ttft_s=0.3 + n / 1000) for n in range(100)])

    found = search(slow, SLO(ttft_ms=200, tpot_ms=50), share=0.9)
    assert (found.kept, found.missed) == (None, 1)
    (shortfall,) = found.shortfalls
    assert (shortfall.limit, shortfall.kept_share) == ("ttft_ms", 0.0)
    assert shortfall.needed == pytest.approx(389)
    assert str(shortfall) == "0 % of requests keep ttft 200 ms; it would have to be 389 ms, 189 ms more"
    assert found.as_json()["shortfalls"][0]["needed"] == pytest.approx(389)


@pytest.mark.parametrize(("share", "num"), [(0.7, 10), (0.55, 100), (0.9, 10), (0.99, 100)])
def test_the_limit_that_would_do_is_kept_by_the_required_share_and_not_by_more(share: float, num: int) -> None:
    """``0.55 * 100`` is a little more than 55 in floating point, and 55 of 100 are enough."""
    slow = run([record(n, ttft_s=0.3 + n / 1000) for n in range(num)])
    (shortfall,) = shortfalls(slow, SLO(ttft_ms=200), share)
    assert shortfall.needed == pytest.approx(300 + round(share * num) - 1)


def test_failed_requests_and_the_papers_rule_have_no_limit_that_would_do() -> None:
    def failing(level: float, repeat: int) -> Run:
        return run([record(n, ttft_s=0.1, error="no" if n < 50 else None) for n in range(100)])

    found = search(failing, SLO(ttft_ms=200, paper_tokens_per_s=4)).shortfalls
    assert [(one.limit, one.needed) for one in found] == [("ttft_ms", None), ("paper_tokens_per_s", None)]
    assert str(found[0]) == "50 % of requests keep ttft 200"


def test_a_search_that_nothing_stops_ends_with_what_was_kept() -> None:
    found = search(Machine(1e9), TTFT)
    assert (found.kept, found.missed) == (65536, None)


def test_a_search_ends_where_the_workload_has_too_few_requests() -> None:
    def measure(level: float, repeat: int) -> Run:
        if level > 20:
            raise TooFewRequestsError("too few")
        return Machine(1e9)(level, repeat)

    found = search(measure, TTFT)
    assert (found.kept, found.missed) == (16, None)
    with pytest.raises(TooFewRequestsError):
        search(measure, TTFT, start=64)


def test_an_interrupted_search_keeps_its_levels() -> None:
    machine = Machine(7)

    def measure(level: float, repeat: int) -> Run:
        if level > 4:
            return run([record(0, ttft_s=0.1)], interrupted=True)
        return machine(level, repeat)

    found = search(measure, TTFT)
    assert found.interrupted
    assert [level.value for level in found.levels] == [1, 2, 4, 8]
    assert found.kept == 4
    nothing = search(lambda level, repeat: run([], interrupted=True), TTFT)
    assert nothing == Found(TTFT, 0.9, (), interrupted=True)
    assert (nothing.kept, nothing.missed, nothing.shortfalls) == (None, None, [])


@pytest.mark.parametrize(
    "wrong",
    [{"share": 1.0}, {"share": 0.0}, {"start": 0}, {"start": 1.5}, {"resolution": 0.0}, {"max_repeats": 0}],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        search(Machine(1), TTFT, **wrong)  # type: ignore[arg-type]
