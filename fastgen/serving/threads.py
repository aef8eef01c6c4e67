"""Work on other threads of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from fastgen.serving.refusals import UnavailableError

_Result = TypeVar("_Result")


async def on_thread(work: Callable[[], _Result], threads: Executor | None = None) -> _Result:
    """Returns what ``work`` returns, on one of ``threads``, by default the loop's own. Raises ``UnavailableError`` if
    the system has no thread for it.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(threads, work)
    except RuntimeError as error:
        raise UnavailableError(f"the server has no thread for this now: {error}") from error
    return await running
