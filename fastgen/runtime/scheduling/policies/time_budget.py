"""SplitFuse under a bound on the gap between tokens: a step takes as many prompt tokens as the time allows.

A model of step times, fitted while the engine runs, predicts how long a step takes. A chunk beside decodes is cut so
that the step stays below the target, at a captured size where possible. A prompt makes progress in every step all the
same. Where even one token of it takes too long, the step takes about as long as with that one token: beside reading its
context, a few more tokens cost next to nothing, and where decodes alone take longer than the target, little is gained.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.policies.step_time import StepTimeModel
from fastgen.runtime.step_cost.work import StepWork

_log = logging.getLogger(__name__)
# Lengths of chunks in steps below the finely spaced sizes.
_FEW_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_CLOSE_SIZE = 64
# A step that is too long with one prompt token already may take this many times as long.
_SLACK = 1.1


class TimeBudgetSplitFuse(SplitFuse):
    """SplitFuse whose steps take at most ``itl_target_s`` seconds while any answer is being generated."""

    parameters = ("itl_target_s",)
    observes = True

    def __init__(self, itl_target_s: float):
        self.itl_target_s: float = itl_target_s
        self.model = StepTimeModel()
        self._has_told = False

    @property
    def learned(self) -> tuple[float, ...]:
        return self.model.learned

    def recall(self, learned: tuple[float, ...]) -> None:
        self.model.recall(learned)

    def observe(self, work: StepWork, step_s: float) -> None:
        self.model.observe(work, step_s)

    def limit(self, work: StepWork, start: int, num_tokens: int, sizes: SequenceOf[int]) -> int:
        is_first = not work.num_pairs
        most = min(num_tokens, self.model.most_tokens(sizes[-1]) - work.num_tokens)
        if most < 1:
            return int(is_first)

        def step_s(length: int) -> float:
            return self.model.upper_bound_s(work.with_chunk(start, length))

        limit_s = self.itl_target_s
        if is_first and (least_s := self._least_s(work, start)) > limit_s:
            limit_s = _SLACK * least_s
        lengths = _lengths(work.num_tokens, most, sizes)
        num_fitting = bisect_right(lengths, limit_s, key=step_s)
        return lengths[num_fitting - 1] if num_fitting else int(is_first)

    def _least_s(self, work: StepWork, start: int) -> float:
        """Returns the least time of a step in which the prompt at ``start`` makes progress; logs once that it is too
        long.
        """
        expected_s = self.model.predict_s(work.with_chunk(start, 1))
        if expected_s > self.itl_target_s and not self._has_told:
            self._has_told = True
            _log.warning(
                "itl_target_ms=%g cannot be held: a step of %d decodes and one token of a prompt at position %d takes "
                "about %.3g ms. Gaps are kept near that; fewer sequences (max_num_seqs), shorter prompts or a higher "
                "target would help.",
                1000 * self.itl_target_s,
                work.num_tokens,
                start,
                1000 * expected_s,
            )
        return expected_s * self.model.scatter


def _lengths(num_before: int, most: int, sizes: SequenceOf[int]) -> list[int]:
    """Returns lengths for a chunk of at most ``most`` tokens beside ``num_before`` others, ascending."""
    few = [length for length in _FEW_TOKENS if num_before + length < _CLOSE_SIZE]
    many = [size - num_before for size in sizes[bisect_right(sizes, max(num_before, _CLOSE_SIZE - 1)) :]]
    return [*(length for length in (*few, *many) if length < most), most]
