"""The answer of a request so far, from the user's side: text, log-probabilities, times."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from fastgen.runtime.requests.outputs import FinishReason, GenerationChunk, GenerationOutput, RequestMetrics
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.sampling.beam_group import BeamGroup
from fastgen.runtime.sampling.beam_search import Hypothesis
from fastgen.runtime.text.detokenizer import Detokenizer


@dataclass(slots=True)
class Completion:
    """One sequence's answer so far. ``token_times_s`` has the engine clock's time of each token."""

    sequence: Sequence
    detokenizer: Detokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_accepted_drafts: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    score: float | None = None
    num_chars_taken: int = 0
    num_tokens_taken: int = 0
    finish_taken: bool = False
    _text: str = ""
    # Tokens that are not decoded yet: text is made when it is read, not in the middle of a step.
    _undecoded: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Returns the text that is certain so far."""
        self._decode()
        return self._text

    def append(self, token: SampledToken, stop_ids: frozenset[int], now_s: float) -> FinishReason | None:
        """Adds a token. Returns why the sequence ends with it, if it does. A stop token contributes no text."""
        sampling = self.sequence.request.sampling
        self.token_ids.append(token.token_id)
        self.token_times_s.append(now_s)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        if token.token_id in stop_ids:
            return "stop"
        if self.detokenizer is not None:
            self._undecoded.append(token.token_id)
            if sampling.stop:
                self._decode()
                if self.detokenizer.stopped:
                    return "stop"
        matcher = self.sequence.matcher
        if matcher is not None and matcher.advance(token.token_id):
            return "stop"
        # An answer that this token completes may say so here: where its parser is late, nothing waits for it.
        return "length" if len(self.token_ids) >= sampling.max_new_tokens else None

    def adopt(self, found: Hypothesis, stop_ids: frozenset[int], times_s: list[float]) -> FinishReason | None:
        """Takes over the answer that a beam search ``found``. Returns why it ended, if it did. ``times_s`` has at least
        a time for each token.
        """
        self.score = found.score
        reason: FinishReason | None = None
        for token, time_s in zip(found.beam.tokens(), times_s, strict=False):
            reason = self.append(SampledToken(token.token_id, token.logprobs), stop_ids, time_s)
        return reason

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        if self.detokenizer is not None:
            self._text = self.text + self.detokenizer.finish()
        self.finish_reason, self.error = reason, error

    def fail(self, error: str) -> None:
        """Ends it as it is: the tokens that are left cannot be decoded."""
        self._undecoded.clear()
        self.finish_reason, self.error = "error", error

    def take_chunk(self) -> GenerationChunk | None:
        """Returns what was added since the last chunk was taken, or ``None``."""
        text, token_ids = self.text[self.num_chars_taken :], self.token_ids[self.num_tokens_taken :]
        ended = self.finish_reason is not None and not self.finish_taken
        if not text and not token_ids and not ended:
            return None
        self.num_chars_taken, self.num_tokens_taken = len(self.text), len(self.token_ids)
        self.finish_taken = ended
        return GenerationChunk(
            index=self.sequence.index, text=text, token_ids=token_ids, finish_reason=self.finish_reason
        )

    def take_logprobs(self) -> list[dict[int, float]]:
        """Returns the log-probabilities that were added since the last call, and forgets them."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def _decode(self) -> None:
        if self._undecoded:
            assert self.detokenizer is not None
            self._text += "".join(map(self.detokenizer.append, self._undecoded))
            self._undecoded.clear()


class Generation:
    """A submitted request: its completions and what they share. With ``beams`` a search finds the completions."""

    __slots__ = ("_completions", "_num_finished", "beams", "left_queue_s", "prompt_logprobs", "request")

    def __init__(self, request: Request, beams: BeamGroup | None = None):
        self.request = request
        self.beams = beams
        self.prompt_logprobs: list[dict[int, float] | None] | None = (
            None if request.sampling.prompt_logprobs is None else [None] * len(request.prompt_ids)
        )
        # When its first token was scheduled, or when it ended without one.
        self.left_queue_s: float | None = None
        self._completions: list[Completion] | None = None
        self._num_finished = 0

    @property
    def completions(self) -> list[Completion]:
        """Returns all ``n`` completions. They are created at first use, so a request that waits costs nothing."""
        if self._completions is None:
            self._completions = [Completion(sequence) for sequence in self.request.sequences[: self.request.sampling.n]]
        return self._completions

    @property
    def finished(self) -> bool:
        """Returns whether every completion has ended. Completions known to have ended are not looked at again.

        Any thread may ask: nothing is created, and the place that was reached is set and not advanced, so that two
        threads do not skip a completion.
        """
        completions, place = self._completions or (), self._num_finished
        while place < len(completions) and completions[place].finish_reason is not None:
            place += 1
        self._num_finished = place
        return 0 < len(completions) == place

    def adopt_beams(self, stop_ids: frozenset[int]) -> list[FinishReason | None]:
        """Takes the best hypotheses as the completions. Returns why each ended; ``None`` for one that has not ended,
        and for those that have no hypothesis.
        """
        assert self.beams is not None
        found = self.beams.hypotheses()
        ends = [
            completion.adopt(hypothesis, stop_ids, self.beams.token_times_s)
            for completion, hypothesis in zip(self.completions, found, strict=False)
        ]
        return ends + [None] * (len(self.completions) - len(found))

    def take_chunks(self) -> list[GenerationChunk]:
        """Returns what each completion has added since the last call."""
        return [chunk for completion in self.completions if (chunk := completion.take_chunk()) is not None]

    def output(self) -> GenerationOutput:
        """Returns the finished answer. Further completions are attached to the first."""
        assert self.finished
        others = tuple(self._completion_output(completion) for completion in self.completions[1:])
        return self._completion_output(self.completions[0], others)

    def _completion_output(self, completion: Completion, others: tuple[GenerationOutput, ...] = ()) -> GenerationOutput:
        assert completion.finish_reason is not None
        return GenerationOutput(
            request_id=self.request.request_id,
            index=completion.sequence.index,
            text=completion.text,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            error=completion.error,
            score=completion.score,
            logprobs=None if self.request.sampling.logprobs is None else completion.logprobs,
            prompt_token_ids=list(self.request.prompt_ids),
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics_of(completion),
            others=others,
        )

    def metrics_of(self, completion: Completion) -> RequestMetrics:
        """Returns the times of ``completion``, which has ended."""
        assert self.left_queue_s is not None
        arrival_s, times_s = self.request.arrival_s, completion.token_times_s
        return RequestMetrics(
            queue_s=self.left_queue_s - arrival_s,
            ttft_s=times_s[0] - arrival_s if times_s else None,
            gaps_s=[later - earlier for earlier, later in pairwise(times_s)],
            cached_tokens=completion.sequence.num_cached_tokens,
            accepted_drafts=completion.num_accepted_drafts,
            preemptions=completion.sequence.num_preemptions,
        )
