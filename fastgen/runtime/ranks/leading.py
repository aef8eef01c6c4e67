"""The forward pass of the rank that leads: it has the other ranks compute their parts of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from fastgen.errors import RankError
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.runtime.ranks.team import Team
from fastgen.runtime.step.forward import Forward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.plan_costs import PlanCosts
from fastgen.runtime.step.plans import MAX_PAIRS, Array, Kind


class LeadingForward(Forward):
    """Runs ``own``, the first rank's part, together with those of the ``team``."""

    def __init__(self, own: Forward, inputs: InputBatch, team: Team):
        super().__init__(own.model, own.kv_cache)
        self._own, self._inputs, self._team = own, inputs, team

    def hidden(self, batch: RaggedBatch) -> Tensor:
        """Returns the hidden states ``[T, H]``, which every rank has."""
        built = self._inputs.built
        self._team.write_tables(built.places, built.blocks)
        numbers = len(batch.input_ids), built.num_updates
        with self._together(Kind.HIDDEN, numbers, built.packed.numpy()):
            return self._own.hidden(batch)

    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Returns the logits ``[R, V]``, of which each rank computes some columns."""
        if not len(batch.logits_indices):
            return self._own.logits(hidden, batch)
        with self._together(Kind.LOGITS, (len(batch.logits_indices),)):
            return self._own.logits(hidden, batch)

    def some_logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """Returns the logits of tokens ``first`` to ``end``."""
        with self._together(Kind.SOME_LOGITS, (first, end)):
            return self._own.some_logits(hidden, first, end)

    def copy_blocks(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies blocks of every rank's cache. A piece is read before it is written, so all are read here first."""
        assert len(sources) <= MAX_PAIRS, "a step forks fewer sequences than a plan has room for"
        pairs = tuple(np.array(each, np.int64) for each in (sources, destinations))
        with self._together(Kind.COPY_BLOCKS, (group,), *pairs):
            self._own.copy_blocks(group, sources, destinations)

    @contextmanager
    def _together(self, kind: Kind, numbers: Sequence[int], *arrays: Array) -> Iterator[None]:
        """Has the other ranks carry out a plan while this one does its part in the block. If that fails, the ranks are
        no longer at the same place, and all end."""
        self._team.plan(kind, numbers, arrays)
        try:
            yield
        except RankError as error:
            self._team.give_up(str(error))
            self._team.check()  # raises the team's own reason where it knows more
            raise
        except BaseException as error:
            self._team.give_up(f"rank 0 failed: {error}")
            raise
        self._team.check()

    @property
    def lost(self) -> str | None:
        """Returns why the ranks cannot continue; ``None`` while they can."""
        return self._team.lost

    @property
    def plan_costs(self) -> PlanCosts:
        """Returns the cost so far of leading other ranks."""
        return self._team.board.costs

    def check(self) -> None:
        """Raises :class:`RankError` if ranks were lost: a GPU that waited for one has then gone on without it."""
        self._team.check()

    def close(self) -> None:
        """Ends the other ranks. What is captured goes first: it has exchanges with them."""
        self._own.close()
        self._team.close()
