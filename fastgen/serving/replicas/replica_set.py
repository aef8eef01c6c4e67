"""The server's side of its replicas: the requests in them, and what comes back.

A request whose replica ends before anything of its answer was passed on is sent to another one; what is late from the
first is told apart by its number. A request of which something was passed on fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, TypeVar

import msgspec
from ray.serve.handle import DeploymentHandle

from fastgen.errors import FastgenError, GenerationError
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.routing import RoutedRequest, block_hashes
from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.engine.messages import EngineFacts, Report, Status, Submit, encoder, pack_sampling
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.engine.supervisor import State
from fastgen.serving.refusals import EngineDiedError, UnavailableError
from fastgen.serving.replicas.inbox import Inbox
from fastgen.serving.replicas.membership import RAY_ERRORS, Membership, Replica, awaited
from fastgen.serving.replicas.messages import Answered, FromReplica
from fastgen.serving.replicas.routing_table import RoutingTable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# How often a request is sent to replicas, where they or their engines end. One that ends every engine it comes to must
# not end them all again and again.
MAX_TRIES = 6
# The pause before the second of them; doubled each time.
_FIRST_DELAY_S = 0.02
# How long the last tokens of an answer may take after Ray has reported its end.
_LAST_NEWS_S = 10.0
# Requests whose replica is remembered: as many as recordings have.
_MAX_PLACES = 10_000
# How often a question looks whether its replica is still there.
_POLL_S = 0.5


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
        # By the number of a request in a replica: ends the wait for it where the replica is silent for too long.
        self._losing: dict[int, asyncio.Future[Answered]] = {}
        # The replica of the last requests, by their numbers.
        self._places: dict[int, str] = {}
        # The last number of those that were sent again, by their first.
        self._renumbered: dict[int, int] = {}
        self._inbox: Inbox | None = None
        self._routes: RoutingTable | None = None
        self._members: Membership | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Returns the attached replicas, by their ids."""
        return {} if self._members is None else self._members.replicas

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
        return self._members.facts.result() if self._members is not None and self._members.facts.done() else None

    @property
    def status(self) -> Status:
        """Returns the load of all replicas together."""
        each = [replica.status for replica in self.replicas.values()]
        return Status(*(sum(getattr(one, name) for one in each) for name in Status.__struct_fields__))

    @property
    def num_restarts(self) -> int:
        """Returns how many replicas are gone, and how often the engines of the present ones were restarted."""
        num_gone = 0 if self._members is None else self._members.num_gone
        return num_gone + sum(replica.num_restarts for replica in self.replicas.values())

    @property
    def num_open(self) -> int:
        """Returns the number of requests whose last message has not been taken."""
        return len(self._requests)

    def replica_views(self) -> list[ReplicaView]:
        """Returns the state of each replica."""
        routes = self._routes
        router, silent = (None, frozenset()) if routes is None else (routes.router, routes.silent)
        return [
            ReplicaView(
                id=one.id,
                host=one.host,
                state="restarting" if not one.is_ready else "silent" if one.id in silent else "ready",
                num_running=one.status.num_running,
                num_waiting=one.status.num_waiting,
                outstanding_tokens=0 if router is None else router.outstanding(one.id),
                num_restarts=one.num_restarts,
            )
            for one in sorted(self.replicas.values(), key=lambda one: one.id)
        ]

    async def start(self) -> EngineFacts:
        """Waits until a replica is ready. Raises ``FastgenError`` if none can be used."""
        loop = asyncio.get_running_loop()
        self._inbox = Inbox(secrets.token_hex(8), self._host, self._take)
        self._routes = RoutingTable.current = RoutingTable(
            lambda ids: _call(loop, self._replicas_changed, ids),
            lambda number, replica: _call(loop, self._routed, number, replica),
        )
        self._members = members = Membership(
            self._handle, self._inbox.address, self._routes, self._watcher, router=self._router, on_lost=self._lost
        )
        self._tasks = [asyncio.create_task(members.watch(self._on_beat)), asyncio.create_task(members.discover())]
        outcomes: set[asyncio.Future[Any]] = {members.facts, members.failure}
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        if members.failure.done():
            raise FastgenError(members.failure.result())
        return members.facts.result()

    async def failed(self) -> str:
        """Waits until replicas can never be used, and returns why. Those that end are replaced by Ray Serve."""
        assert self._members is not None
        return await asyncio.shield(self._members.failure)

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
        routed = RoutedRequest(
            len(prompt_ids),
            sampling.max_new_tokens * max(sampling.n, sampling.beam_width),
            block_hashes(prompt_ids, self.facts.block_size),
            session,
        )
        message = Submit(request.number, prompt_ids, pack_sampling(sampling), is_stream)
        self._requests.add(request)
        self._sending[request] = asyncio.create_task(self._send(request, routed, message))
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
        ``RefusedError`` if there is none, and ``GenerationError`` if it cannot answer.
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
        tasks = [*self._sending.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        if self._members is not None:
            await self._members.stop()
        if self._routes is not None and RoutingTable.current is self._routes:
            RoutingTable.current = None
        if self._inbox is not None:
            self._inbox.close()

    # --- requests

    async def _send(self, request: EngineRequest, routed: RoutedRequest, message: Submit) -> None:
        """Sends ``request`` to replicas until one has answered it."""
        first = request.number
        try:
            for attempt in range(1, MAX_TRIES + 1):
                answered = await self._run(message, routed, request.sampling.n)
                if answered.error is None:
                    await self._await_last_news(request)
                    return
                if request.was_read or attempt == MAX_TRIES:
                    break
                _log.warning("a request is sent to another replica: %s", answered.error)
                await asyncio.sleep(_FIRST_DELAY_S * 2**attempt)
                if request.was_read:
                    break
                message.number = self._renumbered[first] = next(self._numbers)
                self._requests.renumber(request, message.number)
            self._fail(request, EngineDiedError(f"{answered.error}; send it again"))
        finally:
            self._sending.pop(request, None)

    async def _run(self, message: Submit, routed: RoutedRequest, num_sequences: int) -> Answered:
        """Runs a request at the replica that the router chooses, until it has ended there, or is lost."""
        assert self._inbox is not None
        assert self._routes is not None
        number = message.number
        self._routes.add(number, routed)
        response: Any = self._handle.run.remote(
            number, self._inbox.address.server, encoder.encode(message), num_sequences
        )
        answer: asyncio.Future[Answered] = asyncio.ensure_future(awaited(response))
        lost: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._losing[number] = lost
        try:
            done, _ = await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        except RAY_ERRORS as error:
            return Answered(error=f"{self._place_text(number)} ended while this request was in it: {_kind(error)}")
        finally:
            del self._losing[number]
            self._routes.remove(number)
            if not answer.done():
                response.cancel()
                answer.cancel()

    async def _await_last_news(self, request: EngineRequest) -> None:
        """Waits for what is still on its way of an answer that has ended, and fails ``request`` if that does not
        come.
        """
        for delay_s in (0.01, 0.1, 1.0, _LAST_NEWS_S):
            if not request.num_open or request not in self._requests:
                return
            await asyncio.sleep(delay_s)
        self._fail(request, EngineDiedError("the end of this answer was lost between the replica and the server"))

    def _fail(self, request: EngineRequest, failure: Exception) -> None:
        if request in self._requests:
            request.fail(failure)
            self._requests.drop(request)

    def _routed(self, number: int, replica: str) -> None:
        """Notes the replica that a request went to."""
        self._places[number] = replica
        for remembered in (self._places, self._renumbered):
            while len(remembered) > _MAX_PLACES:
                del remembered[next(iter(remembered))]
        if (request := self._requests.numbered(number)) is not None:
            self._watcher.request_routed(request, replica)

    def _lost(self, replica: str) -> None:
        """Ends the wait for all requests in a replica that is silent for too long, or on their way to it."""
        assert self._routes is not None
        for number, lost in self._losing.items():
            if self._routes.place(number) == replica and not lost.done():
                lost.set_result(Answered(error=f"replica {replica} has fallen silent with this request in it"))

    def _place_text(self, number: int) -> str:
        replica = self._places.get(number)
        return "the replica" if replica is None else f"replica {replica}"

    # --- replicas

    def _replicas_changed(self, ids: list[str]) -> None:
        if not self._is_stopped:
            assert self._members is not None
            self._members.changed(ids)

    def _take(self, replica: str, message: FromReplica) -> None:
        """Takes a message of a replica."""
        assert self._members is not None
        self._members.heard(replica)
        if isinstance(message, Report):
            self._requests.take(message)
        else:
            self._members.take(replica, message)

    async def _call(self, replica: str | None, method: str, *arguments: Any) -> bytes:
        """Calls ``method`` of a replica, by default the first that is ready, and returns its answer."""
        target = replica or next((one.id for one in self.replicas.values() if one.is_ready), None)
        if target is None or target not in self.replicas:
            raise UnavailableError("this replica is not there now; try again in a moment")
        response = getattr(self._handle, method).remote(target, *arguments)
        answer = asyncio.ensure_future(awaited(response))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=_POLL_S)
                if not answer.done() and target not in self.replicas:
                    raise EngineDiedError(f"replica {target} ended before it had answered")
            answered: Answered = answer.result()
        except RAY_ERRORS as error:
            raise EngineDiedError(f"replica {target} ended before it had answered: {_kind(error)}") from error
        finally:
            if not answer.done():
                response.cancel()
                answer.cancel()
        if answered.error is not None:
            raise EngineDiedError(answered.error) if answered.has_died else GenerationError(answered.error)
        return answered.body


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function`` in ``loop``, which another thread runs."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)


def _kind(error: BaseException) -> str:
    """Returns what Ray calls an error; its text fills pages."""
    return type(error).__name__
