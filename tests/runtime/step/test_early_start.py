"""When the next step of steady decodes is started early, and that it is waited for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.step.early_start import EarlyStart

POOL: Any = object()


class FakeTape:
    """Begins where it ``can``, and counts how often it is waited for."""

    def __init__(self, can: bool = True) -> None:
        self.can, self.num_ended = can, 0

    def begin(self, pool: object) -> bool:
        assert pool is POOL
        return self.can

    def end(self) -> None:
        self.num_ended += 1


def sequence(num_left: int = 100) -> Sequence:
    """Returns a sequence with five tokens generated that still gets ``num_left``."""
    (found,) = Request(0, [1, 2, 3], SamplingParams(max_new_tokens=5 + num_left), 0.0).sequences
    found.token_ids += [4] * 5
    return found


def num_steps_before(early: EarlyStart, decodes: list[Sequence]) -> int:
    """Returns how many steps pass until the next is started early."""
    for number in range(1, 50):
        early.start(cast(Any, FakeTape()), decodes, [4] * len(decodes))
        if early.take():
            return number
    raise AssertionError("none is started")


@pytest.mark.parametrize(("num_decodes", "num_steps"), [(1, 8), (2, 16), (3, 24), (4, 32), (5, 32), (64, 32)])
def test_a_step_is_started_after_some_steps_for_each_decode(num_decodes: int, num_steps: int) -> None:
    early, decodes = EarlyStart(POOL, 16), [sequence() for _ in range(num_decodes)]
    assert num_steps_before(early, decodes) == num_steps
    assert num_steps_before(early, decodes) == 1, "steps still follow one another"
    early.interrupted()
    assert num_steps_before(early, decodes) == num_steps


@pytest.mark.parametrize(
    ("num_left", "positions", "expected"),
    [
        ([2, 2], [4, 5], True),
        ([2, 1], [4, 5], False),  # the second sequence gets its last token now
        ([1, 1], [4, 5], False),
        ([2, 2], [4, 15], False),  # position 16 begins a block
        ([2, 2], [31, 15], False),
        ([2, 2], [16, 14], True),
    ],
)
def test_no_step_is_started_where_another_one_is_certain_to_follow(
    num_left: list[int], positions: list[int], expected: bool
) -> None:
    early, tape = EarlyStart(POOL, 16), FakeTape()
    decodes = [sequence(num) for num in num_left]
    for _ in range(32):
        early.start(cast(Any, tape), decodes, positions)
    assert (early.started is tape) == expected
    assert early.take() == expected


def test_a_step_that_was_started_is_waited_for_and_forgotten() -> None:
    early, tape = EarlyStart(POOL, 16), FakeTape()
    early.wait()
    assert not early.take()
    for _ in range(8):
        early.start(cast(Any, tape), [sequence()], [4])
    early.wait()
    assert (early.started, tape.num_ended) == (tape, 1)
    assert early.take()
    assert (early.started, tape.num_ended) == (None, 2)
    assert not early.take()
    early.start(cast(Any, FakeTape(can=False)), [sequence()], [4])
    assert not early.take(), "the other threads were busy"
