"""Who hears of launches before they happen: a recorder, where this thread has one, else nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_PLAIN = (Tensor, int, float, str, type(None), torch.dtype)


class Recorder(Protocol):
    """Is told of launches and library calls in the place of their happening."""

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None: ...

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def recorder() -> Recorder | None:
    """This thread's."""
    return _active.recorder


@contextmanager
def recording(by: Recorder) -> Iterator[None]:
    """Within the block this thread's launches go to ``by``. Raises ``RuntimeError`` inside another recording."""
    if _active.recorder is not None:
        raise RuntimeError("a recording is under way in this thread")
    _active.recorder = by
    try:
        yield
    finally:
        _active.recorder = None


def library_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a library's ``function`` from within a step that may be captured: ``library_call(torch.mm, x, w, out=y)``.

    All that it computes must go into tensors that it is given. The function must be one that compares equal each time
    (no lambda), and arguments are tensors or plain values, since a tape keeps and compares them. Raises ``TypeError``.
    """
    for value in (*args, *kwargs.values()):
        if not isinstance(value, _PLAIN):
            raise TypeError(f"{_name(function)}: a {type(value).__name__} is neither a tensor nor a plain value")
    if _active.recorder is not None:
        _active.recorder.library_call(function, args, kwargs)
        return
    result = function(*args, **kwargs)
    returned: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
    for each in returned:
        if each is not None and not any(each is value for value in (*args, *kwargs.values())):
            raise TypeError(f"{_name(function)} returned something new; what it computes must go into a given tensor")


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
