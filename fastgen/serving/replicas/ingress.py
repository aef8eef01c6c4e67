"""The ingress: an actor of Ray Serve that keeps the process of the HTTP server.

The server has a process of its own, as it has without Ray: so its limits, its page and gRPC are the same, and bytes
reach clients without Ray. The actor starts the process, reports to Ray Serve when it is gone or does not answer, and
ends it. Ray Serve then starts another actor, which takes the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from fastgen.errors import FastgenError
from fastgen.serving.replicas.server_process import ServerProcess

_log = logging.getLogger(__name__)

# The server's process gives a sign of life about twice a second. One that is silent for this long hangs.
_SILENCE_S = 10.0


class Ingress:
    """Runs the server of ``replicas``. ``given`` are the arguments of ``fastgen.serve`` with the model. API keys with
    these ``key_digests`` are valid beside those of its file.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, replicas: DeploymentHandle[Any], given: Mapping[str, Any], key_digests: Sequence[str] = ()
    ) -> None:
        context = serve.get_replica_context()
        self._app = context.app_name
        self._is_ending = False
        self._server = ServerProcess(
            {
                "given": dict(given),
                "key_digests": list(key_digests),
                "app": context.app_name,
                "deployment": replicas.deployment_name,
                "cluster": ray.get_runtime_context().gcs_address,
            }
        )
        self._deployment = await self._server.ready()
        self._watching = asyncio.create_task(self._watch())

    async def deployment(self) -> dict[str, Any]:
        """Returns the deployment by which clients find the server."""
        return asdict(self._deployment)

    async def end(self) -> None:
        """Ends the server as SIGTERM does: running requests may finish. Returns when it has ended."""
        self._is_ending = True
        await self._server.end()

    async def _watch(self) -> None:
        """Deletes the application after a client has ended the server. Ends this actor after the server's process has
        ended in any other way, which Ray Serve notices at once. Does neither where the actor itself was to end, such as
        in a rolling update, after which another one serves.
        """
        failure = await self._server.failure()
        if self._is_ending:
            return
        if failure is None:
            self._is_ending = True
            try:
                await asyncio.to_thread(serve.delete, self._app, _blocking=False)
                return
            except Exception:
                _log.exception("the application of a server that a client has ended cannot be deleted")
        else:
            _log.error("%s", failure)
        os._exit(1)

    async def check_health(self) -> None:
        """Raises ``FastgenError`` if the server's process hangs or is gone, so that Ray Serve replaces this actor."""
        if self._server.ended.done():
            if not self._is_ending:
                raise FastgenError("the server's process has ended")
        elif (silent_s := self._server.silent_s) > _SILENCE_S:
            self._server.kill()
            raise FastgenError(f"the server's process gave no sign of life for {silent_s:.0f} s")

    async def __del__(self) -> None:  # Ray Serve awaits it before it ends the actor
        with contextlib.suppress(AttributeError, ProcessLookupError):  # it never started
            await self.end()
