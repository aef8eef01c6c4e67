"""Spreads work that takes long over the turns of the event loop, and over time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator
from typing import TypeVar

from fastgen.serving.breaks import BREAKS

Result = TypeVar("Result")

# The next callers wait only after pieces that took longer together.
_SHORT_S = 0.002


def at_once(work: Generator[None, None, Result]) -> Result:
    """Runs ``work`` and returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


class Turns:
    """Lets callers go on in their order, at most ``num_at_once`` in one turn of the event loop. A turn takes as long as
    their pieces of work together. The pieces take at most about ``share`` of the loop's time: after long pieces the
    next callers wait.

    A piece is what a caller does until it waits for anything. Its time is processor time.
    """

    def __init__(self, num_at_once: int, *, share: float = 1.0):
        self._num_at_once, self._rests = num_at_once, 1 / share - 1
        self._waiting: deque[asyncio.Future[None]] = deque()
        # Whether the next callers will be let go on, or the last ones have not done their pieces.
        self._is_going = False
        # Callers of this turn that did not have to wait.
        self._num_at_once_now = 0
        # When the last pieces began, by the thread's processor time, and when others may, by ``time.monotonic``.
        self._began_s = self._free_s = 0.0

    async def wait(self) -> None:
        """Waits for the caller's turn. Without a ``share`` the first callers of a turn of the loop do not wait. Others
        wait for two turns, or longer behind other callers and long pieces.
        """
        loop = asyncio.get_running_loop()
        if not (self._rests or self._is_going) and self._num_at_once_now < self._num_at_once:
            if not self._num_at_once_now:
                loop.call_soon(self._turn_ended)
            self._num_at_once_now += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        if not self._is_going:
            self._is_going = True
            loop.call_soon(self._go_on_when_free)
        await place

    async def run(self, work: Generator[None, None, Result]) -> Result:
        """Runs ``work`` and returns its result. Each turn lasts until it first yields after some milliseconds."""
        while True:
            await self.wait()
            end_s = time.thread_time() + _SHORT_S
            try:
                next(work)
                while time.thread_time() <= end_s:
                    next(work)
            except StopIteration as end:
                result: Result = end.value
                return result

    def _turn_ended(self) -> None:
        self._num_at_once_now = 0

    def _go_on_when_free(self) -> None:
        delay_s = self._free_s - time.monotonic()
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        loop, num_left = asyncio.get_running_loop(), self._num_at_once
        loop.call_soon(self._begin)  # the loop runs the callers between this and the end
        while self._waiting and num_left:
            place = self._waiting.popleft()
            if not place.done():  # it is, if its caller was cancelled
                place.set_result(None)
                if self._num_at_once > 1:
                    BREAKS.take_soon()
                num_left -= 1
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._began_s = time.thread_time()

    def _end(self) -> None:
        took_s = time.thread_time() - self._began_s
        if took_s > _SHORT_S:
            self._free_s = time.monotonic() + took_s * self._rests
        if self._waiting:
            self._go_on_when_free()
        else:
            self._is_going = False
            self._num_at_once_now = self._num_at_once  # the turn has had its callers
            asyncio.get_running_loop().call_soon(self._turn_ended)
