"""Which turn the event loop is in."""

from __future__ import annotations

import asyncio


class LoopTurns:
    """Counts the turns of the running loop until it is cancelled."""

    def __init__(self) -> None:
        self.number = 0
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.number += 1

    def stop(self) -> None:
        self._task.cancel()
