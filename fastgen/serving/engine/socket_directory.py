"""The directory with the local socket between a server and its engine's process.

A server that is killed cannot remove its directory. The system releases the lock that it held on it, so the next server
of this user can tell, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "fastgen-engine-"


class SocketDirectory:
    """A new directory that only this user can enter. It is locked until :meth:`remove`, or until this process ends."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # this file system has no locks, so nothing of it is ever removed
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes it with the sockets in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    """Removes the directories of this user's servers that have ended without doing so."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or in use, or has just gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # An empty one may be new, and not locked yet.
                if os.fstat(descriptor).st_uid == os.getuid() and os.listdir(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)
