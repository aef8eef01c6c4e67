"""Deadlines of requests."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol


class _Open(Container[int], Sized, Protocol):
    """The ids of the requests that have not ended."""


class Deadlines:
    """A heap of deadlines, the next first, in seconds of the engine's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request_id: int, deadline_s: float) -> None:
        """Adds the time ``deadline_s`` at which a request times out."""
        heappush(self._heap, (deadline_s, request_id))

    def passed(self, now_s: float) -> Iterator[int]:
        """Removes and yields the requests whose deadline has passed. Some of them may have ended before."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heappop(self._heap)[1]

    def keep(self, open_ids: _Open) -> None:
        """Drops the deadlines of ended requests once there are more than two deadlines for each of the ``open_ids``."""
        if len(self._heap) > 2 * len(open_ids):
            self._heap = [each for each in self._heap if each[1] in open_ids]
            heapify(self._heap)
