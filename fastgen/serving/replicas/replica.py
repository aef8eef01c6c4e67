"""A replica: an actor of Ray Serve that keeps an engine's process and passes requests to it and its reports on.

A call of :meth:`EngineReplica.run` lasts as long as its request, so that Ray Serve counts it, waits for it before it
ends the replica, and reports its loss. Its tokens go to the server's inbox, one message a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec
import zmq
from ray import serve

from fastgen.errors import FastgenError
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    EngineFacts,
    Reply,
    Report,
    Status,
    encoder,
)
from fastgen.serving.engine.supervisor import EngineProcess
from fastgen.serving.monitoring.log import set_up_logging_of_engine
from fastgen.serving.refusals import UnavailableError
from fastgen.serving.replicas.inbox import Outbox
from fastgen.serving.replicas.messages import Answered, Attached, Beat, InboxAddress
from fastgen.version import __version__

# How often a replica reports its state.
BEAT_S = 0.5
_NO_METRICS = msgspec.Raw(encoder.encode(None))


class _Run:
    """A request in the engine: the server that it is of, and its end."""

    __slots__ = ("ended", "num_open", "server")

    def __init__(self, server: str, num_open: int):
        self.server, self.num_open = server, num_open
        self.ended: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()

    def end(self, answered: Answered) -> None:
        if not self.ended.done():
            self.ended.set_result(answered)


class EngineReplica:
    """Runs an engine with the ``arguments`` of ``fastgen.load``; see :class:`EngineProcess`."""

    async def __init__(self, arguments: Mapping[str, Any], *, timeout_s: float) -> None:  # type: ignore[misc]
        set_up_logging_of_engine()
        self.id = serve.get_replica_context().replica_id.unique_id
        self._engine = EngineProcess(arguments, self, timeout_s=timeout_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outboxes: dict[str, Outbox] = {}
        self._runs: dict[int, _Run] = {}
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Answered]] = {}
        self._status = Status(0, 0, 0)
        # The engine's last answer about its counters, as MessagePack.
        self._metrics = _NO_METRICS
        self._counting: asyncio.Task[None] | None = None
        self._beating = asyncio.create_task(self._beat_for_ever())
        await self._engine.start()

    # --- calls of servers

    async def attach(self, target: str, address: InboxAddress) -> Attached:
        """Sends from now on to the server at ``address``."""
        if address.server not in self._outboxes:
            self._outboxes[address.server] = Outbox(
                self._context, address, self.id, lambda: self._detach(address.server)
            )
        assert self._engine.facts is not None
        self._beat()
        return Attached(self._engine.facts, socket.gethostname(), __version__)

    async def run(self, number: int, server: str, encoded: bytes, num_sequences: int) -> Answered:
        """Runs the request in ``encoded``, a ``Submit`` of a server, until it has ended or is cancelled."""
        if server not in self._outboxes:
            return Answered(error="this replica has lost the server", has_died=True)
        self._runs[number] = run = _Run(server, num_sequences)
        try:
            self._engine.check_ready()
            self._engine.send_encoded(encoded)
            return await run.ended
        except UnavailableError as error:
            return Answered(error=str(error), has_died=True)
        finally:
            del self._runs[number]
            if not run.ended.done() and self._engine.state == "ready":
                with contextlib.suppress(UnavailableError):
                    self._engine.send(Cancel(number))

    async def ask(self, target: str, what: str) -> Answered:
        """Returns the engine's answer to :class:`Ask`."""
        number = next(self._numbers)
        return await self._reply_to(Ask(number, what))

    async def refusal(self, target: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Answered:
        """Returns the engine's answer to :class:`Check`."""
        number = next(self._numbers)
        return await self._reply_to(Check(number, prompt_ids, sampling))

    async def _reply_to(self, message: Ask | Check) -> Answered:
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._asked[message.number] = answer
        try:
            self._engine.check_ready()
            self._engine.send(message)
            return await answer
        except UnavailableError as error:
            return Answered(error=str(error), has_died=True)
        finally:
            del self._asked[message.number]

    # --- what Ray Serve calls

    async def check_health(self) -> None:
        """Raises ``FastgenError`` if the engine cannot be restarted, so that Ray Serve replaces this replica."""
        failure = self._engine.failure
        if failure is not None and failure.done():
            raise FastgenError(failure.result())

    # --- what comes from the engine's process

    def engine_ready(self, facts: EngineFacts) -> None:
        self._metrics = _NO_METRICS

    def engine_sent(self, message: Report | Reply, encoded: bytes) -> None:
        if isinstance(message, Reply):
            if (asked := self._asked.get(message.number)) is not None and not asked.done():
                asked.set_result(Answered(bytes(message.body), message.error))
            return
        if message.status is not None:
            self._status = message.status
        if not (message.tokens or message.progress or message.started or message.refused):
            return
        for outbox in list(self._outboxes.values()):
            outbox.send(encoded)
        for progress in message.progress:
            if progress.end is not None and (run := self._runs.get(progress.number)) is not None:
                run.num_open -= 1
                if progress.end.reason in ("stop", "length"):
                    self._engine.answered()
                if not run.num_open:
                    run.end(Answered())
        for refused in message.refused:
            if (run := self._runs.get(refused.number)) is not None:
                run.end(Answered())

    def engine_beat(self) -> None:
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self._count())

    def engine_ended(self, failure: Exception) -> None:
        for run in self._runs.values():
            run.end(Answered(error=str(failure), has_died=True))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(Answered(error=str(failure), has_died=True))
        self._beat()

    # --- the state of this replica

    async def _beat_for_ever(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> None:
        """Reports the state of this replica."""
        beat = Beat(self._engine.state == "ready", self._status, self._metrics, self._engine.num_restarts)
        encoded = encoder.encode(beat)
        for outbox in list(self._outboxes.values()):
            outbox.send(encoded)

    async def _count(self) -> None:
        answered = await self._reply_to(Ask(next(self._numbers), "metrics"))
        if answered.error is None:
            self._metrics = msgspec.Raw(answered.body)

    def _detach(self, server: str) -> None:
        """Forgets a server that is gone, and cancels its requests."""
        if (outbox := self._outboxes.pop(server, None)) is not None:
            outbox.close()
        for number, run in self._runs.items():
            if run.server == server and not run.ended.done():
                with contextlib.suppress(UnavailableError):
                    self._engine.send(Cancel(number))
                run.end(Answered(error="the server that sent this request is gone", has_died=True))
