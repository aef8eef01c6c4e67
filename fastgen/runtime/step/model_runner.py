"""Runs a step on the model: builds the batch, launches the forward pass, samples, collects the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastgen.compile.host.device import being_current
from fastgen.errors import GenerationError
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.causal_lm import CausalLM
from fastgen.runtime.requests.outputs import Logprobs
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import PromptLogprobs, SampledToken
from fastgen.runtime.sampling.sampler import Sampler, launch_prompt_logprobs, sampled_token
from fastgen.runtime.scheduling.drafts import SampledSequence, owner
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.step.forward import Forward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.late_masks import without_mask
from fastgen.runtime.step.plan_costs import PlanCosts
from fastgen.runtime.step.steady_decodes import SteadyDecodes
from fastgen.runtime.step.step import Step

# Rows of prompt log-probabilities computed at a time: ``[64, V]`` fp32.
PROMPT_LOGITS_ROWS = 64


def accept(
    rows: SequenceOf[SampledSequence], tokens: SequenceOf[SampledToken]
) -> tuple[list[tuple[Sequence, SampledToken]], dict[Sequence, int]]:
    """Returns the tokens that count among the ``tokens`` sampled for ``rows``, in order, and how many drafts were
    accepted, for each sequence that had some. The token of a drafted row counts only if each draft before it is the
    token that was sampled there.
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


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _on_its_device(method: Callable[Concatenate[ModelRunner, _P], _R]) -> Callable[Concatenate[ModelRunner, _P], _R]:
    """Runs ``method`` without gradients, and on the runner's GPU, whichever thread calls."""

    @wraps(method)
    def call(runner: ModelRunner, /, *args: _P.args, **options: _P.kwargs) -> _R:
        with torch.inference_mode(), being_current(runner.device):
            return method(runner, *args, **options)

    return call


