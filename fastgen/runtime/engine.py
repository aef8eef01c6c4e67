"""The engine: schedule, launch, sample, collect, update, one step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any, TypeVar, TypeVarTuple, Unpack

from fastgen.runtime.answers.answers import Answers, NewDetokenizer
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.flight.engine_facts import engine_facts
from fastgen.runtime.flight.recorder import Recorder
from fastgen.runtime.metrics import EngineMetrics
from fastgen.runtime.requests.checks import RequestChecks
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.requests.sampling_params import SamplingParams, resolve_seed
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.runtime.scheduling.drafts import NgramDrafter
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.faults import Failure, Phase, cause_of
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.observer import DrafterObserver, Observers
from fastgen.runtime.step.plan_costs import PlanCosts
from fastgen.runtime.step.run_ahead import awaited, tokens_to_come
from fastgen.runtime.step.step import Step

_log = logging.getLogger(__name__)

_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")


class Engine:
    """Serves submitted requests step by step. Not thread-safe: callers hold one lock around each call.

    ``new_detokenizer(prompt_ids, sampling)`` and ``grammars``, which compiles response formats, are ``None`` for a
    model without a tokenizer; its answers are token ids. ``drafter`` is the one that ``scheduler`` asks for drafts.

    With ``runs_ahead`` a call of :meth:`step` returns the tokens of the step that the call before launched, and
    launches the forward pass of the next step before it waits for them. That needs a runner whose kernels sample on the
    device. ``ranks`` is how many processes the runner's model is shared by.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        new_detokenizer: NewDetokenizer | None,
        grammars: Grammars | None = None,
        drafter: NgramDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        runs_ahead: bool = False,
        ranks: int = 1,
    ):
        self.runner, self.scheduler = runner, scheduler
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids
        self.grammars = grammars
        self.clock, self._drafter, self._runs_ahead, self._ranks = clock, drafter, runs_ahead, ranks
        self._checks = RequestChecks(vocab_size, max_model_len, eos_token_ids, new_detokenizer is not None, grammars)
        self.recorder = Recorder(engine_facts(scheduler, runs_ahead=runs_ahead, ranks=ranks), clock)
        plan_costs = PlanCosts if ranks == 1 else lambda: runner.plan_costs
        self.metrics = EngineMetrics(scheduler, ranks=ranks, plan_costs=plan_costs)
        drafters = [] if drafter is None else [DrafterObserver(drafter)]
        self.observers = Observers(self.recorder, self.metrics, *drafters)
        self.answers = Answers(
            scheduler,
            self.observers,
            self._attempt,
            eos_token_ids=eos_token_ids,
            new_detokenizer=new_detokenizer,
            clock=lambda: self.clock(),
        )
        self._request_ids = count()
        # The step whose tokens are not collected yet.
        self._in_flight: Step | None = None
        self._last_end_s = -math.inf
        # Errors that kept the policy from learning, each of which is logged once.
        self._not_learned: set[type[Exception]] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.answers.open)

    @property
    def idle_s(self) -> float:
        """Returns for how many seconds nothing will run unless a request arrives, because the policy waits."""
        resumes_at_s = self.scheduler.resumes_at_s
        return 0.0 if resumes_at_s is None else max(0.0, resumes_at_s - self.clock())

    def use_policy(self, policy: Policy) -> None:
        """Replaces the scheduling policy, and begins a new flight recording. There may be no open request."""
        assert not self.has_work, "a policy is replaced between requests only"
        if self._in_flight is not None:  # its requests were cancelled, and the next recording will not know it
            self._update(self._collect(self._in_flight))
        self.scheduler.use_policy(policy)
        others = [one for one in self.observers.each if one is not self.recorder]
        facts = engine_facts(self.scheduler, runs_ahead=self._runs_ahead, ranks=self._ranks)
        self.recorder = Recorder(facts, self.clock, first_step=self.recorder.next_step)
        self.recorder.snapshot(self.scheduler)
        self.observers.set(self.recorder, *others)

    def check(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> None:
        """Raises with the reason if a request cannot be served. Changes nothing."""
        self._checks.check(prompt_ids, sampling)
        self.scheduler.check_fits(len(prompt_ids), sampling)

    def submit(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> Generation:
        """Queues a request. Its answer grows with the steps that follow. What it needs only to run is made when it is
        scheduled.
        """
        self.check(prompt_ids, sampling)
        constraint = self.grammars.constraint(sampling) if self.grammars is not None else None
        request = Request(next(self._request_ids), prompt_ids, resolve_seed(sampling), self.clock(), constraint)
        generation = self.answers.begin(request)
        self.observers.arrived(request)
        if sampling.timeout_s is not None:
            self.answers.deadlines.add(request.request_id, request.arrival_s + sampling.timeout_s)
        self.scheduler.enqueue(request)  # last: a request must not run if any of this failed
        self.answers.add(generation)
        return generation

    def cancel(self, generation: Generation, reason: FinishReason = "cancelled", error: str | None = None) -> None:
        """Ends what is still running of ``generation``. Its blocks and slots are free at once."""
        self.answers.cancel(generation, reason, error)

    def cancel_all(self) -> None:
        """Ends every request that runs or waits."""
        for generation in list(self.answers.open.values()):
            self.cancel(generation)

    def step(self) -> None:
        """Runs one step, if there is anything to run.

        Without run-ahead, a step goes through all phases in one call. With run-ahead it stays in flight after it was
        sampled, and the next call launches the step that follows before it collects this one's tokens.

        A failure ends requests with ``finish_reason="error"`` and the reason, and the engine continues.
        :class:`~fastgen.runtime.step.faults.Phase` says which requests end.
        """
        self.answers.expire()
        step = None
        if self._in_flight is not None:
            ahead = self._launch_ahead(self._in_flight)
            self._update(self._collect(self._in_flight))
            step = self._sample(ahead)
        if step is None:
            step = self._sample(self._launch(self._schedule()))
        if step is not None and not self._stays_in_flight(step):
            self._update(self._collect(step))

    # The phases. Each takes the step from the phase before, or ``None`` if there is none or it failed.

    def _schedule(self) -> Step | None:
        if self.recorder.wants_snapshot:
            self.recorder.snapshot(self.scheduler)
        began_s = self.clock()
        schedule = self._attempt(Phase.SCHEDULE, None, self.scheduler.schedule, began_s)
        if isinstance(schedule, Failure):
            schedule = self._attempt(Phase.SCHEDULE_AGAIN, None, self.scheduler.schedule, began_s)
        return self._begin(schedule, began_s)

    def _launch(self, step: Step | None) -> Step | None:
        if step is not None and not step.has_failed:
            self._attempt(Phase.RUN, step, self.runner.launch, step)
            if step.is_ahead and not step.has_failed:  # block tables may change before it is committed
                self._attempt(Phase.RUN, step, self.scheduler.launched, step.schedule)
                step.counts = not step.has_failed
        return step

    def _sample(self, step: Step | None) -> Step | None:
        if step is None:
            return None
        if not step.has_failed:
            self._attempt(Phase.RUN, step, self.runner.sample, step)
            step.counts = step.counts or not step.has_failed
        if step.counts:
            self._attempt(Phase.RUN, step, self.scheduler.commit, step.schedule, step.postponed)
        if step.has_failed:
            self._give_up(step)
            return None
        self._in_flight = step
        return step

    def _collect(self, step: Step) -> Step | None:
        self._attempt(Phase.RUN, step, self.runner.collect, step)
        self._in_flight = None
        if step.has_failed:
            self._give_up(step)
            return None
        step.ran_s = self.clock()
        self.observers.ran(step)
        return step

    def _update(self, step: Step | None) -> None:
        if step is None:
            return
        self.answers.update(step)
        step.ended_s = self.clock()
        step.took_s = step.ended_s - max(step.began_s, self._last_end_s)
        self._last_end_s = step.ended_s
        self.observers.ended(step)
        self._attempt(Phase.LEARN, None, self.scheduler.observe, step.schedule, step.took_s)

    # Run-ahead

    def _launch_ahead(self, before: Step) -> Step | None:
        """Schedules and launches the step that follows ``before``, as far as that needs none of its tokens here."""
        if not self._runs_ahead or self.recorder.wants_snapshot:  # a snapshot needs a time when no step is in flight
            return None
        began_s = self.clock()
        may_draft = self._drafter.may_draft if self._drafter is not None else lambda sequence: False
        ready, held_back = awaited(before, may_draft)
        with tokens_to_come(ready):
            schedule = self._attempt(Phase.SCHEDULE_AHEAD, None, self.scheduler.schedule_ahead, began_s)
            return self._launch(self._begin(schedule, began_s, held_back))

    def _stays_in_flight(self, step: Step) -> bool:
        """Returns whether another call is sure to collect ``step``: there is one as long as any sequence runs."""
        return self._runs_ahead and any(seq.status is SequenceStatus.RUNNING for seq in step.sequences)

    # Parts of phases

    def _begin(
        self, schedule: Schedule | Failure | None, began_s: float, held_back: SequenceOf[Sequence] | None = None
    ) -> Step | None:
        if schedule is None or isinstance(schedule, Failure):
            return None
        step = Step(schedule, began_s, self.clock(), held_back)
        self.answers.admit(step)
        self.observers.scheduled(step, self.scheduler)
        return step

    # Failures

    def _attempt(self, phase: Phase, subject: Any, function: Callable[[Unpack[_Ts]], _R], *args: *_Ts) -> _R | Failure:
        """Calls ``function``, which is all or part of ``phase``. If it raises, applies what :class:`Phase` says."""
        try:
            return function(*args)
        except Exception as error:
            self._fail(phase, subject, error)
            return Failure(error)

    def _fail(self, phase: Phase, subject: Any, error: Exception) -> None:
        if phase is Phase.SCHEDULE_AHEAD:
            _log.warning("a step cannot be scheduled ahead: %s", cause_of(error), exc_info=error)
        elif phase is Phase.SCHEDULE:
            _log.warning("a step cannot be scheduled at the first try: %s", cause_of(error), exc_info=error)
        elif phase is Phase.SCHEDULE_AGAIN:
            head = self.scheduler.waiting.head
            suspects = [*self.scheduler.running, *([] if head is None else [head])]
            self.answers.fail(suspects or self.scheduler.unfinished, error)
        elif phase is Phase.PREPARE:
            step, sequence = subject
            step.unprepared += ((sequence, error),)
            step.has_failed = True
        elif phase is Phase.RUN:
            subject.error = subject.error or error
            subject.has_failed = True
        elif phase is Phase.UPDATE:
            self.answers.fail([subject], error)
        elif phase is Phase.TEXT:
            _log.error("a request ends with an error: %s", cause_of(error), exc_info=error)
        elif type(error) not in self._not_learned:  # it may be raised at every step
            self._not_learned.add(type(error))
            _log.error("the policy cannot learn from a step: %s", cause_of(error), exc_info=error)

    def _give_up(self, step: Step) -> None:
        """Ends the requests that made ``step`` fail: those that could not be prepared, or all if the step failed."""
        for sequence, error in step.unprepared:
            self.answers.fail([sequence], error)
        if step.error is None:
            return
        if step.counts:  # records must say that it is committed
            step.ran_s = self.clock()
            self.observers.ran(step)
        self.answers.withdraw(step.sequences, step)
        self.answers.fail(step.sequences, step.error)

    @property
    def lost(self) -> str | None:
        """Returns why no step can run any more; ``None`` while steps can."""
        return self.runner.lost

    def close(self) -> None:
        """Releases captured steps, and ends other processes that take part. No step may follow."""
        self.runner.close()

    def check_integrity(self) -> None:
        """Asserts that scheduler, blocks and open requests agree."""
        self.scheduler.check_integrity()
        open_sequences = {
            sequence
            for generation in self.answers.open.values()
            for sequence in generation.request.sequences
            if sequence.status is not SequenceStatus.FINISHED
        }
        assert open_sequences == set(self.scheduler.unfinished)
