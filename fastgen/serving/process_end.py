"""Ends the processes of a server quickly, and together with the process that started them."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_process() -> NoReturn:
    """Ends this process with status 0, after the functions that are registered for its end.

    Unlike Python's own end, this does not take torch apart, which takes seconds on a busy machine. Nor does it wait for
    threads that tokenize long texts.
    """
    atexit._run_exitfuncs()
    os._exit(0)


def end_with(parent: int) -> None:
    """Lets the kernel kill this process when its ``parent`` ends, even while it loads or is in a long step.

    Only Linux can do that. On other systems the process merely exits if its parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        sys.exit(1)
