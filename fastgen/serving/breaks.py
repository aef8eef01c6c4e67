"""Breaks in long turns of the event loop, in which tokens that have come are handed on.

The loop looks for what has come once in a turn, and a turn has as much work as clients give it. So work that clients
may give in any number is followed by a break.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Breaks follow each other no sooner: an engine hardly reports tokens more often.
_EVERY_S = 0.005


class Breaks:
    """Calls ``takers`` in breaks, which take what has come from an engine. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._takers: list[Callable[[], None]] = []
        # When the last break was, by ``time.monotonic``.
        self._last_s = 0.0

    def add(self, taker: Callable[[], None]) -> None:
        """Has ``taker`` called in each break until it is given to :meth:`remove`. It raises nothing."""
        self._takers.append(taker)

    def remove(self, taker: Callable[[], None]) -> None:
        self._takers.remove(taker)

    def take(self) -> None:
        """Has a break now, if the last one was long enough ago. The caller is no task: tasks cannot be nested."""
        if time.monotonic() - self._last_s >= _EVERY_S:
            self.taken()
            for taker in self._takers:
                taker()

    def taken(self) -> None:
        """Puts the next break off, since all that has come was taken outside a break."""
        self._last_s = time.monotonic()

    def take_soon(self) -> None:
        """Has a break after what the event loop is to do already, in the same turn where that is possible."""
        if self._takers:
            asyncio.get_running_loop().call_soon(self.take)


# A process has one event loop that serves.
BREAKS = Breaks()
