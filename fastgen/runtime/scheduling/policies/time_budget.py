"""SplitFuse under a bound on the gap between tokens: the budget of each step is what the time allows.

A model of step times, fitted while the engine runs, says how long a step of so many tokens would take; the budget is
the largest captured size that stays below the target. A prompt gets on in every step all the same, at the smallest size
that has a place for it: where decodes alone take longer than the target nothing would be gained by stopping it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.request import Sequence
from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView
from fastgen.runtime.scheduling.policies.splitfuse import FILLS_FROM_PASSES, even_share
from fastgen.runtime.scheduling.step_time import StepTimeModel, StepWork, chunk_pairs


class TimeBudgetSplitFuse(Policy):
    """SplitFuse whose steps take at most ``itl_target_s`` seconds as long as anybody is being answered."""

    splits_prompts = True
    parameters = ("itl_target_s",)
    observes = True

    def __init__(self, itl_target_s: float):
        self.itl_target_s = itl_target_s
        self.model = StepTimeModel()

    @property
    def learned(self) -> tuple[float, ...]:
        return self.model.learned

    def recall(self, learned: tuple[float, ...]) -> None:
        self.model.recall(learned)

    def observe(self, work: StepWork, step_s: float) -> None:
        self.model.observe(work, step_s)

    def plan(self, view: StepView) -> StepPlan:
        num_decodes, budget = len(view.decodes), view.token_budget
        prompts = _read(view, FILLS_FROM_PASSES * (budget - num_decodes))
        if view.decodes and prompts:
            budget = self._budget(view, prompts)
        num_pending = sum(seq.num_pending_tokens for seq in prompts)
        _, num_prompt_tokens = even_share(num_decodes, num_pending, budget, view.sizes)
        return StepPlan(True, num_prompt_tokens, view.num_free_seats, budget)

    def _budget(self, view: StepView, prompts: SequenceOf[Sequence]) -> int:
        """The largest size that the model gives the time for, of those that it can know something about."""
        num_decodes = len(view.decodes)
        num_context = sum([seq.num_tokens for seq in view.decodes])
        least = bisect_right(view.sizes, num_decodes)
        most = bisect_right(view.sizes, self.model.most_tokens(view.token_budget))
        for size in reversed(view.sizes[least + 1 : most]):
            work = StepWork(size, num_context, _pairs(prompts, size - num_decodes))
            if self.model.upper_bound_s(work) <= self.itl_target_s:
                return size
        return view.sizes[min(least, len(view.sizes) - 1)]


def _read(view: StepView, enough: int) -> list[Sequence]:
    """The prompts, the running ones first, as far as they are needed to know of ``enough`` pending tokens."""
    prompts: list[Sequence] = []
    num_pending = 0
    for some in (view.prompts, view.waiting):
        for seq in some if num_pending < enough else ():
            prompts.append(seq)
            num_pending += seq.num_pending_tokens
            if num_pending >= enough:
                break
    return prompts


def _pairs(prompts: SequenceOf[Sequence], num_tokens: int) -> int:
    """How many tokens those of the chunks would read together, were ``num_tokens`` of the prompts taken in order."""
    num_pairs = 0
    for seq in prompts:
        length = min(seq.num_pending_tokens, num_tokens)
        num_pairs += chunk_pairs(seq.num_computed_tokens, length)
        num_tokens -= length
        if not num_tokens:
            break
    return num_pairs
