"""The router of Ray Serve between a server and its replicas: it reports replicas, and leads calls to one of them.

Ray Serve makes it in the server's process, where it finds the server's
:class:`~fastgen.serving.replicas.routing_table.RoutingTable`. The table ranks replicas for requests, which do not pass
through Ray.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from fastgen.serving.replicas.routing_table import RoutingTable


class ReplicaRouter(RequestRouter):
    """Leads a call of ``attach`` to the replica that it names, and other calls to any."""

    def initialize_state(self, **arguments: Any) -> None:
        # The ids of all replicas, as last reported.
        self._ids: list[str] = []

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or pending_request.metadata.call_method != "attach":
            return [candidate_replicas]
        # Where the replica is not there, Ray asks again; without a pause it would do nothing else in this thread.
        pending_request.routing_context.should_backoff = True
        target = pending_request.args[0]
        return [[replica] for replica in candidate_replicas if replica.replica_id.unique_id == target]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._report_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._report_replicas()

    def _report_replicas(self) -> None:
        """Reports which replicas there are, if that has changed."""
        ids = sorted(replica.unique_id for replica in self.curr_replicas)
        if ids != self._ids and RoutingTable.current is not None:
            self._ids = ids
            RoutingTable.current.update(ids)
