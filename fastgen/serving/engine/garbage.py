"""Garbage collection in a serving process: rare, and limited to new objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Thresholds of the three generations; Python's defaults are 700, 10, 10. A collection looks at 5000 new objects, which
# takes some milliseconds, or at 50,000. All are looked at after 2 million at the earliest.
_THRESHOLDS = (5000, 10, 40)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Excludes all present objects from garbage collection, and makes it rare. Frequent full collections would delay
    steps and streams.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
