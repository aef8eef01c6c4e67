"""Breaks in long turns of the event loop, in which tokens that have come are handed on.

The loop looks for what has come once in a turn, and a turn has as much work as clients give it. So work that clients
may give in any number is followed by a break.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Work between two breaks: an engine hardly reports tokens more often.
_WORK_S = 0.005


class Breaks:
    """Calls ``takers`` in breaks, which take what has come from an engine. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._takers: list[Callable[[], None]] = []
        # When the next break may be, by ``time.monotonic``.
        self._next_s = 0.0

    def add(self, taker: Callable[[], None]) -> None:
        """Has ``taker`` called in each break until it is given to :meth:`remove`. It raises nothing."""
        self._takers.append(taker)

    def remove(self, taker: Callable[[], None]) -> None:
        self._takers.remove(taker)

    def take(self) -> None:
        """Has a break now, if there was enough work since the last one. That is some milliseconds of it, and as much as
        the break took: where tokens take all the time that there is, other work gets half of it.

        The caller should be no task. In one, what a taker would let go on goes on later.
        """
        if time.monotonic() >= self._next_s:
            self.take_now()

    def take_now(self) -> None:
        """Has a break now."""
        began_s = time.monotonic()
        for taker in tuple(self._takers):
            taker()
        ended_s = time.monotonic()
        self._next_s = ended_s + max(_WORK_S, ended_s - began_s)

    def take_soon(self) -> None:
        """Has a break after what the event loop is to do already, in the same turn where that is possible."""
        if self._takers:
            asyncio.get_running_loop().call_soon(self.take)


# A process has one event loop that serves.
BREAKS = Breaks()