class ModelRunner:
    """Owns the model and the static inputs. Knows nothing of requests beyond the step it is given."""

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

    @property
    def lost(self) -> str | None:
        """Returns why no step can run any more; ``None`` while steps can."""
        return self.forward.lost

    @property
    def plan_costs(self) -> PlanCosts:
        """Returns the cost so far of leading other ranks."""
        return self.forward.plan_costs

    def close(self) -> None:
        """Releases captured steps, and ends other processes that take part. No step may follow."""
        self.forward.close()

    def launch(self, step: Step) -> None:
        """Launches the forward pass of ``step``. One that is ahead takes tokens that the host does not know yet from
        the device, and nothing that :meth:`sample` needs is looked at. Steady decodes run to their tokens here.
        """
        if step.schedule.block_copies:
            if self.steady is not None:
                self.steady.forget()
            self._copy_blocks(step.schedule)
        if self.steady is None or not self._continue(self.steady, step):
            self._launch(step)

    def sample(self, step: Step) -> None:
        """Launches the sampling of ``step``. All tokens of the steps before it are known by now."""
        if step.batch is not None:
            self._sample(step, step.batch)

    def collect(self, step: Step) -> None:
        """Waits for the tokens of ``step``, and puts them into it."""
        if step.tokens is not None:
            tokens = step.tokens()
            self.forward.check()
            step.sampled, step.num_accepted = accept(step.rows, tokens)
            if step.postponed:
                step.sampled = [(seq, token) for seq, token in step.sampled if seq not in step.postponed]
        if step.scores is not None:
            step.prompt_logprobs = step.scores()

    @staticmethod
    def _continue(steady: SteadyDecodes, step: Step) -> bool:
        """Runs ``step`` in one native call, if it is one of steady decodes. Returns whether it is."""
        decodes = step.schedule.decodes
        found = steady.run(step.schedule)
        if found is None:
            return False
        step.sampled = list(zip(decodes, map(sampled_token, found, decodes), strict=True))
        return True

    @_on_its_device
    def _launch(self, step: Step) -> None:
        began_s = time.perf_counter()
        batch, step.rows = self.input_batch.build(step.schedule)
        step.build_s = time.perf_counter() - began_s
        step.num_padding = len(batch.input_ids) - step.schedule.num_tokens
        scored = [chunk.seq for chunk in step.schedule.chunks if chunk.seq.request.sampling.prompt_logprobs is not None]
        step.first_rows = {sequence: self.input_batch.first_row(sequence) for sequence in scored}
        if not step.is_ahead:
            self.sampler.prepare(step.rows)
        step.batch, step.hidden = batch, self.forward.hidden(batch)

    @_on_its_device
    def _sample(self, step: Step, batch: RaggedBatch) -> None:
        assert step.hidden is not None
        rows = [row for row in step.rows if owner(row).slot is not None]  # a sequence without a slot has finished
        if step.is_ahead:
            self.sampler.prepare(rows)
        slots = self.sampler.slots
        if slots is not None:
            step.postponed = without_mask(rows)
        self.sampler.constrain(rows)
        self.input_batch.forget_sampled(rows)
        logits = self.forward.logits(step.hidden, batch)
        if slots is None:
            step.postponed = without_mask(rows)
        step.tokens = self.sampler.launch(logits, step.rows)
        if slots is not None:
            unknown = {owner(row) for row in rows if not isinstance(row, Sequence)} | step.postponed
            self.input_batch.note_sampled([row for row in rows if isinstance(row, Sequence) and row not in unknown])
        step.scores = self._launch_scores(step, step.hidden)
        if self.steady is not None:
            self.steady.note(step.schedule)

    @torch.inference_mode()
    def _copy_blocks(self, schedule: Schedule) -> None:
        for group in {copy.group for copy in schedule.block_copies}:
            copies = [copy for copy in schedule.block_copies if copy.group == group]
            self.forward.copy_blocks(group, [c.source for c in copies], [c.destination for c in copies])

    def _launch_scores(self, step: Step, hidden: Tensor) -> Callable[[], list[PromptLogprobs]] | None:
        """Launches log-probabilities of the prompt tokens that the rows of this step predict: the row of position ``p``
        predicts token ``p + 1``. Returns a function that waits for them, ``None`` where there are none.
        """
        launched: list[tuple[ScheduledTokens, list[Callable[[], list[Logprobs]]]]] = []
        for entry in step.schedule.chunks:  # decodes are past their prompts
            sequence = entry.seq
            num_alternatives = sequence.request.sampling.prompt_logprobs
            actual = sequence.token_ids[entry.start + 1 : min(entry.end + 1, sequence.num_prompt_tokens)]
            if num_alternatives is None or sequence.index > 0 or not actual or sequence.slot is None:
                continue
            first = step.first_rows[sequence]
            launched.append((entry, self._launch_pieces(hidden, first, actual, num_alternatives)))
        return partial(_scores, launched) if launched else None

    def _launch_pieces(
        self, hidden: Tensor, first: int, token_ids: list[int], num_alternatives: int
    ) -> list[Callable[[], list[Logprobs]]]:
        """Launches the log-probabilities of ``token_ids``, which the tokens of the step from ``first`` on predict."""
        pieces = []
        for start in range(0, len(token_ids), PROMPT_LOGITS_ROWS):
            piece = token_ids[start : start + PROMPT_LOGITS_ROWS]
            logits = self.forward.some_logits(hidden, first + start, first + start + len(piece))
            pieces.append(launch_prompt_logprobs(logits, piece, num_alternatives))
        return pieces


def _scores(
    launched: SequenceOf[tuple[ScheduledTokens, SequenceOf[Callable[[], list[Logprobs]]]]],
) -> list[PromptLogprobs]:
    """Waits for the log-probabilities of each chunk's pieces, and returns them."""
    found = []
    for entry, pieces in launched:
        try:
            logprobs = [each for piece in pieces for each in piece()]
        except GenerationError as error:
            found.append(PromptLogprobs(entry.seq, entry.start + 1, [], str(error)))
        else:
            found.append(PromptLogprobs(entry.seq, entry.start + 1, logprobs))
    return found
