"""Prompts first, each whole, in steps without decodes: how vLLM scheduled when it was published.

After "Efficient Memory Management for Large Language Model Serving with PagedAttention" (Kwon et al., 2023) and the
implementation of that time. First tokens come early; running answers wait meanwhile.
"""

from __future__ import annotations

from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView


class PrefillFirst(Policy):
    splits_prompts = False

    def plan(self, view: StepView) -> StepPlan:
        if view.prompts or any(True for _ in view.waiting):
            return StepPlan(False, view.token_budget, view.num_free_slots)
        return StepPlan(True, 0, 0)
