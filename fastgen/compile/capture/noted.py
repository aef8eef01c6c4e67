"""Notes what a step launches on a GPU, so that a capture can repeat it without running the modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.capture.recording import call_library, recording


class NotedStep:
    """Runs ``step``, and notes its launches and library calls with their addresses.

    :meth:`again` makes the same calls on the same addresses. Neither modules nor checks run then, and nothing is
    allocated. No tensor is kept alive, so intermediate results share memory. The caller says where that memory comes
    from and keeps it. As in a tape, a step is nothing but kernels and library calls.
    """

    def __init__(self, step: Callable[[], None]):
        self._calls: list[Callable[[], Any]] = []
        with recording(self):
            step()

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launches a kernel now, and notes it."""
        if 0 not in grid:
            self._calls.append(kernel.launch_noted(grid, arguments))

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls a library's function now, and notes it."""
        call_library(function, args, kwargs)
        named = {name: _unowned(value) for name, value in kwargs.items()}
        self._calls.append(partial(function, *map(_unowned, args), **named))

    def again(self) -> None:
        """Makes the same calls once more, on the stream on which the step ran."""
        for call in self._calls:
            call()


def _unowned(value: Any) -> Any:
    """Returns a tensor's numbers where they lie, without keeping them there; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    memory = value.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), value.device, memory.nbytes())
    nothing = torch.empty(0, dtype=value.dtype, device=value.device)
    return nothing.set_(same, value.storage_offset(), value.shape, value.stride())
