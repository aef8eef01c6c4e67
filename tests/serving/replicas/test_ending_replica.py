"""The end of a replica, as Ray Serve asks for it, with an engine that a test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from fastgen.serving.engine.messages import Progress, Report, Submit, encoder
from fastgen.serving.replicas import membership, replica
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import Attached, from_replica
from fastgen.serving.replicas.replica import EngineReplica
from tests.serving.fake_engine import FACTS
from tests.serving.replicas.played import ENDED, GENERATION, WAIT_S, run, until

LAST_NEWS_S = 0.1


class PlayedEngine:
    """Takes requests, and does nothing."""

    state, facts, num_restarts, is_stopped = "ready", FACTS, 0, False

    async def start(self) -> None:
        pass

    def check_ready(self) -> None:
        pass

    def send_encoded(self, encoded: bytes) -> None:
        pass

    def answered(self) -> None:
        pass

    async def stop(self) -> None:
        self.is_stopped = True


class OwnEndReplica(EngineReplica):
    """A replica that only the test ends, and not the collector of garbage."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PlayedEngine:
    engine = PlayedEngine()
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(replica, "set_up_logging_of_engine", lambda: None)
    monkeypatch.setattr(replica, "EngineProcess", lambda *given, **more: engine)
    monkeypatch.setattr(replica, "_LAST_NEWS_S", LAST_NEWS_S)
    return engine


def test_a_request_that_comes_while_a_replica_ends_is_finished(engine: PlayedEngine) -> None:
    async def test() -> None:
        ends = OwnEndReplica.__new__(OwnEndReplica)
        beginning: Any = EngineReplica.__init__(ends, {}, generation=GENERATION, timeout_s=WAIT_S)  # type: ignore[func-returns-value]
        await beginning
        attached = msgspec.msgpack.decode((await ends.attach("a", "server"))["attached"], type=Attached)
        got: list[object] = []
        with zmq.Context() as context:
            link = Link(context, from_replica, lambda message, _: got.append(message), lambda: None)
            link.connect(attached.address)
            ending = asyncio.create_task(EngineReplica.__del__(ends))
            link.send(encoder.encode(Submit(7, [1, 2, 3], {}, False)))
            async with asyncio.timeout(WAIT_S):
                await until(lambda: ends._runs)
                await asyncio.wait({ending}, timeout=3 * LAST_NEWS_S)  # it must not end meanwhile
                assert not ending.done()
                last = Report([], [Progress(7, 0, [5], None, ENDED)], [], [], None)
                ends.engine_sent(last, encoder.encode(last))
                await until(lambda: last in got)
                await ending
            assert engine.is_stopped
            link.close()
            ends._beating.cancel()
            for each in ends._links.values():
                each.close()
            ends._context.term()

    run(test)


def test_a_replica_waits_for_requests_longer_than_servers_send_them() -> None:
    assert membership.KEEP_S < replica._LAST_NEWS_S
