"""The results of a request: finished outputs, pieces of a stream, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
# Token id to natural log-probability. The token at that position is always included.
Logprobs = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times of one completion, in seconds of a monotonic clock."""

    # From submission until the first of its tokens was scheduled.
    queue_s: float
    # From submission to the first generated token; ``None`` when there was none.
    ttft_s: float | None
    # Between each generated token and the next: one fewer than there are tokens.
    gaps_s: list[float] = field(default_factory=list)
    # Prompt tokens whose keys and values were found in the prefix cache.
    cached_tokens: int = 0
    # Generated tokens that had been drafted: each came in the same step as the token before it.
    accepted_drafts: int = 0
    # How often its blocks were freed and it was computed again.
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """One finished completion of a prompt."""

    # Requests of an engine are numbered in order of arrival.
    request_id: int
    # Which of the ``n`` completions of its request it is.
    index: int = 0
    text: str
    # All generated ids, including those of a stop string and a final stop or end-of-text token.
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    # One per generated token, or ``None`` when not asked for.
    logprobs: Sequence[Logprobs] | None = None
    # One per prompt token, ``None`` for the first, which nothing precedes; ``None`` when not asked for.
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    # What went wrong, when ``finish_reason`` is ``"error"``.
    error: str | None = None
    # With beam search, what this completion was ranked by: the sum of its tokens' log-probabilities, as penalties and
    # bias made them, divided by its length to the power ``length_penalty``.
    score: float | None = None
    # The further completions of the same prompt when ``n > 1``, with beam search best first; empty in each of these.
    others: tuple[GenerationOutput, ...] = field(default=(), repr=False)

    @property
    def completions(self) -> tuple[GenerationOutput, ...]:
        """Returns all ``n`` completions of the prompt; the first is this output itself."""
        return (self, *self.others)


@dataclass(frozen=True, kw_only=True)
class GenerationChunk:
    """A piece of a stream: the text and ids that are new since the last chunk of the same completion. A beam search
    knows its answers when it is done, so each comes whole then."""

    # Which of the ``n`` completions this belongs to.
    index: int
    text: str
    token_ids: list[int]
    # Set in the last chunk of a completion.
    finish_reason: FinishReason | None = None
