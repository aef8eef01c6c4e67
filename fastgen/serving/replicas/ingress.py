"""The ingress: an actor of Ray Serve that keeps the process of the HTTP server.

The server has a process of its own, as it has without Ray: so its limits, its page and gRPC are the same, and bytes
reach clients without Ray. The actor starts the process, reports to Ray Serve when it is gone or does not answer, and
ends it. Ray Serve then starts another actor, which takes the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from fastgen.errors import FastgenError
from fastgen.serving.api_keys import API_KEY_VARIABLE
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.engine.supervisor import end_of, ending_text

_log = logging.getLogger(__name__)

# The server's process gives a sign of life about twice a second. One that is silent for this long hangs.
_SILENCE_S = 10.0


class Ingress:
    """Runs the server of ``replicas``. ``given`` are the arguments of ``fastgen.serve`` with the model; ``api_key`` is
    valid beside those of its file.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, replicas: DeploymentHandle[Any], given: Mapping[str, Any], api_key: str | None = None
    ) -> None:
        context = serve.get_replica_context()
        self._app = context.app_name
        self._is_ending = False
        reading, writing = os.pipe()
        request = {
            "given": dict(given),
            "app": context.app_name,
            "deployment": replicas.deployment_name,
            "cluster": ray.get_runtime_context().gcs_address,
        }
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "fastgen.serving.replicas.ingress_process", str(writing), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # its addresses, which the command that started the application prints
            pass_fds=(writing,),
            env=os.environ | ({} if api_key is None else {API_KEY_VARIABLE: api_key}),
        )
        os.close(writing)
        self._ended = end_of(process)
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request).encode())
        outcome = json.loads(await asyncio.to_thread(self._pipe.readline) or "{}")
        if "deployment" not in outcome:
            status = await asyncio.shield(self._ended)
            raise FastgenError(
                outcome.get("error") or f"the server's process {ending_text(status)} before it was ready"
            )
        self._deployment = Deployment(**outcome["deployment"])
        self._watching = asyncio.create_task(self._watch())
        self._heard_s = time.monotonic()
        threading.Thread(target=self._hear, name="server-signs", daemon=True).start()

    async def deployment(self) -> dict[str, Any]:
        """Returns the deployment by which clients find the server."""
        return asdict(self._deployment)

    async def end(self) -> None:
        """Ends the server as SIGTERM does: running requests may finish. Returns when it has ended."""
        self._is_ending = True
        if not self._ended.done():
            self._process.send_signal(signal.SIGTERM)
        await asyncio.shield(self._ended)

    async def _watch(self) -> None:
        """Deletes the application after a client has ended the server. Ends this actor after the server's process has
        failed, which Ray Serve notices at once. Does neither where the actor itself was to end, such as in a rolling
        update, after which another one serves.
        """
        status = await asyncio.shield(self._ended)
        if self._is_ending:
            return
        if status == 0:
            await asyncio.to_thread(serve.delete, self._app, _blocking=False)
        else:
            _log.error("the server's process %s", ending_text(status))
            os._exit(1)

    async def check_health(self) -> None:
        """Raises ``FastgenError`` if the server's process hangs, so that Ray Serve replaces this actor."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s > _SILENCE_S and not self._ended.done():
            self._process.kill()
            raise FastgenError(f"the server's process gave no sign of life for {silent_s:.0f} s")

    def _hear(self) -> None:
        """Notes the signs of life of the server's process."""
        while self._pipe.read(1):
            self._heard_s = time.monotonic()

    async def __del__(self) -> None:  # Ray Serve awaits it before it ends the actor
        with contextlib.suppress(AttributeError, ProcessLookupError):  # it never started
            await self.end()
