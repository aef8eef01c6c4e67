"""A server that takes the place of another at the same port, as in a rolling update: no client is turned away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving import run
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.ending import Ending
from fastgen.serving.grpc import messages
from fastgen.serving.grpc.server import GrpcServer
from fastgen.serving.http.server import bind_shared, hold_port, listen
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import BadRequestError, UnavailableError
from fastgen.serving.service import Service
from tests.serving.fake_engine import FACTS
from tests.serving.http_client import RawClient, get
from tests.serving.local_server import WAIT_S, Served, check, on_uvloop, post
from tests.serving.refusing import Refusing

# Connections among which a server that listens too would be chosen at least once.
NUM_CONNECTIONS = 32
HOST = "127.0.0.1"
# After this long a call is given up. One whose connection is reset takes a second more than others.
CALL_S = 15.0


class PlayedEngine:
    """Takes the place of replicas, with as many open requests as the test says."""

    state, facts, num_restarts, num_open = "ready", FACTS, 0, 0

    def replica_views(self) -> list[Any]:
        return []

    async def ask(self, *arguments: Any, **more: Any) -> Any:
        raise UnavailableError("it is asked and does not answer")

    def check_ready(self) -> None:
        pass

    def fail_all(self, failure: Exception) -> None:
        pass

    async def failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def count(self) -> None:
        pass

    async def stop(self, timeout_s: float = 10.0) -> None:
        pass


class Server:
    """A server in this process, whose model is loaded when the test says so."""

    def __init__(self, name: str, port: int):
        self.name, self.engine, self.loaded = name, PlayedEngine(), asyncio.Event()
        self.deployment: asyncio.Future[Deployment] = asyncio.get_running_loop().create_future()
        self.num_terminated = 0
        self.log = SimpleNamespace(flush=lambda: None)
        options = ServeOptions(host=HOST, port=port, name=name, drain_timeout_s=WAIT_S)
        self.running = asyncio.create_task(
            run._run(
                {"model": "tiny-llama", "name": name},
                options,
                self.deployment.set_result,
                self._terminated,
                self.log,  # type: ignore[arg-type]
                self._make_engine,  # type: ignore[arg-type]
            )
        )

    def _terminated(self) -> None:
        self.num_terminated += 1

    def _make_engine(self, watcher: Any) -> PlayedEngine:
        self.engine.server = self  # type: ignore[attr-defined]
        return self.engine

    async def terminate(self) -> None:
        """Ends it as a client does."""
        deployment, status = await self.deployment, 401
        while status == 401:  # of another server at this port
            client = await RawClient.connect(deployment.address)
            client.send(b"{}", f"authorization: Bearer {deployment.token}", path="/terminate")
            status, _ = await client.head()
        assert status == 200


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has services load nothing: they are started once their server's test says so."""

    async def start(service: Service) -> None:
        await service.engine.server.loaded.wait()  # type: ignore[attr-defined]

    monkeypatch.setattr(Service, "start", start)
    monkeypatch.setattr(run.COLLECTOR, "running", contextlib.nullcontext)


async def answering(port: int) -> str:
    """Returns the name of the server that a new connection leads to."""
    client = await RawClient.connect(f"http://{HOST}:{port}")
    try:
        client.writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await client.head())[0] == 200
        return str(json.loads(await client.reader.read())["model"])
    finally:
        client.leave()


def test_a_new_server_gets_connections_once_it_is_ready_and_all_once_the_old_one_ends(no_model: None) -> None:
    async def test() -> None:
        with hold_port(HOST, 0) as port:
            old, new = Server("old", port), Server("new", port)
            for _ in range(3):
                await asyncio.sleep(0)  # both have taken the port
            with pytest.raises(ConnectionRefusedError):
                await answering(port)
            old.loaded.set()
            await old.deployment
            assert {await answering(port) for _ in range(NUM_CONNECTIONS)} == {"old"}
            new.loaded.set()
            await new.deployment
            assert {await answering(port) for _ in range(NUM_CONNECTIONS)} == {"old", "new"}
            old.engine.num_open = 1  # a stream that takes its time
            await old.terminate()
            while {await answering(port) for _ in range(NUM_CONNECTIONS)} != {"new"}:
                pass  # the old one has answered, and is about to leave
            assert (old.num_terminated, new.num_terminated) == (1, 0)
            old.engine.num_open = 0
            await old.running
            await new.terminate()
            await new.running

    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    on_uvloop(bounded())


