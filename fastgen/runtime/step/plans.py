"""Plans: what the first rank has the others do, written to the memory that they share.

A plan has a kind, a few numbers, and arrays. There are two places for plans, which take turns; a place is written again
when all ranks have taken what it held. A rank that waits for a plan looks for a moment, then sleeps until it is woken.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.compile.host.rank_memory import LINE_BYTES, TIMEOUT_S, RankMemory, wait_for
from fastgen.errors import RankError
from fastgen.runtime.step.plan_costs import PlanCosts

MAX_NUMBERS = 8
# Pairs of numbers, such as a place of a block table and a block, for which a plan has room; more take several plans.
MAX_PAIRS = 4096
_HEADER_BYTES = 8 * (2 + MAX_NUMBERS)
_NUM_PLACES = 2
# Seconds for which a rank looks for a plan before it sleeps: longer than the host's part of a step.
LOOK_S = 0.002
# Seconds of a sleep at most; then it looks again, whether it was woken or not.
SLEEP_S = 0.05

Array = npt.NDArray[Any]


class Kind(enum.IntEnum):
    """The kinds of work that ranks do together."""

    # Compute hidden states of a step: tokens, updates of block tables; the packed inputs.
    HIDDEN = 0
    # Compute logits of the rows of the step: tokens and rows.
    LOGITS = 1
    # Compute logits of neighbouring tokens of the step: the first one and the end.
    SOME_LOGITS = 2
    # Copy blocks: the KV group; sources and destinations.
    COPY_BLOCKS = 3
    # Write entries of block tables; places and blocks.
    WRITE_TABLES = 4
    # Run steady decodes as long as messages tell their tokens: how many, and the last message; their slots.
    DECODES = 5


@dataclass(frozen=True)
class Plan:
    """The next work of all ranks. ``payload`` are the bytes of its arrays, valid until the plan is taken."""

    kind: Kind
    numbers: tuple[int, ...]
    payload: Array


class PlanBoard:
    """The places for plans in ``memory``, each with room for ``payload_bytes``."""

    def __init__(self, memory: RankMemory, payload_bytes: int):
        self._memory = memory
        raw = memory.others.numpy()
        lines = 2 * memory.count * LINE_BYTES
        words = raw[:lines].view(np.int64)[:: LINE_BYTES // 8]
        # The number of the last plan (rank 0's word), or of the last one taken; and whether a rank sleeps.
        self._numbers, self._asleep = words[: memory.count], words[memory.count :]
        place_bytes = _place_bytes(payload_bytes)
        starts = [lines + place * place_bytes for place in range(_NUM_PLACES)]
        self._headers = [raw[start : start + _HEADER_BYTES].view(np.int64) for start in starts]
        self._payloads = [raw[start + _HEADER_BYTES : start + place_bytes] for start in starts]
        self.costs = PlanCosts()

    @staticmethod
    def size_bytes(count: int, payload_bytes: int) -> int:
        """Returns the bytes that a board for ``count`` ranks needs."""
        return 2 * count * LINE_BYTES + _NUM_PLACES * _place_bytes(payload_bytes)

    def write(self, kind: Kind, numbers: Sequence[int], arrays: Sequence[Array], wake: Callable[[int], None]) -> None:
        """Writes the next plan, and wakes ranks that sleep. Raises :class:`RankError` if a rank takes none."""
        began_s = time.perf_counter()
        number = int(self._numbers[0]) + 1
        self._wait_until_taken(number - _NUM_PLACES)
        header, payload = self._headers[number % _NUM_PLACES], self._payloads[number % _NUM_PLACES]
        header[2 : 2 + len(numbers)] = numbers
        end = 0
        for array in arrays:
            start, end = end, end + array.nbytes
            payload[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        header[0], header[1] = kind * MAX_NUMBERS + len(numbers), end
        self._numbers[0] = number
        for rank in np.flatnonzero(self._asleep).tolist():
            self._asleep[rank] = 0
            wake(rank)
        before, took_s = self.costs, time.perf_counter() - began_s
        self.costs = PlanCosts(before.num_plans + 1, before.num_bytes + _HEADER_BYTES + end, before.took_s + took_s)

    def finish(self) -> None:
        """Waits until all ranks have taken all plans. Raises :class:`RankError` if one takes none."""
        self._wait_until_taken(int(self._numbers[0]))

    def _wait_until_taken(self, number: int) -> None:
        others = self._numbers[1:]
        if not wait_for(lambda: bool((others >= number).all()), self._memory, TIMEOUT_S):
            self._memory.check()
            late = 1 + int((others < number).argmax())
            raise RankError(f"rank {late} of {self._memory.count} takes no plans")

    def slowest(self) -> tuple[int, int] | None:
        """Returns the rank that has taken fewest plans, and how many; ``None`` if all have taken all."""
        rank = 1 + int(self._numbers[1:].argmin())
        taken = int(self._numbers[rank])
        return None if taken == self._numbers[0] else (rank, taken)

    def next(self, rank: int, sleep: Callable[[float], None]) -> Plan:
        """Waits for the next plan for ``rank``. ``sleep`` sleeps for so many seconds, or until it is woken."""
        number = int(self._numbers[rank]) + 1
        while not self._look(number):
            self._asleep[rank] = 1
            if self._numbers[0] < number:
                sleep(SLEEP_S)
            self._asleep[rank] = 0
        header = self._headers[number % _NUM_PLACES]
        kind, count = divmod(int(header[0]), MAX_NUMBERS)
        numbers = tuple(header[2 : 2 + count].tolist())
        return Plan(Kind(kind), numbers, self._payloads[number % _NUM_PLACES][: int(header[1])])

    def taken(self, rank: int) -> None:
        """Notes that ``rank`` needs nothing more of its plan's place."""
        self._numbers[rank] += 1

    def _look(self, number: int) -> bool:
        end_s = time.perf_counter() + LOOK_S
        while True:
            for _ in range(100):
                if self._numbers[0] >= number:
                    return True
            if time.perf_counter() > end_s:
                return False


def _place_bytes(payload_bytes: int) -> int:
    return -(-(_HEADER_BYTES + payload_bytes) // LINE_BYTES) * LINE_BYTES
