"""When requests time out."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol


class _Open(Container[int], Sized, Protocol):
    """The ids of the requests that have not ended."""


class Deadlines:
    """The deadlines of requests by their ids, the next first; seconds of the engine's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: int, deadline_s: float) -> None:
        """The request times out at ``deadline_s``."""
        heappush(self._heap, (deadline_s, request_id))

    def passed(self, now_s: float) -> Iterator[int]:
        """Take out whose deadline has passed, perhaps of requests that have ended since."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heappop(self._heap)[1]

    def keep(self, open_ids: _Open) -> None:
        """Hold no more than twice as many as there are ``open_ids``: those of ended requests go."""
        if len(self._heap) > 2 * len(open_ids):
            self._heap = [each for each in self._heap if each[1] in open_ids]
            heapify(self._heap)
