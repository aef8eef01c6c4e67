"""The handle to replicas: what it asks of Ray Serve, whose handle a test plays."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import call, create_autospec

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve._private.router import RouterMetricsManager
from ray.serve.request_router import ReplicaID

from fastgen.serving.replicas import handle
from fastgen.serving.replicas.handle import RayHandle
from fastgen.serving.replicas.messages import AttachAnswer

REPLICAS = DeploymentID("Replicas", "fastgen")
ANSWER: AttachAnswer = {"version": "1", "host": "h", "attached": b""}
WAIT_S = 30.0


def played(**more: Any) -> RayHandle:
    found: Any = SimpleNamespace(deployment_id=REPLICAS, **more)
    return RayHandle(found)


def test_requests_are_counted_where_ray_serve_counts_its_own() -> None:
    metrics = create_autospec(RouterMetricsManager, instance=True)
    counting = played(_router=SimpleNamespace(_asyncio_router=SimpleNamespace(_metrics_manager=metrics)))
    counting.began("a")
    counting.began("b")
    counting.ended("a")
    a, b = (ReplicaID(unique_id=name, deployment_id=REPLICAS) for name in "ab")
    assert metrics.inc_num_running_requests_for_replica.call_args_list == [call(a), call(b)]
    assert metrics.dec_num_running_requests_for_replica.call_args_list == [call(a)]


def test_a_replica_is_asked_by_its_name_and_all_are_for_their_discovery() -> None:
    asked: list[tuple[str, ...]] = []

    async def answer(*arguments: str) -> AttachAnswer:
        asked.append(arguments)
        return ANSWER

    asking = played(
        attach=SimpleNamespace(remote=answer),
        broadcast=lambda method: SimpleNamespace(results_async=lambda: answer(method)),
    )
    assert asyncio.run(asking.attach("a", "server")) == ANSWER
    asyncio.run(asking.discover())
    assert asked == [("a", "server"), ("check_health",)]


def test_a_replica_is_killed_beside_the_event_loop_and_may_have_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[str, str]] = []
    here = threading.current_thread()

    def get_actor(name: str, namespace: str) -> str:
        assert threading.current_thread() is not here
        if "#gone" in name:
            raise ValueError("there is no such actor")
        return f"{namespace}: {name}"

    def kill(actor: str) -> None:
        killed.append((actor, threading.current_thread().name))

    monkeypatch.setattr(handle.ray, "get_actor", get_actor)
    monkeypatch.setattr(handle.ray, "kill", kill)
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    before = set(threading.enumerate())
    for name in ("gone", "a"):
        played().kill(name)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    assert [actor for actor, _ in killed] == ["serve: SERVE_REPLICA::fastgen#Replicas#a"]
    assert failures == []
