"""A server started from the command line, for tests of its outside behaviour."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastgen.serving.clients.deployments import deployments

# Longer than a server takes to start and to end.
WAIT_S = 120.0


@dataclass
class ServerProcess:
    """``fastgen serve`` on a port of its own. An example of ``address`` is ``http://127.0.0.1:40123``."""

    process: subprocess.Popen[str]
    address: str


@contextmanager
def served(model: str, *flags: str, stderr: int | None = None) -> Iterator[ServerProcess]:
    """Runs ``fastgen serve MODEL FLAGS``, ready; it ends when the block is left. ``stderr`` is a file descriptor for
    its log.
    """
    command = [sys.executable, "-m", "fastgen", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"is served at (https?://[^\s/]+)", line):
                    yield ServerProcess(process, found[1])
                    break
            else:
                raise AssertionError(f"the server ended with status {process.wait()} before it was ready")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextmanager
def served_by_shell(shell: str, model: str, *flags: str, stderr: int | None = None) -> Iterator[ServerProcess]:
    """Runs ``fastgen serve MODEL FLAGS``, ready, by a line of ``bash`` in which ``"$@"`` is that command.
    It ends when the block is left, and must then have status 0. ``stderr`` is as in :func:`served`.
    """
    command = ["bash", "-c", shell, "bash", sys.executable, "-m", "fastgen", "serve", model, "--port", "0"]
    with subprocess.Popen([*command, *flags], stderr=stderr, text=True) as process:
        try:
            end_s = time.monotonic() + WAIT_S
            while not (found := [one for one in deployments() if one.pid == process.pid]):
                assert process.poll() is None, f"the server ended with status {process.returncode}"
                assert time.monotonic() < end_s, "the server is not ready"
                time.sleep(0.05)
            yield ServerProcess(process, found[0].address)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
