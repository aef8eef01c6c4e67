"""Ctrl-C between steps, never inside one: a step is either complete or not started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


def interrupt_deferred() -> InterruptDeferral:
    """Defers Ctrl-C until the end of the block, where it would raise in the middle of the block.

    It would on the main thread, if a Python function handles the signal (``KeyboardInterrupt`` comes from one). Where
    the signal ends the process, or is ignored, there is nothing to defer. Inside another such block, the outer block
    raises it, and the inner one costs next to nothing.
    """
    return InterruptDeferral()


class InterruptDeferral:
    """The block of :func:`interrupt_deferred`."""

    __slots__ = ("_previous", "_received")

    _outermost: InterruptDeferral | None = None

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._received: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        if InterruptDeferral._outermost is None and threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, lambda number, frame: self._received.append((number, frame)))
                InterruptDeferral._outermost = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            InterruptDeferral._outermost = None
            signal.signal(signal.SIGINT, self._previous)
            self.raise_received()

    def raise_received(self) -> None:
        """Raises a deferred Ctrl-C now, between two parts of a long block."""
        if self._received:
            assert self._previous is not None
            received, self._received = self._received[0], []
            self._previous(*received)
