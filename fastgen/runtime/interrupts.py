"""Ctrl-C between steps, never inside one: a step is either whole or not begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Hold back Ctrl-C until the block has ended, where it would raise in the middle of it.

    That is on the main thread, if a Python function handles the signal (``KeyboardInterrupt`` comes from one). Where it
    ends the process, or is ignored, there is nothing to hold back.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            previous(*received[0])
