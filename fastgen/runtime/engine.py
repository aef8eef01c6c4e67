"""The engine: schedule → build batch → forward → sample → update, one step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import count

from fastgen.runtime.faults import cause_of
from fastgen.runtime.flight.recorder import Recorder, StepRecord, engine_facts
from fastgen.runtime.metrics import EngineMetrics
from fastgen.runtime.requests.checks import RequestChecks
from fastgen.runtime.requests.deadlines import Deadlines
from fastgen.runtime.requests.generation import Completion, Generation
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.sampling.beam_group import BeamGroup
from fastgen.runtime.sampling.sampler import SampledToken
from fastgen.runtime.sampling.sampling_params import SamplingParams, resolve_seed
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.runtime.scheduling.drafts import NgramDrafter
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.model_runner import ModelRunner, PromptLogprobs, StepOutput
from fastgen.runtime.step.run_ahead import InFlight, awaited, tokens_to_come
from fastgen.runtime.text.detokenizer import Detokenizer

_log = logging.getLogger(__name__)


class Engine:
    """Serves submitted requests step by step. Not thread-safe: whoever calls holds one lock around each call.

    ``new_detokenizer(prompt_ids, sampling)`` and ``grammars``, which compile what requests ask their answers to be, are
    ``None`` where the model has no tokenizer; answers are token ids then.
    The ``drafter``, if any, is the one that ``scheduler`` asks; it is told who has ended.

    With ``runs_ahead`` a call of :meth:`step` gives the tokens of the step that the last call launched, and before it
    waits for them it launches the forward pass of the next one. That takes a runner whose kernels sample on the device.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        new_detokenizer: Callable[[SequenceOf[int], SamplingParams], Detokenizer] | None,
        grammars: Grammars | None = None,
        drafter: NgramDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        runs_ahead: bool = False,
    ):
        self.runner, self.scheduler = runner, scheduler
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids
        self._new_detokenizer, self._grammars = new_detokenizer, grammars
        self._checks = RequestChecks(vocab_size, max_model_len, eos_token_ids, new_detokenizer is not None, grammars)
        self._drafter, self.clock, self._runs_ahead = drafter, clock, runs_ahead
        self.recorder = Recorder(engine_facts(scheduler, runs_ahead=runs_ahead), clock)
        self.metrics = EngineMetrics(scheduler)
        self._in_flight: InFlight | None = None
        self._last_end_s = -math.inf
        # What kept the policy from learning, which was told.
        self._not_learned: set[type[Exception]] = set()
        # Told of a request whenever one of its completions has ended.
        self.on_end: Callable[[Generation], None] | None = None
        # Whether answers have a text. Without, only those are decoded that a stop string may end.
        self.gives_text = True
        self._request_ids = count()
        self._generations: dict[int, Generation] = {}
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    @property
    def idle_s(self) -> float:
        """For how many seconds nothing will run, unless a request comes, because the policy waits for more."""
        resumes_at_s = self.scheduler.resumes_at_s
        return 0.0 if resumes_at_s is None else max(0.0, resumes_at_s - self.clock())

    def check(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> None:
        """Refuse a request that cannot be served, saying why; nothing is changed."""
        self._checks.check(prompt_ids, sampling)
        self.scheduler.check_fits(len(prompt_ids), sampling)

    def submit(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> Generation:
        """Queue a request. Its answer grows with the steps that follow. What is not needed before its turn is made
        then.
        """
        self.check(prompt_ids, sampling)
        constraint = self._grammars.constraint(sampling) if self._grammars is not None else None
        request = Request(next(self._request_ids), prompt_ids, resolve_seed(sampling), self.clock(), constraint)
        beams = BeamGroup(request, sampling.stop_ids(self.eos_token_ids)) if request.has_beams else None
        generation = Generation(request, beams)
        self.recorder.arrived(request)
        self.metrics.arrived(len(prompt_ids))
        if sampling.timeout_s is not None:
            self._deadlines.add(request.request_id, request.arrival_s + sampling.timeout_s)
        self.scheduler.enqueue(request)  # last: what could not be noted must not run, for nobody would hear of it
        self._generations[request.request_id] = generation
        return generation

    def cancel(self, generation: Generation, reason: FinishReason = "cancelled", error: str | None = None) -> None:
        """End what is still running of ``generation``; blocks and slots are free at once."""
        if generation.beams is not None and not generation.finished:
            self._finish_beams(generation, reason, error)
        for completion in generation.completions:
            if completion.finish_reason is None:
                self._finish(completion, reason, error)

    def cancel_all(self) -> None:
        """End everything that runs or waits."""
        for generation in list(self._generations.values()):
            self.cancel(generation)

    def step(self) -> None:
        """Run one step, if there is anything to run; where it runs ahead, launch one and end the one before.

        What fails in it ends requests with ``finish_reason="error"`` and says why, and the engine goes on. Only those
        end that the failure is of: a single one where its own token or text could not be handled, all of the step where
        that could not be run, for nothing is known of what it left of theirs.
        """
        if len(self._deadlines):
            self._expire()
        if self._in_flight is not None:
            # A snapshot wants a moment at which no step is under way.
            ahead = None if self.recorder.wants_snapshot else self._launch_ahead(self._in_flight)
            self._collect(self._in_flight)
            if ahead is not None and self._sample(ahead):
                return
        if self.recorder.wants_snapshot:
            self.recorder.snapshot(self.scheduler)
        began_s = self.clock()
        schedule = self._schedule(began_s)
        if schedule is None:
            return
        step = self._begin(schedule, began_s)
        if step.has_failed:
            self._tell_failures(step)
        elif self._runs_ahead:
            self._launch(step, ahead=False)
            self._sample(step)
        else:
            self._run(step)

    def _begin(self, schedule: Schedule, began_s: float, held_back: list[Sequence] | None = None) -> InFlight:
        """``schedule`` was made since ``began_s``. Where a request that is new in it failed, it is to be made again."""
        record = self.recorder.scheduled(schedule, self.scheduler, began_s, self.clock(), held_back)
        if schedule.preempted:
            self.metrics.preempted(len(schedule.preempted))
        return InFlight(schedule, record, self._note_admitted(record) if record.admitted else [])

    def _run(self, step: InFlight) -> None:
        """A step from its beginning to its end."""
        try:
            output = self.runner.run(step.schedule)
            self.recorder.ran(step.record, output.build_s, output.num_padding, self.clock())
            self.scheduler.commit(step.schedule)
        except Exception as error:
            self._fail_step(step, error)
        else:
            self._end(step, output)

    def _launch_ahead(self, before: InFlight) -> InFlight | None:
        """The step that follows ``before``, whose tokens are on their way, as far as it needs none of them here;
        ``None`` where there is no such step, or it cannot be made."""
        began_s = self.clock()
        may_draft = self._drafter.may_draft if self._drafter is not None else lambda sequence: False
        go_on, held_back = awaited(before.schedule, may_draft)
        with tokens_to_come(go_on):
            try:
                schedule = self.scheduler.schedule_ahead(began_s)
            except Exception as error:  # it is tried again when all tokens are here
                _log.warning("a step cannot be scheduled ahead: %s", cause_of(error), exc_info=error)
                return None
            if schedule is None:
                return None
            step = self._begin(schedule, began_s, held_back)
            if not step.has_failed:
                self._launch(step, ahead=True)
        return step

    def _launch(self, step: InFlight, *, ahead: bool) -> None:
        """The forward pass of ``step``."""
        try:
            launched = self.runner.launch(step.schedule, ahead=ahead)
            self.scheduler.launched(step.schedule)
            step.launched = launched
        except Exception as error:
            step.error = error

    def _sample(self, step: InFlight) -> bool:
        """Launch the sampling of a step; now only its tokens are missing. ``False`` where it failed."""
        if not step.has_failed:
            assert step.launched is not None
            try:
                self.runner.sample(step.launched)
            except Exception as error:
                step.error = error
            self.scheduler.commit(step.schedule)
        if step.has_failed:
            self._tell_failures(step)
            return False
        if any(seq.status is SequenceStatus.RUNNING for seq in step.sequences):
            self._in_flight = step
        else:  # all have ended, so nobody may ask for another step
            self._collect(step)
        return True

    def _tell_failures(self, step: InFlight) -> None:
        for seq, error in step.unprepared:
            self._fail([seq], error)
        if step.error is not None:
            self._fail_step(step, step.error)

    def _fail_step(self, step: InFlight, error: Exception) -> None:
        """Nobody knows what a step did that raised ``error``. If it was launched, the scheduler took it for computed,
        and so must who reads its record."""
        if step.launched is not None:
            num_padding = step.schedule.size - step.schedule.num_tokens
            self.recorder.ran(step.record, step.launched.build_s, num_padding, self.clock())
        self._withdraw(step.sequences, step.record)
        self._fail(step.sequences, error)

    def _collect(self, step: InFlight) -> None:
        """Wait for the tokens of a step, and give them to its sequences."""
        assert step.launched is not None
        try:
            output = self.runner.collect(step.launched)
            self.recorder.ran(step.record, output.build_s, output.num_padding, self.clock())
        except Exception as error:
            self._in_flight = None
            self._fail_step(step, error)
        else:
            self._in_flight = None
            self._end(step, output)

    def _end(self, step: InFlight, output: StepOutput) -> None:
        """The tokens of a step are here."""
        record = step.record
        self._update(output, record)
        record.ended_s = self.clock()
        step_s = record.ended_s - max(record.began_s, self._last_end_s)
        self._last_end_s = record.ended_s
        self.metrics.stepped(step.schedule, record.num_padding, step_s)
        try:
            self.scheduler.observe(step.schedule, step_s)
        except Exception as error:  # the step is whole: it is the policy that learns nothing from it
            if type(error) not in self._not_learned:  # it may fail at every step
                self._not_learned.add(type(error))
                _log.error("the policy cannot learn from a step: %s", cause_of(error), exc_info=error)

    def _schedule(self, now_s: float) -> Schedule | None:
        """The next step. One that cannot be made, not even at a second try, is nobody's in particular: those end that
        run and who would be next, so that it cannot fail for ever."""
        for is_last in (False, True):
            try:
                return self.scheduler.schedule(now_s)
            except Exception as error:
                if is_last:
                    head = self.scheduler.waiting.head
                    suspects = [*self.scheduler.running, *([] if head is None else [head])]
                    self._fail(suspects or self.scheduler.unfinished, error)
        return None

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End the requests of ``sequences``."""
        cause = cause_of(error)
        _log.error("requests end with an error: %s", cause, exc_info=error)
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in sequences):
            if request_id in self._generations:
                self.cancel(self._generations[request_id], "error", cause)

    def _withdraw(self, sequences: Iterable[Sequence], step: StepRecord) -> None:
        """Let no other request use what was computed for those of ``sequences``, which ``step`` showed to be wrong, or
        where nobody knows what it did."""
        for request in dict.fromkeys(sequence.request for sequence in sequences):
            self.recorder.withdrawn(request, step)
            for sequence in request.sequences:
                self.scheduler.kv.withdraw(sequence)

    def check_integrity(self) -> None:
        """Assert that scheduler, blocks and open requests agree."""
        self.scheduler.check_integrity()
        open_sequences = {
            sequence
            for generation in self._generations.values()
            for sequence in generation.request.sequences
            if sequence.status is not SequenceStatus.FINISHED
        }
        assert open_sequences == set(self.scheduler.unfinished)

    def _update(self, output: StepOutput, step: StepRecord) -> None:
        for piece in output.prompt_logprobs:
            try:
                self._note_prompt_logprobs(piece, step)
            except Exception as error:
                self._fail([piece.sequence], error)
        previous: Sequence | None = None
        for sequence, token in output.sampled:
            if sequence.status is SequenceStatus.FINISHED:  # its request failed in this step, or ended before a draft
                continue
            try:
                # A step gives a second token only behind a draft.
                self._take(sequence, token, step, was_drafted=sequence is previous)
            except Exception as error:
                self._fail([sequence], error)
            previous = sequence
        for sequence, num_drafts in output.num_accepted.items() if output.num_accepted else ():
            if sequence.status is SequenceStatus.RUNNING and num_drafts:
                try:
                    self.scheduler.accept(sequence, num_drafts)
                except Exception as error:
                    self._fail([sequence], error)

    def _note_prompt_logprobs(self, piece: PromptLogprobs, step: StepRecord) -> None:
        generation = self._generations[piece.sequence.request.request_id]
        if piece.error is not None:
            self._withdraw([piece.sequence], step)
            self.cancel(generation, "error", piece.error)
            return
        assert generation.prompt_logprobs is not None
        generation.prompt_logprobs[piece.start : piece.start + len(piece.logprobs)] = piece.logprobs

    def _take(self, sequence: Sequence, token: SampledToken, step: StepRecord, *, was_drafted: bool) -> None:
        """``token`` is what was sampled for ``sequence``, perhaps behind an accepted draft."""
        generation = self._generations[sequence.request.request_id]
        if token.error is not None:
            if token.is_damaged:
                self._withdraw([sequence], step)
            self.cancel(generation, "error", token.error)
            return
        if generation.beams is not None:
            self._update_beams(generation, sequence, token, step)
            return
        assert step.ran_s is not None
        completion = generation.completions[sequence.index]
        sequence.token_ids.append(token.token_id)
        completion.num_accepted_drafts += was_drafted
        step.sampled.append(sequence.key)
        reason = completion.append(token, sequence.request.sampling.stop_ids(self.eos_token_ids), step.ran_s)
        self.metrics.gave_token(sequence.request.arrival_s, completion.token_times_s)
        if reason is not None:
            self._finish(completion, reason)

    def _update_beams(self, generation: Generation, sequence: Sequence, token: SampledToken, step: StepRecord) -> None:
        beams = generation.beams
        assert beams is not None
        assert token.candidates is not None
        assert step.ran_s is not None
        beams.report(sequence, token.candidates)
        if beams.ready:
            moves = self.recorder.beam_moves(self.scheduler.forks, generation.request, step)
            beams.advance(moves, step.ran_s)
            self.recorder.beams_moved(generation.request, moves)
        if beams.done:
            self._finish_beams(generation)

    def _finish_beams(
        self, generation: Generation, reason: FinishReason | None = None, error: str | None = None
    ) -> None:
        """Give out what the search found. A ``reason`` ends it before its time."""
        for sequence in generation.request.sequences:
            self.scheduler.finish(sequence)
        ends: list[FinishReason | None] = [None] * len(generation.completions)
        try:
            ends = generation.adopt_beams(generation.request.sampling.stop_ids(self.eos_token_ids))
        except Exception as failure:  # of their text
            reason, error = "error", error or cause_of(failure)
            _log.error("a request ends with an error: %s", error, exc_info=failure)
        for completion, end in zip(generation.completions, ends, strict=True):
            self.metrics.gave_answer(generation.request.arrival_s, completion.token_times_s)
            if (why := reason or end) is not None:
                self._finish(completion, why, error)
            else:
                self._finish(completion, "error", "the beam search found fewer answers: no other token can be chosen")

    def _finish(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(completion.sequence)
        if self._drafter is not None:
            self._drafter.forget(completion.sequence)
        is_broken = False
        try:
            completion.finish(reason, error)
        except Exception as failure:  # of what was left to decode
            is_broken, reason, error = True, "error", error or cause_of(failure)
            _log.error("a request ends with an error: %s", error, exc_info=failure)
            completion.fail(error)
        now_s = self.clock()
        generation = self._generations[completion.sequence.request.request_id]
        if generation.left_queue_s is None:
            generation.left_queue_s = now_s
        num_tokens, is_last = len(completion.token_ids), generation.finished
        self.recorder.finished(completion.sequence, reason, now_s, num_tokens=num_tokens, is_last=is_last)
        self.metrics.finished(reason, now_s - generation.request.arrival_s if generation.finished else None)
        if generation.finished:
            del self._generations[generation.request.request_id]
            self._deadlines.keep(self._generations)
        elif is_broken and generation.beams is None:
            self.cancel(generation, reason, error)
        if self.on_end is not None:
            self.on_end(generation)

    def _note_admitted(self, step: StepRecord) -> list[tuple[Sequence, Exception]]:
        """Make what the requests that are new in this step need; returns of which request that failed, and why."""
        failures: list[tuple[Sequence, Exception]] = []
        for (request_id, _), *_ in step.admitted:
            generation = self._generations.get(request_id)
            if generation is None or generation.left_queue_s is not None:
                continue
            try:
                self._prepare(generation)
            except Exception as error:
                failures.append((generation.request.sequences[0], error))
            else:
                generation.left_queue_s = step.scheduled_s
                self.metrics.left_queue(step.scheduled_s - generation.request.arrival_s)
        return failures

    def _prepare(self, generation: Generation) -> None:
        """It is the turn of ``generation``: make what its answers need."""
        request = generation.request
        if self._new_detokenizer is not None and (self.gives_text or request.sampling.stop):
            for completion in generation.completions:
                completion.detokenizer = self._new_detokenizer(request.prompt_ids, request.sampling)

    def _expire(self) -> None:
        """End the requests whose ``timeout_s`` has passed, with what they have."""
        for request_id in self._deadlines.passed(self.clock()):
            if request_id in self._generations:
                self.cancel(self._generations[request_id], "timeout")
