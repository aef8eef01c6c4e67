"""Iteration-level scheduling: each step takes every decode and the whole prompts that fit beside them.

After "Orca: A Distributed Serving System for Transformer-Based Generative Models" (Yu et al., 2022). Requests join and
leave at every step; but a long prompt makes a long step, which delays all running answers.
"""

from __future__ import annotations

from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView


class Orca(Policy):
    splits_prompts = False

    def plan(self, view: StepView) -> StepPlan:
        num_places = view.token_budget - len(view.decodes)
        return StepPlan(True, num_places, view.num_free_slots)
