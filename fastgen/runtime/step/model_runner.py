"""Runs a schedule on the model: build batch, forward, sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastgen.compile.host.device import being_current
from fastgen.errors import GenerationError
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.causal_lm import CausalLM
from fastgen.runtime.requests.outputs import Logprobs
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.sampling.sampler import SampledToken, Sampler, prompt_logprobs, sampled_token
from fastgen.runtime.scheduling.drafts import SampledSequence, owner
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step.forward import Forward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.steady_decodes import SteadyDecodes

# Rows of prompt log-probabilities computed at a time: ``[64, V]`` fp32.
PROMPT_LOGITS_ROWS = 64


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from ``start`` on, one dict (token id -> log-probability) each; with an
    ``error``, why there are none.
    """

    sequence: Sequence
    start: int
    logprobs: list[Logprobs]
    error: str | None = None


class StepOutput(NamedTuple):
    """What one step produced: a token for every sequence that caught up, one more for each draft of it that was
    accepted, and prompt log-probabilities where asked. ``num_accepted`` says how many drafts that were, for each
    sequence that had some.

    ``build_s`` is what building the batch took, ``num_padding`` how many tokens it was filled up with.
    """

    sampled: list[tuple[Sequence, SampledToken]]
    prompt_logprobs: list[PromptLogprobs]
    num_accepted: Mapping[Sequence, int] = MappingProxyType({})
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


@dataclass
class LaunchedStep:
    """A step whose forward pass was launched. ``tokens`` gives, once it was sampled, what its ``rows`` got; it waits
    for them. Launched ``ahead``, it was while the tokens of the step before were on their way.
    """

    schedule: Schedule
    batch: RaggedBatch
    rows: list[SampledSequence]
    hidden: Tensor
    build_s: float
    ahead: bool
    tokens: Callable[[], list[SampledToken]] = list
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _on_its_device(method: Callable[Concatenate[ModelRunner, _P], _R]) -> Callable[Concatenate[ModelRunner, _P], _R]:
    """Without gradients, and on the runner's GPU whichever thread calls."""

    @wraps(method)
    def call(runner: ModelRunner, /, *args: _P.args, **options: _P.kwargs) -> _R:
        with torch.inference_mode(), being_current(runner.device):
            return method(runner, *args, **options)

    return call


class ModelRunner:
    """Owns the model and the static inputs; knows nothing of requests beyond the step it is given."""

    def __init__(
        self, forward: Forward, input_batch: InputBatch, sampler: Sampler, steady: SteadyDecodes | None = None
    ):
        self.forward, self.input_batch, self.sampler, self.steady = forward, input_batch, sampler, steady
        self.device = input_batch.sampled_ids.device

    @property
    def model(self) -> CausalLM:
        return self.forward.model

    @property
    def kv_cache(self) -> PagedKVCache:
        return self.forward.kv_cache

    def run(self, schedule: Schedule) -> StepOutput:
        """A step from its beginning to its tokens."""
        if schedule.block_copies:
            if self.steady is not None:
                self.steady.forget()
            self._copy_blocks(schedule)
        if self.steady is not None and (found := self.steady.run(schedule)) is not None:
            return StepOutput(list(zip(schedule.decodes, map(sampled_token, found, schedule.decodes), strict=True)), [])
        return self._run_built(schedule)

    @_on_its_device
    def _run_built(self, schedule: Schedule) -> StepOutput:
        step = self._launch(schedule, ahead=False)
        self.sample(step)
        if self.steady is not None:
            self.steady.note(schedule)
        return self.collect(step)

    @_on_its_device
    def launch(self, schedule: Schedule, *, ahead: bool) -> LaunchedStep:
        """The forward pass of a step. One ``ahead`` takes tokens that are not known on the host from the device; what
        :meth:`sample` needs to know is not looked at yet."""
        self._copy_blocks(schedule)
        return self._launch(schedule, ahead=ahead)

    def _launch(self, schedule: Schedule, *, ahead: bool) -> LaunchedStep:
        began_s = time.perf_counter()
        batch, rows = self.input_batch.build(schedule)
        build_s = time.perf_counter() - began_s
        if not ahead:
            self.sampler.prepare(rows)
        return LaunchedStep(schedule, batch, rows, self.forward.hidden(batch), build_s, ahead)

    @_on_its_device
    def sample(self, step: LaunchedStep) -> None:
        """Launches what chooses the tokens of a step. All tokens of the steps before it are known by now; a sequence
        that ended with them, and so has no slot any more, is sampled for nobody."""
        rows = [row for row in step.rows if owner(row).slot is not None]
        if step.ahead:
            self.sampler.prepare(rows)
        self.sampler.constrain(rows)
        self.input_batch.forget_sampled(rows)
        logits = self.forward.logits(step.hidden, step.batch)
        step.tokens = self.sampler.launch(logits, step.rows)
        if self.sampler.slots is not None:
            drafted = {owner(row) for row in rows if not isinstance(row, Sequence)}
            self.input_batch.note_sampled([row for row in rows if isinstance(row, Sequence) and row not in drafted])
        step.prompt_logprobs = self._prompt_logprobs(step.schedule, step.batch.cu_seqlens_q, step.hidden)

    @torch.inference_mode()
    def collect(self, step: LaunchedStep) -> StepOutput:
        """What a sampled step gave, when it is here."""
        sampled, num_accepted = accept(step.rows, step.tokens())
        return StepOutput(
            sampled,
            step.prompt_logprobs,
            num_accepted,
            build_s=step.build_s,
            num_padding=len(step.batch.input_ids) - step.schedule.num_tokens,
        )

    @torch.inference_mode()
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
            if num_alternatives is None or sequence.index > 0 or not actual or sequence.slot is None:
                continue
            first = int(cu_seqlens_q[sequence.slot])
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
