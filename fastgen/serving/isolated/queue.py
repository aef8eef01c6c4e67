"""Queues of work for helper processes. What waits in them holds no thread, so that nothing else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

from fastgen.serving.refusals import OverloadedError, UnavailableError
from fastgen.serving.threads import begin_on_thread, on_thread

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


class WorkQueue:
    """Runs work that waits for processes of one kind, as many pieces at once as there are processes. It belongs to one
    event loop.

    ``what`` says what its pieces wait for, as in "texts wait to be encoded".
    """

    def __init__(self, what: str, *, max_running: int, max_waiting: int, retry_after_s: float):
        self._what, self._max_waiting, self._retry_after_s = what, max_waiting, retry_after_s
        self._threads = ThreadPoolExecutor(max_running, "helpers")
        self._free = asyncio.Semaphore(max_running)
        self._num_waiting = 0
        # Called for each piece of work that is refused.
        self.on_full: Callable[[], None] = lambda: None

    async def run(self, work: Callable[[], _Answer]) -> _Answer:
        """Returns what ``work`` returns, on a thread of its own.

        A call that is cancelled while it waits gives up its place. Work that has begun cannot be stopped, and keeps its
        place until it ends. Raises ``OverloadedError`` if too much waits already, and ``UnavailableError`` if the
        system has no thread for it.
        """
        await self._take_turn()
        try:
            running = begin_on_thread(work, self._threads)
        except UnavailableError:
            self._free.release()
            raise
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        finally:
            del running

    def close(self) -> None:
        """Begins no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take_turn(self) -> None:
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            self.on_full()
            raise OverloadedError(
                f"{self._num_waiting} {self._what}, and this server lets at most {self._max_waiting} wait; try again "
                "later",
                retry_after_s=self._retry_after_s,
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    def _ended(self, running: asyncio.Future[_Answer]) -> None:
        self._free.release()
        if not running.cancelled():
            running.exception()  # it is raised where the work is awaited, if anything still awaits it


class ByHelpers(Generic[_Asked, _Answer]):
    """A function whose work helper processes do. A call holds its thread until one of them has answered; ``queue`` is
    for callers whose threads have other work, too.
    """

    def __init__(self, function: Callable[_Asked, _Answer], queue: WorkQueue):
        self._function, self.queue = function, queue

    def __call__(self, *arguments: _Asked.args, **options: _Asked.kwargs) -> _Answer:
        return self._function(*arguments, **options)


async def in_turn(function: Callable[..., object], work: Callable[[], _Answer]) -> _Answer:
    """Returns what ``work`` returns, which calls ``function``. It runs on a thread, and if helper processes do the work
    of ``function``, in their queue.

    Raises ``OverloadedError`` if too much waits there already, and ``UnavailableError`` if the system has no thread.
    """
    if isinstance(function, ByHelpers):
        return await function.queue.run(work)
    return await on_thread(work)
