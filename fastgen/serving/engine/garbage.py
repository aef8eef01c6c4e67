"""Garbage collection in a process that serves: rare, and of what is new only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Containers made before the youngest are looked through, and so on; Python's own are 700, 10, 10.
_THRESHOLDS = (20_000, 20, 50)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """What is there now stays, and is not looked through again and again: that would hold up steps and streams."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