def test_a_server_whose_engine_is_given_up_ends_with_the_reason(
    no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[tuple[ServeOptions, str]] = []
    monkeypatch.setattr(run, "warn_if_open", lambda *given: warned.append(given))

    async def test() -> None:
        given_up = asyncio.Event()

        async def failed() -> str:
            await given_up.wait()
            return "the engine did not start 3 times in a row"

        async with asyncio.timeout(WAIT_S):
            with hold_port(HOST, 0) as port:
                server = Server("one", port)
                server.engine.failed = failed  # type: ignore[method-assign]
                server.loaded.set()
                address = (await server.deployment).address
                server.log.on_dropped()  # as a log does that cannot be written
                assert b"\nfastgen_log_lines_dropped_total 1.0\n" in (await get(address, "/metrics"))[1]
                given_up.set()
                with pytest.raises(FastgenError, match=r"^the engine did not start 3 times in a row$"):
                    await server.running
        assert [(options.port, address) for options, address in warned] == [(port, HOST)]

    on_uvloop(test())


def test_a_port_of_grpc_that_is_taken_is_found_before_the_model_is_loaded(no_model: None) -> None:
    log: Any = SimpleNamespace(flush=lambda: None)
    engine: Any = PlayedEngine()

    async def test() -> None:
        with socket.create_server((HOST, 0)) as taken:
            port = taken.getsockname()[1]
            options = ServeOptions(host=HOST, port=0, grpc_port=port)
            with pytest.raises(InvalidArgumentError, match=f"cannot listen on {HOST}:{port}: Address already in use"):
                await run._run({"model": "m"}, options, print, print, log, lambda watcher: engine)

    on_uvloop(test())


def test_connections_to_a_server_that_is_left_end_with_their_next_answer() -> None:
    async def test(server: Served) -> None:
        idle, busy, fresh = [await server.connect() for _ in range(3)]
        idle.writer.write(post("/echo", b"a"))
        assert "connection" not in (await idle.response())[1]
        busy.writer.write(post("/endless", b""))
        await busy.reader.readuntil(b"\r\n\r\n")
        while len(server.http.server_state.connections) < 3:
            await asyncio.sleep(0.01)
        server.http.leave()
        assert await idle.reader.read() == b"", "an idle connection is closed, so its client opens another"
        with pytest.raises(OSError):  # noqa: PT011  # refused or reset
            await server.ask(post("/echo", b""))
        await busy.reader.readexactly(1 << 20)
        server.app.gone.set()
        assert (await busy.reader.read()).endswith(b"0\r\n\r\n"), "an answer that has begun is whole"
        fresh.writer.write(post("/echo", b"b"))
        status, headers, body = await fresh.response()
        assert (status, headers["connection"], body) == (200, "close", b"b")
        assert await fresh.reader.read() == b""

    check(test)


def test_a_request_that_is_coming_when_its_server_is_left_is_answered() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"a"))
        await client.response()
        request = post("/echo", b"b")
        client.writer.write(request[:20])
        (connection,) = server.http.server_state.connections
        while not connection._has_head_begun:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        server.http.leave()
        client.writer.write(request[20:])
        status, headers, body = await client.response()
        assert (status, headers["connection"], body) == (200, "close", b"b")

    check(test)


def test_a_shared_port_is_kept_from_others_even_before_anything_listens() -> None:
    with hold_port(HOST, 0) as port:
        for refused in (lambda: hold_port(HOST, port).__enter__(), lambda: listen(HOST, port)):
            with pytest.raises(InvalidArgumentError, match=f"cannot listen on {HOST}:{port}: Address already in use"):
                refused()
        with bind_shared(HOST, port) as first, bind_shared(HOST, port) as second:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port))
            first.listen()
            for _ in range(NUM_CONNECTIONS):
                with socket.create_connection((HOST, port)):
                    first.accept()[0].close()
            second.listen()
    listen(HOST, port).close()


def test_a_port_with_a_server_that_shares_it_is_in_use() -> None:
    with bind_shared(HOST, 0) as server:
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match="Address already in use"):
            hold_port(HOST, port).__enter__()


