"""Steady decodes: steps of the same sequences, one after the other. The inputs of each follow from those of the last,
so a whole step, inputs and sampling included, is one tape and one native call.

Host code beside the kernels runs with cold caches, since the weights have just been streamed through them: it takes
several times as long there as in a loop. One native call leaves little of it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from fastgen.compile.capture.tape import Tape
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel
from fastgen.compile.ops.sampling.cpp import SampledRow, SamplingKernel
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.sampling.sampled_rows import penalises
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step.early_start import EarlyStart
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.plans import Array

# Returns the sampling parameters of the next token of each sequence.
RowsOf = Callable[[SequenceOf[Sequence]], SequenceOf[SampledRow]]

_NEXT = (1).__add__


class OtherRanks(Protocol):
    """Other ranks of the model, which run the same steps."""

    def begin(self, slots: Tensor) -> None:
        """Has them follow steps of the decodes in ``slots [R]`` i32."""

    def tell(self, token_ids: Tensor) -> None:
        """Tells them the ``token_ids [R]`` i64 of the next step. May be recorded."""

    def update(self, places: Array, blocks: Array) -> None:
        """Has them write entries of block tables before the next step whose tokens they are sent."""

    def step_ended(self) -> None:
        """Notes that a step has ended whose tokens they were sent. Raises :class:`RankError` if the ranks are lost."""


class SteadyDecodes:
    """Runs a step as the continuation of the one before, where that is possible; :meth:`note` gets every other step.

    ``early``, if given, starts steps before they are asked for. ``others`` share the model. A batch has its tokens in
    the order of slots, a schedule has its decodes in another.
    """

    def __init__(
        self,
        forward: TapedForward,
        inputs: InputBatch,
        sampling: SamplingKernel,
        next_decodes: NextDecodesKernel,
        rows_of: RowsOf,
        early: EarlyStart | None = None,
        others: OtherRanks | None = None,
    ):
        self._forward, self._inputs, self._sampling = forward, inputs, sampling
        self._next_decodes, self._rows_of, self.early, self._others = next_decodes, rows_of, early, others
        self._tapes: dict[int, Tape] = {}
        self._slots = torch.zeros(sampling.max_rows, dtype=torch.int32)
        self._decodes: SequenceOf[Sequence] = ()
        self._next_positions: SequenceOf[int] = ()
        # The place of each decode in the batch. Empty while nothing is held for the tape.
        self._places: list[int] = []

    def note(self, schedule: Schedule) -> None:
        """Notes that ``schedule`` was built and run in phases."""
        self._places = []
        self._expect(() if schedule.chunks else schedule.decodes, schedule.positions)

    def run(self, schedule: Schedule) -> list[int] | None:
        """Returns the next token of each of the schedule's decodes, or ``-status``. Returns ``None`` and does nothing
        if they are not those of the step before, one token further, or if sampling depends on their tokens.
        """
        was_started = self._take()
        decodes, positions = schedule.decodes, schedule.positions
        is_next = decodes == self._decodes and positions == self._next_positions and not schedule.chunks
        self._decodes = ()  # a step that does not complete is not continued, whether it runs here or is built
        if not is_next or not (self._places or self._hold(decodes)):
            if self.early is not None:
                self.early.interrupted()
            return None
        num_rows = len(decodes)
        if num_rows not in self._tapes:
            self.record(num_rows)
        if schedule.block_updates:
            updates = self._inputs.update_tables(schedule.block_updates)
            if self._others is not None:
                self._others.update(*updates)
        if not was_started:
            self._tapes[num_rows].replay()
            if self._others is not None:
                self._others.step_ended()
        self._expect(decodes, positions)
        found = self._sampling.chosen(num_rows)
        if self.early is not None:
            self.early.start(self._tapes[num_rows], decodes, positions)
        return list(map(found.__getitem__, self._places))

    def forget(self) -> None:
        """Makes sure that no step continues what the batch holds."""
        self._take()
        self._decodes = ()

    def _take(self) -> bool:
        """Waits for the step that was started early. Returns whether there was one."""
        was_started = self.early is not None and self.early.take()
        if was_started and self._others is not None:
            self._others.step_ended()
        return was_started

    def wait(self) -> None:
        """Waits for the kernels of a step that was started early, if one was."""
        if self.early is not None:
            self.early.wait()

    @torch.inference_mode()
    def record(self, num_rows: int) -> None:
        """Records the tape of ``num_rows`` decodes."""
        prepare = partial(self._prepare, num_rows)
        self._tapes[num_rows] = self._forward.record_decodes(num_rows, prepare, self._sampling.sample_held)

    def _expect(self, decodes: SequenceOf[Sequence], positions: SequenceOf[int]) -> None:
        """Notes that only one more token of each of ``decodes`` continues what the batch holds."""
        self._decodes, self._next_positions = decodes, tuple(map(_NEXT, positions))

    @torch.inference_mode()
    def _hold(self, decodes: SequenceOf[Sequence]) -> bool:
        """Keeps what the tape does not find in the batch: slots, tokens and rows, in the batch's order. Returns
        ``False``, with nothing done, if a tape cannot sample for ``decodes``.
        """
        if not all(map(_can_be_held, decodes)):
            return False
        in_order = sorted(decodes, key=attrgetter("slot"))
        rows = self._rows_of(in_order)
        if any(len(row.biases[0]) for row in rows):  # ``min_new_tokens`` still forbids some tokens
            return False
        # The tape advances all positions before it uses them.
        self._sampling.hold([row._replace(position=row.position - 1) for row in rows])
        self._sampling.token_ids[: len(rows)] = torch.tensor([sequence.token_ids[-1] for sequence in in_order])
        self._slots[: len(rows)] = torch.tensor([sequence.slot for sequence in in_order])
        place_of = {sequence: place for place, sequence in enumerate(in_order)}
        self._places = [place_of[sequence] for sequence in decodes]
        if self._others is not None:
            self._others.begin(self._slots[: len(rows)])
        return True

    def _prepare(self, num_rows: int) -> None:
        if self._others is not None:
            self._others.tell(self._sampling.token_ids[:num_rows])
        token_ids, positions = self._sampling.token_ids[:num_rows], self._sampling.held_positions(num_rows)
        self._inputs.advance(self._next_decodes, self._slots[:num_rows], token_ids, positions)


def _can_be_held(sequence: Sequence) -> bool:
    """Returns whether a sampling of ``sequence`` differs from the last one only in its position, and the token is all
    that the request asks for.
    """
    sampling = sequence.request.sampling
    depends_on_tokens = penalises(sampling) or sequence.matcher is not None or sequence.request.has_beams
    return not (depends_on_tokens or sampling.logit_bias or sampling.logprobs is not None)
