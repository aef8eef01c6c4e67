"""The server's handle to the replicas: which one a request goes to, and calls to one of them.

Requests themselves do not pass through Ray, since a call takes it some milliseconds of processor time. Ray Serve
chooses the replica, by :class:`~fastgen.serving.replicas.router.ReplicaRouter`, and counts the requests, by which it
scales. The ways in which this module does that are those of Ray Serve's own direct streaming, and not public.
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

from fastgen.serving.replicas.messages import Attached

# The errors of calls through Ray.
RAY_ERRORS = (RayError, RayServeException)


class ReplicaHandle(Protocol):
    """Leads to the replicas. Calls raise :data:`RAY_ERRORS`."""

    async def discover(self) -> None:
        """Has the router made, which from then on reports which replicas there are."""

    async def attach(self, replica: str, server: str) -> Attached:
        """Calls :meth:`~fastgen.serving.replicas.replica.EngineReplica.attach` of ``replica``."""

    def kill(self, replica: str) -> None:
        """Ends the process of ``replica`` at once, if it is still there."""

    async def choose(self, number: int) -> str:
        """Returns the replica that the router chooses for request ``number``. Waits while there is none."""

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

    async def attach(self, replica: str, server: str) -> Attached:
        response: Any = self._handle.attach.remote(replica, server)
        attached: Attached = await response
        return attached

    def kill(self, replica: str) -> None:
        threading.Thread(target=self._kill, args=(self._id(replica).to_full_id_str(),), daemon=True).start()

    @staticmethod
    def _kill(actor: str) -> None:
        with contextlib.suppress(ValueError, RayError):  # it has ended
            ray.kill(ray.get_actor(actor, namespace="serve"))

    async def choose(self, number: int) -> str:
        async with self._handle.choose_replica(number, _reserve=False) as chosen:
            return chosen.replica_id

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
