"""Standard input, output and error of a server. It runs on where they are closed, full or not read."""

from __future__ import annotations

import contextlib
import locale
import os
import threading

STDOUT, STDERR = 1, 2
# Most seconds to wait until a reader takes a text.
_PATIENCE_S = 1.0


def open_closed_streams() -> None:
    """Opens the null device in place of standard input, output and error where they are closed.

    Otherwise the next files and sockets would get their numbers, and whatever is printed would go there.
    """
    for descriptor in (0, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)


def write_text(descriptor: int, text: str) -> None:
    """Writes ``text`` and the end of a line to a standard stream. Text that the system or the reader does not take is
    lost.
    """
    data = f"{text}\n".encode(locale.getpreferredencoding(False), "replace")
    writing = threading.Thread(target=_write, args=(descriptor, data), daemon=True)
    writing.start()
    writing.join(_PATIENCE_S)


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
