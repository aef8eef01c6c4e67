"""The engine: schedule → build batch → forward → sample → update, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush
from itertools import count

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.detokenizer import Detokenizer
from fastgen.runtime.drafts import NgramDrafter
from fastgen.runtime.generation import Completion, Generation
from fastgen.runtime.model_runner import ModelRunner, StepOutput
from fastgen.runtime.outputs import FinishReason
from fastgen.runtime.request import Request, Sequence, SequenceStatus
from fastgen.runtime.sampling_params import SamplingParams, resolve_seed
from fastgen.runtime.schedule import Schedule
from fastgen.runtime.scheduler import Scheduler


class Engine:
    """Serves submitted requests step by step. Not thread-safe: whoever calls holds one lock around each call.

    ``new_detokenizer(prompt_ids, sampling)`` is ``None`` where the model has no tokenizer; answers are token ids then.
    The ``drafter``, if any, is the one that ``scheduler`` asks; it is told who has ended.
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
        drafter: NgramDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.runner, self.scheduler = runner, scheduler
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids
        self._new_detokenizer, self._drafter, self._clock = new_detokenizer, drafter, clock
        self._request_ids = count()
        self._generations: dict[int, Generation] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    def check(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> None:
        """Refuse a request that cannot be served, saying why; nothing is changed."""
        if not prompt_ids:
            raise InvalidArgumentError("the prompt has no tokens; give it at least one")
        for position, token_id in enumerate(prompt_ids):
            if not 0 <= token_id < self.vocab_size:
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
        self.scheduler.kv.check_fits(len(prompt_ids), sampling.max_new_tokens)

    def submit(self, prompt_ids: SequenceOf[int], sampling: SamplingParams) -> Generation:
        """Queue a request. Its answer grows with the steps that follow."""
        self.check(prompt_ids, sampling)
        request = Request(next(self._request_ids), prompt_ids, resolve_seed(sampling), self._clock())
        completions = [
            Completion(sequence, self._new_detokenizer(prompt_ids, sampling) if self._new_detokenizer else None)
            for sequence in request.sequences
        ]
        generation = Generation(request, completions)
        self.scheduler.add(request)
        self._generations[request.request_id] = generation
        if sampling.timeout_s is not None:
            heappush(self._deadlines, (request.arrival_s + sampling.timeout_s, request.request_id))
        return generation

    def cancel(self, generation: Generation, reason: FinishReason = "cancelled", error: str | None = None) -> None:
        """End what is still running of ``generation``; blocks and seats are free at once."""
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
        schedule = self.scheduler.schedule(self._clock())
        if schedule is None:
            return
        self._note_scheduled(schedule)
        output = self.runner.run(schedule)
        self.scheduler.commit(schedule)
        self._update(output)

    def check_integrity(self) -> None:
        """Assert that scheduler, blocks and open requests agree."""
        self.scheduler.check_integrity()
        open_sequences = {
            completion.sequence
            for generation in self._generations.values()
            for completion in generation.completions
            if completion.finish_reason is None
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
        previous: Sequence | None = None
        for sequence, token in output.sampled:
            if sequence.status is SequenceStatus.FINISHED:  # its request failed in this step, or ended before a draft
                continue
            generation = self._generations[sequence.request.request_id]
            if token.error is not None:
                self.cancel(generation, "error", token.error)
                continue
            completion = generation.completions[sequence.index]
            sequence.token_ids.append(token.token_id)
            completion.num_accepted_drafts += sequence is previous  # a step gives a second token only behind a draft
            previous = sequence
            reason = completion.append(token, self._stop_ids(sequence.request.sampling), now_s)
            if reason is not None:
                self._finish(completion, reason)
        for sequence, num_drafts in output.num_accepted.items():
            if sequence.status is SequenceStatus.RUNNING and num_drafts:
                self.scheduler.accept(sequence, num_drafts)

    def _finish(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(completion.sequence)
        if self._drafter is not None:
            self._drafter.forget(completion.sequence)
        completion.finish(reason, error)
        generation = self._generations[completion.sequence.request.request_id]
        if generation.left_queue_s is None:
            generation.left_queue_s = self._clock()
        if generation.finished:
            del self._generations[generation.request.request_id]

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self.eos_token_ids

    def _note_scheduled(self, schedule: Schedule) -> None:
        now_s = self._clock()
        for chunk in schedule.chunks:  # a decode was one before
            generation = self._generations[chunk.seq.request.request_id]
            if generation.left_queue_s is None:
                generation.left_queue_s = now_s

    def _expire(self) -> None:
        """End the requests whose ``timeout_s`` has passed, with what they have."""
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heappop(self._deadlines)
            if request_id in self._generations:
                self.cancel(self._generations[request_id], "timeout")
