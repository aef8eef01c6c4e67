"""Decode steps of the same sequences, one after the other: the inputs of each follow from the last one's, so a whole
step, inputs and sampling included, is one tape and one native call.

What a step does outside its kernels is paid with cold caches, since the weights have just been streamed through them:
host code takes several times as long there as in a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

from fastgen.compile.cuda_graph import Graph
from fastgen.compile.ops.next_decodes import NextDecodesKernel
from fastgen.compile.ops.sampling_cpp import SampledRow, SamplingKernel
from fastgen.runtime.forward import TapedForward
from fastgen.runtime.input_batch import InputBatch
from fastgen.runtime.request import Sequence


RowsOf = Callable[[SequenceOf[Sequence]], SequenceOf[SampledRow]]
"""How the next token of each sequence is sampled."""


class SteadyDecodes:
    """Continues the step before: :meth:`note` what ran otherwise, and :meth:`run` where that is enough."""

    def __init__(self, forward: TapedForward, inputs: InputBatch, sampling: SamplingKernel, advance: NextDecodesKernel):
        self._forward, self._inputs, self._sampling, self._advance = forward, inputs, sampling, advance
        self._tapes: dict[int, Graph] = {}
        self._sequences: SequenceOf[Sequence] = ()
        self._holds_rows = False

    def note(self, sequences: SequenceOf[Sequence]) -> None:
        """A step ran whose inputs are one token of each of ``sequences``, in this order; none where they are not."""
        self._sequences, self._holds_rows = sequences, False

    def run(self, sequences: SequenceOf[Sequence], rows_of: RowsOf) -> list[int] | None:
        """The next token of each of ``sequences``, or ``-status``, where they are those of the step before one token
        further on, and the device knows their blocks. ``None`` with nothing done where that is not so, or something of
        their rows depends on what was generated.
        """
        if list(sequences) != list(self._sequences) or not self._hold(sequences, rows_of):
            return None
        self._sequences = ()  # a step that fails cannot be continued
        num_rows = len(sequences)
        if num_rows not in self._tapes:
            prepare = partial(self._prepare, num_rows)
            self._tapes[num_rows] = self._forward.record_decodes(num_rows, prepare, self._sampling.sample_held)
        self._tapes[num_rows].replay()
        self._sequences = sequences
        return self._sampling.chosen(num_rows)

    def _hold(self, sequences: SequenceOf[Sequence], rows_of: RowsOf) -> bool:
        if not self._holds_rows and sequences:
            rows = rows_of(sequences)
            if all(map(_is_steady, rows)):
                self._sampling.hold([row._replace(position=row.position - 1) for row in rows])
                self._holds_rows = True
        return self._holds_rows

    def _prepare(self, num_rows: int) -> None:
        positions = self._sampling.held_positions(num_rows)
        self._inputs.advance(self._advance, num_rows, self._sampling.token_ids[:num_rows], positions)


def _is_steady(row: SampledRow) -> bool:
    """Whether nothing but its position will change from one token to the next."""
    sampling = row.sampling
    is_penalised = sampling.repetition != 1 or sampling.presence or sampling.frequency
    return not is_penalised and sampling.num_top is None and not len(row.biases[0])
