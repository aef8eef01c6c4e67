"""``/live`` in front of replicas: each is listed, and one of them is looked at."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.http.app import create_app
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import UnavailableError
from fastgen.serving.service import Service
from tests.serving.test_page import answer


def view(id: str, state: Any = "ready") -> ReplicaView:
    return ReplicaView(
        id=id, host="host-" + id, state=state, num_running=2, num_waiting=1, outstanding_tokens=300, num_restarts=4
    )


class Replicas:
    """Takes the place of a set of replicas that holds no engine."""

    def __init__(self, *views: ReplicaView):
        self.views, self.asked = list(views), []
        self.state, self.facts, self.num_restarts = "ready", None, 9

    def replica_views(self) -> list[ReplicaView]:
        return self.views

    async def ask(self, what: str, kind: type, *, replica: str | None = None) -> Any:
        self.asked.append((what, replica))
        raise UnavailableError("it is asked and does not answer")

    async def stop(self, timeout_s: float = 10.0) -> None:
        pass


def live(replicas: Replicas, *queries: str, metrics: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Returns what ``/live`` answers to each query."""

    async def run() -> list[dict[str, Any]]:
        service = Service({"model": "tiny-llama"}, make_engine=lambda watcher: replicas)  # type: ignore[arg-type,return-value]
        for replica, counted in (metrics or {}).items():
            service.metrics.observe(counted, replica)
        app = create_app(service, ServeOptions())
        found = []
        for query in queries:
            status, body = await answer(app, "/live", query=query)
            assert status == 200
            found.append(json.loads(body))
        await service.stop()
        return found

    return asyncio.run(run())


def test_every_replica_is_listed_with_what_it_does() -> None:
    counted = SimpleNamespace(kv_blocks=50, kv_blocks_held=20)
    (found,) = live(Replicas(view("a"), view("b", "restarting")), "", metrics={"a": counted})
    first, second = found["replicas"]
    assert first == {
        "id": "a",
        "host": "host-a",
        "state": "ready",
        "num_running": 2,
        "num_waiting": 1,
        "outstanding_tokens": 300,
        "restarts": 4,
        "num_blocks": 50,
        "num_held_blocks": 20,
    }
    assert (second["state"], second["num_blocks"], second["num_held_blocks"]) == ("restarting", None, None)
    assert (found["restarts"], found["replica"]) == (9, "a")


def test_the_replica_that_is_named_is_looked_at() -> None:
    replicas = Replicas(view("a"), view("b"))
    first, second = live(replicas, "", "replica=b")
    assert (first["replica"], second["replica"]) == ("a", "b")
    assert replicas.asked == [("live", "a"), ("live", "b")]


def test_in_place_of_one_that_is_gone_the_first_that_is_ready_is_looked_at() -> None:
    replicas = Replicas(view("a", "silent"), view("b"))
    (found,) = live(replicas, "replica=gone")
    assert found["replica"] == "b"
    assert replicas.asked == [("live", "b")]


def test_without_replicas_nothing_is_listed() -> None:
    replicas = Replicas()
    (found,) = live(replicas, "replica=any")
    assert "replicas" not in found
    assert "replica" not in found
    assert replicas.asked == [("live", None)]
