"""The room that a step has left, by a policy that notes what it is asked."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.schedule import ScheduledTokens
from fastgen.runtime.scheduling.step_room import StepRoom
from fastgen.runtime.step_cost.work import StepWork

SIZES = (1, 2, 4, 8)
Asked = tuple[StepWork, int, int, SequenceOf[int]]


class Noting(SplitFuse):
    """Lets three tokens in."""

    def __init__(self, itl_target_s: float | None) -> None:
        self.itl_target_s = itl_target_s
        self.asked: list[Asked] = []

    def limit(self, work: StepWork, start: int, num_tokens: int, sizes: SequenceOf[int]) -> int:
        self.asked.append((work, start, num_tokens, sizes))
        return min(num_tokens, 3)


def decode(num_computed: int) -> Sequence:
    (found,) = Request(0, range(num_computed), SamplingParams(), 0.0).sequences
    found.num_computed_tokens = num_computed
    return found


def test_without_decodes_or_without_a_target_there_is_room_for_everything() -> None:
    for policy, decodes in ((Noting(0.1), []), (Noting(None), [decode(5)])):
        room = StepRoom(policy, decodes, SIZES)
        assert (room.limit(7, 50), room.limit_drafts(40)) == (50, 40)
        room.take(ScheduledTokens(decode(9), 9, 4, False))
        assert room.limit(7, 50) == 50
        assert policy.asked == []


def test_beside_decodes_the_policy_limits_chunks_and_drafts() -> None:
    """Decodes at positions 5 and 10 read 6 and 11 tokens, so a draft is taken to stand at position 8."""
    policy = Noting(0.1)
    room = StepRoom(policy, [decode(5), decode(10)], SIZES)
    assert room.limit(7, 50) == 3
    assert room.limit_drafts(40) == 3
    room.take(ScheduledTokens(decode(9), 9, 4, False))
    assert room.limit(0, 2) == 2
    assert (room.limit(0, 0), room.limit(0, -1)) == (0, -1)
    alone, beside = StepWork(2, 17, 0, 2), StepWork(6, 30, 10 + 11 + 12 + 13, 2, 1, 1)
    assert policy.asked == [(alone, 7, 50, SIZES), (alone, 8, 40, SIZES), (beside, 0, 2, SIZES)]
