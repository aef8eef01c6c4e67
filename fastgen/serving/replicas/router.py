"""The router between a server and its replicas, as Ray Serve calls it.

Ray Serve makes it in the process that sends the requests: the server's own, where it finds the server's
:class:`~fastgen.serving.replicas.routing_table.RoutingTable`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from fastgen.serving.replicas.routing_table import RoutingTable


class ReplicaRouter(RequestRouter):
    """Ranks replicas as the server's routing table does. In a process without a server all replicas are alike."""

    def initialize_state(self, **arguments: Any) -> None:
        # The ids of all replicas, as last reported.
        self._ids: list[str] = []

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        routes = RoutingTable.current
        if routes is None or pending_request is None:
            return [candidate_replicas]
        # Where no replica is chosen, Ray asks again; without a pause it would do nothing else in this thread.
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request.metadata.call_method == "attach":
            ranked = pending_request.args[:1]
        else:
            ranked = routes.rank(pending_request.args[0])
        return [[replicas[each]] for each in ranked if each in replicas]

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
