"""The server's handle to the replicas: calls to one of them, and the counts of requests by which Ray Serve scales.

Requests themselves do not pass through Ray, since a call takes it some milliseconds of processor time, and even the
choice of a replica one. Ray Serve scales by the number of requests, so they are counted where it counts its own calls.
That place is not public.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import ReplicaID

from fastgen.serving.replicas.messages import AttachAnswer

# The errors of calls through Ray.
RAY_ERRORS = (RayError, RayServeException)


class ReplicaHandle(Protocol):
    """Leads to the replicas. Calls raise :data:`RAY_ERRORS`."""

    async def discover(self) -> None:
        """Has the router made, which from then on reports which replicas there are."""

    async def attach(self, replica: str, server: str) -> AttachAnswer:
        """Calls :meth:`~fastgen.serving.replicas.replica.EngineReplica.attach` of ``replica``."""

    def kill(self, replica: str) -> None:
        """Ends the process of ``replica`` at once, if it is still there."""

    def began(self, replica: str) -> None:
        """Counts a request at ``replica``."""

    def ended(self, replica: str) -> None:
        """Counts one request less at ``replica``."""


class RayHandle:
    """The :class:`ReplicaHandle` of a deployment of Ray Serve."""

    def __init__(self, handle: DeploymentHandle[Any]):
        self._handle = handle

    async def discover(self) -> None:
        await self._handle.broadcast("check_health").results_async()

    async def attach(self, replica: str, server: str) -> AttachAnswer:
        response: Any = self._handle.attach.remote(replica, server)
        answer: AttachAnswer = await response
        return answer

    def kill(self, replica: str) -> None:
        threading.Thread(target=self._kill, args=(self._id(replica).to_full_id_str(),), daemon=True).start()

    @staticmethod
    def _kill(actor: str) -> None:
        with contextlib.suppress(ValueError, RayError):  # it has ended
            ray.kill(ray.get_actor(actor, namespace="serve"))

    def began(self, replica: str) -> None:
        self._metrics.inc_num_running_requests_for_replica(self._id(replica))

    def ended(self, replica: str) -> None:
        self._metrics.dec_num_running_requests_for_replica(self._id(replica))

    @property
    def _metrics(self) -> Any:
        """Returns the object that reports the requests of this handle to Ray Serve."""
        router: Any = self._handle._router
        return router._asyncio_router._metrics_manager

    def _id(self, replica: str) -> ReplicaID:
        return ReplicaID(unique_id=replica, deployment_id=self._handle.deployment_id)
