"""The router that Ray Serve makes in a server's process: whom it leads calls to, and what it reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID, RequestRouter

from fastgen.serving.replicas.router import ReplicaRouter
from fastgen.serving.replicas.routing_table import RoutingTable


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(unique_id=name, deployment_id=DeploymentID("Replicas", "fastgen")))


A, B = replica("a"), replica("b")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ReplicaRouter:
    """A router without the tasks and metrics that Ray Serve's own class has."""

    def update_replicas(self: RequestRouter, replicas: list[Any]) -> None:
        self._replicas = {each.replica_id: each for each in replicas}

    def on_replica_actor_died(self: RequestRouter, replica_id: ReplicaID) -> None:
        self._replicas.pop(replica_id, None)

    monkeypatch.setattr(RequestRouter, "update_replicas", update_replicas)
    monkeypatch.setattr(RequestRouter, "on_replica_actor_died", on_replica_actor_died)
    made = ReplicaRouter.__new__(ReplicaRouter)
    made._replicas = {}
    made.initialize_state()
    return made


def test_an_attach_is_led_to_the_replica_that_it_names_and_other_calls_to_any(router: ReplicaRouter) -> None:
    def chosen(method: str | None, *arguments: str) -> tuple[list[list[Any]], bool]:
        pending: Any = None
        if method is not None:
            pending = SimpleNamespace(
                metadata=SimpleNamespace(call_method=method),
                args=arguments,
                routing_context=SimpleNamespace(should_backoff=False),
            )
        found = asyncio.run(router.choose_replicas([A, B], pending))
        return found, pending is not None and pending.routing_context.should_backoff

    assert chosen("attach", "b", "server") == ([[B]], True)
    assert chosen("attach", "gone", "server") == ([], True), "Ray asks again, after a pause"
    assert chosen("check_health") == ([[A, B]], False)
    assert chosen(None) == ([[A, B]], False)


def test_replicas_are_reported_whenever_they_have_changed(
    router: ReplicaRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[list[str]] = []
    monkeypatch.setattr(RoutingTable, "current", None)
    router.update_replicas([B, A])  # there is no server yet
    monkeypatch.setattr(RoutingTable, "current", SimpleNamespace(update=reported.append))
    router.update_replicas([B, A])
    router.update_replicas([A, B])
    assert reported == [["a", "b"]]
    router.on_replica_actor_died(A.replica_id)
    router.on_replica_actor_died(A.replica_id)
    assert reported == [["a", "b"], ["b"]]
