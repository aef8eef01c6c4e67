"""Sampling by kernels on a device: the parameters of the sequence in each slot, and the tokens chosen.

The parameters of a sequence are written to its slot once. After that nothing is copied for it: the kernels count the
tokens they penalise, and the chosen ids stay where the next step reads them. The state of a slot follows from its
sequence's parameters and tokens, so it is simply written again after a preemption or a failed step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastgen.compile.backends.backend import MAX_LOGPROBS, Backend
from fastgen.compile.host.device import to_device
from fastgen.compile.ops.sampling.cpp import Biases, Uses
from fastgen.compile.ops.sampling.triton import SamplingKernel, SlotSampling
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampled_rows import BiasLists, EndingIds, RowHistory, is_plain, penalises
from fastgen.runtime.scheduling.drafts import SampledSequence


class SamplingInputs(Protocol):
    """The static inputs that sampling reads and writes."""

    max_rows: int
    # The ids sampled last, by slot; i32.
    sampled_ids: Tensor

    def sampled_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns the slot of each of the first ``num_rows`` rows, -1 for none, and the position of its token; i32."""
        ...


class SlotSampler:
    """Launches ``kernels`` on the rows of ``inputs``, and keeps the parameters of each slot up to date."""

    def __init__(self, kernels: SamplingKernel, inputs: SamplingInputs):
        self._kernels, self._inputs, self._bias_lists = kernels, inputs, BiasLists(kernels.vocab_size)
        self._settings: list[SlotSampling | None] = [None] * kernels.max_slots
        # Slots in sync for their next token: the sequence, its preemptions so far, the position. ``None`` is dirty.
        self._synced: list[tuple[Sequence, int, int] | None] = [None] * kernels.max_slots

    def launch(self, logits: Tensor) -> None:
        """Samples a token for each of the ``logits [R, V]``, the batch's first rows. Unused rows get none. Can be
        captured.
        """
        self._kernels(logits, *self._inputs.sampled_rows(len(logits)))

    @staticmethod
    def can_draft(sequence: Sequence) -> bool:
        """Returns whether ``sequence`` may have several rows in a step: the state of its slot must hold for each
        row.
        """
        sampling = sequence.request.sampling
        num_generated = sequence.num_tokens - sequence.num_prompt_tokens
        return not penalises(sampling) and num_generated >= sampling.min_new_tokens

    def prepare(self, sequences: SequenceOf[Sequence], ending_ids: EndingIds) -> None:
        """Brings the slots of ``sequences`` in sync, before a step that samples a token for each."""
        for sequence in sequences:
            slot, position = _slot(sequence), sequence.num_tokens
            known = self._synced[slot] == (sequence, sequence.num_preemptions, position)
            first_free = sequence.num_prompt_tokens + sequence.request.sampling.min_new_tokens
            if not known or position == first_free:
                self._write(slot, sequence, ending_ids)
            self._synced[slot] = None  # dirty until the step has ended: it is unknown what was counted

    def constrain(self, sequences: SequenceOf[Sequence]) -> None:
        """Copies the masks of those ``sequences`` that have a response format, before their logits are computed."""
        masks = {_slot(each): each.matcher.mask() for each in sequences if each.matcher is not None}
        if masks:
            rows = self._kernels.buffer("mask")
            given = torch.tensor(list(masks)), torch.from_numpy(np.stack(list(masks.values())))
            slots, bits = (to_device(each, rows.device) for each in given)
            rows.index_copy_(0, slots, bits)

    def chosen(self, sequences: SequenceOf[SampledSequence]) -> Tensor:
        """Returns what the step chose, still on the device: an id for each row, or ``-status``; i32. A sequence without
        a slot has ended since the step was launched.
        """
        for sequence in sequences:
            is_late = sequence.matcher is not None and sequence.matcher.is_late
            if isinstance(sequence, Sequence) and sequence.slot is not None and not is_late:
                self._synced[sequence.slot] = (sequence, sequence.num_preemptions, sequence.num_tokens + 1)
        return self._kernels.buffer("token_ids")[: len(sequences)]

    def logprobs(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns for rows with :func:`gives_logprobs`, still on the device: the log-probabilities of the chosen
        tokens, those of the likeliest tokens, and the ids of the likeliest.
        """
        logprobs, top, top_ids = map(self._kernels.buffer, ("logprobs", "top_logprobs", "top_ids"))
        return logprobs[:num_rows], top[:num_rows], top_ids[:num_rows]

    def _write(self, slot: int, sequence: Sequence, ending_ids: EndingIds) -> None:
        settings = SlotSampling()
        if not is_plain(sequence.request.sampling):
            row = RowHistory(sequence, ending_ids, self._bias_lists).row()
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
    """Returns whether the kernels compute the log-probabilities of a request. If not, torch does."""
    return sampling.logprobs is not None and sampling.logprobs <= MAX_LOGPROBS and sampling.beam_width == 1


def slot_sampler(backend: Backend, vocab_size: int, inputs: SamplingInputs) -> SlotSampler | None:
    """Returns the sampler for the slots of ``inputs``, its kernels asked for; ``None`` if the backend has none."""
    kernels = backend.slot_sampling(vocab_size, max_rows=inputs.max_rows, sampled_ids=inputs.sampled_ids)
    return None if kernels is None else SlotSampler(kernels, inputs)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
