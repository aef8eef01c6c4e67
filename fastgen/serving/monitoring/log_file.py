"""The file for the output of a detached server. The output goes there once the server is ready, so that a terminal can
show the progress of loading."""

from __future__ import annotations

import os
import sys

# The environment variable with the file, for a detached server and its engine.
LOG_VARIABLE = "FASTGEN_SERVE_LOG"


def move_output_to_log() -> None:
    """Redirects the output of this process to the file, if it belongs to a detached server."""
    if log := os.environ.get(LOG_VARIABLE):
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
