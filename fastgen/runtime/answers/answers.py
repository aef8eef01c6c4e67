"""The open requests of an engine: sampled tokens become answers, and answers end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.answers.generation import Completion, Generation
from fastgen.runtime.requests.deadlines import Deadlines
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.requests.sampled import PromptLogprobs, SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.beam_group import BeamForks, BeamGroup
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.faults import Attempt, Failure, Phase, cause_of
from fastgen.runtime.step.observer import Observer
from fastgen.runtime.step.step import Step
from fastgen.runtime.text.detokenizer import Detokenizer

_log = logging.getLogger(__name__)

# Makes the detokenizer of an answer from its prompt's ids and its sampling parameters.
NewDetokenizer = Callable[[SequenceOf[int], SamplingParams], Detokenizer]


class Answers:
    """The open requests by id, and how their answers grow and end.

    ``attempt`` runs what may fail for one request alone. ``observer`` gets the events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observer: Observer,
        attempt: Attempt,
        *,
        eos_token_ids: frozenset[int],
        new_detokenizer: NewDetokenizer | None,
        clock: Callable[[], float],
    ):
        self._scheduler, self._observer, self._attempt = scheduler, observer, attempt
        self._eos_token_ids, self.new_detokenizer, self._clock = eos_token_ids, new_detokenizer, clock
        self.open: dict[int, Generation] = {}
        self.deadlines = Deadlines()
        # Called with a request whenever one of its completions has ended.
        self.on_end: Callable[[Generation], None] | None = None
        # Whether answers need a text. If not, only those are decoded that a stop string may end.
        self.gives_text = True

    def begin(self, request: Request) -> Generation:
        """Returns the answer of ``request``, which is empty, and not open yet."""
        beams = BeamGroup(request, self._stop_ids(request)) if request.has_beams else None
        return Generation(request, beams)

    def add(self, generation: Generation) -> None:
        """Opens the answer of a request that was queued."""
        self.open[generation.request.request_id] = generation

    def expire(self) -> None:
        """Ends the requests whose ``timeout_s`` has passed, with what they have."""
        if not len(self.deadlines):
            return
        for request_id in self.deadlines.passed(self._clock()):
            if request_id in self.open:
                self.cancel(self.open[request_id], "timeout")

    def admit(self, step: Step) -> None:
        """Makes what the answers of requests that are new in ``step`` need."""
        for chunk in step.schedule.chunks:
            generation = self.open.get(chunk.seq.request.request_id)
            if generation is None or generation.left_queue_s is not None:
                continue
            if not isinstance(self._attempt(Phase.PREPARE, (step, chunk.seq), self._prepare, generation), Failure):
                generation.left_queue_s = step.scheduled_s
                step.admitted += (generation.request,)

    def update(self, step: Step) -> None:
        """Gives the tokens of ``step`` to their sequences."""
        attempt, take, finished = self._attempt, self._take, SequenceStatus.FINISHED
        for piece in step.prompt_logprobs:
            if piece.sequence.status is finished:  # its request was cancelled while the step ran
                continue
            attempt(Phase.UPDATE, piece.sequence, self._take_prompt_logprobs, piece, step)
        previous: Sequence | None = None
        for sequence, token in step.sampled:
            if sequence.status is finished:  # its request failed in this step, or ended before a draft
                continue
            # A step gives a second token only behind a draft.
            attempt(Phase.UPDATE, sequence, take, sequence, token, step, sequence is previous)
            previous = sequence
        for sequence in step.postponed:
            matcher = sequence.matcher
            if sequence.status is SequenceStatus.RUNNING and matcher is not None and matcher.is_complete:
                attempt(Phase.UPDATE, sequence, self._end, sequence)
        for sequence, num_drafts in step.num_accepted.items() if step.num_accepted else ():
            if sequence.status is SequenceStatus.RUNNING and num_drafts:
                attempt(Phase.UPDATE, sequence, self._scheduler.accept, sequence, num_drafts)

    def cancel(self, generation: Generation, reason: FinishReason = "cancelled", error: str | None = None) -> None:
        """Ends what is still running of ``generation``. Its blocks and slots are free at once."""
        if generation.beams is not None and not generation.finished:
            self._finish_beams(generation, reason, error)
        for completion in generation.completions:
            if completion.finish_reason is None:
                self._finish(completion, reason, error)

    def fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """Ends the requests of ``sequences`` because of ``error``."""
        cause = cause_of(error)
        _log.error("requests end with an error: %s", cause, exc_info=error)
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in sequences):
            if request_id in self.open:
                self.cancel(self.open[request_id], "error", cause)

    def withdraw(self, sequences: Iterable[Sequence], step: Step) -> None:
        """Keeps other requests from using what was computed for the requests of ``sequences``: ``step`` showed that it
        is wrong, or it is unknown what the step did.
        """
        for request in dict.fromkeys(sequence.request for sequence in sequences):
            self._observer.withdrawn(request, step)
            for sequence in request.sequences:
                self._scheduler.kv.withdraw(sequence)

    def _prepare(self, generation: Generation) -> None:
        request = generation.request
        if self.new_detokenizer is not None and (self.gives_text or request.sampling.stop):
            for completion in generation.completions:
                completion.detokenizer = self.new_detokenizer(request.prompt_ids, request.sampling)

    def _take_prompt_logprobs(self, piece: PromptLogprobs, step: Step) -> None:
        generation = self.open[piece.sequence.request.request_id]
        if piece.error is not None:
            self.withdraw([piece.sequence], step)
            self.cancel(generation, "error", piece.error)
            return
        assert generation.prompt_logprobs is not None
        generation.prompt_logprobs[piece.start : piece.start + len(piece.logprobs)] = piece.logprobs

    def _take(self, sequence: Sequence, token: SampledToken, step: Step, was_drafted: bool) -> None:
        """Adds ``token`` to ``sequence``. It may have been sampled behind an accepted draft."""
        generation = self.open[sequence.request.request_id]
        if token.error is not None:
            if token.is_damaged:
                self.withdraw([sequence], step)
            self.cancel(generation, "error", token.error)
            return
        if generation.beams is not None:
            self._take_candidates(generation.beams, sequence, token, step)
            return
        assert step.ran_s is not None
        completion = generation.completions[sequence.index]
        sequence.token_ids.append(token.token_id)
        completion.num_accepted_drafts += was_drafted
        times_s = completion.token_times_s
        step.given.append((sequence, times_s[-1] if times_s else None))
        reason = completion.append(token, self._stop_ids(sequence.request), step.ran_s)
        if reason is not None:
            self._finish(completion, reason)

    def _end(self, sequence: Sequence) -> None:
        """Ends the answer of ``sequence``, whose format allows nothing more."""
        self._finish(self.open[sequence.request.request_id].completions[sequence.index], "stop")

    def _take_candidates(self, beams: BeamGroup, sequence: Sequence, token: SampledToken, step: Step) -> None:
        assert token.candidates is not None
        assert step.ran_s is not None
        beams.report(sequence, token.candidates)
        if beams.ready:
            beams.advance(_ObservedForks(self._scheduler.forks, self._observer), step.ran_s)
            self._observer.beams_moved(beams.request, step)
        if beams.done:
            self._finish_beams(self.open[beams.request.request_id])

    def _finish_beams(
        self, generation: Generation, reason: FinishReason | None = None, error: str | None = None
    ) -> None:
        """Ends a beam search with the best that it found. A ``reason`` ends it before it is done."""
        for sequence in generation.request.sequences:
            self._scheduler.finish(sequence)
        ends: list[FinishReason | None] = [None] * len(generation.completions)
        adopted = self._attempt(Phase.TEXT, None, generation.adopt_beams, self._stop_ids(generation.request))
        if isinstance(adopted, Failure):
            reason, error = "error", error or adopted.cause
        else:
            ends = adopted
        for completion, end in zip(generation.completions, ends, strict=True):
            if (why := reason or end) is not None:
                self._finish(completion, why, error)
            else:
                self._finish(completion, "error", "the beam search found fewer answers: no other token can be chosen")

    def _finish(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        self._scheduler.finish(completion.sequence)
        text = self._attempt(Phase.TEXT, None, completion.finish, reason, error)
        if isinstance(text, Failure):
            reason, error = "error", error or text.cause
            completion.fail(error)
        now_s = self._clock()
        generation = self.open[completion.sequence.request.request_id]
        if generation.left_queue_s is None:
            generation.left_queue_s = now_s
        is_last = generation.finished
        # The recorder keeps requests, and a compiled format is large.
        if (matcher := completion.sequence.matcher) is not None:
            matcher.drop()
        completion.sequence.matcher = None
        if is_last:
            generation.request.constraint = None
        self._observer.finished(completion.sequence, reason, now_s, completion.token_times_s, is_last)
        if is_last:
            del self.open[generation.request.request_id]
            self.deadlines.keep(self.open)
        elif isinstance(text, Failure) and generation.beams is None:
            self.cancel(generation, reason, error)
        if self.on_end is not None:
            self.on_end(generation)

    def _stop_ids(self, request: Request) -> frozenset[int]:
        return request.sampling.stop_ids(self._eos_token_ids)


class _ObservedForks:
    """Reports what a beam search does with its sequences, just before it is done."""

    def __init__(self, forks: BeamForks, observer: Observer):
        self._forks, self._observer = forks, observer

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self._observer.beam_moves(child, parent)
        self._forks.fork(parent, child)

    def suspend(self, beam: Sequence) -> None:
        self._observer.beam_moves(beam, None)
        self._forks.suspend(beam)
