"""Counts of answers as they end, and the time from which their first token is dated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import pytest

from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.admission import Admitted
from fastgen.serving.engine.messages import End, Progress
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.options import Limits
from fastgen.serving.watch import Watch

NOW_S = 1000.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(time, "monotonic", lambda: NOW_S)
    return Watch(Limits(), lambda: True)


def end(
    watch: Watch, *, arrived_s: float, first_token_s: float, gaps_s: Sequence[float], reason: FinishReason = "stop"
) -> None:
    """A completion of a prompt of 512 tokens, which is due within a second, has ended now; times are seconds ago."""
    request = EngineRequest(1, 512, SamplingParams(), NOW_S - arrived_s)
    metrics = RequestMetrics(queue_s=0.0, ttft_s=0.01, gaps_s=list(gaps_s))
    ended = End(reason, None, None, metrics, first_token_s)
    watch.completion_ended(request, Progress(1, 0, [5], None, ended))


def counted(watch: Watch) -> tuple[float, float, float]:
    """Returns the sum of the times to first tokens, the number of answers, and of those that were good at 2
    tokens/s.
    """
    values = dict(line.rsplit(" ", 1) for line in watch.metrics.text().decode().splitlines() if line[0] != "#")
    names = ("server_ttft_seconds_sum", "answers_total", 'good_answers_total{tokens_per_s="2"}')
    ttft_s, num_answers, num_good = (float(values[f"fastgen_{name}"]) for name in names)
    return ttft_s, num_answers, num_good


def test_what_a_request_waits_before_it_is_submitted_counts(watch: Watch) -> None:
    end(watch, arrived_s=3.0, first_token_s=0.25, gaps_s=[0.125, 0.125])
    assert counted(watch) == (2.75, 1, 0)
    end(watch, arrived_s=1.0, first_token_s=0.25, gaps_s=[0.125, 0.125])
    assert counted(watch) == (3.5, 2, 1)


def test_an_answer_that_a_search_found_long_ago_came_when_it_was_found(watch: Watch) -> None:
    """A beam search gives its answers when all of it ends."""
    end(watch, arrived_s=10.0, first_token_s=9.5, gaps_s=[0.125])
    assert counted(watch) == (0.5, 1, 1)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error"])
def test_what_was_not_given_whole_is_no_answer(watch: Watch, reason: FinishReason) -> None:
    end(watch, arrived_s=0.5, first_token_s=0.25, gaps_s=[0.125], reason=reason)
    assert counted(watch) == (0.0, 0, 0)


class Noted:
    """Takes the place of an admitted request, and notes what is reported of it."""

    def __init__(self) -> None:
        self.notes: list[object] = []

    def routed(self, replica: str) -> None:
        self.notes.append(replica)

    def started(self) -> None:
        self.notes.append("started")

    def ended(self, num_generated: int, *, is_whole: bool) -> None:
        self.notes.append((num_generated, is_whole))


@pytest.mark.parametrize(
    ("reason", "index", "first_token_s", "num_gaps", "noted"),
    [
        ("stop", 0, 0.25, 3, (4, True)),
        ("length", 0, 0.25, 0, (1, True)),
        ("stop", 1, 0.25, 3, (0, False)),
        ("cancelled", 0, 0.25, 3, (0, False)),
        ("stop", 0, None, 0, (0, False)),
    ],
)
def test_admission_hears_how_long_the_first_answer_got_if_it_is_whole(
    watch: Watch, reason: FinishReason, index: int, first_token_s: float | None, num_gaps: int, noted: object
) -> None:
    request, admitted = EngineRequest(1, 512, SamplingParams(n=2), NOW_S - 1.0), Noted()
    watch.submitted(request, cast(Admitted, admitted))
    watch.request_routed(request, "b")
    watch.request_started(request)
    metrics = RequestMetrics(queue_s=0.0, ttft_s=0.01, gaps_s=[0.125] * num_gaps)
    watch.completion_ended(request, Progress(1, index, [5], None, End(reason, None, None, metrics, first_token_s)))
    for _ in range(2):
        watch.request_gone(request)
    watch.request_started(request)
    watch.request_routed(request, "a")
    assert admitted.notes == ["b", "started", noted]
