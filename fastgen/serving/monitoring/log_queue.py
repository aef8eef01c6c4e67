"""A log that delays nothing: lines wait in memory for a thread that writes them."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

# Most bytes of lines that wait to be written. One line alone may be longer.
MAX_WAITING_BYTES = 4 << 20
# Most seconds that an ending process waits for its last lines to be written.
FLUSH_S = 1.0


class LogQueue(logging.Handler):
    """Writes messages to a file descriptor from a thread of its own.

    So a reader that stands still, as a pipe can have, stops only the log. A message that finds ``MAX_WAITING_BYTES``
    waiting is dropped. So is one that the system does not take, because the disk is full or the reader has gone.
    ``on_dropped`` is called for each, in any thread. Once lines can be written again, one says how many were dropped.
    """

    def __init__(self, descriptor: int, on_dropped: Callable[[], None] = lambda: None):
        super().__init__()
        self.on_dropped = on_dropped
        self._descriptor = descriptor
        self._changed = threading.Condition()
        # Lines, and numbers of lines that were dropped in their places.
        self._waiting: deque[bytes | int] = deque()
        self._num_waiting_bytes = 0
        self._is_writing = self._is_closed = self._is_stuck = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = _encoded(self.format(record))
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            is_dropped = bool(self._num_waiting_bytes) and self._num_waiting_bytes + len(line) > MAX_WAITING_BYTES
            if not is_dropped:
                self._waiting.append(line)
                self._num_waiting_bytes += len(line)
            elif isinstance(last := self._waiting[-1] if self._waiting else None, int):
                self._waiting[-1] = last + 1
            else:
                self._waiting.append(1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if is_dropped:
            self.on_dropped()

    def flush(self) -> None:
        """Waits until all lines are written, for at most ``FLUSH_S`` seconds. If that once was not enough, further
        calls do not wait.
        """
        with self._changed:
            if not self._is_stuck:
                is_done = self._changed.wait_for(lambda: not (self._waiting or self._is_writing), FLUSH_S)
                self._is_stuck = not is_done

    def close(self) -> None:
        """Ends the thread once it has written all lines."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _write_all(self) -> None:
        num_dropped = 0
        while (item := self._next()) is not None:
            if isinstance(item, int):
                num_dropped += item
                can_write = True
            else:
                can_write = self._write(item)
                if not can_write:
                    num_dropped += 1
                    self.on_dropped()
            if num_dropped and can_write and self._write(self._notice(num_dropped)):
                num_dropped = 0

    def _next(self) -> bytes | int | None:
        """Waits for the next item and returns it, or ``None`` once there are no more."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            item = self._waiting.popleft()
            if isinstance(item, bytes):
                self._num_waiting_bytes -= len(item)
            self._is_writing = True
            return item

    def _write(self, line: bytes) -> bool:
        """Returns whether the system has taken the whole ``line``."""
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program has made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:
                return False
        return True

    def _notice(self, num_dropped: int) -> bytes:
        text = "%d lines of the log were dropped, because they could not be written in time"
        return _encoded(
            self.format(logging.LogRecord("fastgen.serving", logging.WARNING, __file__, 0, text, (num_dropped,), None))
        )


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode("utf-8", "backslashreplace")
