"""The queue of formats that wait for their trial. They wait without a thread, so that nothing else waits for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.serving.isolated.grammars.trial import MAX_PROCESSES, FormatTrials
from fastgen.serving.refusals import OverloadedError

# Formats that may wait for their trial. A slow one takes about 1.5 s: half a second of processor time, and the start of
# another process.
MAX_WAITING = 16
_SLOW_TRIAL_S = 1.5


class TrialQueue:
    """Tries formats, as many at once as there are processes. It belongs to one event loop."""

    def __init__(self, trials: FormatTrials):
        self._trials = trials
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "trial")
        self._free = asyncio.Semaphore(MAX_PROCESSES)
        self._num_waiting = 0

    async def refusal(self, response_format: ResponseFormat) -> str | None:
        """Returns why the format would be refused, or ``None``. Waits for a trial if it was not tried yet.

        A call that is cancelled while it waits gives up its place. Raises ``OverloadedError`` if the queue is full.
        """
        if not self._trials.knows(response_format):
            await self._take_turn()
            if not self._trials.knows(response_format):  # another request has the same format
                return await self._try(response_format)
            self._free.release()
        return self._trials.refusal(response_format)

    def close(self) -> None:
        """Ends all trials."""
        self._trials.processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take_turn(self) -> None:
        if self._free.locked() and self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} formats of answers wait to be compiled for the first time, and this server lets "
                f"at most {MAX_WAITING} wait; try again later",
                retry_after_s=_SLOW_TRIAL_S * MAX_WAITING / MAX_PROCESSES,
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    async def _try(self, response_format: ResponseFormat) -> str | None:
        """Tries the format on a thread. A trial that has begun cannot be stopped, and keeps its place until it ends."""
        trial = asyncio.get_running_loop().run_in_executor(self._threads, self._trials.refusal, response_format)
        trial.add_done_callback(self._ended)
        return await asyncio.shield(trial)

    def _ended(self, trial: asyncio.Future[str | None]) -> None:
        self._free.release()
        if not trial.cancelled():
            trial.exception()  # it is raised where the trial is awaited, if anything still awaits it
