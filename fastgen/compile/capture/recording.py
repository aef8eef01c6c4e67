"""Records what a step launches, on this thread, in place of running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.build.launches import Recorder, recorder, set_recorder

_PLAIN = (Tensor, int, float, str, type(None), torch.dtype)


@contextmanager
def recording(by: Recorder) -> Iterator[None]:
    """Gives this thread's launches to ``by`` within the block. Raises ``RuntimeError`` inside another recording."""
    if recorder() is not None:
        raise RuntimeError("a recording is under way in this thread")
    set_recorder(by)
    try:
        yield
    finally:
        set_recorder(None)


def library_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a library's ``function`` from within a step that may be captured: ``library_call(torch.mm, x, w, out=y)``.

    All results must go into tensors that it is given. The function must be one that compares equal each time (no
    lambda), and arguments are tensors or plain values, since a tape keeps and compares them. Raises ``TypeError``.
    """
    for value in (*args, *kwargs.values()):
        if not isinstance(value, _PLAIN):
            raise TypeError(f"{_name(function)}: a {type(value).__name__} is neither a tensor nor a plain value")
    if (active := recorder()) is not None:
        active.library_call(function, args, kwargs)
        return
    call_library(function, args, kwargs)


def call_library(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes such a call now. Raises ``TypeError`` where a result is in none of the tensors that it was given."""
    result = function(*args, **kwargs)
    returned: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
    for each in returned:
        if each is not None and not any(each is value for value in (*args, *kwargs.values())):
            raise TypeError(f"{_name(function)} returned something new; what it computes must go into a given tensor")


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
