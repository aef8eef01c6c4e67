"""Steady decodes over ranks: the leader's tape of a step begins with a message, for which the others wait with theirs.

A run of steps begins with one plan, which says what sequences it has. Every further step costs no plan: the tokens, and
entries of block tables that changed, go through the :class:`~fastgen.runtime.step.mailbox.Mailbox`. The run ends with a
message without tokens, before the next plan of any kind.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastgen.compile.capture.tape import Tape
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel
from fastgen.compile.ops.ranks.decodes import HearTokensKernel, TellTokensKernel
from fastgen.runtime.ranks.team import Team
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.mailbox import Mailbox
from fastgen.runtime.step.plans import Array, Kind


class LedDecodes:
    """The leader's side of steady decodes."""

    def __init__(self, team: Team, tell: TellTokensKernel):
        self._team, self._tell, self._mailbox = team, tell, team.mailbox
        self._is_running = False
        self._slots = torch.empty(0, dtype=torch.int32)
        team.before_plans(self._end)

    def begin(self, slots: Tensor) -> None:
        """Has the other ranks follow steps of the decodes in ``slots [R]`` i32, from the next message on."""
        self._slots = slots
        self._team.plan(Kind.DECODES, (len(slots), self._mailbox.number), [slots.numpy()])
        self._is_running = True

    def tell(self, token_ids: Tensor) -> None:
        """Tells the ``token_ids [R]`` i64 of the next step. May be recorded."""
        self._tell(token_ids, self._mailbox.words, self._mailbox.max_rows, self._mailbox.max_updates)

    def update(self, places: Array, blocks: Array) -> None:
        """Has the next message bring changed entries of block tables: flat ``places`` and ``blocks``, i64."""
        if self._mailbox.has_room_for(len(places)):
            self._mailbox.add_updates(places, blocks)
        else:
            self._team.write_tables(places, blocks)
            self.begin(self._slots)

    def step_ended(self) -> None:
        """Notes that a step has ended that began with a message. Raises :class:`RankError` if the ranks are lost."""
        self._mailbox.clear_updates()
        self._team.check()

    def _end(self) -> None:
        if self._is_running:
            self._is_running = False
            self.tell(torch.empty(0, dtype=torch.int64))
            self._team.finish_plans()  # all have heard it
            self._mailbox.clear_updates()


class FollowedDecodes:
    """Another rank's side of steady decodes: tapes that begin with what the leader tells."""

    def __init__(
        self,
        forward: TapedForward,
        inputs: InputBatch,
        next_decodes: NextDecodesKernel,
        hear: HearTokensKernel,
        mailbox: Mailbox,
        shared: Tensor,
    ):
        self._forward, self._inputs, self._next_decodes = forward, inputs, next_decodes
        self._slots = torch.zeros(mailbox.max_rows, dtype=torch.int32)
        self._token_ids = torch.zeros(mailbox.max_rows, dtype=torch.int64)
        # Positions of sampled tokens, which only the leader reads.
        self._positions = torch.zeros(mailbox.max_rows, dtype=torch.int64)
        self._heard = torch.zeros(2, dtype=torch.int64)
        self._tapes: dict[int, Tape] = {}
        self._hear = hear.bind(
            self._heard,
            self._token_ids,
            inputs.buffers.flat_tables,
            mailbox.words,
            shared,
            mailbox.max_rows,
            mailbox.max_updates,
        )

    def follow(self, number: int, slots: Tensor) -> None:
        """Runs steps of the decodes in ``slots [R]`` i32 as long as the leader tells their tokens in messages behind
        ``number``."""
        num_rows = len(slots)
        self._slots[:num_rows] = slots
        if num_rows not in self._tapes:
            prepare = partial(self._prepare, num_rows)
            self._tapes[num_rows] = self._forward.record_decodes(num_rows, prepare, lambda logits: None)
        replay, heard = self._tapes[num_rows].replay, self._heard.numpy()
        heard[0] = number
        self._hear()
        while heard[1]:
            replay()
            self._hear()

    def _prepare(self, num_rows: int) -> None:
        self._inputs.advance(
            self._next_decodes, self._slots[:num_rows], self._token_ids[:num_rows], self._positions[:num_rows]
        )
