"""The server's side of its replicas: the requests in them, and what comes back.

A request whose replica ends before anything of its answer was passed on is sent to another one. A replica that falls
silent gets no more requests as long as there are others; Ray Serve replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from fastgen.errors import GenerationError
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.routing import RoutedRequest, block_hashes, make_router
from fastgen.serving.engine.messages import EngineFacts, Report, Status, Submit, encoder, pack_sampling
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.engine.supervisor import State
from fastgen.serving.refusals import EngineDiedError, UnavailableError
from fastgen.serving.replicas.inbox import Inbox
from fastgen.serving.replicas.messages import Answered, Attached, Beat, FromReplica
from fastgen.serving.replicas.switchboard import Switchboard

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# How often silence is looked for.
_BEAT_S = 0.5
# A replica that was not heard for this long gets no requests where there are others.
SILENT_S = 3.0
# How long a replica may take to answer a call that needs no engine.
_ATTACH_S = 10.0
# How long the last tokens of an answer may take after Ray has reported its end.
_LAST_NEWS_S = 10.0
# How often a request is sent to another replica after its replica or its engine has ended. One that ends every engine
# it comes to must not end them all again and again.
MAX_TRIES = 6
# The pause before the second of them; doubled each time.
_FIRST_DELAY_S = 0.02
# Requests whose replica is remembered: as many as recordings have.
_MAX_PLACES = 10_000


@dataclass
class Replica:
    """A replica as the server knows it."""

    id: str
    host: str
    facts: EngineFacts
    heard_s: float
    is_ready: bool = True
    status: Status = field(default_factory=lambda: Status(0, 0, 0))
    num_restarts: int = 0


class ReplicaSet:
    """Sends requests to the replicas behind ``handle``, and receives their tokens at ``host``, an address of this
    machine that theirs reach. ``router`` is a name of :data:`~fastgen.runtime.routing.ROUTERS`. ``on_beat`` is called
    about twice a second as long as the event loop runs.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        watcher: EngineWatcher,
        *,
        host: str,
        router: str = "prefix",
        on_beat: Callable[[], None] = lambda: None,
    ):
        self._handle, self._watcher, self._router = handle, watcher, router
        self._host, self._on_beat = host, on_beat
        self._is_stopped = False
        # Numbers of requests differ from those of a server before or beside this one.
        self._numbers = count(secrets.randbits(38) << 24)
        self._requests = OpenRequests(watcher)
        self._sending: dict[EngineRequest, asyncio.Task[None]] = {}
        # The replica of the last requests, by their numbers.
        self._places: dict[int, str] = {}
        # The last number of those that were sent again, by their first.
        self._renumbered: dict[int, int] = {}
        self.replicas: dict[str, Replica] = {}
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._ids: list[str] = []
        self._facts: asyncio.Future[EngineFacts] | None = None
        self.num_lost = 0
        self._inbox: Inbox | None = None
        self._board: Switchboard | None = None
        self._watching: asyncio.Task[None] | None = None

    # --- what a service asks of its engine

    @property
    def state(self) -> State:
        if self._is_stopped:
            return "stopped"
        if any(replica.is_ready for replica in self.replicas.values()):
            return "ready"
        return "starting" if self.facts is None else "restarting"

    @property
    def facts(self) -> EngineFacts | None:
        """Returns the properties of an engine, once one is attached. All engines have the same."""
        return self._facts.result() if self._facts is not None and self._facts.done() else None

    @property
    def status(self) -> Status:
        """Returns the load of all replicas together."""
        each = [replica.status for replica in self.replicas.values()]
        return Status(*(sum(getattr(one, name) for one in each) for name in Status.__struct_fields__))

    @property
    def num_restarts(self) -> int:
        """Returns how many replicas were lost, and how often the engines of the present ones were restarted."""
        return self.num_lost + sum(replica.num_restarts for replica in self.replicas.values())

    @property
    def num_open(self) -> int:
        """Returns the number of requests whose last message has not been taken."""
        return len(self._requests)

    async def start(self) -> EngineFacts:
        """Waits until a replica is ready."""
        loop = asyncio.get_running_loop()
        self._facts = loop.create_future()
        self._inbox = Inbox(secrets.token_hex(8), self._host, self._take)
        self._board = Switchboard.current = Switchboard(
            lambda ids: _call(loop, self._replicas_changed, ids),
            lambda number, replica: _call(loop, self._routed, number, replica),
        )
        self._watching = asyncio.create_task(self._watch())
        # The first call has Ray Serve make the router, which then passes on what replicas there are.
        knocking = asyncio.create_task(self._knock())
        try:
            return await asyncio.shield(self._facts)
        finally:
            knocking.cancel()

    async def failed(self) -> str:
        """Waits for ever: Ray Serve replaces replicas as long as the application is deployed."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    def check_ready(self) -> None:
        """Raises ``UnavailableError`` if requests cannot be accepted now."""
        if self.state != "ready":
            retry_after_s = 1.0 if self.facts is None else self.facts.load_s
            raise UnavailableError(
                f"no replica is ready: the server is {self.state}; try again in a moment", retry_after_s=retry_after_s
            )

    def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        is_stream: bool,
        arrived_s: float,
        session: str | None = None,
    ) -> EngineRequest:
        """Sends a request that arrived at ``arrived_s`` of ``time.monotonic`` to a replica. Requests of one ``session``
        are kept together. A refusal by the engine comes with the first news.
        """
        self.check_ready()
        assert self.facts is not None
        request = EngineRequest(next(self._numbers), len(prompt_ids), sampling, arrived_s)
        num_sequences = max(sampling.n, sampling.beam_width)
        routed = RoutedRequest(
            len(prompt_ids),
            sampling.max_new_tokens * num_sequences,
            block_hashes(prompt_ids, self.facts.block_size),
            session,
        )
        encoded = encoder.encode(Submit(request.number, prompt_ids, pack_sampling(sampling), is_stream))
        self._requests.add(request)
        self._sending[request] = asyncio.create_task(self._send(request, routed, encoded))
        return request

    def cancel(self, request: EngineRequest) -> None:
        """Ends ``request``, whose result is no longer needed. The engine drops it before the next step."""
        sending = self._sending.get(request)
        if self._requests.drop(request) and sending is not None:
            sending.cancel()

    def finish(self, request: EngineRequest) -> None:
        """Forgets ``request`` after all its news were taken."""
        self._requests.drop(request)

    async def ask(self, what: str, kind: type[_T], *, replica: str | None = None) -> _T:
        """Returns the answer to ``what`` of the engine of ``replica``, by default the first that is ready. Raises
        ``UnavailableError`` if there is none, and ``GenerationError`` if it cannot answer.
        """
        return msgspec.msgpack.decode(await self._call(replica, "ask", what), type=kind)

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Returns why an engine would refuse such a request, or ``None``. Raises like :meth:`ask`."""
        answer = await self._call(None, "refusal", prompt_ids, pack_sampling(sampling))
        return msgspec.msgpack.decode(answer, type=str | None)

    async def count(self) -> None:
        """Passes the counters of all engines to the watcher."""

        async def count_one(replica: str) -> None:
            with contextlib.suppress(UnavailableError, EngineDiedError, GenerationError):
                counted = await self.ask("metrics", Metrics, replica=replica)
                if replica in self.replicas:
                    self._watcher.engine_counted(counted, replica)

        await asyncio.gather(*map(count_one, list(self.replicas)))

    def place_of(self, number: int) -> tuple[str, int] | None:
        """Returns the replica that the request with this first number went to last, and its number there; ``None`` if
        it is not remembered.
        """
        number = self._renumbered.get(number, number)
        replica = self._places.get(number)
        return None if replica is None else (replica, number)

    def fail_all(self, failure: Exception) -> None:
        """Ends all requests with ``failure``."""
        for request in self._requests:
            request.fail(failure)
            self.cancel(request)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends all requests, and receives nothing more. The replicas remain."""
        self._is_stopped = True
        self.fail_all(UnavailableError("the server is ending"))
        tasks = [*self._sending.values(), *self._attaching.values()]
        tasks += [] if self._watching is None else [self._watching]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        if self._board is not None and Switchboard.current is self._board:
            Switchboard.current = None
        if self._inbox is not None:
            self._inbox.close()

    # --- requests

    async def _send(self, request: EngineRequest, routed: RoutedRequest, encoded: bytes) -> None:
        """Sends ``request`` to replicas until one has answered it."""
        assert self._board is not None
        first = number = request.number
        try:
            for attempt in range(1, MAX_TRIES + 1):
                self._board.add(number, routed)
                try:
                    answered = await self._run(number, encoded, request.sampling.n)
                finally:
                    self._board.remove(number)
                if answered.error is None:
                    await self._await_last_news(request)
                    return
                if request.was_read or attempt == MAX_TRIES or not answered.has_died:
                    request.fail(EngineDiedError(answered.error))
                    self._requests.drop(request)
                    return
                _log.warning("a request is sent to another replica: %s", answered.error)
                await asyncio.sleep(_FIRST_DELAY_S * 2**attempt)
                number = next(self._numbers)
                self._renumbered[first] = number
                self._requests.renumber(request, number)
        finally:
            self._sending.pop(request, None)

    async def _run(self, number: int, encoded: bytes, num_sequences: int) -> Answered:
        """Runs a request at the replica that the router chooses, until it has ended there."""
        assert self._inbox is not None
        response: Any = self._handle.run.remote(number, self._inbox.address.server, encoded, num_sequences)
        try:
            found: Answered = await response
            return found
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException) as error:
            place = self._places.get(number)
            return Answered(
                error=f"{_replica_text(place)} ended while this request was in it ({type(error).__name__}); send it "
                "again",
                has_died=True,
            )

    async def _await_last_news(self, request: EngineRequest) -> None:
        """Waits for what is still on its way of an answer that has ended, and fails ``request`` if that does not
        come.
        """
        for delay_s in (0.0, 0.01, 0.1, 1.0, _LAST_NEWS_S):
            if not request.num_open or request not in self._requests:
                return
            await asyncio.sleep(delay_s)
        if request.num_open and request in self._requests:
            request.fail(EngineDiedError("the end of this answer was lost between the replica and the server"))
            self._requests.drop(request)

    def _routed(self, number: int, replica: str) -> None:
        self._places[number] = replica
        for remembered in (self._places, self._renumbered):
            while len(remembered) > _MAX_PLACES:
                del remembered[next(iter(remembered))]
        if (request := self._requests.numbered(number)) is not None:
            self._watcher.request_routed(request, replica)

    # --- replicas

    async def _call(self, replica: str | None, method: str, *arguments: Any, timeout_s: float = math.inf) -> bytes:
        """Calls ``method`` of a replica, by default the first that is ready, and returns its answer."""
        target = replica or next((one.id for one in self.replicas.values() if one.is_ready), None)
        if target is None:
            raise UnavailableError("no replica is ready; try again in a moment")
        response = getattr(self._handle, method).remote(target, *arguments)
        gone = asyncio.ensure_future(self._until_gone(target))
        answer = asyncio.ensure_future(_awaited(response))
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineDiedError(f"{_replica_text(target)} ended before it had answered")
            answered: Answered = answer.result()
        except (RayError, RayServeException) as error:
            raise EngineDiedError(f"{_replica_text(target)} cannot be asked: {error}") from error
        finally:
            gone.cancel()
            if not answer.done():
                response.cancel()
                answer.cancel()
        if answered.error is not None:
            raise EngineDiedError(answered.error) if answered.has_died else GenerationError(answered.error)
        return answered.body

    async def _until_gone(self, replica: str) -> None:
        while replica in self.replicas:
            await asyncio.sleep(_BEAT_S)

    async def _knock(self) -> None:
        """Calls all replicas until one is attached. Ray Serve then makes the router, which knows later ones."""
        while True:
            with contextlib.suppress(RayError, RayServeException):
                await self._handle.broadcast("check_health").results_async()
            await asyncio.sleep(_BEAT_S)

    def _replicas_changed(self, ids: list[str]) -> None:
        """Attaches new replicas, and forgets those that are gone."""
        if self._is_stopped:
            return
        self._ids = ids
        for replica in set(self.replicas) - set(ids):
            self._forget(replica)
        for replica in ids:
            if replica not in self.replicas and replica not in self._attaching:
                self._attaching[replica] = asyncio.create_task(self._attach(replica))

    def _forget(self, replica: str) -> None:
        assert self._board is not None
        self.num_lost += 1
        del self.replicas[replica]
        self._board.attached = frozenset(self.replicas)
        if self._board.router is not None:
            self._board.router.forget(replica)
        self._watcher.engine_ended(replica)
        _log.info("replica %s is gone; %d are left", replica, len(self.replicas))

    async def _attach(self, replica: str) -> None:
        """Has ``replica`` send its tokens here, and uses it from then on."""
        assert self._inbox is not None
        assert self._board is not None
        assert self._facts is not None
        try:
            while replica in self._ids:
                try:
                    async with asyncio.timeout(_ATTACH_S):
                        attached: Attached = await _awaited(self._handle.attach.remote(replica, self._inbox.address))
                    break
                except (RayError, RayServeException, TimeoutError) as error:
                    _log.warning("replica %s cannot be reached: %s", replica, error)
                    await asyncio.sleep(_BEAT_S)
            else:
                return
        finally:
            del self._attaching[replica]
        if replica not in self._ids:
            return
        facts = attached.facts
        if self._board.router is None:
            self._board.router = make_router(self._router, block_size=facts.block_size, num_blocks=facts.num_blocks)
        self.replicas[replica] = Replica(replica, attached.host, facts, time.monotonic())
        self._watcher.engine_ready(facts, replica)
        self._board.attached = frozenset(self.replicas)
        if not self._facts.done():
            self._facts.set_result(facts)
        _log.info("replica %s on %s is ready; %d are", replica, attached.host, len(self.replicas))

    def _take(self, replica_id: str, message: FromReplica) -> None:
        """Takes a message of a replica."""
        replica = self.replicas.get(replica_id)
        if replica is not None:
            replica.heard_s = time.monotonic()
        if isinstance(message, Report):
            self._requests.take(message)
        elif replica is not None:
            self._take_beat(replica, message)

    def _take_beat(self, replica: Replica, beat: Beat) -> None:
        replica.status = beat.status
        if replica.is_ready and not beat.is_ready:
            self._watcher.engine_ended(replica.id)
            if self._board is not None and self._board.router is not None:
                self._board.router.forget(replica.id)  # its KV cache is empty
        elif beat.is_ready and not replica.is_ready:
            self._watcher.engine_ready(replica.facts, replica.id)
        replica.is_ready, replica.num_restarts = beat.is_ready, beat.num_restarts
        metrics = msgspec.msgpack.decode(beat.metrics, type=Metrics | None)
        if metrics is not None and beat.is_ready:
            self._watcher.engine_counted(metrics, replica.id)

    async def _watch(self) -> None:
        """Looks for replicas that have fallen silent."""
        while True:
            await asyncio.sleep(_BEAT_S)
            self._on_beat()
            assert self._board is not None
            now_s = time.monotonic()
            silent = frozenset(
                one.id for one in self.replicas.values() if now_s - one.heard_s > SILENT_S or not one.is_ready
            )
            for replica in silent - self._board.silent:
                _log.warning("replica %s was not heard for %g s, or its engine restarts", replica, SILENT_S)
            self._board.silent = silent


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function`` in ``loop``, which another thread runs."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)


async def _awaited(response: Any) -> Any:
    return await response


def _replica_text(replica: str | None) -> str:
    return "the replica" if replica is None else f"replica {replica}"