@pytest.mark.parametrize("get", [listen, bind_shared])
def test_an_address_that_cannot_be_had_is_refused_in_a_line(get: Callable[[str, int], socket.socket]) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidArgumentError) as refused:
            get(HOST, port)
    in_use = "Address already in use; choose another port, or end what listens there"
    assert str(refused.value) == f"cannot listen on {HOST}:{port}: {in_use}"
    with pytest.raises(InvalidArgumentError) as refused:
        get("203.0.113.7", port)  # an address that no machine has
    assert str(refused.value) == f"cannot listen on 203.0.113.7:{port}: Cannot assign requested address"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("get", [listen, bind_shared])
def test_an_address_of_ipv6_leaves_the_port_to_others_at_addresses_of_ipv4(
    get: Callable[[str, int], socket.socket],
) -> None:
    with get("::", 0) as here:
        here.listen()
        with socket.create_server((HOST, here.getsockname()[1])):
            pass


@asynccontextmanager
async def grpc_server(name: str, port: int) -> AsyncIterator[GrpcServer]:
    service: Any = Refusing()
    service.error, service.state = BadRequestError(name), "ready"
    options = ServeOptions(host=HOST, grpc_port=port)
    server = GrpcServer(service, options, Ending("token", ApiKeys(), lambda: None), is_shared=True)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


async def asked_by_grpc(channel: grpc.aio.Channel) -> str:
    """Returns the name of the server at the other end; another text if the call is not answered."""
    request = messages.GenerateRequest(text="a")
    call = channel.unary_unary(f"/{messages.SERVICE}/Generate")(
        request.SerializeToString(), wait_for_ready=True, timeout=CALL_S
    )
    return str(await call.details())


async def answering_by_grpc(port: int) -> str:
    """Returns the name of the server that a new connection leads to; another text if the call is not answered."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"{HOST}:{port}", options=options) as channel:
        return await asked_by_grpc(channel)


def test_a_new_grpc_server_listens_beside_the_old_one_and_gets_all_connections_once_that_ends() -> None:
    async def test() -> None:
        with hold_port(HOST, 0) as port:
            async with (
                asyncio.timeout(WAIT_S),
                grpc_server("old", port) as old,
                grpc.aio.insecure_channel(f"{HOST}:{port}") as channel,
            ):
                health = health_pb2_grpc.HealthStub(channel)
                watching = health.Watch(health_pb2.HealthCheckRequest())
                assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
                async with grpc_server("new", port):
                    assert {await answering_by_grpc(port) for _ in range(NUM_CONNECTIONS)} == {"old", "new"}
                    leaving = asyncio.create_task(old.leave(WAIT_S))
                    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                    assert await asked_by_grpc(channel) == "old", "it answers calls of connections that it has"
                    assert not leaving.done()
                    await leaving
                    assert {await answering_by_grpc(port) for _ in range(NUM_CONNECTIONS)} == {"new"}
                    assert await asked_by_grpc(channel) == "new"
                    with pytest.raises(grpc.aio.AioRpcError) as ended:  # so a watching client calls the new server
                        await watching.read()
                    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(test())


def test_a_grpc_server_that_is_left_accepts_no_more_connections_before_it_refuses_calls() -> None:
    async def test() -> None:
        with hold_port(HOST, 0) as port:
            async with asyncio.timeout(WAIT_S), grpc_server("old", port) as old, grpc_server("new", port):
                leaving = asyncio.create_task(old.leave(WAIT_S))
                await asyncio.sleep(0)
                assert {await answering_by_grpc(port) for _ in range(NUM_CONNECTIONS)} == {"new"}
                await leaving

    asyncio.run(test())


@pytest.mark.slow
def test_no_grpc_call_is_lost_when_the_old_server_is_left() -> None:
    """Clients connect, call and leave in a tight loop meanwhile."""

    async def test() -> None:
        found = Counter[str]()
        with hold_port(HOST, 0) as port:
            async with grpc_server("new", port):
                for _ in range(40):
                    async with grpc_server("old", port) as old:
                        is_over = False

                        async def call_on() -> None:
                            while not is_over:  # noqa: B023 (it ends in this round)
                                found[await answering_by_grpc(port)] += 1

                        calling = [asyncio.create_task(call_on()) for _ in range(6)]
                        await asyncio.sleep(0.1)
                        await old.leave(WAIT_S)
                        await asyncio.sleep(0.1)
                        is_over = True
                        await asyncio.gather(*calling)
        assert found.keys() == {"old", "new"}, found

    asyncio.run(test())
