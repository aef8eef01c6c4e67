"""The actor of a replica: how it introduces servers to its engine, and how it ends; a test plays the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from fastgen.errors import FastgenError
from fastgen.serving.engine.messages import Ask, Close, Open, Reply, Report, Status, ToEngine, encoder
from fastgen.serving.engine.remote_socket import RemoteAddress
from fastgen.serving.refusals import EngineDiedError, UnavailableError
from fastgen.serving.replicas import membership, replica
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import Attached, Beat, beat_decoder
from fastgen.serving.replicas.replica import EngineReplica
from tests.serving.fake_engine import FACTS
from tests.serving.replicas.played import GENERATION, WAIT_S, run, until

LAST_NEWS_S = 0.1
SERVER = "server"


class PlayedEngine:
    """The engine's process: opens sockets, unless a test has it fail or wait."""

    def __init__(self) -> None:
        self.state, self.facts, self.num_restarts = "ready", FACTS, 0
        self.is_stopped = False
        # Why it cannot be restarted, once that is so.
        self.failure: asyncio.Future[str] | None = None
        self.num_answered = 0
        self.got: list[ToEngine] = []
        # Open sockets, by the servers that they are for.
        self.addresses: dict[str, RemoteAddress] = {}
        # How often a socket cannot be opened, and whether the engine is in a long step.
        self.num_failures, self.is_busy = 0, False
        self.replica: Any = None

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.is_stopped = True

    def check_ready(self) -> None:
        if self.state != "ready":
            raise UnavailableError("the engine is restarting")

    def answered(self) -> None:
        self.num_answered += 1

    def send(self, message: ToEngine) -> None:
        self.got.append(message)
        if isinstance(message, Open) and not self.is_busy:
            asyncio.get_running_loop().call_soon(self.reply, message)
        if isinstance(message, Close):
            self.addresses.pop(message.server, None)

    def reply(self, message: Open) -> None:
        address: RemoteAddress | None = None
        if self.num_failures:
            self.num_failures -= 1
        else:
            address = self.addresses[message.server] = RemoteAddress(f"tcp://{message.host}:{len(self.got)}", b"key")
        error = "too many open files" if address is None else None
        self.replica.engine_sent(Reply(message.number, msgspec.Raw(encoder.encode(address)), error), b"")

    def report(self, *, num_open: int, num_answered: int = 0) -> None:
        self.replica.engine_sent(Report([], [], [], [], Status(0, 0, 0, num_open, num_answered)), b"")

    def die(self) -> None:
        self.state = "restarting"
        self.addresses.clear()
        self.replica.engine_ended(EngineDiedError("the engine's process was ended"))

    def restart(self) -> None:
        """Starts another process, as ``EngineProcess`` does."""
        self.num_restarts += 1
        self.replica.engine_ready(FACTS)
        self.state = "ready"


class OwnEndReplica(EngineReplica):
    """A replica that only the test ends, and not the collector of garbage."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


class AttachedServer:
    """A server with a link, and the states that came by it."""

    def __init__(self, attached: Attached, context: zmq.Context[zmq.Socket[bytes]]):
        self.attached = attached
        self.beats: list[Beat] = []
        self.link = Link(context, beat_decoder, self.beats.append, lambda: None)
        self.link.connect(attached.address)

    async def until_engine(self, address: RemoteAddress | None) -> None:
        """Waits until the replica says that its engine waits at ``address``."""
        await until(lambda: self.beats and self.beats[-1].engine == address)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PlayedEngine:
    engine = PlayedEngine()
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(replica, "set_up_logging_of_engine", lambda: None)
    monkeypatch.setattr(replica, "EngineProcess", lambda *given, **more: engine)
    monkeypatch.setattr(replica, "_LAST_NEWS_S", LAST_NEWS_S)
    monkeypatch.setattr(replica, "BEAT_S", 0.02)
    monkeypatch.setattr(replica, "_OPEN_S", 0.1)
    return engine


@asynccontextmanager
async def attached(engine: PlayedEngine) -> AsyncIterator[tuple[OwnEndReplica, AttachedServer]]:
    """Yields a replica with this engine, and a server with a link to it."""
    found = engine.replica = OwnEndReplica.__new__(OwnEndReplica)
    beginning: Any = EngineReplica.__init__(found, {}, generation=GENERATION, timeout_s=WAIT_S)  # type: ignore[func-returns-value]
    await beginning
    answer = await found.attach("a", SERVER)
    with zmq.Context() as context:
        server = AttachedServer(msgspec.msgpack.decode(answer["attached"], type=Attached), context)
        async with asyncio.timeout(WAIT_S):
            yield found, server
        server.link.close()
        found._beating.cancel()
        for each in found._servers.values():
            each.link.close()
        found._context.term()


def test_a_server_learns_where_the_engine_waits_for_it_and_of_each_engine_after_that(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (_, server):
            first = engine.addresses[SERVER]
            assert server.attached.state.engine == first
            await server.until_engine(first)
            engine.die()
            await server.until_engine(None)
            engine.restart()
            await until(lambda: SERVER in engine.addresses)
            assert engine.addresses[SERVER] != first
            await server.until_engine(engine.addresses[SERVER])
            assert server.beats[-1].num_restarts == 1

    run(test)


def test_an_engine_that_dies_before_it_has_opened_a_socket_is_followed_by_one_that_does(engine: PlayedEngine) -> None:
    async def test() -> None:
        engine.is_busy = True
        async with attached(engine) as (_, server):
            assert server.attached.state.engine is None  # a step takes long, and the answer does not wait for it
            await server.until_engine(None)
            engine.is_busy = False
            engine.die()
            engine.restart()
            await until(lambda: SERVER in engine.addresses)
            await server.until_engine(engine.addresses[SERVER])

    run(test)


def test_an_engine_that_could_not_open_a_socket_is_asked_again(engine: PlayedEngine) -> None:
    async def test() -> None:
        engine.num_failures = 2
        async with attached(engine) as (_, server):
            assert server.attached.state.engine is None
            await until(lambda: SERVER in engine.addresses)
            await server.until_engine(engine.addresses[SERVER])

    run(test)


def test_the_requests_of_a_server_that_is_gone_end(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (_, server):
            await until(lambda: server.beats)
            server.link.close()
            await until(lambda: Close(SERVER) in engine.got)
            assert not engine.addresses

    run(test)


def test_a_server_that_asks_again_gets_a_link_in_place_of_the_one_that_it_had(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (found, _):
            answer = await found.attach("a", SERVER)
            with zmq.Context() as context:
                again = AttachedServer(msgspec.msgpack.decode(answer["attached"], type=Attached), context)
                await again.until_engine(engine.addresses[SERVER])
                again.link.close()
            assert [type(each) for each in engine.got[:3]] == [Open, Close, Open], "requests of the first one end"

    run(test)


def test_servers_are_told_the_counters_of_the_engine_that_there_is(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (found, server):

            async def answer(value: object, error: str | None = None) -> None:
                """Answers the replica's question, and waits until the server has been told something since."""
                found.engine_beat()
                found.engine_beat()  # a question that is open is not asked again
                asked = [each for each in engine.got if isinstance(each, Ask)]
                assert [each.what for each in asked] == ["metrics"]
                engine.got.clear()
                found.engine_sent(Reply(asked[0].number, msgspec.Raw(encoder.encode(value)), error), b"")
                num_told = len(server.beats)
                await until(lambda: len(server.beats) > num_told + 1)

            def told() -> object:
                return msgspec.msgpack.decode(server.beats[-1].metrics)

            await until(lambda: server.beats)
            assert told() is None
            await answer("five requests")
            assert told() == "five requests"
            await answer("nothing", "out of memory")
            assert told() == "five requests"
            engine.report(num_open=2)
            await until(lambda: server.beats[-1].status.num_open == 2)
            engine.die()
            await until(lambda: server.beats[-1].status == Status(0, 0, 0))
            engine.restart()
            await until(lambda: server.beats[-1].engine is not None)
            assert told() is None, "the next engine counts from zero"

    run(test)


