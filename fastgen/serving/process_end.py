"""The quick end of a server's processes."""

from __future__ import annotations

import atexit
import os
from typing import NoReturn


def end_process() -> NoReturn:
    """Ends this process with status 0, after the functions that are registered for its end.

    Unlike Python's own end, this does not take torch apart, which takes seconds on a busy machine. Nor does it wait for
    threads that tokenize long texts.
    """
    atexit._run_exitfuncs()
    os._exit(0)
