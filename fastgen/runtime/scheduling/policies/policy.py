"""The interface of a scheduling policy: from a view of the step to a plan of it. Arithmetic only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import ClassVar

from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.step_cost.work import StepWork


@dataclass(frozen=True, slots=True)
class StepView:
    """A view of a step that is to be planned, for policies.

    ``decodes`` run and have one token pending each; ``prompts`` run and have more. ``waiting`` sequences could be given
    a slot now; read them once and no further than needed, because reading costs time. ``prompts`` and ``waiting`` are
    in order of urgency. ``num_waiting`` counts all that wait, whether or not there is a slot. ``num_opened`` is how
    many admissions of the last plan are unused. ``sizes`` are the captured sizes, ascending to ``token_budget``.
    ``now_s`` is the engine's clock.
    """

    decodes: SequenceOf[Sequence]
    prompts: SequenceOf[Sequence]
    waiting: Iterable[Sequence]
    num_waiting: int
    num_free_slots: int
    num_opened: int
    token_budget: int
    sizes: SequenceOf[int]
    now_s: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The amounts of work that a step takes. The policy does not choose sequences: the most urgent come first.

    At most ``num_prompt_tokens`` of prompts go in, and at most ``num_admissions`` requests are admitted. A preempted
    sequence may always return, and further sequences of a request follow the first. Where ``runs_decodes`` is false,
    decodes run all the same if prompts can get nothing. With ``until_s``, possible while no sequence has a slot, there
    is no step; the next plan is made then, or when a request comes.
    """

    runs_decodes: bool
    num_prompt_tokens: int
    num_admissions: int
    until_s: float | None = None


class Policy(ABC):
    """Plans steps. A policy is copied before it is used, so it may keep what it observes. It is not asked about steps
    with nothing to share out: where only decodes run and nothing waits, all of them run.
    """

    # Whether a prompt may be cut to the rest of a step. Otherwise it is computed in one step, or, where it is longer
    # than the places that a step has for prompts, in steps that it fills.
    splits_prompts: ClassVar[bool]
    # Its constructor arguments, each an attribute too. With its observations, they determine all decisions.
    parameters: ClassVar[tuple[str, ...]] = ()
    # Whether `observe` is called with the time of each step.
    observes: ClassVar[bool] = False
    # The longest gap between two tokens of an answer, in seconds, where it has such a bound: :meth:`limit` is called
    # for chunks beside decodes.
    itl_target_s: float | None = None

    @property
    def learned(self) -> tuple[float, ...]:
        """Returns what it has learned from observations and decides by."""
        return ()

    def recall(self, learned: tuple[float, ...]) -> None:  # noqa: B027
        """Sets what another policy of its kind has :attr:`learned`."""

    def check(self, max_num_seqs: int) -> None:  # noqa: B027
        """Refuses parameters that cannot work where at most ``max_num_seqs`` sequences run at once."""

    @abstractmethod
    def plan(self, view: StepView) -> StepPlan:
        """Returns what the step of ``view`` takes."""

    def limit(self, work: StepWork, start: int, num_tokens: int, sizes: SequenceOf[int]) -> int:
        """Returns how many of ``num_tokens`` tokens of a sequence, from position ``start`` on, a step takes that has
        ``work`` already, decodes included. At least one where it has no other chunk yet, so that a prompt makes
        progress.
        """
        return num_tokens

    def observe(self, work: StepWork, step_s: float) -> None:  # noqa: B027
        """Learns that a step with ``work`` took ``step_s`` seconds. Called where :attr:`observes`."""
