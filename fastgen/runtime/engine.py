"""The engine: schedule → build batch → forward → sample → update, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from heapq import heapify, heappop, heappush
from itertools import count

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.beam_group import BeamGroup
from fastgen.runtime.detokenizer import Detokenizer
from fastgen.runtime.generation import Completion, Generation
from fastgen.runtime.model_runner import ModelRunner, StepOutput
from fastgen.runtime.outputs import FinishReason
from fastgen.runtime.request import Request, Sequence, SequenceStatus
from fastgen.runtime.sampler import SampledToken
from fastgen.runtime.sampling_params import SamplingParams, resolve_seed
from fastgen.runtime.schedule import Schedule
from fastgen.runtime.scheduler import Scheduler


class Engine:
    """Serves submitted requests step by step. Not thread-safe: whoever calls holds one lock around each call.

    ``new_detokenizer(prompt_ids, sampling)`` is ``None`` where the model has no tokenizer; answers are token ids then.
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
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.runner, self.scheduler = runner, scheduler
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids
        self._new_detokenizer, self._clock = new_detokenizer, clock
        self._request_ids = count()
        self._generations: dict[int, Generation] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    @property
    def idle_s(self) -> float:
        """For how many seconds nothing will run, unless a request comes, because the policy waits for more."""
        resumes_at_s = self.scheduler.resumes_at_s
        return 0.0 if resumes_at_s is None else max(0.0, resumes_at_s - self._clock())

    def check(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> None:
        """Refuse a request that cannot be served, saying why; nothing is changed."""
        if not prompt_ids:
            raise InvalidArgumentError("the prompt has no tokens; give it at least one")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            found = ((at, token_id) for at, token_id in enumerate(prompt_ids) if not 0 <= token_id < self.vocab_size)
            position, token_id = next(found)
            raise InvalidArgumentError(
                f"prompt token {position} is id {token_id}; the model's ids are 0 to {self.vocab_size - 1}"
            )
        sampling.check_against(self.vocab_size)
        if sampling.stop and self._new_detokenizer is None:
            raise InvalidArgumentError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        num_tokens = len(prompt_ids) + sampling.max_new_tokens
        if num_tokens > self.max_model_len:
            room = self.max_model_len - len(prompt_ids)
            advice = f"ask for at most {room} new tokens or shorten the prompt" if room > 0 else "shorten the prompt"
            raise RequestTooLargeError(
                f"a prompt of {len(prompt_ids)} tokens with max_new_tokens={sampling.max_new_tokens} makes "
                f"{num_tokens} tokens, max_model_len is {self.max_model_len}; {advice}",
                room=room,
            )
        num_endings = len(self._stop_ids(sampling))
        if 1 < sampling.beam_width > self.vocab_size - num_endings:
            raise InvalidArgumentError(
                f"beam_width={sampling.beam_width} beams cannot all go on with different tokens: of {self.vocab_size} "
                f"in the vocabulary {num_endings} end a beam"
            )
        self.scheduler.check_fits(len(prompt_ids), sampling)

    def submit(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> Generation:
        """Queue a request. Its answer grows with the steps that follow. What is not needed before its turn is made
        then.
        """
        self.check(prompt_ids, sampling)
        request = Request(next(self._request_ids), prompt_ids, resolve_seed(sampling), self._clock())
        completions = [Completion(sequence) for sequence in request.sequences[: sampling.n]]
        beams = BeamGroup(request, self._stop_ids(sampling)) if request.has_beams else None
        generation = Generation(request, completions, beams)
        self.scheduler.add(request)
        self._generations[request.request_id] = generation
        if sampling.timeout_s is not None:
            heappush(self._deadlines, (request.arrival_s + sampling.timeout_s, request.request_id))
        return generation

    def cancel(self, generation: Generation, reason: FinishReason = "cancelled", error: str | None = None) -> None:
        """End what is still running of ``generation``; blocks and seats are free at once."""
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
        """Run one step, if there is anything to run."""
        self._expire()
        began_s = self._clock()
        schedule = self.scheduler.schedule(began_s)
        if schedule is None:
            return
        self._note_scheduled(schedule)
        output = self.runner.run(schedule)
        self.scheduler.commit(schedule)
        self._update(output)
        self.scheduler.observe(schedule, self._clock() - began_s)

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

    def _update(self, output: StepOutput) -> None:
        now_s = self._clock()
        for piece in output.prompt_logprobs:
            generation = self._generations[piece.sequence.request.request_id]
            if piece.error is not None:
                self.cancel(generation, "error", piece.error)
                continue
            assert generation.prompt_logprobs is not None
            generation.prompt_logprobs[piece.start : piece.start + len(piece.logprobs)] = piece.logprobs
        for sequence, token in output.sampled:
            if sequence.status is SequenceStatus.FINISHED:  # its request failed in this step
                continue
            generation = self._generations[sequence.request.request_id]
            if token.error is not None:
                self.cancel(generation, "error", token.error)
                continue
            if generation.beams is not None:
                self._update_beams(generation, sequence, token, now_s)
                continue
            completion = generation.completions[sequence.index]
            sequence.token_ids.append(token.token_id)
            reason = completion.append(token, self._stop_ids(sequence.request.sampling), now_s)
            if reason is not None:
                self._finish(completion, reason)

    def _update_beams(self, generation: Generation, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        beams = generation.beams
        assert beams is not None
        assert token.candidates is not None
        beams.report(sequence, token.candidates)
        if beams.ready:
            beams.advance(self.scheduler.forks, now_s)
        if beams.done:
            self._finish_beams(generation)

    def _finish_beams(
        self, generation: Generation, reason: FinishReason | None = None, error: str | None = None
    ) -> None:
        """Give out what the search found. A ``reason`` ends it before its time."""
        for sequence in generation.request.sequences:
            self.scheduler.finish(sequence)
        ends = generation.adopt_beams(self._stop_ids(generation.request.sampling))
        for completion, end in zip(generation.completions, ends, strict=True):
            if (why := reason or end) is not None:
                self._finish(completion, why, error)
            else:
                self._finish(completion, "error", "the beam search found fewer answers: no other token can be chosen")

    def _finish(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(completion.sequence)
        completion.finish(reason, error)
        generation = self._generations[completion.sequence.request.request_id]
        if generation.left_queue_s is None:
            generation.left_queue_s = self._clock()
        if generation.finished:
            del self._generations[generation.request.request_id]
            self._drop_deadlines()

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self.eos_token_ids

    def _note_scheduled(self, schedule: Schedule) -> None:
        now_s = self._clock()
        for chunk in schedule.chunks:  # a decode was one before
            generation = self._generations[chunk.seq.request.request_id]
            if generation.left_queue_s is None:
                self._prepare(generation)
                generation.left_queue_s = now_s

    def _prepare(self, generation: Generation) -> None:
        """It is the turn of ``generation``: make what its answers need."""
        if self._new_detokenizer is not None:
            for completion in generation.completions:
                request = generation.request
                completion.detokenizer = self._new_detokenizer(request.prompt_ids, request.sampling)

    def _drop_deadlines(self) -> None:
        """Keep no more than twice as many deadlines as there are requests; those of finished ones go."""
        if len(self._deadlines) > 2 * len(self._generations):
            self._deadlines = [each for each in self._deadlines if each[1] in self._generations]
            heapify(self._deadlines)

    def _expire(self) -> None:
        """End the requests whose ``timeout_s`` has passed, with what they have."""
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heappop(self._deadlines)
            if request_id in self._generations:
                self.cancel(self._generations[request_id], "timeout")
