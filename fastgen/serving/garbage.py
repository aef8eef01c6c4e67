"""Garbage collection in serving processes: rare, and limited to new objects. The server's process does it itself, and
puts it off while it reads large JSON.

A collection looks at every item of every new list, so a prompt of a million token ids takes it tens of milliseconds, in
which no stream goes on. Python itself collects whenever enough lists were made: just after they were read.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastgen.collector import collector_off

# Thresholds of the three generations; Python's defaults are 700, 10, 10. A collection looks at 5000 new objects, which
# takes some milliseconds, or at 50,000. All are looked at after 2 million at the earliest.
_NEW_OBJECTS, _YOUNG, _OLD = 5000, 10, 40
# How often it is looked at whether there is enough to collect.
_PERIOD_S = 0.1
# How long large JSON puts a collection off: by then it is refused, or what is left of it stays for long. And how long a
# collection is put off at most.
_LARGE_S, _MAX_POSTPONED_S = 1.0, 2.0


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Excludes all present objects from garbage collection, and makes it rare. Frequent full collections would delay
    steps and streams.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG, _OLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class Collector:
    """Collects garbage in place of Python while it is :meth:`running`."""

    def __init__(self) -> None:
        # Until when large values put a collection off, by ``time.monotonic``.
        self._large: dict[object, float] = {}
        # Since when there is enough to collect, by ``time.monotonic``.
        self._due_s: float | None = None

    @contextmanager
    def large(self) -> Iterator[None]:
        """Puts collections off for a moment, or until the block ends, since it holds large values."""
        held = object()
        self._large[held] = time.monotonic() + _LARGE_S
        try:
            yield
        finally:
            del self._large[held]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Collects in the running loop until the block ends. What is there before is excluded."""
        with rarely_collected(), collector_off():
            collecting = asyncio.create_task(self._run())
            try:
                yield
            finally:
                collecting.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.collect()

    def collect(self) -> None:
        """Collects if there is enough, and no reason to put it off."""
        num_new, num_young, num_old = gc.get_count()
        if num_new < _NEW_OBJECTS:
            self._due_s = None
            return
        now_s = time.monotonic()
        if self._due_s is None:
            self._due_s = now_s
        if now_s - self._due_s < _MAX_POSTPONED_S and any(until_s > now_s for until_s in self._large.values()):
            return
        self._due_s = None
        gc.collect(2 if num_old >= _OLD else 1 if num_young >= _YOUNG else 0)


# A process has one garbage collector.
COLLECTOR = Collector()
