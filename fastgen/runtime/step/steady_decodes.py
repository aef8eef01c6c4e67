"""Decode steps of the same sequences, one after the other: the inputs of each follow from the last one's, so a whole
step, inputs and sampling included, is one tape and one native call.

What a step does outside its kernels is paid with cold caches, since the weights have just been streamed through them:
host code takes several times as long there as in a loop. So once steps have followed each other for a while the next
begins, where all that is known of it says that it comes, before the host has looked at the tokens of the last one.
Where another comes instead (a sequence ended, somebody new is there) what was begun has been for nothing, and is as if
it had never been: what it wrote lies behind the last token of each sequence, in blocks of its own, and whoever is given
these writes them first.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from operator import attrgetter

import torch

from fastgen.compile.capture.tape import Tape
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel
from fastgen.compile.ops.sampling.cpp import SampledRow, SamplingKernel
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.sampling.sampled_rows import penalises
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step.input_batch import InputBatch

# How the next token of each sequence is sampled.
RowsOf = Callable[[SequenceOf[Sequence]], SequenceOf[SampledRow]]

_NEXT = (1).__add__
# How many steps follow each other, for each of their decodes, before the next begins early, and how many at most. Of
# more decodes one ends sooner, and a step for nothing lasts longer, while what is saved stays as it is. But steps that
# have followed each other so often will most likely go on to, and one step for nothing in 32 costs less than is saved.
_STEPS_PER_DECODE, _MOST_STEPS = 8, 32


class SteadyDecodes:
    """Continues the step before: :meth:`note` what ran otherwise, and :meth:`run` where that is enough.

    A batch has its tokens in the order of slots, a schedule its decodes in another.
    """

    def __init__(
        self,
        forward: TapedForward,
        inputs: InputBatch,
        sampling: SamplingKernel,
        next_decodes: NextDecodesKernel,
        rows_of: RowsOf,
        pool: ThreadPool,
    ):
        self._forward, self._inputs, self._sampling = forward, inputs, sampling
        self._next_decodes, self._rows_of, self._pool = next_decodes, rows_of, pool
        self._tapes: dict[int, Tape] = {}
        # The next step's, where it was begun.
        self._begun: Tape | None = None
        # How many steps followed each other so far.
        self._num_continued = 0
        self._slots = torch.zeros(sampling.max_rows, dtype=torch.int32)
        self._decodes: SequenceOf[Sequence] = ()
        self._next_positions: SequenceOf[int] = ()
        # Where each decode stands in the batch; nothing is held for the tape while it is empty.
        self._places: list[int] = []

    def note(self, schedule: Schedule) -> None:
        """``schedule`` ran otherwise."""
        self._places = []
        self._expect(() if schedule.chunks else schedule.decodes, schedule.positions)

    def run(self, schedule: Schedule) -> list[int] | None:
        """The next token of each of the schedule's decodes, or ``-status``. ``None``, with nothing done, where they are
        not those of the step before, one token further on, or how they are sampled depends on what was generated.
        """
        was_begun = self._end_begun()
        decodes, positions = schedule.decodes, schedule.positions
        is_next = decodes == self._decodes and positions == self._next_positions and not schedule.chunks
        self._decodes = ()  # whether it runs here or is built: a step that does not come to its end is not continued
        if not is_next or not (self._places or self._hold(decodes)):
            self._num_continued = 0
            return None
        num_rows = len(decodes)
        if num_rows not in self._tapes:
            self.record(num_rows)
        if schedule.block_updates:
            self._inputs.update_tables(schedule.block_updates)
        if not was_begun:
            self._tapes[num_rows].replay()
        self._expect(decodes, positions)
        found = self._sampling.chosen(num_rows)
        self._num_continued += 1
        num_needed = min(_STEPS_PER_DECODE * num_rows, _MOST_STEPS)
        if self._num_continued >= num_needed and self._seems_to_continue(decodes, positions):
            tape = self._tapes[num_rows]
            self._begun = tape if tape.begin(self._pool) else None
        return list(map(found.__getitem__, self._places))

    def forget(self) -> None:
        """What the batch holds is not continued, whatever comes."""
        self._end_begun()
        self._decodes = ()

    def wait(self) -> None:
        """Until the kernels of a step that was begun, if one was, have run. It counts as before."""
        if self._begun is not None:
            self._begun.end()

    def _end_begun(self) -> bool:
        """Whether a step was begun; if so, it has run."""
        self.wait()
        was_begun, self._begun = self._begun is not None, None
        return was_begun

    def _seems_to_continue(self, decodes: SequenceOf[Sequence], positions: SequenceOf[int]) -> bool:
        """Whether another step follows unless the tokens of this one, of ``positions``, end a sequence or somebody
        comes: none has all its tokens, nor begins a block, for which it needs the scheduler."""
        block_size = self._inputs.block_size
        return all((position + 1) % block_size for position in positions) and not any(map(_is_last, decodes))

    @torch.inference_mode()
    def record(self, num_rows: int) -> None:
        """Make the tape of so many decodes."""
        prepare = partial(self._prepare, num_rows)
        self._tapes[num_rows] = self._forward.record_decodes(num_rows, prepare, self._sampling.sample_held)

    def _expect(self, decodes: SequenceOf[Sequence], positions: SequenceOf[int]) -> None:
        """Nothing but one more token of each of ``decodes`` continues what the batch holds."""
        self._decodes, self._next_positions = decodes, tuple(map(_NEXT, positions))

    @torch.inference_mode()
    def _hold(self, decodes: SequenceOf[Sequence]) -> bool:
        """Keep for the tape what it does not find in the batch: slots, tokens and rows, in the batch's order."""
        if not all(map(_can_be_held, decodes)):
            return False
        in_order = sorted(decodes, key=attrgetter("slot"))
        rows = self._rows_of(in_order)
        if any(len(row.biases[0]) for row in rows):  # by ``min_new_tokens``, for a while
            return False
        # The tape moves all positions on before it uses them.
        self._sampling.hold([row._replace(position=row.position - 1) for row in rows])
        self._sampling.token_ids[: len(rows)] = torch.tensor([sequence.token_ids[-1] for sequence in in_order])
        self._slots[: len(rows)] = torch.tensor([sequence.slot for sequence in in_order])
        place_of = {sequence: place for place, sequence in enumerate(in_order)}
        self._places = [place_of[sequence] for sequence in decodes]
        return True

    def _prepare(self, num_rows: int) -> None:
        token_ids, positions = self._sampling.token_ids[:num_rows], self._sampling.held_positions(num_rows)
        self._inputs.advance(self._next_decodes, self._slots[:num_rows], token_ids, positions)


def _is_last(sequence: Sequence) -> bool:
    """Whether the token that it gets now is the last one of ``sequence`` for sure."""
    return sequence.num_tokens + 1 - sequence.num_prompt_tokens >= sequence.request.sampling.max_new_tokens


def _can_be_held(sequence: Sequence) -> bool:
    """Whether nothing but its position tells how the next token of ``sequence`` is sampled from how the last one was,
    and the token is all that is wanted.
    """
    sampling = sequence.request.sampling
    depends_on_tokens = penalises(sampling) or sequence.matcher is not None or sequence.request.has_beams
    return not (depends_on_tokens or sampling.logit_bias or sampling.logprobs is not None)
