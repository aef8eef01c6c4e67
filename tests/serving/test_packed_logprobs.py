"""Log-probabilities that are packed are what they were."""

from __future__ import annotations

import math

import pytest

from fastgen.runtime.requests.outputs import Logprobs
from fastgen.serving.engine.messages import Progress, Report, encoder, to_server
from fastgen.serving.engine.packed_logprobs import PackedLogprobs, pack

LOGPROBS: list[Logprobs | None] = [None, *({n: -0.5 * n, n + 1: -math.inf} for n in range(99))]


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 64, 100])
def test_packed_log_probabilities_are_a_sequence_of_what_was_packed(number: int) -> None:
    packed: PackedLogprobs[Logprobs | None] = PackedLogprobs()
    for start in range(0, number, 40):
        some = LOGPROBS[start : min(start + 40, number)]
        packed.add(pack(some), len(some))
    assert [*packed] == [*packed] == LOGPROBS[:number]
    assert len(packed) == number
    assert packed[1:-1] == LOGPROBS[:number][1:-1]
    assert packed[:] == LOGPROBS[:number]
    if number:
        assert packed[-1] == LOGPROBS[number - 1]


def test_what_is_packed_of_a_report_does_not_hold_the_rest_of_it() -> None:
    """A report has the log-probabilities of up to all running requests."""
    report = Report([], [Progress(1, 0, [5], pack([{5: -1.0}]), None)], [], [], None)
    received = to_server.decode(encoder.encode(report))
    (piece,) = received.progress[0].logprobs
    assert type(piece) is bytes
