"""Decodes tokens to text in the server's process, so that no step of the engine waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fastgen.runtime.requests.outputs import GenerationOutput, Logprobs
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.detokenizer import Detokenizer
from fastgen.serving.engine.messages import End, Progress
from fastgen.serving.engine.packed_logprobs import PackedLogprobs, pack


@dataclass(frozen=True)
class Update:
    """The progress of a completion since its last update: final text, tokens, and with the last tokens its end."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[Logprobs] | None
    end: End | None
    # Comes with the first update of completion 0, if it was requested.
    prompt_logprobs: Sequence[Logprobs | None] | None = None


@dataclass(frozen=True)
class TextRules:
    """The way in which an answer's tokens become text."""

    # Special tokens that have a text, by their ids.
    spelled: Mapping[int, str] = field(default_factory=dict)
    # Whether the stop string or stop token that ends an answer is part of its text.
    includes_stop: bool = False
    # Whether each token has an update of its own.
    reports_each_token: bool = False


USUAL_TEXT = TextRules()


@dataclass
class Answer:
    """One completion that is being generated."""

    # Created with its first token: thousands of requests may exist, most of them waiting.
    detokenizer: Detokenizer | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: PackedLogprobs[Logprobs] = field(default_factory=PackedLogprobs)
    end: End | None = None


class Answers:
    """The completions of one request."""

    def __init__(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        codec: TextCodec,
        rules: TextRules = USUAL_TEXT,
    ):
        self._prompt_ids, self._sampling = prompt_ids, sampling
        # Tokens without text: a stop token, which comes last.
        self._mute_ids = frozenset[int]() if rules.includes_stop else sampling.stop_ids(codec.eos_token_ids)
        self._reports_each_token = rules.reports_each_token
        self._new_detokenizer = None
        if codec.has_tokenizer:
            self._new_detokenizer = partial(
                codec.new_detokenizer, prompt_ids, sampling, rules.spelled, includes_stop=rules.includes_stop
            )
        self._answers = [Answer() for _ in range(sampling.n)]
        self._num_open = sampling.n
        self._prompt_logprobs: PackedLogprobs[Logprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    def add(self, progress: Progress) -> Update:
        """Takes the engine's progress on one completion."""
        answer = self._answers[progress.index]
        answer.token_ids += progress.token_ids
        logprobs: PackedLogprobs[Logprobs] | None = None
        prompt_logprobs: PackedLogprobs[Logprobs | None] | None = None
        if progress.prompt_logprobs is not None:
            prompt_logprobs = PackedLogprobs(progress.prompt_logprobs, len(self._prompt_ids))
            self._prompt_logprobs = prompt_logprobs
        if progress.logprobs is not None:
            logprobs = PackedLogprobs(progress.logprobs, len(progress.token_ids))
            answer.logprobs.add(progress.logprobs, len(progress.token_ids))
        text = ""
        if answer.detokenizer is None and self._new_detokenizer is not None:
            answer.detokenizer = self._new_detokenizer()
        if answer.detokenizer is not None:
            text = "".join(answer.detokenizer.append(id_) for id_ in progress.token_ids if id_ not in self._mute_ids)
            if progress.end is not None:
                text += answer.detokenizer.finish()
        answer.text += text
        if progress.end is not None:
            answer.end = progress.end
            self._num_open -= 1
        return Update(progress.index, text, progress.token_ids, logprobs, progress.end, prompt_logprobs)

    def num_values(self, update: Update) -> int:
        """Returns how many tokens ``update`` has, with the log-probabilities that each may have."""
        number = len(update.token_ids)
        for logprobs, alternatives in (
            (update.logprobs, self._sampling.logprobs),
            (update.prompt_logprobs, self._sampling.prompt_logprobs),
        ):
            if logprobs is not None and alternatives is not None:
                number += len(logprobs) * (1 + alternatives)
        return number

    def parts(self, progress: Progress) -> list[Progress]:
        """Returns ``progress`` in parts, for each of which there is an update: by default it is one."""
        if not self._reports_each_token or len(progress.token_ids) < 2:
            return [progress]
        parts = [Progress(progress.number, progress.index, [token_id], None, None) for token_id in progress.token_ids]
        if progress.logprobs is not None:
            unpacked: PackedLogprobs[Logprobs] = PackedLogprobs(progress.logprobs, len(parts))
            for part, each in zip(parts, unpacked, strict=True):
                part.logprobs = pack([each])
        parts[0].prompt_logprobs, parts[-1].end = progress.prompt_logprobs, progress.end
        return parts

    def output(self, request_id: int) -> GenerationOutput:
        """Returns the finished answer, as ``LLM.generate`` returns it."""
        first, *others = range(len(self._answers))
        return self._output(request_id, first, tuple(self._output(request_id, index) for index in others))

    def _output(self, request_id: int, index: int, others: tuple[GenerationOutput, ...] = ()) -> GenerationOutput:
        answer = self._answers[index]
        assert answer.end is not None
        return GenerationOutput(
            request_id=request_id,
            index=index,
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.end.reason,
            error=answer.end.error,
            score=answer.end.score,
            logprobs=None if self._sampling.logprobs is None else answer.logprobs,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            metrics=answer.end.metrics,
            others=others,
        )
