"""A replica: an actor of Ray Serve that keeps an engine's process, and connects servers with it.

A server asks for a link through Ray. Its requests, and the reports of the engine, then go over the link: one message
for a request, and one for a step.
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
from fastgen.serving.engine.messages import Ask, Cancel, Check, EngineFacts, Reply, Report, Status, Submit, encoder
from fastgen.serving.engine.supervisor import EngineProcess
from fastgen.serving.monitoring.log import set_up_logging_of_engine
from fastgen.serving.refusals import UnavailableError
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import AttachAnswer, Attached, Beat, Lost, ToReplica, to_replica
from fastgen.version import __version__

# How often a replica reports its state.
BEAT_S = 0.5
# How long a replica that ends and has no requests waits until its servers have taken the last tokens: longer than
# ``membership.KEEP_S``, for which they may still send some.
_LAST_NEWS_S = 15.0
_NO_METRICS = msgspec.Raw(encoder.encode(None))


@dataclass
class _Run:
    """A request in the engine."""

    # The server that sent it.
    server: str
    # Completions that have not ended.
    num_open: int


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
        # By the names of their servers, as the next two by the numbers of requests and questions.
        self._links: dict[str, Link] = {}
        self._runs: dict[int, _Run] = {}
        # The servers that have asked.
        self._asked: dict[int, str] = {}
        self._numbers = count()
        # The number of the replica's own question for counters, while it is open.
        self._counting: int | None = None
        # The engine's last answer about its counters, as MessagePack.
        self._metrics = _NO_METRICS
        self._status = Status(0, 0, 0)
        # Set whenever a request or a link has ended.
        self._changed = asyncio.Event()
        self._beating = asyncio.create_task(self._beat_for_ever())
        await self._engine.start()

    # --- what Ray Serve calls

    async def attach(self, target: str, server: str) -> AttachAnswer:
        """Opens a link for ``server``, in place of the one that it has."""
        self._lose(server)

        def take(message: ToReplica, encoded: bytes) -> None:
            self._take(server, message, encoded)

        self._links[server] = link = Link(self._context, to_replica, take, lambda: self._lose(server))
        assert self._engine.facts is not None
        attached = Attached(link.listen(self._host), self._generation, self._engine.facts, self._state())
        return {"version": __version__, "host": socket.gethostname(), "attached": encoder.encode(attached)}

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
            while self._runs or self._links:
                try:
                    async with asyncio.timeout(_LAST_NEWS_S):
                        await self._change()
                except TimeoutError:
                    if not self._runs:
                        break
            await self._engine.stop()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # --- what comes from servers

    def _take(self, server: str, message: ToReplica, encoded: bytes) -> None:
        match message:
            case Submit():
                self._runs[message.number] = _Run(server, message.sampling.get("n", 1))
            case Cancel():
                if self._runs.pop(message.number, None) is None:
                    return
                self._changed.set()
            case Ask() | Check():
                self._asked[message.number] = server
        try:
            self._engine.check_ready()
            self._engine.send_encoded(encoded)
        except UnavailableError as error:
            self._fail([message.number], str(error))

    def _lose(self, server: str) -> None:
        """Forgets a server that is gone, and cancels its requests."""
        if (link := self._links.pop(server, None)) is None:
            return
        link.close()
        for number, run in list(self._runs.items()):
            if run.server == server:
                del self._runs[number]
                with contextlib.suppress(UnavailableError):
                    self._engine.send(Cancel(number))
        self._changed.set()

    def _fail(self, numbers: list[int], error: str) -> None:
        """Reports requests and questions that get no answer."""
        by_server: dict[str, list[int]] = {}
        for number in numbers:
            if (run := self._runs.pop(number, None)) is not None:
                by_server.setdefault(run.server, []).append(number)
            elif (server := self._asked.pop(number, None)) is not None:
                by_server.setdefault(server, []).append(number)
        for server, lost in by_server.items():
            self._send(server, encoder.encode(Lost(lost, error)))
        self._changed.set()

    def _send(self, server: str, encoded: bytes) -> None:
        if (link := self._links.get(server)) is not None:
            link.send(encoded)

    def _send_all(self, encoded: bytes) -> None:
        for link in self._links.values():
            link.send(encoded)

    # --- what comes from the engine's process

    def engine_ready(self, facts: EngineFacts) -> None:
        self._metrics, self._counting = _NO_METRICS, None

    def engine_sent(self, message: Report | Reply, encoded: bytes) -> None:
        if isinstance(message, Reply):
            if message.number == self._counting:
                self._counting = None
                self._metrics = message.body if message.error is None else self._metrics
            elif (server := self._asked.pop(message.number, None)) is not None:
                self._send(server, encoded)
            return
        if message.status is not None:
            self._status = message.status
        if message.tokens or message.progress or message.started or message.refused:
            self._send_all(encoded)
        for progress in message.progress:
            if progress.end is not None and (run := self._runs.get(progress.number)) is not None:
                run.num_open -= 1
                if progress.end.reason in ("stop", "length"):
                    self._engine.answered()
                if not run.num_open:
                    self._end(progress.number)
        for refused in message.refused:
            self._end(refused.number)

    def _end(self, number: int) -> None:
        if self._runs.pop(number, None) is not None:
            self._changed.set()

    def engine_beat(self) -> None:
        if self._counting is None:
            self._counting = next(self._numbers)
            with contextlib.suppress(UnavailableError):
                self._engine.send(Ask(self._counting, "metrics"))

    def engine_ended(self, failure: Exception) -> None:
        self._fail([*self._runs, *self._asked], str(failure))
        self._beat()

    # --- the state of this replica

    async def _beat_for_ever(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> None:
        """Reports the state of this replica."""
        self._send_all(encoder.encode(self._state()))

    def _state(self) -> Beat:
        return Beat(self._engine.state == "ready", self._status, self._metrics, self._engine.num_restarts)
