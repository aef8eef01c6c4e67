"""Runs a schedule on the model: build batch, forward, sample."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.errors import GenerationError
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.causal_lm import CausalLM
from fastgen.runtime.drafts import SampledSequence
from fastgen.runtime.forward import Forward
from fastgen.runtime.input_batch import InputBatch
from fastgen.runtime.outputs import Logprobs
from fastgen.runtime.request import Sequence
from fastgen.runtime.sampler import SampledToken, Sampler, prompt_logprobs, sampled_token
from fastgen.runtime.schedule import Schedule
from fastgen.runtime.steady_decodes import SteadyDecodes

PROMPT_LOGITS_ROWS = 64
"""Rows of prompt log-probabilities computed at a time: ``[64, V]`` fp32."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from ``start`` on, one dict (token id -> log-probability) each; with an
    ``error``, why there are none.
    """

    sequence: Sequence
    start: int
    logprobs: list[Logprobs]
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one step produced: a token for every sequence that caught up, one more for each draft of it that was
    accepted, and prompt log-probabilities where asked. ``num_accepted`` says how many drafts that were, for each
    sequence that had some.

    ``build_s`` is what building the batch took, ``num_padding`` how many tokens it was filled up with.
    """

    sampled: list[tuple[Sequence, SampledToken]]
    prompt_logprobs: list[PromptLogprobs]
    num_accepted: Mapping[Sequence, int] = field(default_factory=dict)
    build_s: float = 0.0
    num_padding: int = 0


def accept(
    rows: SequenceOf[SampledSequence], tokens: SequenceOf[SampledToken]
) -> tuple[list[tuple[Sequence, SampledToken]], dict[Sequence, int]]:
    """Of the ``tokens`` sampled for ``rows``, those that count, in order: of a drafted row only where each draft is the
    token that the row before it got. And how many drafts that are, for each sequence that had some.
    """
    sampled: list[tuple[Sequence, SampledToken]] = []
    num_accepted: dict[Sequence, int] = {}
    follows, previous = False, None
    for row, token in zip(rows, tokens, strict=True):
        if isinstance(row, Sequence):
            follows = True
            sampled.append((row, token))
        else:
            assert previous is not None, "a drafted row stands behind that of its sequence"
            follows = follows and previous.error is None and previous.token_id == row.drafts[-1]
            num_accepted[row.sequence] = num_accepted.get(row.sequence, 0) + follows
            if follows:
                sampled.append((row.sequence, token))
        previous = token
    return sampled, num_accepted


class ModelRunner:
    """Owns the model and the static inputs; knows nothing of requests beyond the step it is given."""

    def __init__(
        self, forward: Forward, input_batch: InputBatch, sampler: Sampler, steady: SteadyDecodes | None = None
    ):
        self.forward, self.input_batch, self.sampler, self.steady = forward, input_batch, sampler, steady

    @property
    def model(self) -> CausalLM:
        return self.forward.model

    @property
    def kv_cache(self) -> PagedKVCache:
        return self.forward.kv_cache

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> StepOutput:
        self._copy_blocks(schedule)
        if self.steady is not None and (found := self.steady.run(schedule)) is not None:
            return StepOutput(list(zip(schedule.decodes, map(sampled_token, found, schedule.decodes), strict=True)), [])
        began_s = time.perf_counter()
        batch, rows = self.input_batch.build(schedule)
        build_s = time.perf_counter() - began_s
        self.sampler.prepare(rows)
        hidden = self.forward.hidden(batch)
        self.sampler.constrain(rows)
        logits = self.forward.logits(hidden, batch)
        sampled, num_accepted = accept(rows, self.sampler.sample(logits, rows))
        if self.sampler.seats is not None:
            on_device = (sequence for sequence in rows if isinstance(sequence, Sequence))
            self.input_batch.note_sampled([sequence for sequence in on_device if sequence not in num_accepted])
        if self.steady is not None:
            self.steady.note(schedule)
        return StepOutput(
            sampled,
            self._prompt_logprobs(schedule, batch.cu_seqlens_q, hidden),
            num_accepted,
            build_s=build_s,
            num_padding=len(batch.input_ids) - schedule.num_tokens,
        )

    def _copy_blocks(self, schedule: Schedule) -> None:
        for group in {copy.group for copy in schedule.block_copies}:
            copies = [copy for copy in schedule.block_copies if copy.group == group]
            self.kv_cache.copy_blocks(group, [c.source for c in copies], [c.destination for c in copies])

    def _prompt_logprobs(self, schedule: Schedule, cu_seqlens_q: Tensor, hidden: Tensor) -> list[PromptLogprobs]:
        """The row of position ``p`` predicts prompt token ``p + 1``; the first token has no prediction."""
        pieces = []
        for entry in schedule.chunks:  # decodes are past their prompts
            sequence = entry.seq
            num_alternatives = sequence.request.sampling.prompt_logprobs
            actual = sequence.token_ids[entry.start + 1 : min(entry.end + 1, sequence.num_prompt_tokens)]
            if num_alternatives is None or sequence.index > 0 or not actual:
                continue
            assert sequence.seat is not None
            first = int(cu_seqlens_q[sequence.seat])
            rows = hidden[first : first + len(actual)]
            try:
                logprobs = self._row_logprobs(rows, actual, num_alternatives)
            except GenerationError as error:
                pieces.append(PromptLogprobs(sequence, entry.start + 1, [], str(error)))
            else:
                pieces.append(PromptLogprobs(sequence, entry.start + 1, logprobs))
        return pieces

    def _row_logprobs(self, hidden: Tensor, token_ids: list[int], num_alternatives: int) -> list[Logprobs]:
        logprobs: list[Logprobs] = []
        for start in range(0, len(token_ids), PROMPT_LOGITS_ROWS):
            piece = slice(start, start + PROMPT_LOGITS_ROWS)
            logprobs += prompt_logprobs(self.model.logits(hidden[piece]), token_ids[piece], num_alternatives)
        return logprobs
