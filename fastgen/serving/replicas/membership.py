"""The replicas that a server uses: linked when they come, watched, and forgotten when they are gone.

A replica has two links: one with its actor, which reports where its engine waits, and one with that engine, over which
requests go. The second is made anew whenever there is another engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.routing import make_router
from fastgen.serving.engine.messages import EngineFacts, Status
from fastgen.serving.engine.remote_socket import RemoteAddress
from fastgen.serving.engine.request import EngineWatcher
from fastgen.serving.replicas.handle import RAY_ERRORS, ReplicaHandle
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import AttachAnswer, Attached, Beat, FromEngine, beat_decoder, from_engine
from fastgen.serving.replicas.routing_table import RoutingTable
from fastgen.version import __version__

_log = logging.getLogger(__name__)

# How often silence is looked for.
_WATCH_S = 0.5
# A replica that was not heard for this long gets no requests where there are others.
SILENT_S = 3.0
# After this long its requests are taken from it.
LOST_S = 10.0
# A replica that Ray Serve no longer lists still gets requests for this long, if there is no other: in a rolling update
# the new server is not ready yet.
KEEP_S = 10.0
# How long the link with an engine may be lost before all of its replica counts as lost. If the engine has ended, the
# replica says so before.
_APART_S = 2.0
# How long a replica may take to answer a server that wants to be attached. One that takes longer hangs.
_ATTACH_S = 10.0


@dataclass(eq=False)
class Replica:
    """A replica with a link to the server."""

    id: str
    host: str
    facts: EngineFacts
    # The link with its actor.
    link: Link
    # The link with its engine. Without one it gets no requests.
    engine: Link | None = None
    # Where the engine that it had last waits for this server.
    address: RemoteAddress | None = None
    # For how long the link with the engine is lost, though it did not end.
    apart_s: float = 0.0
    # For how long it was not heard.
    silent_s: float = 0.0
    # For how long Ray Serve has not listed it.
    unlisted_s: float = 0.0
    # How often its engine was restarted.
    num_restarts: int = 0
    status: Status = field(default_factory=lambda: Status(0, 0, 0))
    # The number of this server's requests and questions in it.
    num_requests: int = 0

    @property
    def is_ready(self) -> bool:
        """Returns whether its engine accepts requests."""
        return self.engine is not None

    def send(self, encoded: bytes) -> None:
        """Sends a message to its engine. It is dropped while there is none."""
        if self.engine is not None:
            self.engine.send(encoded)

    def close(self) -> None:
        """Closes both links."""
        self.link.close()
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class Membership:
    """Keeps links with the replicas of one ``generation`` behind ``handle``, and makes the router of ``routes`` by its
    name. During a rolling update there are replicas of another one, which may have another model and get no requests.

    ``on_message`` is called with what an engine sends of requests and questions, and ``on_lost`` with a replica whose
    requests are lost. A replica that Ray Serve no longer lists gets no more requests once there is another, and its
    link remains until those in it have ended. One that hangs is killed then: Ray Serve would let it have its time to
    finish. All methods belong to one event loop.
    """

    def __init__(
        self,
        handle: ReplicaHandle,
        server: str,
        routes: RoutingTable,
        watcher: EngineWatcher,
        *,
        generation: str,
        router: str,
        on_message: Callable[[FromEngine], None],
        on_lost: Callable[[Replica], None],
    ):
        self._handle, self._server, self._routes, self._watcher = handle, server, routes, watcher
        self._generation = generation
        self._router, self._on_message, self._on_lost = router, on_message, on_lost
        # Those that get requests, by their ids.
        self.replicas: dict[str, Replica] = {}
        # Those that get no more, and have some.
        self._leaving: set[Replica] = set()
        # The ids of those of another generation.
        self._others: set[str] = set()
        # The ids of those that fell silent or do not answer, and were not attached since.
        self._hanging: set[str] = set()
        # Those that Ray Serve lists and whose link was lost: how often their engines had been restarted.
        self._away: dict[str, int] = {}
        # How often a replica was lost, and engines of replicas were restarted.
        self.num_restarts = 0
        # The properties of the first engine that was ready; all have the same.
        self.facts: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        # Why replicas can never be used.
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The ids of all replicas that Ray Serve has now.
        self._ids: frozenset[str] = frozenset()
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def changed(self, ids: list[str]) -> None:
        """Attaches the new ones of these replicas, and lets those go that are not among them."""
        self._ids = frozenset(ids)
        self._others &= self._ids
        self._let_go()
        for id in ids:
            self._begin_to_attach(id)
        for id in self._away.keys() - self._ids:
            del self._away[id]
            self._watcher.engine_ended(id)
        for id in self._hanging - self._ids:
            self._kill(id)

    def _let_go(self) -> None:
        """Sends no more requests to replicas that Ray Serve no longer lists, if there are others or it was long ago."""
        has_others = any(one.is_ready and one.id in self._ids for one in self.replicas.values())
        for replica in list(self.replicas.values()):
            if replica.id not in self._ids and (has_others or replica.unlisted_s > KEEP_S):
                self._remove(replica)
                self._leaving.add(replica)
                self.left(replica)

    def left(self, replica: Replica) -> None:
        """Closes the link of a replica that gets no more requests and has none."""
        if replica in self._leaving and not replica.num_requests:
            self._leaving.remove(replica)
            replica.close()
            self._watcher.engine_ended(replica.id)

    async def discover(self) -> None:
        """Asks Ray Serve for replicas until one is attached."""
        while not self.facts.done():
            try:
                with contextlib.suppress(*RAY_ERRORS):
                    await self._handle.discover()
            except Exception:
                _log.exception("replicas cannot be discovered")
            await asyncio.sleep(_WATCH_S)

    async def watch(self, on_beat: Callable[[], None]) -> None:
        """Looks for replicas that have fallen silent, for ever. ``on_beat`` is called about twice a second."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            on_beat()
            # A pause of this process says nothing about theirs.
            passed_s = min(time.monotonic() - began_s, 2 * _WATCH_S)
            for replica in (*self.replicas.values(), *self._leaving):
                replica.silent_s += passed_s
                replica.unlisted_s = 0.0 if replica.id in self._ids else replica.unlisted_s + passed_s
                if replica.silent_s > SILENT_S and replica.id not in self._routes.silent:
                    _log.warning("replica %s was not heard for %.1f s", replica.id, replica.silent_s)
                if replica.silent_s > LOST_S:
                    self._hanging.add(replica.id)
                    self._lose(replica)
                is_apart = replica.engine is None and replica.address is not None
                replica.apart_s = replica.apart_s + passed_s if is_apart else 0.0
                if replica.apart_s > _APART_S:
                    self._lose(replica)
            self._let_go()
            self._update_routes()

    def _update_routes(self) -> None:
        """Notes which replicas get requests."""
        self._routes.ready = sorted(one.id for one in self.replicas.values() if one.is_ready)
        self._routes.silent = frozenset(one.id for one in self.replicas.values() if one.silent_s > SILENT_S)

    async def stop(self) -> None:
        """Closes all links, and makes no more."""
        self._ids = frozenset()
        for task in list(self._attaching.values()):
            task.cancel()
            await asyncio.wait({task})
        for replica in (*self.replicas.values(), *self._leaving):
            replica.close()
        self._context.term()

    # --- the end of a replica

    def _remove(self, replica: Replica) -> None:
        """Sends no more requests to ``replica``."""
        del self.replicas[replica.id]
        self._update_routes()
        self._empty(replica)
        self._watcher.engine_away(replica.id)
        _log.info("replica %s is gone; %d are left", replica.id, len(self.replicas))

    def _empty(self, replica: Replica) -> None:
        """Notes that the KV cache of a replica holds nothing any more."""
        if self._routes.router is not None:
            self._routes.router.forget(replica.id)

    def _lose(self, replica: Replica) -> None:
        """Takes the requests from a replica that is lost. It is attached again if it still exists."""
        self._part(replica)
        replica.close()
        if replica in self._leaving:
            self._leaving.remove(replica)
        elif self.replicas.get(replica.id) is replica:
            self._remove(replica)
        else:
            return  # its last message has let it go
        self.num_restarts += 1
        if replica.id in self._ids:
            self._away[replica.id] = replica.num_restarts
            self._begin_to_attach(replica.id)
        else:
            self._watcher.engine_ended(replica.id)
            if replica.id in self._hanging:
                self._kill(replica.id)

    def _kill(self, id: str) -> None:
        self._hanging.remove(id)
        _log.error("replica %s hangs and is killed", id)
        self._handle.kill(id)

    # --- attaching

    def _begin_to_attach(self, id: str) -> None:
        if id not in self.replicas and id not in self._others and id not in self._attaching:
            self._attaching[id] = asyncio.create_task(self._attach(id))

    async def _attach(self, id: str) -> None:
        """Links a replica with this server, and uses it from then on."""
        try:
            while id in self._ids:
                try:
                    async with asyncio.timeout(_ATTACH_S):
                        answer = await self._handle.attach(id, self._server)
                    self._hanging.discard(id)
                    if id in self._ids:
                        self._use(id, answer)
                    return
                except (*RAY_ERRORS, TimeoutError) as error:
                    _log.warning("replica %s cannot be reached: %s", id, type(error).__name__)
                    if isinstance(error, TimeoutError) and id in self._ids:
                        self._hanging.add(id)
                except Exception:  # such as too many open files, which may become fewer
                    _log.exception("replica %s cannot be attached", id)
                await asyncio.sleep(_WATCH_S)
        finally:
            del self._attaching[id]

    def _use(self, id: str, answer: AttachAnswer) -> None:
        version, host = answer["version"], answer["host"]
        if version != __version__:
            if not self.failure.done():
                self.failure.set_result(
                    f"replica {id} on {host} runs fastgen {version}, and the server {__version__}: install the same "
                    "version on all machines of the cluster"
                )
            return
        attached = msgspec.msgpack.decode(answer["attached"], type=Attached)
        if attached.generation != self._generation:
            self._others.add(id)
            _log.info("replica %s on %s was deployed with other arguments, and is left to another server", id, host)
            return
        if self._routes.router is None:
            facts = attached.facts
            self._routes.router = make_router(self._router, block_size=facts.block_size, num_blocks=facts.num_blocks)

        def take(beat: Beat) -> None:
            self._take_beat(replica, beat)

        link = Link(self._context, beat_decoder, take, lambda: self._lose(replica))
        self.replicas[id] = replica = Replica(id, host, attached.facts, link, num_restarts=self._away.pop(id, 0))
        try:
            link.connect(attached.address)
            self._take_beat(replica, attached.state)
        except BaseException:
            self._away[id] = replica.num_restarts
            del self.replicas[id]
            replica.close()
            raise
        _log.info("replica %s on %s is attached; %d are", id, host, len(self.replicas))

    # --- the state of a replica

    def _take_beat(self, replica: Replica, beat: Beat) -> None:
        replica.silent_s = 0.0
        if beat.num_restarts != replica.num_restarts or (beat.engine is None and replica.address is not None):
            self._part(replica)
            self._watcher.engine_ended(replica.id)
            self.num_restarts += beat.num_restarts - replica.num_restarts
            replica.num_restarts, replica.address = beat.num_restarts, None
        if beat.engine is not None and beat.engine != replica.address:
            self._meet(replica, beat.engine)
        replica.status = beat.status
        metrics = msgspec.msgpack.decode(beat.metrics, type=Metrics | None)
        if metrics is not None and replica.is_ready:
            self._watcher.engine_counted(metrics, replica.id)

    def _meet(self, replica: Replica, address: RemoteAddress) -> None:
        """Links the engine of a replica with this server, and uses it from then on."""
        self._part(replica)
        engine = Link(self._context, from_engine, self._on_message, lambda: self._part(replica))
        try:
            engine.connect(address)
        except BaseException:
            engine.close()
            raise
        replica.engine, replica.address = engine, address
        if replica not in self._leaving:
            self._watcher.engine_ready(replica.facts, replica.id)
        if not self.facts.done():
            self.facts.set_result(replica.facts)
        self._let_go()
        self._update_routes()

    def _part(self, replica: Replica) -> None:
        """Takes the requests from the engine of a replica, which has ended or cannot be reached."""
        if (engine := replica.engine) is None:
            return
        engine.receive()
        if replica.engine is None:  # its last message has let the replica go
            return
        engine.close()
        replica.engine = None
        self._update_routes()
        self._empty(replica)
        self._watcher.engine_away(replica.id)
        self._on_lost(replica)
