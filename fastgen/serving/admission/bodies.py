"""The bytes in the bodies of all requests that are not answered yet, within a limit."""

from __future__ import annotations

from typing import Self

from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import OverloadedError

# Most bytes in the body of a request that needs no key. None of these requests has a use for more.
MAX_OPEN_BODY_BYTES = 4 << 10
# How many of the largest bodies the server holds at once.
MAX_LARGEST_BODIES = 16
# The first bytes of each body, which do not count. So large bodies, whose clients may send them as slowly as they like,
# leave room for ordinary requests.
FREE_BYTES = 64 << 10


def max_bytes(limits: ConnectionLimits) -> int:
    """Returns the most bytes that the bodies of all requests may have, beyond the first of each."""
    return MAX_LARGEST_BODIES * limits.max_body_bytes


class Bodies:
    """Counts the bytes in the bodies of all requests that are not answered yet."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._max_bytes = max_bytes(limits)
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts more bytes. Raises ``OverloadedError`` if that is too many, and then counts none of them."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"the requests in work have {self._max_bytes} bytes, no more large ones are taken", retry_after_s=1.0
            )
        self._num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


class CountedBody:
    """One body, whose bytes count in ``bodies`` until its context is left."""

    def __init__(self, bodies: Bodies):
        self._bodies = bodies
        self._num_counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bodies.remove(self._num_counted)

    def count(self, num_bytes: int) -> None:
        """Counts the bytes of a body that has ``num_bytes`` by now. Raises ``OverloadedError`` if all bodies together
        have too many.
        """
        num_more = num_bytes - FREE_BYTES - self._num_counted
        if num_more > 0:
            self._bodies.add(num_more)
            self._num_counted += num_more
