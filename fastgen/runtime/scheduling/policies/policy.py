"""What a scheduling policy is: from a view of the step to how much of it goes to whom. Arithmetic only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import ClassVar

from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.policies.step_time import StepWork


@dataclass(frozen=True, slots=True)
class StepView:
    """What a policy sees of a step that is to be planned.

    ``decodes`` run and have one token pending each, ``prompts`` run and have more; ``waiting`` could be given a slot
    now, and is to be read once and no further than needed: it costs what is read. The latter two are in order of
    urgency. ``num_waiting`` counts all that wait, whether or not there is a slot, and ``num_opened`` how many of the
    admissions in the last plan were not used yet. ``sizes`` are the captured sizes, ascending to ``token_budget``.
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
    """How much of each kind a step takes. Whose tokens they are is not a policy's to say: the most urgent come first.

    At most ``num_prompt_tokens`` of prompts go in, and at most ``num_admissions`` requests are admitted; a sequence
    that was preempted may always come back, and further ones of a request follow the first. Where ``runs_decodes`` is
    false they run all the same if prompts can have nothing. With ``until_s``, possible while nobody has a slot, there
    is no step; the next plan is asked for then, or when a request comes.
    """

    runs_decodes: bool
    num_prompt_tokens: int
    num_admissions: int
    until_s: float | None = None


class Policy(ABC):
    """Plans steps. A policy that is to be used is copied, so it may keep what it has seen. It is not asked about steps
    with nothing to share out: where only decodes run and nobody waits, all of them do."""

    # Whether a prompt may be cut to what is left of a step. Otherwise it is computed in one step, or, where it is
    # longer than what a step has for prompts, in steps that it fills.
    splits_prompts: ClassVar[bool]
    # The arguments it is made with, each an attribute too. They say all that it decides by, but what it observes.
    parameters: ClassVar[tuple[str, ...]] = ()
    # Whether it is told how long steps took.
    observes: ClassVar[bool] = False
    # The longest gap between two tokens of an answer, in seconds, where it bounds that: it is asked to :meth:`limit`
    # what goes beside decodes.
    itl_target_s: float | None = None

    @property
    def learned(self) -> tuple[float, ...]:
        """What it goes by of all that it has observed."""
        return ()

    def recall(self, learned: tuple[float, ...]) -> None:  # noqa: B027
        """Go by what another of its kind has :attr:`learned`."""

    def check(self, max_num_seqs: int) -> None:  # noqa: B027
        """Refuse what cannot work where at most ``max_num_seqs`` sequences run at once."""

    @abstractmethod
    def plan(self, view: StepView) -> StepPlan:
        """What the step of ``view`` takes."""

    def limit(self, work: StepWork, start: int, num_tokens: int, sizes: SequenceOf[int]) -> int:
        """How many of ``num_tokens`` tokens of a sequence, from position ``start`` on, a step takes that has ``work``
        already, decodes among it. At least one where it has no other chunk yet, so that somebody gets on.
        """
        return num_tokens

    def observe(self, work: StepWork, step_s: float) -> None:  # noqa: B027
        """A step with ``work`` took ``step_s`` seconds. Called where :attr:`observes`."""
