"""The mailbox: where the first of several ranks tells the others the tokens of steady decodes.

It lies in the memory that ranks share, behind the plans, and needs no plan: kernels write and read it
(``compile/ops/ranks/decodes.py``), so a step of steady decodes stays one tape on each rank. A message has a number, the
token ids of the step's rows, and entries of block tables that changed. A message without tokens says that no more
steps follow. One place for messages is enough: a step has sums over the ranks, so when rank 0 has ended it, all ranks
have read its message; and behind the last message rank 0 waits until the others have taken the plan of these steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.host.rank_memory import LINE_BYTES
from fastgen.runtime.step.plans import MAX_PAIRS, Array

_NUMBER, _NUM_UPDATES = 0, 3  # words of the first line
_WORDS = LINE_BYTES // 8


class Mailbox:
    """The mailbox in ``memory``, bytes, for steps of up to ``max_rows`` rows and :attr:`max_updates` changed entries of
    block tables."""

    max_updates = MAX_PAIRS

    def __init__(self, memory: Tensor, max_rows: int):
        self.max_rows = max_rows
        self.words = memory[: self.size_bytes(max_rows)].view(torch.int64)
        words = self.words.numpy()
        self._first = words[:_WORDS]
        self._places, self._blocks = words[_WORDS + max_rows :].reshape(2, -1)

    @classmethod
    def size_bytes(cls, max_rows: int) -> int:
        """Returns the bytes that a mailbox needs."""
        return 8 * (_WORDS + max_rows + 2 * cls.max_updates)

    @property
    def number(self) -> int:
        """Returns the number of the last message."""
        return int(self._first[_NUMBER])

    def has_room_for(self, num_updates: int) -> bool:
        """Returns whether the next message may bring ``num_updates`` more changed entries."""
        return int(self._first[_NUM_UPDATES]) + num_updates <= self.max_updates

    def add_updates(self, places: Array, blocks: Array) -> None:
        """Adds changed entries of block tables to the next message."""
        start = int(self._first[_NUM_UPDATES])
        end = start + len(places)
        self._places[start:end], self._blocks[start:end] = places, blocks
        self._first[_NUM_UPDATES] = end

    def clear_updates(self) -> None:
        """Notes that a message has brought all changed entries to all ranks."""
        self._first[_NUM_UPDATES] = 0
