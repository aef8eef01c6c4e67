"""Deadlines over random histories, and when those of ended requests are dropped."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fastgen.runtime.requests.deadlines import Deadlines


@given(seed=st.integers(0, 2**32))
def test_deadlines_pass_in_order_of_time_also_after_some_were_dropped(seed: int) -> None:
    draw, deadlines = random.Random(seed), Deadlines()
    due_s = {request_id: float(draw.randrange(50)) for request_id in draw.sample(range(1000), 40)}
    for request_id, deadline_s in due_s.items():
        deadlines.add(request_id, deadline_s)
    open_ids = set(draw.sample(sorted(due_s), draw.randrange(5, 20)))
    deadlines.keep(open_ids)
    assert len(deadlines) == len(open_ids)
    passed: list[int] = []
    for now_s in range(50):
        passed += deadlines.passed(now_s)
        assert {each for each in open_ids if due_s[each] <= now_s} == set(passed), "those that are due, and no others"
    assert [due_s[each] for each in passed] == sorted(due_s[each] for each in open_ids)


def test_deadlines_of_ended_requests_stay_until_they_are_more_than_two_for_each_open_one() -> None:
    deadlines = Deadlines()
    for request_id in range(4):
        deadlines.add(request_id, 1.0)
    deadlines.keep({1, 2})
    assert len(deadlines) == 4
    deadlines.add(4, 1.0)
    deadlines.keep({1, 2})
    assert list(deadlines.passed(1.0)) == [1, 2]
