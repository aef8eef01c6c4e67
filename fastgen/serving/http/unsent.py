"""The bytes that clients have not taken yet, over all connections."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import Protocol

# Answers that wait for their clients take at most so much memory together. One alone may take more.
MAX_UNSENT_BYTES = 256 << 20


class Sender(Protocol):
    """A connection whose client does not take what is sent."""

    @property
    def num_unsent(self) -> int:
        """Returns how many bytes wait for its client in this process."""

    def abort(self) -> None:
        """Closes it at once."""


class UnsentAnswers:
    """Holds the connections whose clients take their answers more slowly than these come, and closes those of which
    most waits when all together hold more than ``max_bytes``.
    """

    def __init__(self, max_bytes: int = MAX_UNSENT_BYTES):
        self._max_bytes = max_bytes
        self._waiting: set[Sender] = set()

    def add(self, sender: Sender) -> None:
        """Adds a connection whose client lets an answer wait. Others are closed for it, and it is not; none are for an
        answer that is too large by itself.
        """
        num_unsent = {each: each.num_unsent for each in self._waiting if each is not sender}
        total = sender.num_unsent + sum(num_unsent.values())
        self._waiting.add(sender)
        if sender.num_unsent > self._max_bytes:
            return
        for each in sorted(num_unsent, key=num_unsent.__getitem__, reverse=True):
            if total <= self._max_bytes:
                break
            total -= num_unsent[each]
            self._waiting.remove(each)
            each.abort()

    def discard(self, sender: Sender) -> None:
        """Forgets a connection whose client has taken what waited, or which has ended."""
        self._waiting.discard(sender)


def unacknowledged(connected: socket.socket | None) -> int:
    """Returns how many bytes of a TCP connection the system holds that the other end has not acknowledged; 0 where the
    system does not tell (``SIOCOUTQ`` is Linux's, and the same number as ``TIOCOUTQ``).
    """
    if connected is None:
        return 0
    try:
        (number,) = struct.unpack("i", fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, struct.pack("i", 0)))
    except (OSError, ValueError):  # it is closed, or no TCP connection
        return 0
    return int(number)
