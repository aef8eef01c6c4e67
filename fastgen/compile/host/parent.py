"""The end of a process together with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
# Seconds between two looks whether the parent is there, where the system does not tell.
_LOOK_S = 0.2


def end_with(parent: int) -> None:
    """Ends this process when its ``parent`` ends, even while it loads or is in a long step.

    On Linux the kernel kills it, also if it is stopped. It does so as soon as the thread that started it ends, so that
    thread has to last as long. On other systems a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        sys.exit(1)
    if sys.platform != "linux":
        threading.Thread(target=_look_for, args=(parent,), name="fastgen parent", daemon=True).start()


def _look_for(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
