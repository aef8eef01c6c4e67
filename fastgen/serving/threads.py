"""Work on other threads of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from fastgen.serving.refusals import UnavailableError

_Result = TypeVar("_Result")


def begin_on_thread(work: Callable[[], _Result], threads: Executor | None = None) -> asyncio.Future[_Result]:
    """Begins ``work`` on one of ``threads``, by default the loop's own. Raises ``UnavailableError`` if the system has
    no thread for it.

    Who awaits the future deletes it then: an error of ``work`` holds the frames of those that it passes, and with them
    a future there, which holds the error.
    """
    # Emptied if it is refused: an executor keeps what it could not begin, and begins it when it has a thread again.
    given = [work]

    def unless_refused() -> _Result:
        if not given:
            raise asyncio.CancelledError
        return given.pop()()

    try:
        return asyncio.get_running_loop().run_in_executor(threads, unless_refused)
    except RuntimeError as error:
        given.clear()
        raise UnavailableError(f"the server has no thread for this now: {error}") from error


async def on_thread(work: Callable[[], _Result], threads: Executor | None = None) -> _Result:
    """Returns what ``work`` returns, on one of ``threads``, by default the loop's own. Raises ``UnavailableError`` if
    the system has no thread for it.
    """
    running = begin_on_thread(work, threads)
    try:
        return await running
    finally:
        del running
