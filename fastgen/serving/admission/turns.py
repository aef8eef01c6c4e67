"""Spreads work over the turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets at most ``num_at_once`` callers go on in one turn of the event loop, in their order.

    A turn lasts as long as the work of all who go on in it, and everybody else waits for its end.
    """

    def __init__(self, num_at_once: int):
        self._num_at_once = num_at_once
        # While there are any, the next of them are asked for in the next turn.
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Returns in a later turn of the loop: the next but one, if no more than ``num_at_once`` wait."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._let_some_go_on)
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _let_some_go_on(self) -> None:
        num_left = self._num_at_once
        while self._waiting and num_left:
            place = self._waiting.popleft()
            if not place.done():  # it is, if its caller was cancelled
                place.set_result(None)
                num_left -= 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._let_some_go_on)
