"""Where a detached server's output goes once it is ready: while it loads, a terminal may show its progress."""

from __future__ import annotations

import os
import sys

# In the environment of a detached server and of its engine: the file.
LOG_VARIABLE = "FASTGEN_SERVE_LOG"


def move_output_to_log() -> None:
    """From here on, what this process says goes to the file, if it belongs to a detached server."""
    if log := os.environ.get(LOG_VARIABLE):
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
