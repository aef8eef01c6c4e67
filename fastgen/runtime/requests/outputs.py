"""What a request gives back: whole outputs, pieces of a stream, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
Logprobs = dict[int, float]
"""Token id to natural log-probability; the token that stands there is always among them."""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Where a request's time went. Times are seconds of a monotonic clock."""

    queue_s: float
    """From submission until the first of its tokens was scheduled."""
    ttft_s: float | None
    """From submission to the first generated token; ``None`` when there was none."""
    gaps_s: list[float] = field(default_factory=list)
    """Between each generated token and the next: one fewer than there are tokens."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    accepted_drafts: int = 0
    """Generated tokens that had been drafted before, so that each came in the step of the token before it."""
    preemptions: int = 0
    """How often its blocks were taken away and it was computed anew."""


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """One completion of a prompt, finished."""

    request_id: int
    """Requests of an engine are numbered in order of arrival."""
    index: int = 0
    """Which of the ``n`` completions of its request it is."""
    text: str
    token_ids: list[int]
    """All generated ids, those of a stop string and a final stop or end-of-text token included."""
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    logprobs: list[Logprobs] | None = None
    """One per generated token, or ``None`` when not asked for."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One per prompt token, ``None`` for the first, which nothing precedes; ``None`` when not asked for."""
    error: str | None = None
    """What went wrong, when ``finish_reason`` is ``"error"``."""
    score: float | None = None
    """With beam search, what this completion was ranked by: the sum of its tokens' log-probabilities, as penalties and
    bias made them, divided by its length to the power ``length_penalty``."""
    others: tuple[GenerationOutput, ...] = field(default=(), repr=False)
    """The further completions of the same prompt when ``n > 1``, with beam search best first; empty in each of
    these."""

    @property
    def completions(self) -> tuple[GenerationOutput, ...]:
        """All ``n`` completions of the prompt; the first is this output itself."""
        return (self, *self.others)


@dataclass(frozen=True, kw_only=True)
class GenerationChunk:
    """What a stream yields: the text and ids that are new since the last chunk of the same completion. A beam search
    knows its answers when it is done, so each comes whole then."""

    index: int
    """Which of the ``n`` completions this belongs to."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set in the last chunk of a completion."""
