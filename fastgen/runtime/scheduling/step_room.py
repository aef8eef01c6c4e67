"""The room that a step has left under the policy's bound on the gap between tokens, if it has one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.schedule import ScheduledTokens
from fastgen.runtime.step_cost.work import decode_work

_num_computed_tokens = attrgetter("num_computed_tokens")
_NO_WORK = decode_work(())


class StepRoom:
    """Tracks a step under construction with ``decodes``. A step without decodes delays no answer and has unlimited
    room.
    """

    def __init__(self, policy: Policy, decodes: SequenceOf[Sequence], sizes: SequenceOf[int]):
        self._policy, self._sizes = policy, sizes
        self._is_bounded = policy.itl_target_s is not None and bool(decodes)
        self._work = decode_work(list(map(_num_computed_tokens, decodes))) if self._is_bounded else _NO_WORK

    def limit(self, start: int, num_tokens: int) -> int:
        """Returns how many of ``num_tokens`` tokens of a sequence, from position ``start`` on, still fit."""
        if num_tokens <= 0 or not self._is_bounded:
            return num_tokens
        return self._policy.limit(self._work, start, num_tokens, self._sizes)

    def limit_drafts(self, num_drafts: int) -> int:
        """Returns how many of ``num_drafts`` drafts still fit. Their decodes read the context anyway; the mean position
        of the decodes says how much each draft reads.
        """
        if not self._is_bounded:
            return num_drafts
        return self.limit(self._work.num_context // self._work.num_tokens, num_drafts)

    def take(self, chunk: ScheduledTokens) -> None:
        """Adds ``chunk`` to the step."""
        if self._is_bounded:
            self._work = self._work.with_chunk(chunk.start, chunk.num_tokens)
