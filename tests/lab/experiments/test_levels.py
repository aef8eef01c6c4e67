"""The runs of a search have enough requests for their level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fastgen.lab.experiments.levels import by_clients, by_rate
from fastgen.lab.experiments.search import TooFewRequestsError
from fastgen.lab.load.generator import Load
from fastgen.lab.records import Run
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.synthetic import Chats, FixedLengths
from tests.lab.experiments.made_runs import run

Asked = list[tuple[str, Sequence[PlannedRequest], Load]]


def noted(asked: Asked) -> Any:
    def runs(title: str) -> Any:
        def one(requests: Sequence[PlannedRequest], load: Load, workload: Mapping[str, Any]) -> Run:
            asked.append((title, requests, load))
            return run([])

        return one

    return runs


def test_a_level_has_requests_for_all_its_clients() -> None:
    asked: Asked = []
    measure = by_clients(
        noted(asked), lambda n: FixedLengths(num_prompt_tokens=3, num_requests=n), vocab_size=9, seed=5
    )
    measure(7.0, 0)
    measure(7.0, 1)
    (title, first, load), (_, second, _) = asked
    assert (title, len(first), load.num_clients) == ("7 clients", 4 * 7 + 32, 7)
    assert first[0].prompt_ids != second[0].prompt_ids, "a repeat has other requests"
    sessions = by_clients(noted(asked), lambda n: Chats(num_sessions=n, num_turns=2), vocab_size=9)
    sessions(1.0, 0)
    assert len(asked[-1][1]) == 2 * 36


def test_a_rate_lasts_long_enough() -> None:
    asked: Asked = []
    of_size = lambda n: FixedLengths(num_prompt_tokens=3, num_requests=n)  # noqa: E731
    by_rate(noted(asked), of_size, seconds=20, vocab_size=9)(2.5, 0)
    ((title, requests, load),) = asked
    assert (title, len(requests), load.num_clients) == ("2.5 requests/s", 50, None)
    assert load.facts()["arrivals"]["rate"] == 2.5


def test_a_workload_that_ends_earlier_is_refused() -> None:
    measure = by_clients(noted([]), lambda n: FixedLengths(num_prompt_tokens=3, num_requests=39), vocab_size=9)
    measure(1.0, 0)
    with pytest.raises(TooFewRequestsError, match="has 39 requests or sessions, and a run with 2 clients needs 40"):
        measure(2.0, 0)
