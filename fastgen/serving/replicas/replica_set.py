"""The server's side of its replicas: the requests in them, and what comes back.

A request whose replica ends before anything of its answer was passed on is sent to another one, under another number,
so that late tokens of the first are not mistaken for its own. A request of which something was passed on fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec

from fastgen.errors import FastgenError, GenerationError
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.routing import RoutedRequest, block_hashes
from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    EngineFacts,
    Reply,
    Report,
    Status,
    Submit,
    encoder,
    pack_sampling,
)
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.engine.supervisor import State
from fastgen.serving.refusals import EngineDiedError, UnavailableError
from fastgen.serving.replicas.handle import RAY_ERRORS, ReplicaHandle
from fastgen.serving.replicas.membership import Membership, Replica
from fastgen.serving.replicas.messages import FromReplica, Lost
from fastgen.serving.replicas.routing_table import RoutingTable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# How often a request is sent to replicas, where they or their engines end. One that ends every engine it comes to must
# not end them all again and again.
MAX_TRIES = 6
# The pause before the second of them; doubled each time.
_FIRST_DELAY_S = 0.02
# Requests whose replica is remembered: as many as recordings have.
_MAX_PLACES = 10_000


@dataclass(eq=False)
class _Run:
    """A request under one of its numbers."""

    request: EngineRequest
    # ``None`` until it is sent.
    replica: Replica | None
    # Its result once it has ended: ``None``, or why its replica gives no answer.
    outcome: asyncio.Future[str | None]

    def end(self, error: str | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(error)


class ReplicaSet:
    """Sends requests to the replicas behind ``handle``. ``router`` is a name of
    :data:`~fastgen.runtime.routing.ROUTERS`. ``on_beat`` is called about twice a second as long as the event loop runs.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        handle: ReplicaHandle,
        watcher: EngineWatcher,
        *,
        router: str = "prefix",
        on_beat: Callable[[], None] = lambda: None,
    ):
        self._handle, self._watcher, self._router, self._on_beat = handle, watcher, router, on_beat
        self._is_stopped = False
        # Numbers of requests and questions differ from those of a server before or beside this one.
        self._numbers = count(secrets.randbits(38) << 24)
        self._requests = OpenRequests(watcher)
        self._sending: dict[EngineRequest, asyncio.Task[None]] = {}
        self._runs: dict[int, _Run] = {}
        # The open questions with the replicas that they went to, by their numbers.
        self._asked: dict[int, tuple[Replica, asyncio.Future[msgspec.Raw]]] = {}
        # The replica of the last requests, by their numbers.
        self._places: dict[int, str] = {}
        # The last number of those that were sent again, by their first.
        self._renumbered: dict[int, int] = {}
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
        """Returns how often a replica was lost, and engines of replicas were restarted. It never falls."""
        return 0 if self._members is None else self._members.num_restarts

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
        self._routes = RoutingTable.current = RoutingTable(lambda ids: _call(loop, self._replicas_changed, ids))
        self._members = members = Membership(
            self._handle,
            secrets.token_hex(8),
            self._routes,
            self._watcher,
            router=self._router,
            on_message=self._take,
            on_lost=self._lost,
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
        ``UnavailableError`` if there is none, ``EngineDiedError`` if it ends before it has answered, and
        ``GenerationError`` if it cannot answer.
        """
        return msgspec.msgpack.decode(await self._reply_to(Ask(next(self._numbers), what), replica), type=kind)

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Returns why an engine would refuse such a request, or ``None``. Raises like :meth:`ask`."""
        asked = Check(next(self._numbers), prompt_ids, pack_sampling(sampling))
        return msgspec.msgpack.decode(await self._reply_to(asked, None), type=str | None)

    async def count(self) -> None:
        """Passes the counters of all engines to the watcher."""

        async def count_one(replica: str) -> None:
            with contextlib.suppress(UnavailableError, EngineDiedError, GenerationError):
                counted = await self.ask("metrics", Metrics, replica=replica)
                one = self.replicas.get(replica)
                if one is not None and one.is_ready:  # else its engine has ended meanwhile
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
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(failure)

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

    # --- requests

    async def _send(self, request: EngineRequest, routed: RoutedRequest, message: Submit) -> None:
        """Sends ``request`` to replicas until one has answered it."""
        first = request.number
        try:
            for attempt in range(1, MAX_TRIES + 1):
                error = await self._run(request, routed, message)
                if error is None:
                    return
                if request.was_read or attempt == MAX_TRIES:
                    break
                _log.warning("a request is sent to another replica: %s", error)
                await asyncio.sleep(_FIRST_DELAY_S * 2**attempt)
                if request.was_read:
                    break
                message.number = self._renumbered[first] = next(self._numbers)
                self._requests.renumber(request, message.number)
            if request in self._requests:
                request.fail(EngineDiedError(f"{error}; send it again"))
                self._requests.drop(request)
        finally:
            self._sending.pop(request, None)

    async def _run(self, request: EngineRequest, routed: RoutedRequest, message: Submit) -> str | None:
        """Runs a request at the replica that the router chooses, until it has ended there. Returns why it gives no
        answer, or ``None``.
        """
        assert self._routes is not None
        assert self._members is not None
        number = message.number
        self._runs[number] = run = _Run(request, None, asyncio.get_running_loop().create_future())
        self._routes.add(number, routed)
        try:
            chosen = await self._handle.choose(number)
            run.replica = replica = self.replicas.get(chosen)
            if replica is None:
                return _ended(chosen)
            replica.num_requests += 1
            self._handle.began(chosen)
            self._remember(number, chosen)
            self._watcher.request_routed(request, chosen)
            replica.link.send(encoder.encode(message))
            return await run.outcome
        except RAY_ERRORS as error:
            return f"Ray Serve chose no replica: {type(error).__name__}"
        finally:
            del self._runs[number]
            self._routes.remove(number)
            if (replica := run.replica) is not None:
                if run.outcome.cancelled():
                    replica.link.send(encoder.encode(Cancel(number)))
                replica.num_requests -= 1
                self._handle.ended(replica.id)
                self._members.left(replica)

    def _remember(self, number: int, replica: str) -> None:
        """Notes the replica that a request goes to."""
        self._places[number] = replica
        for remembered in (self._places, self._renumbered):
            while len(remembered) > _MAX_PLACES:
                del remembered[next(iter(remembered))]

    # --- questions

    async def _reply_to(self, message: Ask | Check, target: str | None) -> msgspec.Raw:
        """Sends a question to ``target``, by default the first replica that is ready, and returns its answer."""
        replica = next(
            (one for one in self.replicas.values() if (one.is_ready if target is None else one.id == target)), None
        )
        if replica is None:
            raise UnavailableError("this replica is not there now; try again in a moment")
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        assert self._members is not None
        self._asked[message.number] = replica, answer
        replica.num_requests += 1
        try:
            replica.link.send(encoder.encode(message))
            return await answer
        finally:
            del self._asked[message.number]
            replica.num_requests -= 1
            self._members.left(replica)

    def _answer(self, number: int, body: msgspec.Raw, failure: Exception | None = None) -> None:
        _, answer = self._asked.get(number, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(body) if failure is None else answer.set_exception(failure)

    # --- what comes from replicas

    def _replicas_changed(self, ids: list[str]) -> None:
        if not self._is_stopped:
            assert self._members is not None
            self._members.changed(ids)

    def _take(self, replica: Replica, message: FromReplica) -> None:
        """Takes a message about requests and questions."""
        match message:
            case Report():
                self._requests.take(message)
                for progress in message.progress:
                    if progress.end is not None:
                        self._end_if_answered(progress.number)
                for refused in message.refused:
                    self._end_if_answered(refused.number)
            case Reply():
                failure = None if message.error is None else GenerationError(message.error)
                self._answer(message.number, message.body, failure)
            case Lost():
                self._fail(message.numbers, message.error)

    def _end_if_answered(self, number: int) -> None:
        if (run := self._runs.get(number)) is not None and not (run.request.num_open and run.request in self._requests):
            run.end(None)

    def _lost(self, replica: Replica) -> None:
        """Ends the wait for all that ``replica`` has yet to answer."""
        numbers = [number for number, run in self._runs.items() if run.replica is replica]
        numbers += [number for number, (asked, _) in self._asked.items() if asked is replica]
        self._fail(numbers, _ended(replica.id))

    def _fail(self, numbers: Iterable[int], error: str) -> None:
        for number in numbers:
            if (run := self._runs.get(number)) is not None:
                run.end(error)
            else:
                self._answer(number, msgspec.Raw(), EngineDiedError(error))


def _ended(replica: str) -> str:
    return f"replica {replica} ended while this request was in it"


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function`` in ``loop``, which another thread runs."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)
