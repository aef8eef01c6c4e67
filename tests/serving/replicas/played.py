"""Replicas that a test plays: a handle of Ray Serve, and the replicas behind it, in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
from ray.exceptions import RayActorError

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    End,
    EngineFacts,
    FromServer,
    Progress,
    Reply,
    Report,
    Status,
    Submit,
    encoder,
    from_server,
)
from fastgen.serving.engine.remote_socket import RemoteAddress
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import AttachAnswer, Attached, Beat, FromEngine, beat_decoder
from fastgen.serving.replicas.replica_set import ReplicaSet
from fastgen.serving.replicas.routing_table import RoutingTable
from fastgen.version import __version__
from tests.serving.fake_engine import FACTS

WAIT_S = 30.0
GENERATION = "of the server"
SAMPLING = SamplingParams(max_new_tokens=8)
ENDED = End("length", None, None, RequestMetrics(queue_s=0.0, ttft_s=0.0), 0.0)


class PlayedReplica:
    """Takes requests and does with them what the test says."""

    def __init__(
        self, name: str, version: str = __version__, *, generation: str = GENERATION, facts: EngineFacts = FACTS
    ):
        self.name, self.version, self.generation, self.facts = name, version, generation, facts
        # The links of the actor and of the engine, by their servers.
        self.links: dict[str, Link] = {}
        self.engines: dict[str, Link] = {}
        self.addresses: dict[str, RemoteAddress] = {}
        # The requests that it was sent, by their numbers, and those that were cancelled.
        self.taken: dict[int, Submit] = {}
        self.cancelled: list[int] = []
        # How often a server asked for a link.
        self.num_asked = 0
        # Whether it does nothing at all, as a suspended process.
        self.is_silent = False
        # Whether it has an engine, and how often that was restarted.
        self.is_ready, self.num_restarts = True, 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def attach(self, server: str) -> AttachAnswer:
        self.num_asked += 1
        if self.is_silent:
            await asyncio.sleep(WAIT_S)
        if (before := self.links.pop(server, None)) is not None:
            before.close()
            self._close_engine(server)

        def lost() -> None:
            if self.links.get(server) is link:
                del self.links[server]
                self._close_engine(server)

        self.links[server] = link = Link(self.context, beat_decoder, lambda message: None, lost)
        address = link.listen("127.0.0.1")
        state = msgspec.structs.replace(self._state(server, None), status=Status(0, 0, 0))
        attached = encoder.encode(Attached(address, self.generation, self.facts, state))
        if self.version != __version__:
            attached = b"in another layout"
        return {"version": self.version, "host": f"host of {self.name}", "attached": attached}

    def _state(self, server: str, metrics: Metrics | None) -> Beat:
        """Returns what the replica tells ``server``. Its engine waits for it from then on, if there is one."""
        if self.is_ready and server not in self.engines:
            self.engines[server] = Link(self.context, from_server, self._take, lambda: None)
            self.addresses[server] = self.engines[server].listen("127.0.0.1")
        if not self.is_ready:
            self._close_engine(server)
        return Beat(
            self.addresses.get(server), Status(1, 2, 3), msgspec.Raw(encoder.encode(metrics)), self.num_restarts
        )

    def _close_engine(self, server: str) -> None:
        self.addresses.pop(server, None)
        if (engine := self.engines.pop(server, None)) is not None:
            engine.close()

    def _take(self, message: FromServer) -> None:
        match message:
            case Submit():
                self.taken[message.number] = message
            case Cancel():
                self.cancelled.append(message.number)
            case Ask():
                if message.what not in ("nothing", "metrics"):
                    self.send(
                        Reply(message.number, msgspec.Raw(encoder.encode(f"{message.what} of {self.name}")), None)
                    )
            case Check():
                self.send(Reply(message.number, msgspec.Raw(encoder.encode(None)), "cannot be checked"))

    def send(self, message: FromEngine) -> None:
        for engine in self.engines.values():
            engine.send(encoder.encode(message))

    def beat(self, *, is_ready: bool = True, num_restarts: int | None = None, metrics: Metrics | None = None) -> None:
        if self.is_silent:
            return
        self.is_ready = is_ready
        self.num_restarts = self.num_restarts if num_restarts is None else num_restarts
        for server, link in list(self.links.items()):
            link.send(encoder.encode(self._state(server, metrics)))

    def give(self, number: int, *token_ids: int) -> None:
        """Sends the next tokens of a stream."""
        self.send(Report([part for token_id in token_ids for part in (number, token_id)], [], [], [], None))

    def finish(self, number: int, *token_ids: int, index: int = 0, reason: FinishReason = "length") -> None:
        """Sends the last tokens of a completion."""
        end = msgspec.structs.replace(ENDED, reason=reason)
        self.send(Report([], [Progress(number, index, list(token_ids), None, end)], [], [], None))

    def restart(self) -> None:
        """Has another engine, without the requests of the one before."""
        self.beat(is_ready=False)
        self.beat(num_restarts=self.num_restarts + 1)

    def close(self) -> None:
        """Ends, as a killed actor does."""
        for server, link in self.links.items():
            link.close()
            self._close_engine(server)
        self.links.clear()


class PlayedHandle:
    """Leads to replicas as Ray Serve's handle does, by the routing table of this process."""

    def __init__(self, *replicas: PlayedReplica):
        self.replicas = {replica.name: replica for replica in replicas}
        # Those that were ever behind it.
        self.all = list(replicas)
        # The requests that count at each.
        self.num_requests: Counter[str] = Counter()
        self.killed: list[str] = []

    def kill(self, replica: str) -> None:
        self.killed.append(replica)

    def add(self, replica: PlayedReplica) -> None:
        self.replicas[replica.name] = replica
        self.all.append(replica)
        self._report_replicas()

    def remove(self, name: str) -> None:
        del self.replicas[name]
        self._report_replicas()

    def _report_replicas(self) -> None:
        assert RoutingTable.current is not None
        RoutingTable.current.update(sorted(self.replicas))

    async def discover(self) -> None:
        self._report_replicas()

    async def attach(self, replica: str, server: str) -> AttachAnswer:
        if replica not in self.replicas:
            raise RayActorError
        return await self.replicas[replica].attach(server)

    def began(self, replica: str) -> None:
        self.num_requests[replica] += 1

    def ended(self, replica: str) -> None:
        self.num_requests[replica] -= 1


