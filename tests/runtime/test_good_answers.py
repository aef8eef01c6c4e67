"""Good answers, compared with the formula written out."""

from __future__ import annotations

import random

import pytest

from fastgen.runtime.goodput import RATES, good_rates, longest_average_gap_s
from tests.averages import ewm_mean


def test_the_average_is_that_of_the_formula() -> None:
    draw = random.Random(3)
    for num_gaps in range(80):
        gaps = [draw.expovariate(4) for _ in range(num_gaps)]
        assert longest_average_gap_s(gaps) == pytest.approx(max(ewm_mean(gaps), default=0.0), rel=1e-12)


def test_drawn_answers_are_good_where_the_formula_says_so() -> None:
    draw = random.Random(7)
    verdicts = set()
    for _ in range(300):
        num_prompt_tokens = draw.randint(100, 1000)
        ttft_s = draw.uniform(0.2, 1.2) * num_prompt_tokens / 512
        gaps = [draw.expovariate(1 / 0.2) for _ in range(draw.randint(0, 60))]
        gaps = [draw.choice([0.3, 1.0, 2.0]) * gap for gap in gaps]
        expected = [
            rate
            for rate in RATES
            if ttft_s <= num_prompt_tokens / 512 and all(average < 1 / rate for average in ewm_mean(gaps))
        ]
        assert good_rates(num_prompt_tokens, ttft_s, gaps) == expected
        verdicts.add(tuple(expected))
    assert verdicts == {(), (2,), (2, 4), (2, 4, 6)}, "each rate decides in some"


@pytest.mark.parametrize(("ttft_s", "rates"), [(2.0, [2, 4, 6]), (2.001, [])])
def test_the_first_token_has_the_time_of_its_prompt_and_no_more(ttft_s: float, rates: list[int]) -> None:
    assert good_rates(1024, ttft_s, [0.1]) == rates


def test_a_gap_must_stay_below_the_limit_not_reach_it() -> None:
    assert good_rates(512, 0.5, [0.25]) == [2]
    assert good_rates(512, 0.5, [0.2499]) == [2, 4]


def test_a_long_gap_after_many_short_ones_is_averaged_out_and_at_the_beginning_it_is_not() -> None:
    assert good_rates(512, 0.5, [0.1] * 40 + [1.0]) == [2, 4]
    assert good_rates(512, 0.5, [1.0] + [0.1] * 40) == []


def test_an_answer_of_one_token_is_judged_by_that() -> None:
    assert good_rates(512, 0.9, []) == [2, 4, 6]
