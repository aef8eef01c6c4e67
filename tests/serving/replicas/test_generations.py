"""The generations of replicas: of two that are listed at once, a server uses the one that it was deployed with."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest

from fastgen.serving.arguments import sort_arguments
from fastgen.serving.replicas import application, membership
from fastgen.serving.replicas.placement import Machine
from fastgen.serving.replicas.replica_set import ReplicaSet
from fastgen.serving.replicas.settings import generation_of
from tests.serving.fake_engine import FACTS
from tests.serving.replicas.played import (
    GENERATION,
    WAIT_S,
    Noted,
    PlayedHandle,
    PlayedReplica,
    run,
    submit,
    until,
    until_linked,
    where,
)


@pytest.mark.usefixtures("quick")
def test_a_server_uses_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=membership.__name__)

    async def test() -> None:
        old = PlayedReplica("old", generation="the one before", facts=msgspec.structs.replace(FACTS, vocab_size=7))
        new, newer = PlayedReplica("new"), PlayedReplica("newer")
        handle = PlayedHandle(old)
        replicas = ReplicaSet(handle, Noted(), generation=GENERATION, router="least_tokens")
        async with asyncio.timeout(WAIT_S):
            starting = asyncio.create_task(replicas.start())
            await until(lambda: "left to another server" in caplog.text)
            assert (replicas.state, replicas.facts, replicas.replicas) == ("starting", None, {})
            handle.add(new)
            assert await starting == FACTS
            handle.add(newer)  # and the list with the old one comes again
            await until(lambda: len(replicas.replicas) == 2)
            await until_linked(replicas, new, newer)
            for _ in range(4):
                assert await where(submit(replicas), old, new, newer) is not old
            assert (old.num_asked, caplog.text.count("left to another server")) == (1, 1)
            await replicas.stop()
        for each in (old, new, newer):
            each.close()
            each.context.term()

    run(test)


def generations(monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[str, str]:
    """Returns the generations of the replicas that are deployed with these arguments, and of their server."""
    monkeypatch.setattr(application, "machines", lambda: [Machine("laptop", 8, 0, 16 << 30)])
    given = {"model": "tiny-llama", "replicas": 2, "prefix_caching": True} | more
    ingress: Any = application.application(given)._bound_deployment
    replicas, its_given = ingress.init_args[:2]
    load_arguments, _ = sort_arguments(json.loads(json.dumps(its_given)), reads_keys=False)
    return replicas._bound_deployment.init_kwargs["generation"], generation_of(load_arguments)


def test_a_deployment_with_other_arguments_of_load_is_another_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    first, of_its_server = generations(monkeypatch)
    assert first == of_its_server
    others: list[dict[str, Any]] = [{"model": "tiny-llama-2"}, {"revision": "2"}, {"max_model_len": 64}]
    found = {generations(monkeypatch, **other) for other in others}
    assert len(found) == 3
    assert all(replicas == server != first for replicas, server in found)
    assert generations(monkeypatch, port=8001, replicas=4, max_queued_requests=7) == (first, first)


def test_the_order_of_arguments_makes_no_other_generation() -> None:
    given = {"model": "tiny-llama", "prefix_caching": True, "max_model_len": 64}
    assert generation_of(given) == generation_of(dict(reversed(given.items())))
