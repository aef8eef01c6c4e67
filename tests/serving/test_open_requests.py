"""Reports of an engine, and how the server's open requests hand them to the watcher."""

from __future__ import annotations

from fastgen.runtime.requests.outputs import RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import End, Progress, Report
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest
from tests.serving.replicas.played import Noted


def opened(number: int) -> tuple[OpenRequests, EngineRequest, Noted]:
    noted = Noted()
    requests, request = OpenRequests(noted), EngineRequest(number, 3, SamplingParams(), 0.0)
    requests.add(request)
    return requests, request, noted


def reported(*progress: Progress, tokens: tuple[int, ...] = ()) -> Report:
    return Report([*tokens], [*progress], [], [], None)


def test_a_request_starts_with_its_first_token_however_it_comes() -> None:
    as_token, without_a_stream = reported(tokens=(7, 5)), Report([], [], [7], [], None)
    for report in (as_token, without_a_stream, reported(Progress(7, 0, [5], None, None))):
        requests, request, noted = opened(7)
        requests.take(report)
        assert request.has_started
        requests.take(as_token)
        assert noted.notes == [("started", "7")], "once"


def test_a_request_that_ends_without_a_token_has_not_started() -> None:
    requests, request, noted = opened(7)
    end = End("cancelled", None, None, RequestMetrics(queue_s=0.0, ttft_s=None), None)
    requests.take(reported(Progress(7, 0, [], None, end)))
    assert not request.has_started
    assert noted.notes == []
    assert noted.num_gone == 1