def test_ray_serve_replaces_a_replica_whose_engine_cannot_be_restarted(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (found, _):
            await found.check_health()
            engine.failure = asyncio.get_running_loop().create_future()
            await found.check_health()
            engine.failure.set_result("the engine did not start 3 times in a row")
            with pytest.raises(FastgenError, match="3 times in a row"):
                await found.check_health()

    run(test)


def test_answers_are_counted_where_restarts_are_judged(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine):
            engine.report(num_open=1)
            assert engine.num_answered == 0
            engine.report(num_open=1, num_answered=3)
            engine.report(num_open=1, num_answered=3)
            assert engine.num_answered == 1
            engine.die()
            engine.restart()
            engine.report(num_open=1, num_answered=1)  # the new process counts from zero
            assert engine.num_answered == 2

    run(test)


def test_a_request_that_comes_while_a_replica_ends_is_finished(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (ends, _):
            ending = asyncio.create_task(EngineReplica.__del__(ends))
            engine.report(num_open=1)
            await asyncio.wait({ending}, timeout=3 * LAST_NEWS_S)  # it must not end meanwhile
            assert not ending.done()
            assert not engine.is_stopped
            engine.report(num_open=0)
            await ending
            assert engine.is_stopped

    run(test)


@pytest.mark.parametrize("num_open", [0, 1])
def test_a_replica_without_servers_ends_with_its_last_request(
    engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch, num_open: int
) -> None:
    monkeypatch.setattr(replica, "_LAST_NEWS_S", WAIT_S)

    async def test() -> None:
        async with attached(engine) as (ends, server):
            await until(lambda: server.beats)
            engine.report(num_open=num_open)
            ending = asyncio.create_task(EngineReplica.__del__(ends))
            server.link.close()
            await until(lambda: not ends._servers)
            if num_open:
                await asyncio.sleep(0)
                assert not ending.done()
                engine.report(num_open=0)
            await ending
            assert engine.is_stopped

    run(test)


def test_a_replica_waits_for_requests_longer_than_servers_send_them() -> None:
    assert membership.KEEP_S < replica._LAST_NEWS_S


def test_servers_are_told_the_load_of_the_engine_that_there_is(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (found, server):
            assert server.attached.state.status == Status(0, 0, 0)
            engine.replica.engine_sent(Report([], [], [], [], Status(1, 2, 3, 4, 5)), b"")
            await until(lambda: server.beats and server.beats[-1].status == Status(1, 2, 3, 4, 5))
            engine.die()
            await server.until_engine(None)
            assert server.beats[-1].status == found._status == Status(0, 0, 0)

    run(test)


def test_an_answer_that_comes_twice_or_to_nobody_does_no_harm(engine: PlayedEngine) -> None:
    async def test() -> None:
        async with attached(engine) as (found, _):
            opened = found._opening[1000] = asyncio.get_running_loop().create_future()
            for address in (RemoteAddress("tcp://a:1", b"key"), RemoteAddress("tcp://a:2", b"key")):
                found.engine_sent(Reply(1000, msgspec.Raw(encoder.encode(address)), None), b"")
            found.engine_sent(Reply(1001, msgspec.Raw(encoder.encode(None)), None), b"")
            assert (await opened) == RemoteAddress("tcp://a:1", b"key")
            del found._opening[1000]

    run(test)
