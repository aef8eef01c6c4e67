"""Sampling by kernels on a device: what they are told of the sequence in each slot, and what they chose.

A slot is told of its sequence once. From then on nothing is copied for it: the kernels count the tokens they penalise
themselves, and the ids they choose are where the next step finds them. What a slot knows follows from its sequence's
parameters and tokens, so one that was preempted, or whose step failed, is simply told of again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from fastgen.compile.backends.backend import MAX_LOGPROBS, Backend
from fastgen.compile.host.device import to_device
from fastgen.compile.ops.sampling.cpp import Biases, Uses
from fastgen.compile.ops.sampling.triton import SamplingKernel, SlotSampling
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.sampling.sampled_rows import RowHistory, is_plain, penalises
from fastgen.runtime.sampling.sampling_params import SamplingParams
from fastgen.runtime.scheduling.drafts import SampledSequence
from fastgen.runtime.step.input_batch import InputBatch

# The ids that a sequence may not have before its ``min_new_tokens``.
EndingIds = Callable[[Sequence], frozenset[int]]


class SlotSampler:
    """Launches ``kernels`` on the rows of ``inputs``, and keeps each slot's parameters up to date."""

    def __init__(self, kernels: SamplingKernel, inputs: InputBatch):
        self._kernels, self._inputs = kernels, inputs
        self._settings: list[SlotSampling | None] = [None] * kernels.max_slots
        # Where a slot knows all of its next token: the sequence, its preemptions so far, the position.
        self._told: list[tuple[Sequence, int, int] | None] = [None] * kernels.max_slots

    def launch(self, logits: Tensor) -> None:
        """A token for each of the ``logits [R, V]``: of the batch's first rows, or of nobody's. May be captured."""
        self._kernels(logits, *self._inputs.sampled_rows(len(logits)))

    @staticmethod
    def can_draft(sequence: Sequence) -> bool:
        """Whether ``sequence`` may have several rows in a step: all that its slot knows must hold for each of them."""
        sampling = sequence.request.sampling
        num_generated = sequence.num_tokens - sequence.num_prompt_tokens
        return not penalises(sampling) and num_generated >= sampling.min_new_tokens

    def prepare(self, sequences: SequenceOf[Sequence], ending_ids: EndingIds) -> None:
        """Before a step that gives each of ``sequences`` a token."""
        for sequence in sequences:
            slot, position = _slot(sequence), sequence.num_tokens
            known = self._told[slot] == (sequence, sequence.num_preemptions, position)
            first_free = sequence.num_prompt_tokens + sequence.request.sampling.min_new_tokens
            if not known or position == first_free:
                self._tell(slot, sequence, ending_ids(sequence))
            self._told[slot] = None  # until the step has ended, nobody knows what was counted

    def constrain(self, sequences: SequenceOf[Sequence]) -> None:
        """Before the logits of ``sequences``: the masks of those that have a response format, in one copy."""
        masks = {_slot(each): each.matcher.mask() for each in sequences if each.matcher is not None}
        if masks:
            rows = self._kernels.buffer("mask")
            given = torch.tensor(list(masks)), torch.from_numpy(np.stack(list(masks.values())))
            slots, bits = (to_device(each, rows.device) for each in given)
            rows.index_copy_(0, slots, bits)

    def chosen(self, sequences: SequenceOf[SampledSequence]) -> Tensor:
        """What that step chose, still on the device: an id for each, or ``-status`` of its row; i32. A sequence without
        a slot has ended since the step was launched."""
        for sequence in sequences:
            if isinstance(sequence, Sequence) and sequence.slot is not None:
                self._told[sequence.slot] = (sequence, sequence.num_preemptions, sequence.num_tokens + 1)
        return self._kernels.buffer("token_ids")[: len(sequences)]

    def logprobs(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows whose sequences :func:`gives_logprobs` says: log-probabilities of the tokens chosen, of the
        likeliest ones, and the ids of these, still on the device."""
        logprobs, top, top_ids = map(self._kernels.buffer, ("logprobs", "top_logprobs", "top_ids"))
        return logprobs[:num_rows], top[:num_rows], top_ids[:num_rows]

    def _tell(self, slot: int, sequence: Sequence, ending_ids: frozenset[int]) -> None:
        settings = SlotSampling()
        if not is_plain(sequence.request.sampling):
            row = RowHistory(sequence, ending_ids, self._kernels.vocab_size).row()
            settings = SlotSampling(
                temperature=row.sampling.temperature,
                top_k=row.sampling.top_k,
                top_p=row.sampling.top_p,
                min_p=row.sampling.min_p,
                seed=row.sampling.seed,
                sequence_index=row.sampling.sequence_index,
                repetition=row.sampling.repetition,
                presence=row.sampling.presence,
                frequency=row.sampling.frequency,
                masked=sequence.matcher is not None,
                biased=len(row.biases[0]) > 0,
                logprobs=gives_logprobs(sequence.request.sampling),
            )
            if settings.penalised:
                self._fill("uses", slot, row.uses)
            if settings.biased:
                self._fill("bias", slot, row.biases)
        if settings != self._settings[slot]:
            self._kernels.write(slot, settings)
            self._settings[slot] = settings

    def _fill(self, name: str, slot: int, given: Uses | Biases) -> None:
        row = self._kernels.buffer(name)[slot].zero_()
        ids, values = (to_device(torch.from_numpy(each), row.device) for each in given)
        row[ids.long()] = values


def gives_logprobs(sampling: SamplingParams) -> bool:
    """Whether the kernels compute the log-probabilities that are asked for. More than they do come from torch."""
    return sampling.logprobs is not None and sampling.logprobs <= MAX_LOGPROBS and sampling.beam_width == 1


def slot_sampler(backend: Backend, vocab_size: int, inputs: InputBatch) -> SlotSampler | None:
    """Returns the sampler for the slots of ``inputs``, its kernels asked for; ``None`` if the backend has none."""
    kernels = backend.slot_sampling(vocab_size, max_rows=inputs.max_rows, sampled_ids=inputs.sampled_ids)
    return None if kernels is None else SlotSampler(kernels, inputs)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
