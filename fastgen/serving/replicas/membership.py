"""The replicas that a server uses: attached when they come, watched, and forgotten when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.routing import make_router
from fastgen.serving.engine.messages import EngineFacts, Status
from fastgen.serving.engine.request import EngineWatcher
from fastgen.serving.replicas.messages import Attached, Beat, InboxAddress
from fastgen.serving.replicas.routing_table import RoutingTable
from fastgen.version import __version__

_log = logging.getLogger(__name__)

# How often silence is looked for.
_WATCH_S = 0.5
# A replica that was not heard for this long gets no requests where there are others.
SILENT_S = 3.0
# After this long its requests are taken from it.
LOST_S = 10.0
# How long a replica may take to answer that it is attached.
_ATTACH_S = 10.0
# The error of a call through Ray.
RAY_ERRORS = (RayError, RayServeException)


@dataclass
class Replica:
    """A replica as the server knows it."""

    id: str
    host: str
    facts: EngineFacts
    # When it was last heard, by ``time.monotonic``.
    heard_s: float
    # Whether its engine accepts requests.
    is_ready: bool = True
    status: Status = field(default_factory=lambda: Status(0, 0, 0))
    num_restarts: int = 0
    # Whether it was silent for so long that its requests were taken from it.
    is_lost: bool = False


class Membership:
    """Keeps the replicas behind ``handle``, which send to ``inbox``, and makes the router of ``routes`` by its name.

    ``on_lost`` is called with the id of a replica whose requests are lost although Ray has not noticed yet. All methods
    belong to one event loop.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        inbox: InboxAddress,
        routes: RoutingTable,
        watcher: EngineWatcher,
        *,
        router: str,
        on_lost: Callable[[str], None],
    ):
        self._handle, self._inbox, self._routes, self._watcher = handle, inbox, routes, watcher
        self._router, self._on_lost = router, on_lost
        self.replicas: dict[str, Replica] = {}
        # Replicas that were attached and are gone.
        self.num_gone = 0
        # The properties of the first engine; all have the same.
        self.facts: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        # Why replicas can never be used.
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The ids of all replicas that Ray Serve has now.
        self._ids: list[str] = []
        self._attaching: dict[str, asyncio.Task[None]] = {}

    def changed(self, ids: list[str]) -> None:
        """Attaches the new ones of these replicas, and forgets those that are not among them."""
        self._ids = ids
        for replica in set(self.replicas) - set(ids):
            self._forget(replica)
        for replica in ids:
            if replica not in self.replicas:
                self._begin_to_attach(replica)

    def heard(self, replica: str) -> None:
        """Notes a sign of life."""
        if (known := self.replicas.get(replica)) is not None:
            known.heard_s, known.is_lost = time.monotonic(), False

    def take(self, replica: str, beat: Beat) -> None:
        """Takes what a replica reports of itself."""
        known = self.replicas.get(replica)
        if known is None:
            return
        known.status, known.num_restarts = beat.status, beat.num_restarts
        if known.is_ready and not beat.is_ready:
            self._watcher.engine_ended(replica)
            self._empty(replica)
        elif beat.is_ready and not known.is_ready:
            self._watcher.engine_ready(known.facts, replica)
        known.is_ready = beat.is_ready
        metrics = msgspec.msgpack.decode(beat.metrics, type=Metrics | None)
        if metrics is not None and beat.is_ready:
            self._watcher.engine_counted(metrics, replica)

    async def discover(self) -> None:
        """Calls all replicas until one is attached. With the first call Ray Serve makes the router, which from then on
        passes on what replicas there are.
        """
        while not self.facts.done():
            with contextlib.suppress(*RAY_ERRORS):
                await self._handle.broadcast("check_health").results_async()
            await asyncio.sleep(_WATCH_S)

    async def watch(self, on_beat: Callable[[], None]) -> None:
        """Looks for replicas that have fallen silent, for ever. ``on_beat`` is called about twice a second."""
        while True:
            await asyncio.sleep(_WATCH_S)
            on_beat()
            now_s = time.monotonic()
            silent = {one.id: now_s - one.heard_s for one in self.replicas.values() if now_s - one.heard_s > SILENT_S}
            for replica, silent_s in silent.items():
                if replica not in self._routes.silent:
                    _log.warning("replica %s was not heard for %.1f s", replica, silent_s)
                if silent_s > LOST_S and not self.replicas[replica].is_lost:
                    self.replicas[replica].is_lost = True
                    self._empty(replica)
                    self._on_lost(replica)
                self._begin_to_attach(replica)  # it may have lost this server, and be well otherwise
            restarting = {one.id for one in self.replicas.values() if not one.is_ready}
            self._routes.silent = frozenset(silent.keys() | restarting)

    async def stop(self) -> None:
        """Attaches no more replicas."""
        self._ids = []
        for task in list(self._attaching.values()):
            task.cancel()
            await asyncio.wait({task})

    def _empty(self, replica: str) -> None:
        """Notes that the KV cache of a replica holds nothing any more."""
        if self._routes.router is not None:
            self._routes.router.forget(replica)

    def _forget(self, replica: str) -> None:
        self.num_gone += 1
        del self.replicas[replica]
        self._routes.attached = frozenset(self.replicas)
        self._empty(replica)
        self._watcher.engine_ended(replica)
        _log.info("replica %s is gone; %d are left", replica, len(self.replicas))

    def _begin_to_attach(self, replica: str) -> None:
        if replica not in self._attaching:
            self._attaching[replica] = asyncio.create_task(self._attach(replica))

    async def _attach(self, replica: str) -> None:
        """Has a replica send to this server, and uses it from then on."""
        try:
            while replica in self._ids:
                try:
                    async with asyncio.timeout(_ATTACH_S):
                        attached: Attached = await awaited(self._handle.attach.remote(replica, self._inbox))
                except (*RAY_ERRORS, TimeoutError) as error:
                    _log.warning("replica %s cannot be reached: %s", replica, type(error).__name__)
                    await asyncio.sleep(_WATCH_S)
                    continue
                self._use(replica, attached)
                return
        finally:
            del self._attaching[replica]

    def _use(self, replica: str, attached: Attached) -> None:
        if attached.version != __version__:
            if not self.failure.done():
                self.failure.set_result(
                    f"replica {replica} on {attached.host} runs fastgen {attached.version}, and the server "
                    f"{__version__}: install the same version on all machines of the cluster"
                )
            return
        if replica in self.replicas:
            self.heard(replica)
        elif replica in self._ids:
            if self._routes.router is None:
                facts = attached.facts
                self._routes.router = make_router(
                    self._router, block_size=facts.block_size, num_blocks=facts.num_blocks
                )
            self.replicas[replica] = Replica(replica, attached.host, attached.facts, time.monotonic())
            self._watcher.engine_ready(attached.facts, replica)
            self._routes.attached = frozenset(self.replicas)
            if not self.facts.done():
                self.facts.set_result(attached.facts)
            _log.info("replica %s on %s is ready; %d are", replica, attached.host, len(self.replicas))


async def awaited(response: Any) -> Any:
    """Returns what a call through Ray gives. Ray's responses can be awaited, but are no coroutines."""
    return await response
