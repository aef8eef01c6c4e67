"""The fence: after warm-up nothing may be compiled or captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastgen.errors import KernelError


class Fence:
    """The fence of one engine, so that another may still warm up in the same process. It is open until
    :meth:`close`.
    """

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def closed(self) -> bool:
        return self._reason is not None

    def close(self, reason: str = "warm-up is over") -> None:
        """Makes :meth:`check` refuse from now on, for this ``reason``."""
        self._reason = reason

    @contextmanager
    def open(self) -> Iterator[None]:
        """Opens the fence within the block, and restores its state afterwards."""
        before, self._reason = self._reason, None
        try:
            yield
        finally:
            self._reason = before

    def check(self, action: str, what: str, **facts: Any) -> None:
        """Raises :class:`KernelError` with these ``facts`` if the fence is closed.

        ``action`` is a verb, such as ``"build"``, and ``what`` its object.
        """
        if self._reason is not None:
            raise KernelError(f"{self._reason}: {what} is not there, and it is too late to {action} it", **facts)
