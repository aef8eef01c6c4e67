"""Scheduling policies: how much of a step goes to decodes and how much to prompts. Arithmetic only, one file each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.scheduling.policies.dynamic import DynamicBatching
from fastgen.runtime.scheduling.policies.orca import Orca
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.policies.prefill_first import PrefillFirst
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.policies.static import StaticBatching
from fastgen.runtime.scheduling.policies.time_budget import TimeBudgetSplitFuse

__all__ = ["POLICIES", "DynamicBatching", "Policy", "StaticBatching", "choose_policy", "make_policy", "policy_name"]

POLICIES: dict[str, type[Policy]] = {
    "splitfuse": SplitFuse,
    "prefill_first": PrefillFirst,
    "orca": Orca,
    "dynamic": DynamicBatching,
    "static": StaticBatching,
}
_KINDS = POLICIES | {"time_budget": TimeBudgetSplitFuse}


def choose_policy(policy: str | Policy, itl_target_ms: float | None = None) -> Policy:
    """Returns the policy with this name, or ``policy`` itself; with a target, the one that keeps it.

    :raises InvalidArgumentError: for an unknown name, or a target that is invalid or that the policy cannot keep.
    """
    if not isinstance(policy, str | Policy) or (isinstance(policy, str) and policy not in POLICIES):
        near = difflib.get_close_matches(str(policy), POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(map(repr, POLICIES))}, or a Policy"
        raise InvalidArgumentError(f"policy={policy!r} is not known; {hint}")
    if itl_target_ms is None:
        return POLICIES[policy]() if isinstance(policy, str) else policy
    if not isinstance(itl_target_ms, int | float) or isinstance(itl_target_ms, bool) or not 0 < itl_target_ms < 1e9:
        raise InvalidArgumentError(f"itl_target_ms={itl_target_ms!r}: expected a number of milliseconds above 0")
    if policy != "splitfuse":
        raise InvalidArgumentError(
            f"itl_target_ms={itl_target_ms} goes with policy='splitfuse' only, which splits prompts to keep it; "
            "leave one of the two out"
        )
    return TimeBudgetSplitFuse(itl_target_ms / 1000)


def policy_name(policy: Policy) -> str:
    """Returns the name that :func:`make_policy` knows a policy by, or the name of its class."""
    kinds = {kind: name for name, kind in _KINDS.items()}
    return kinds.get(type(policy), f"{type(policy).__module__}.{type(policy).__qualname__}")


def make_policy(name: str, parameters: Mapping[str, float | None]) -> Policy:
    """Returns a new policy of this kind, with its :attr:`Policy.parameters`.

    :raises InvalidArgumentError: for a kind that is not one of fastgen's own, or other parameters than it has.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise InvalidArgumentError(f"policy {name!r} is none of fastgen's own, which are {', '.join(_KINDS)}")
    if set(parameters) != set(kind.parameters):
        raise InvalidArgumentError(f"policy {name!r} has the parameters {kind.parameters}, not {tuple(parameters)}")
    return kind(**parameters)
