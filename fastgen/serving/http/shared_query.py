"""Questions to engines that all simultaneous requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class SharedQueries(Generic[_T]):
    """Asks an engine once for all that wait at the same time. ``ask`` begins a question to the replica with this id;
    ``None`` is the first engine. Answers are not kept: a recording may have megabytes.
    """

    def __init__(self, ask: Callable[[str | None], Coroutine[Any, Any, _T]]):
        self._ask = ask
        # The questions that are under way.
        self._asked: dict[str | None, asyncio.Task[_T]] = {}

    async def take(self, replica: str | None) -> _T:
        """Returns the answer to the question that is under way, or to a new one."""
        asked = self._asked.get(replica)
        if asked is None:
            asked = self._asked[replica] = asyncio.create_task(self._ask(replica))
            asked.add_done_callback(lambda _: self._asked.pop(replica))
        return await asyncio.shield(asked)
