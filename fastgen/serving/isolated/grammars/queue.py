"""The queue of formats that wait for their trial."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.serving.isolated.grammars.trial import MAX_PROCESSES, FormatTrials
from fastgen.serving.isolated.queue import WorkQueue

# Formats that may wait for their trial. A slow one takes about 1.5 s: half a second of processor time, and the start of
# another process.
MAX_WAITING = 16
_SLOW_TRIAL_S = 1.5


@dataclass
class _Trying:
    """A format that is tried or waits for that, and how many calls wait for it."""

    task: asyncio.Task[str | None]
    num_calls: int = 0


class TrialQueue:
    """Tries formats, as many at once as there are processes, and each once however many calls ask for it. It belongs to
    one event loop.
    """

    def __init__(self, trials: FormatTrials):
        self._trials = trials
        self._trying: dict[ResponseFormat, _Trying] = {}
        self._queue = WorkQueue(
            "formats of answers wait to be compiled for the first time",
            max_running=MAX_PROCESSES,
            max_waiting=MAX_WAITING,
            retry_after_s=_SLOW_TRIAL_S * MAX_WAITING / MAX_PROCESSES,
        )

    async def refusal(self, response_format: ResponseFormat) -> str | None:
        """Returns why the format would be refused, or ``None``. Waits for a trial if it was not tried yet.

        Calls that are cancelled while they wait give up the place of their format. Raises ``OverloadedError`` if the
        queue is full.
        """
        if self._trials.knows(response_format):
            return self._trials.refusal(response_format)
        trying = self._trying.get(response_format)
        if trying is None:
            task = asyncio.create_task(self._queue.run(lambda: self._trials.refusal(response_format)))
            trying = self._trying[response_format] = _Trying(task)
        trying.num_calls += 1
        try:
            return await asyncio.shield(trying.task)
        finally:
            trying.num_calls -= 1
            if not trying.num_calls:
                del self._trying[response_format]
                trying.task.cancel()

    def close(self) -> None:
        """Ends all trials."""
        self._trials.processes.close()
        self._queue.close()
