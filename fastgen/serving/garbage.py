"""Garbage collection in serving processes: limited to new objects, in small portions. These processes do it themselves,
the engine's between two steps. The server's puts it off while it reads large JSON.

A collection looks at every item of every new list, so a prompt of a million token ids takes it tens of milliseconds, in
which no stream goes on. Python itself collects whenever enough lists were made: just after they were read. It does so
on the thread that made them, and no other thread runs meanwhile. Where that one has a low priority, it takes long.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastgen.collector import collector_off

# Thresholds of the three generations; Python's defaults are 700, 10, 10. A collection looks at 1000 new objects, or at
# what is left of 4000, which takes a millisecond or two. All are looked at after 2 million at the earliest.
_NEW_OBJECTS, _YOUNG, _OLD = 1000, 4, 500
# How often it is looked at whether there is enough to collect.
_PERIOD_S = 0.1
# How long large JSON puts a collection off: by then it is refused, or what is left of it stays for long. And how long a
# collection is put off at most.
_LARGE_S, _MAX_POSTPONED_S = 1.0, 2.0


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Turns Python's own garbage collection off, and excludes all present objects from :func:`collect`."""
    gc.freeze()
    try:
        with collector_off():
            yield
    finally:
        gc.unfreeze()


def is_due() -> bool:
    """Returns whether there is enough to collect."""
    return gc.get_count()[0] >= _NEW_OBJECTS


def collect() -> None:
    """Collects what is new, and now and then what is old, if there is enough."""
    if is_due():
        _, num_young, num_old = gc.get_count()
        gc.collect(2 if num_old >= _OLD else 1 if num_young >= _YOUNG else 0)


class Collector:
    """Collects the garbage of the server's process while it is :meth:`running`."""

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
        with collected_by_hand():
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
        if not is_due():
            self._due_s = None
            return
        now_s = time.monotonic()
        if self._due_s is None:
            self._due_s = now_s
        if now_s - self._due_s < _MAX_POSTPONED_S and any(until_s > now_s for until_s in self._large.values()):
            return
        self._due_s = None
        collect()


# A process has one garbage collector.
COLLECTOR = Collector()
