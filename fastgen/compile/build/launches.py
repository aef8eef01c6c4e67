"""Launches on this thread: they run, or a recorder records them instead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Recorder(Protocol):
    """Notes launches and library calls in place of running them."""

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None: ...

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def recorder() -> Recorder | None:
    """Returns this thread's recorder, ``None`` where launches run."""
    return _active.recorder


def set_recorder(by: Recorder | None) -> None:
    """Has this thread's launches go to a recorder, or run again."""
    _active.recorder = by
