"""Service level objectives: which answers keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.metrics.goodput import SLO, keeps_paper_rule, parse_slo
from fastgen.lab.metrics.rates import max_concurrent_requests
from fastgen.lab.records import RequestRecord

# Its first token after 0.5 s, gaps of 0.1 and 0.3 s, and its end 0.1 s after the last token.
RECORD = RequestRecord(
    request=0,
    num_prompt_tokens=512,
    num_new_tokens=3,
    due_s=0.75,
    sent_s=1.0,
    token_times_s=(1.5, 1.6, 1.9),
    ended_s=2.0,
)


@pytest.mark.parametrize(
    ("limit", "kept", "broken"),
    [("ttft_ms", 500, 499), ("tpot_ms", 200.001, 199), ("itl_ms", 300.001, 299), ("e2el_ms", 1000, 999)],
)
def test_each_limit_is_the_most_that_is_good(limit: str, kept: float, broken: float) -> None:
    assert SLO(**{limit: kept}).is_good(RECORD)
    assert not SLO(**{limit: broken}).is_good(RECORD)
    assert SLO(**{limit: broken}).broken(RECORD) == [limit]


def test_every_limit_must_be_kept() -> None:
    assert SLO(ttft_ms=600, e2el_ms=2000).is_good(RECORD)
    assert not SLO(ttft_ms=600, e2el_ms=900).is_good(RECORD)


def test_the_papers_rule_is_a_limit() -> None:
    assert keeps_paper_rule(RECORD, 4)
    assert not keeps_paper_rule(RECORD, 5), "the average reaches 0.2 s"
    assert SLO(paper_tokens_per_s=4).is_good(RECORD)
    assert SLO(paper_tokens_per_s=5).broken(RECORD) == ["paper_tokens_per_s"]
    late = replace(RECORD, num_prompt_tokens=200)
    assert not keeps_paper_rule(late, 1), "200 tokens have 0.39 s"


def test_a_failed_request_and_one_without_a_token_are_not_good() -> None:
    assert not SLO(ttft_ms=1e6).is_good(replace(RECORD, error="refused"))
    assert not keeps_paper_rule(replace(RECORD, error="refused"), 1)
    assert not SLO(e2el_ms=1e6).is_good(replace(RECORD, token_times_s=()))


def test_an_answer_of_one_token_keeps_the_limits_on_later_tokens() -> None:
    one = replace(RECORD, token_times_s=(1.5,))
    assert SLO(tpot_ms=1, itl_ms=1, paper_tokens_per_s=100).is_good(one)


def test_words_of_commands_are_limits() -> None:
    assert parse_slo(["ttft:200", "tpot:50.5"]) == SLO(ttft_ms=200, tpot_ms=50.5)
    assert parse_slo(["paper:4", "itl:1", "e2el:2"]).as_json() == {"itl_ms": 1, "e2el_ms": 2, "paper_tokens_per_s": 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least one limit"),
        (["speed:3"], "expected LIMIT:NUMBER, with a limit of ttft, tpot, itl, e2el, paper"),
        (["ttft"], "expected LIMIT:NUMBER"),
        (["ttft:fast"], "'fast' is not a number"),
        (["ttft:0"], "ttft_ms=0.0: expected a number above 0"),
        (["ttft:nan"], "expected a number above 0"),
        (["ttft:1", "ttft:2"], "ttft is given twice"),
    ],
)
def test_wrong_words_say_what_is_expected(words: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_slo(words)


def test_concurrent_requests_are_counted_at_one_time() -> None:
    def record(sent_s: float, ended_s: float) -> RequestRecord:
        return replace(RECORD, sent_s=sent_s, ended_s=ended_s)

    assert max_concurrent_requests([]) == 0
    assert max_concurrent_requests([record(0, 1), record(1, 2)]) == 1, "the second follows the first"
    assert max_concurrent_requests([record(0, 3), record(1, 2), record(1.5, 4), record(2, 5)]) == 3
