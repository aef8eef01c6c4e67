"""Scheduling policies compared: the same engine, the same weights and the same requests, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastgen.errors import InvalidArgumentError
from fastgen.lab.experiments.pooled import pooled
from fastgen.lab.load.engine_target import EngineTarget
from fastgen.lab.records import Run
from fastgen.runtime.scheduling.policies import choose_policy


@dataclass(frozen=True)
class Turn:
    """A run under one policy."""

    policy: str
    # From 0. Each round runs every policy once.
    round: int
    run: Run = field(repr=False)


@dataclass(frozen=True)
class Policies:
    """The turns of all policies, in the order in which they ran."""

    turns: tuple[Turn, ...]

    def run(self, policy: str) -> Run:
        """Returns the turns of one policy as one run."""
        return pooled([turn.run for turn in self.turns if turn.policy == policy])

    @property
    def names(self) -> list[str]:
        """Returns the policies that have a turn."""
        return list(dict.fromkeys(turn.policy for turn in self.turns))


def policies(
    target: EngineTarget, names: Sequence[str], measure: Callable[[int], Run], *, num_rounds: int = 3
) -> Policies:
    """Runs ``measure`` under each policy once in every round; it gets the number of the round, as a seed.

    Each round begins with another policy, so that a machine that becomes slower hurts none more than the others. The
    engine keeps the policy of the last turn. Ctrl-C ends it with what was measured.

    :raises InvalidArgumentError: for unknown policies, fewer than two, or an engine with a prefix cache: a policy would
        find the prompts of the one before in it.
    """
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise InvalidArgumentError(f"policies {', '.join(names)}: expected two or more different ones")
    if target.engine.scheduler.kv.prefix_cache is not None:
        raise InvalidArgumentError(
            "policies are compared without a prefix cache, in which each would find the prompts of the one before: "
            "prefix_caching=False"
        )
    chosen = {name: choose_policy(name) for name in names}
    turns: list[Turn] = []
    for number in range(num_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            target.use_policy(chosen[name])
            turns.append(Turn(name, number, measure(number)))
            if turns[-1].run.header.interrupted:
                return Policies(tuple(turns))
    return Policies(tuple(turns))
