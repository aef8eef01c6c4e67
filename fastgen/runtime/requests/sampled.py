"""The tokens and log-probabilities that a step samples for a sequence, as numbers on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastgen.runtime.requests.outputs import Logprobs
from fastgen.runtime.requests.request import Sequence


class Candidate(NamedTuple):
    """A token that may come next in a beam."""

    token_id: int
    # Its log-probability after penalties and bias, which is added to the beam's sum. It is finite.
    score: float
    # The log-probabilities to report with it, if the request asks for them.
    logprobs: Logprobs | None = None


class SampledToken(NamedTuple):
    """The result of one row of logits. With an ``error`` there are no ``logprobs``, and ``token_id`` means nothing."""

    token_id: int
    # Those that :attr:`SamplingParams.logprobs` asks for; see :func:`fastgen.runtime.sampling.sampler.token_logprobs`.
    logprobs: Logprobs | None = None
    error: str | None = None
    # Whether the error is that logits were not finite, so that nothing computed for the sequence can be trusted.
    is_damaged: bool = False
    # For a beam, the tokens that may follow it. The beam search chooses among them, and ``token_id`` means nothing.
    candidates: list[Candidate] | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from ``start`` on, one dict (token id -> log-probability) each; with an
    ``error``, why there are none.
    """

    sequence: Sequence
    start: int
    logprobs: list[Logprobs]
    error: str | None = None
