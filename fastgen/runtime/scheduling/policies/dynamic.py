"""Dynamic batching: a batch is collected, runs until all of it is answered, and then the next one is collected.

This is how servers batch that know nothing of generation: requests are kept until there are enough for a batch, but no
longer than a given delay. All prompts of the batch are computed before its first decode. A slot whose answer is done
early stays empty until the last answer is done.
"""

from __future__ import annotations

import math
from typing import ClassVar

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView


class DynamicBatching(Policy):
    """Batches of ``batch_size`` requests, by default ``max_num_seqs``; or of the requests that wait when the most
    urgent of them has waited for ``max_delay_s`` seconds.
    """

    splits_prompts = False
    parameters: ClassVar[tuple[str, ...]] = ("batch_size", "max_delay_s")

    def __init__(self, batch_size: int | None = None, max_delay_s: float = 0.05):
        if batch_size is not None and (
            not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1
        ):
            raise InvalidArgumentError(f"batch_size={batch_size!r}: expected an integer of at least 1")
        if not isinstance(max_delay_s, int | float) or isinstance(max_delay_s, bool) or not 0 <= max_delay_s < math.inf:
            raise InvalidArgumentError(f"max_delay_s={max_delay_s!r}: expected a number of seconds of at least 0")
        self.batch_size, self.max_delay_s = batch_size, max_delay_s

    def check(self, max_num_seqs: int) -> None:
        if self.batch_size is not None and self.batch_size > max_num_seqs:
            raise InvalidArgumentError(
                f"batch_size={self.batch_size} is above max_num_seqs={max_num_seqs}, so such a batch cannot run at "
                "once; lower batch_size or raise max_num_seqs"
            )

    def plan(self, view: StepView) -> StepPlan:
        first = next(iter(view.waiting), None)
        follows = first is not None and not first.begins_request  # places of a batch that is not done
        if view.decodes or view.prompts or follows:
            has_prompts = bool(view.prompts) or view.num_opened > 0 or follows
            return self._plan(view, view.num_opened, runs_decodes=not has_prompts)
        size = view.num_free_slots if self.batch_size is None else self.batch_size
        if view.num_waiting < size:
            assert first is not None, "nothing runs, so there is a slot for a waiting request"
            begins_s = first.request.arrival_s + self.max_delay_s
            if view.now_s < begins_s:
                return StepPlan(False, 0, 0, until_s=begins_s)
        return self._plan(view, min(size, view.num_waiting), runs_decodes=False)

    def _plan(self, view: StepView, num_admissions: int, *, runs_decodes: bool) -> StepPlan:
        num_prompt_tokens = view.token_budget - len(view.decodes) * runs_decodes
        return StepPlan(runs_decodes, num_prompt_tokens, num_admissions)
