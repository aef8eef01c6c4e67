"""Measures the memory that this process holds, and its peak during a block."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_PERIOD_S = 0.002
_STATUS = Path("/proc/self/status")


class MemoryWatch:
    """Samples memory every two milliseconds. Mapped pages of files, which the system can reclaim, are not counted.

    Needs Linux.
    """

    def __init__(self) -> None:
        self._before = self._most = self._after = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._before = self._most = _own_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._after = _own_bytes()

    def found(self) -> dict[str, int]:
        """Returns bytes held ``before`` and ``after``, and the ``most`` in between."""
        return {"before": self._before, "most": max(self._most, self._after), "after": self._after}

    def _watch(self) -> None:
        while not self._done.wait(_PERIOD_S):
            self._most = max(self._most, _own_bytes())


def _own_bytes() -> int:
    """Returns the bytes of private and shared memory that no file backs, swapped out or not."""
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))
