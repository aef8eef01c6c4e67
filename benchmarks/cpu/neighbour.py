"""A process that keeps one core busy on demand."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Neighbour:
    """A process that uses no CPU time until :meth:`resume`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.pause()

    def pause(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@contextmanager
def neighbour_on(core: int) -> Iterator[Neighbour]:
    """Starts a process that keeps ``core`` as busy as the system allows until the end of the block."""
    process = multiprocessing.get_context("spawn").Process(target=_keep_busy, args=(core,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield Neighbour(process.pid)
    finally:
        process.kill()
        process.join()


def _keep_busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass
