"""The JSON records of ``/generate`` and the headers of ``/recording``, for server and client. JSON has no infinity: the
log-probability of an impossible token is ``null``.
"""

from __future__ import annotations

import math
from typing import Self, cast

import msgspec

from fastgen.runtime.requests.outputs import FinishReason, GenerationChunk, GenerationOutput, Logprobs, RequestMetrics

# The header with the numbers that the requested request has in a recording.
NUMBERS_HEADER = "x-request-numbers"
# The header with the replicas that answered its prompts.
REPLICAS_HEADER = "x-request-replicas"
_Logprobs = dict[int, float | None]


class CompletionRecord(msgspec.Struct, kw_only=True):
    """One completion; :class:`~fastgen.runtime.requests.outputs.GenerationOutput` describes the fields."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[_Logprobs] | None
    error: str | None
    score: float | None
    metrics: RequestMetrics


class OutputRecord(msgspec.Struct, kw_only=True):
    """A whole answer: its completions, and the fields that they share."""

    request_id: int
    prompt_token_ids: list[int]
    prompt_logprobs: list[_Logprobs | None] | None
    completions: list[CompletionRecord]

    @classmethod
    def of(cls, output: GenerationOutput) -> Self:
        completions = [
            CompletionRecord(
                index=completion.index,
                text=completion.text,
                token_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
                logprobs=cast("list[_Logprobs] | None", completion.logprobs),
                error=completion.error,
                score=completion.score,
                metrics=completion.metrics,
            )
            for completion in output.completions
        ]
        return cls(
            request_id=output.request_id,
            prompt_token_ids=output.prompt_token_ids,
            prompt_logprobs=cast("list[_Logprobs | None] | None", output.prompt_logprobs),
            completions=completions,
        )

    def output(self) -> GenerationOutput:
        """Returns the output that :meth:`of` was given."""
        prompt_logprobs = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = [None if entry is None else _finite_or_not(entry) for entry in self.prompt_logprobs]
        others: tuple[GenerationOutput, ...] = ()
        for record in reversed(self.completions):
            completion = GenerationOutput(
                request_id=self.request_id,
                index=record.index,
                text=record.text,
                token_ids=record.token_ids,
                finish_reason=record.finish_reason,
                prompt_token_ids=self.prompt_token_ids,
                prompt_logprobs=prompt_logprobs,
                logprobs=None if record.logprobs is None else [_finite_or_not(entry) for entry in record.logprobs],
                error=record.error,
                score=record.score,
                metrics=record.metrics,
                others=others if record.index == 0 else (),
            )
            others = (completion, *others)
        return others[0]


class ChunkRecord(msgspec.Struct, kw_only=True):
    """An event of a stream. The last one also has the whole answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    output: OutputRecord | None = None

    def chunk(self) -> GenerationChunk:
        return GenerationChunk(
            index=self.index, text=self.text, token_ids=self.token_ids, finish_reason=self.finish_reason
        )


def _finite_or_not(entry: _Logprobs) -> Logprobs:
    return {token_id: -math.inf if logprob is None else logprob for token_id, logprob in entry.items()}
