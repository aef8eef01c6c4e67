"""A replica: an actor of Ray Serve that keeps an engine's process, and introduces servers to it.

A server asks for a link through Ray, by which it learns the state of the replica and where its engine waits for it.
Requests and tokens go between the server and the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import ray
import zmq
from ray import serve

from fastgen.errors import FastgenError
from fastgen.serving.engine.messages import Ask, Close, EngineFacts, Open, Reply, Report, Status, encoder
from fastgen.serving.engine.remote_socket import RemoteAddress
from fastgen.serving.engine.supervisor import EngineProcess
from fastgen.serving.monitoring.log import set_up_logging_of_engine
from fastgen.serving.refusals import EngineDiedError, UnavailableError
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import AttachAnswer, Attached, Beat
from fastgen.version import __version__

# How often a replica reports its state.
BEAT_S = 0.5
# How long a replica that ends and has no requests waits until its servers have taken the last tokens: longer than
# ``membership.KEEP_S``, for which they may still send some.
_LAST_NEWS_S = 15.0
# How long the answer to a server waits for the engine, which may be in a step, to open a socket. The address comes with
# a later beat then.
_OPEN_S = 1.0
_NO_METRICS = msgspec.Raw(encoder.encode(None))
# Servers send nothing by the link.
_nothing = msgspec.msgpack.Decoder(None)


@dataclass(eq=False)
class _Server:
    """A server with a link."""

    name: str
    link: Link
    # Where the engine waits for it; ``None`` while there is no engine.
    engine: RemoteAddress | None = None
    # Asks the engine for that address.
    introduction: asyncio.Task[None] | None = None


class EngineReplica:
    """Runs an engine with the ``arguments`` of ``fastgen.load``; see :class:`EngineProcess`. Only servers of the same
    ``generation`` use it; see :func:`~fastgen.serving.replicas.settings.generation_of`.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, arguments: Mapping[str, Any], *, generation: str, timeout_s: float
    ) -> None:
        set_up_logging_of_engine()
        self.id = serve.get_replica_context().replica_id.unique_id
        self._generation = generation
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._engine = EngineProcess(arguments, self, timeout_s=timeout_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # By their names.
        self._servers: dict[str, _Server] = {}
        self._numbers = count()
        # The sockets that the engine was asked to open, by the numbers of the questions.
        self._opening: dict[int, asyncio.Future[RemoteAddress | None]] = {}
        # The number of the replica's own question for counters, while it is open.
        self._counting: int | None = None
        # The engine's last answer about its counters, as MessagePack.
        self._metrics = _NO_METRICS
        self._status = Status(0, 0, 0)
        # Set whenever the number of requests or of links has changed.
        self._changed = asyncio.Event()
        self._beating = asyncio.create_task(self._beat_for_ever())
        await self._engine.start()

    # --- what Ray Serve calls

    async def attach(self, target: str, server: str) -> AttachAnswer:
        """Opens a link for ``server``, in place of the one that it has."""
        self._lose(server)
        link = Link(self._context, _nothing, lambda message: None, lambda: self._lose(server))
        self._servers[server] = attached = _Server(server, link)
        address = link.listen(self._host)
        await asyncio.wait({self._introduce(attached)}, timeout=_OPEN_S)
        assert self._engine.facts is not None
        answer = Attached(address, self._generation, self._engine.facts, self._state(attached))
        return {"version": __version__, "host": socket.gethostname(), "attached": encoder.encode(answer)}

    async def check_health(self) -> None:
        """Raises ``FastgenError`` if the engine cannot be restarted, so that Ray Serve replaces this replica."""
        failure = self._engine.failure
        if failure is not None and failure.done():
            raise FastgenError(failure.result())

    async def __del__(self) -> None:  # Ray Serve awaits it before it ends the actor
        """Waits until all requests have ended and their servers have taken the last tokens. Then ends the engine. A
        request may still come: a server may use this replica until there is another.
        """
        with contextlib.suppress(AttributeError):  # it never started
            while self._status.num_open or self._servers:
                try:
                    async with asyncio.timeout(_LAST_NEWS_S):
                        await self._change()
                except TimeoutError:
                    if not self._status.num_open:
                        break
            await self._engine.stop()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # --- servers

    def _introduce(self, server: _Server) -> asyncio.Task[None]:
        """Begins to have the engine wait for ``server``, unless it was asked already."""
        if server.introduction is None or server.introduction.done():
            server.introduction = asyncio.create_task(self._open(server))
        return server.introduction

    async def _open(self, server: _Server) -> None:
        number = next(self._numbers)
        self._opening[number] = opened = asyncio.get_running_loop().create_future()
        try:
            self._engine.check_ready()
            self._engine.send(Open(number, server.name, self._host))
            address = await opened
        except (UnavailableError, EngineDiedError):  # the next engine will be asked
            return
        finally:
            del self._opening[number]
        if self._servers.get(server.name) is server:
            server.engine = address
            self._beat(server)

    def _lose(self, server: str) -> None:
        """Forgets a server that is gone. The engine ends its requests."""
        if (lost := self._servers.pop(server, None)) is None:
            return
        lost.link.close()
        with contextlib.suppress(UnavailableError):
            self._engine.check_ready()
            self._engine.send(Close(server))
        self._changed.set()

    # --- what comes from the engine's process

    def engine_ready(self, facts: EngineFacts) -> None:
        self._metrics, self._counting = _NO_METRICS, None
        for server in self._servers.values():
            self._introduce(server)

    def engine_sent(self, message: Report | Reply, encoded: bytes) -> None:
        if isinstance(message, Report):
            if message.status is not None:
                self._take_status(message.status)
        elif message.number == self._counting:
            self._counting = None
            self._metrics = message.body if message.error is None else self._metrics
        elif (opening := self._opening.get(message.number)) is not None and not opening.done():
            opening.set_result(msgspec.msgpack.decode(message.body, type=RemoteAddress | None))

    def _take_status(self, status: Status) -> None:
        before, self._status = self._status, status
        if status.num_answered > before.num_answered:
            self._engine.answered()
        if status.num_open != before.num_open:
            self._changed.set()

    def engine_read(self) -> None:
        """Does nothing: the engine itself sends news to servers."""

    def engine_beat(self) -> None:
        if self._counting is None:
            self._counting = next(self._numbers)
            with contextlib.suppress(UnavailableError):
                self._engine.send(Ask(self._counting, "metrics"))

    def engine_ended(self, failure: Exception) -> None:
        self._status = Status(0, 0, 0)
        for opening in self._opening.values():
            if not opening.done():
                opening.set_exception(failure)
        for server in self._servers.values():
            server.engine = None
            self._beat(server)
        self._changed.set()

    # --- the state of this replica

    async def _beat_for_ever(self) -> None:
        while True:
            for server in list(self._servers.values()):
                if server.engine is None:  # it is not ready, or could not open a socket
                    self._introduce(server)
                self._beat(server)
            await asyncio.sleep(BEAT_S)

    def _beat(self, server: _Server) -> None:
        """Reports the state of this replica."""
        server.link.send(encoder.encode(self._state(server)))

    def _state(self, server: _Server) -> Beat:
        return Beat(server.engine, self._status, self._metrics, self._engine.num_restarts)
