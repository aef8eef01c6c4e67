"""Replicas that a test plays: a handle of Ray Serve, and the replicas behind it, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
from ray.exceptions import RayActorError

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.serving.engine.messages import End, EngineFacts, Progress, Report, Status, Submit, encoder
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.replicas.inbox import Outbox
from fastgen.serving.replicas.messages import Answered, Attached, Beat, InboxAddress
from fastgen.serving.replicas.replica_set import ReplicaSet
from fastgen.serving.replicas.routing_table import RoutingTable
from fastgen.version import __version__
from tests.serving.fake_engine import FACTS

WAIT_S = 30.0
_METRICS = RequestMetrics(queue_s=0.0, ttft_s=0.0)


class PlayedReplica:
    """Takes requests and does with them what the test says."""

    def __init__(self, name: str, version: str = __version__):
        self.name, self.version = name, version
        self.outboxes: dict[str, Outbox] = {}
        # The requests that it has, by their numbers, and those whose call was cancelled.
        self.taken: dict[int, Submit] = {}
        self.cancelled: list[int] = []
        self.ended: dict[int, asyncio.Future[Answered]] = {}
        self.is_dead = self.is_silent = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def attach(self, target: str, address: InboxAddress) -> Attached:
        if self.is_silent:
            await asyncio.sleep(WAIT_S)
        if address.server not in self.outboxes:
            self.outboxes[address.server] = Outbox(self._context, address, self.name, lambda: None)
        self.beat()
        return Attached(FACTS, f"host of {self.name}", self.version)

    async def run(self, number: int, server: str, encoded: bytes, num_sequences: int) -> Answered:
        self.taken[number] = msgspec.msgpack.decode(encoded, type=Submit)
        self.ended[number] = asyncio.get_running_loop().create_future()
        try:
            return await self.ended[number]
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise

    async def ask(self, target: str, what: str) -> Answered:
        return Answered(encoder.encode(f"{what} of {self.name}"))

    async def refusal(self, target: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Answered:
        return Answered(error="cannot be checked")

    def send(self, message: Report | Beat) -> None:
        for outbox in self.outboxes.values():
            outbox.send(encoder.encode(message))

    def beat(self, *, is_ready: bool = True, num_restarts: int = 0, metrics: Metrics | None = None) -> None:
        if not self.is_silent:
            self.send(Beat(is_ready, Status(1, 2, 3), msgspec.Raw(encoder.encode(metrics)), num_restarts))

    def give(self, number: int, *token_ids: int) -> None:
        """Sends the next tokens of a stream."""
        self.send(Report([part for token_id in token_ids for part in (number, token_id)], [], [], [], None))

    def finish(self, number: int, *token_ids: int, reason: FinishReason = "length") -> None:
        """Sends the last tokens, and ends the call."""
        end = End(reason, None, None, _METRICS, 0.0)
        self.send(Report([], [Progress(number, 0, list(token_ids), None, end)], [], [], None))
        self.ended[number].set_result(Answered())

    def die(self) -> None:
        """Ends as a killed actor does."""
        self.is_dead = True
        for ended in self.ended.values():
            if not ended.done():
                ended.set_exception(RayActorError())
        self.close()

    def close(self) -> None:
        for outbox in self.outboxes.values():
            outbox.close()
        self.outboxes.clear()
        self._context.term()


class _Response:
    """What a call through Ray gives at once."""

    def __init__(self, call: Coroutine[Any, Any, Any]):
        self._task = asyncio.ensure_future(call)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class PlayedHandle:
    """Calls replicas as Ray Serve's handle does, by the routing table of this process."""

    def __init__(self, *replicas: PlayedReplica):
        self.replicas = {replica.name: replica for replica in replicas}

    def add(self, replica: PlayedReplica) -> None:
        self.replicas[replica.name] = replica
        self._report_replicas()

    def remove(self, name: str) -> None:
        del self.replicas[name]
        self._report_replicas()

    def _report_replicas(self) -> None:
        assert RoutingTable.current is not None
        RoutingTable.current.on_replicas(sorted(self.replicas))

    def broadcast(self, method: str) -> Any:
        self._report_replicas()

        class Responses:
            async def results_async(self) -> list[None]:
                return []

        return Responses()

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(first: Any, *arguments: Any) -> _Response:
                return _Response(self._call(method, first, *arguments))

        return Method

    async def _call(self, method: str, first: Any, *arguments: Any) -> Any:
        routes = RoutingTable.current
        assert routes is not None
        if method != "run":
            return await getattr(self.replicas[first], method)(first, *arguments)
        while not (ranked := routes.rank(first, list(self.replicas))):
            await asyncio.sleep(0.01)
        replica = self.replicas[ranked[0]]
        if replica.is_silent:  # Ray waits until it accepts the request
            await asyncio.sleep(WAIT_S)
        routes.routed(first, ranked[0])
        if replica.is_dead:
            raise RayActorError
        return await replica.run(first, *arguments)


class Noted:
    """An ``EngineWatcher`` that notes what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.num_gone = 0

    def engine_ready(self, facts: EngineFacts, replica: str = "") -> None:
        self.notes.append(("ready", replica))

    def engine_counted(self, metrics: Metrics, replica: str = "") -> None:
        self.notes.append(("counted", replica))

    def engine_ended(self, replica: str = "") -> None:
        self.notes.append(("ended", replica))

    def request_routed(self, request: EngineRequest, replica: str) -> None:
        self.notes.append(("routed", replica))

    def request_started(self, request: EngineRequest) -> None:
        pass

    def completion_ended(self, request: EngineRequest, progress: Progress) -> None:
        pass

    def request_gone(self, request: EngineRequest) -> None:
        self.num_gone += 1


@asynccontextmanager
async def played_set(
    *replicas: PlayedReplica, router: str = "least_tokens"
) -> AsyncIterator[tuple[ReplicaSet, PlayedHandle, Noted]]:
    """Yields a started set of these replicas, all attached, with its handle and what its watcher notes."""
    handle, noted = PlayedHandle(*replicas), Noted()
    found = ReplicaSet(handle, noted, host="127.0.0.1", router=router)  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        try:
            await found.start()
            await until(lambda: len(found.replicas) == len(handle.replicas))
            yield found, handle, noted
        finally:
            await found.stop()
            for replica in handle.replicas.values():
                replica.close()


async def until(condition: Callable[[], object]) -> None:
    """Waits until ``condition()`` is true."""
    while not condition():
        await asyncio.sleep(0.005)
