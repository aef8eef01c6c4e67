"""The process of the HTTP server as its ingress sees it: started, heard, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastgen.errors import FastgenError
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.engine.supervisor import end_of, ending_text

# The process writes these into its pipe once it is ready: the first about twice a second, the second when a client
# ends the server. The text of an error, which may follow too, has no such character.
SIGN_OF_LIFE, TERMINATED = b"\x06", b"\x04"
_COMMAND = (sys.executable, "-m", "fastgen.serving.replicas.ingress_process")


class ServerProcess:
    """A process that was given ``request`` as JSON, with its pipe and this process's id as arguments after ``command``.
    It belongs to one event loop.
    """

    def __init__(self, request: Mapping[str, Any], command: Sequence[str] = _COMMAND):
        reading, writing = os.pipe()
        self._process = process = subprocess.Popen(
            [*command, str(writing), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # its addresses, which the command that started the application prints
            pass_fds=(writing,),
        )
        os.close(writing)
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        # Its exit status.
        self.ended = end_of(process)
        self._was_terminated = False
        self._heard_s = time.monotonic()
        self._hearing = threading.Thread(target=self._hear, name="server-signs", daemon=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request).encode())

    async def ready(self) -> Deployment:
        """Waits until the server is ready. Raises ``FastgenError`` with the reason if it cannot be."""
        outcome = json.loads(await asyncio.to_thread(self._pipe.readline) or "{}")
        if "deployment" not in outcome:
            status = await asyncio.shield(self.ended)
            raise FastgenError(
                outcome.get("error") or f"the server's process {ending_text(status)} before it was ready"
            )
        self._heard_s = time.monotonic()
        self._hearing.start()
        return Deployment(**outcome["deployment"])

    async def failure(self) -> str | None:
        """Waits for the end of a process that was ready. Returns how it ended, or ``None`` if a client has ended it."""
        status = await asyncio.shield(self.ended)
        await asyncio.to_thread(self._hearing.join)
        return None if self._was_terminated else f"the server's process {ending_text(status)}"

    @property
    def silent_s(self) -> float:
        """Returns for how long it gave no sign of life."""
        return time.monotonic() - self._heard_s

    async def end(self) -> None:
        """Ends it as SIGTERM does: running requests may finish. Returns when it has ended."""
        if not self.ended.done():
            self._process.send_signal(signal.SIGTERM)
        await asyncio.shield(self.ended)

    def kill(self) -> None:
        self._process.kill()

    def _hear(self) -> None:
        """Notes what the process writes, until its end."""
        while sign := self._pipe.read(1):
            self._heard_s = time.monotonic()
            self._was_terminated |= sign == TERMINATED