class Noted:
    """An ``EngineWatcher`` that notes what happens, and sums the counters as a server does."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.metrics = ServerMetrics(lambda: True)
        self.num_gone = 0

    def engine_ready(self, facts: EngineFacts, replica: str = "") -> None:
        self.notes.append(("ready", replica))

    def engine_counted(self, metrics: Metrics, replica: str = "") -> None:
        self.notes.append(("counted", replica))
        self.metrics.observe(metrics, replica)

    def engine_away(self, replica: str = "") -> None:
        self.notes.append(("away", replica))
        self.metrics.engine_away(replica)

    def engine_ended(self, replica: str = "") -> None:
        self.notes.append(("ended", replica))
        self.metrics.engine_ended(replica)

    def request_routed(self, request: EngineRequest, replica: str) -> None:
        self.notes.append(("routed", replica))

    def request_started(self, request: EngineRequest) -> None:
        self.notes.append(("started", str(request.number)))

    def completion_ended(self, request: EngineRequest, progress: Progress) -> None:
        pass

    def request_gone(self, request: EngineRequest) -> None:
        self.num_gone += 1


@asynccontextmanager
async def played_set(
    *replicas: PlayedReplica, router: str = "least_tokens", on_beat: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[ReplicaSet, PlayedHandle, Noted]]:
    """Yields a started set of these replicas, all attached, with its handle and what its watcher notes."""
    handle, noted = PlayedHandle(*replicas), Noted()
    found = ReplicaSet(handle, noted, generation=GENERATION, router=router, on_beat=on_beat)
    async with asyncio.timeout(WAIT_S):
        try:
            await found.start()
            await until(lambda: len(found.replicas) == len(handle.replicas))
            await until_linked(found, *replicas)
            yield found, handle, noted
        finally:
            await found.stop()
            for replica in handle.all:
                replica.close()
                replica.context.term()


async def until(condition: Callable[[], object]) -> None:
    """Waits until ``condition()`` is true."""
    while not condition():
        await asyncio.sleep(0.005)


async def until_linked(found: ReplicaSet, *replicas: PlayedReplica) -> None:
    """Waits until the set hears what these replicas and their engines send."""

    def are_heard() -> bool:
        for replica in replicas:
            replica.beat()
            replica.send(Report([], [], [], [], None))
        engines = [engine for replica in replicas for engine in replica.engines.values()]
        return all(found.replicas[replica.name].status.num_steps for replica in replicas) and all(
            engine._is_connected for engine in engines
        )

    await until(are_heard)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def submit(
    replicas: ReplicaSet, *prompt_ids: int, session: str | None = None, sampling: SamplingParams = SAMPLING
) -> EngineRequest:
    """Submits a stream with this prompt, or with a short one."""
    return replicas.submit(list(prompt_ids) or [1, 2, 3], sampling, is_stream=True, arrived_s=0.0, session=session)


async def where(request: EngineRequest, *replicas: PlayedReplica) -> PlayedReplica:
    """Waits until one of ``replicas`` has ``request``, under its present number, and returns it."""
    await until(lambda: any(request.number in each.taken for each in replicas))
    (found,) = [each for each in replicas if request.number in each.taken]
    return found


async def whole(request: EngineRequest) -> list[int]:
    """Returns all tokens of an answer."""
    tokens: list[int] = []
    while request.num_open or request._news:
        for news in await request.news():
            tokens += news.token_ids
    return tokens
