"""A question to the engine that all simultaneous requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class SharedQuery(Generic[_T]):
    """Asks once for all that wait at the same time. ``ask`` begins a question."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, _T]]):
        self._ask = ask
        self._asked: asyncio.Task[_T] | None = None

    async def take(self) -> _T:
        """Returns the answer to the question that is under way, or to a new one."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)
