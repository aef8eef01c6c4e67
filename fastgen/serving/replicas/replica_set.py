"""The server's side of its replicas: the requests in them, and what comes back.

A request whose replica ends before anything of its answer was passed on is sent to another one, under another number,
so that late tokens of the first are not mistaken for its own. A request of which something was passed on fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec

from fastgen.errors import FastgenError, GenerationError
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.routing import RoutedRequest, block_hashes
from fastgen.serving.admission.request_limits import num_sequences
from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    EngineFacts,
    Reply,
    SamplingPacker,
    Status,
    Submit,
    encoder,
)
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.engine.supervisor import State
from fastgen.serving.refusals import EngineDiedError, RefusedError, UnavailableError
from fastgen.serving.replicas.handle import ReplicaHandle
from fastgen.serving.replicas.membership import Membership, Replica
from fastgen.serving.replicas.messages import FromEngine
from fastgen.serving.replicas.questions import Questions
from fastgen.serving.replicas.routing_table import RoutingTable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# Most times that a request is sent to a replica, if replicas or their engines end. A request that ends every engine it
# comes to must not end them all again and again.
MAX_TRIES = 6
# The pause before the second try. It is doubled before each further one.
_FIRST_DELAY_S = 0.04
# How long a request may wait until a replica is ready: so many times as long as loading took, and at least so long.
_WAIT_LOADS, _MIN_WAIT_S = 3, 60.0
# How often it looks for one meanwhile.
_POLL_S = 0.05
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
    """Sends requests to the replicas of one ``generation`` behind ``handle``. ``router`` is a name of
    :data:`~fastgen.runtime.routing.ROUTERS`. ``on_beat`` is called about twice a second as long as the event loop runs.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        handle: ReplicaHandle,
        watcher: EngineWatcher,
        *,
        generation: str,
        router: str = "prefix",
        on_beat: Callable[[], None] = lambda: None,
    ):
        self._handle, self._watcher, self._on_beat = handle, watcher, on_beat
        self._generation, self._router = generation, router
        self._is_stopped = False
        # Numbers of requests and questions differ from those of a server before or beside this one.
        self._numbers = count(secrets.randbits(38) << 24)
        self._packer = SamplingPacker()
        self._requests = OpenRequests(watcher)
        self._sending: dict[EngineRequest, asyncio.Task[None]] = {}
        self._runs: dict[int, _Run] = {}
        self._questions = Questions()
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
            generation=self._generation,
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
            sampling.max_new_tokens * num_sequences(sampling),
            block_hashes(prompt_ids, self.facts.block_size),
            session,
        )
        message = Submit(request.number, prompt_ids, self._packer.pack(sampling), is_stream)
        self._requests.add(request)
        self._sending[request] = task = asyncio.create_task(self._send(request, routed, message))
        task.add_done_callback(lambda _: self._sending.pop(request, None))  # also if it is cancelled before it begins
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
        asked = Check(next(self._numbers), prompt_ids, self._packer.pack(sampling))
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
        self._questions.fail_all(failure)

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
        """Sends ``request`` to replicas until one has answered it, or fails it."""
        failure: Exception
        try:
            await self._try(request, routed, message)
            return
        except RefusedError as error:
            failure = error
        except Exception as error:
            _log.exception("a request could not be sent to a replica")
            failure = GenerationError(f"the request could not be sent to a replica: {error}")
        if request in self._requests:
            request.fail(failure)
            self._requests.drop(request)

    async def _try(self, request: EngineRequest, routed: RoutedRequest, message: Submit) -> None:
        """Sends ``request`` to replicas until one has answered it. Raises ``RefusedError`` if none does."""
        first = request.number
        for attempt in range(1, MAX_TRIES + 1):
            error = await self._run(request, routed, message)
            if error is None:
                return
            if request.was_read or attempt == MAX_TRIES:
                break
            _log.warning("a request is sent to another replica: %s", error)
            await asyncio.sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))
            if request.was_read:
                break
            message.number = self._renumbered[first] = next(self._numbers)
            self._requests.renumber(request, message.number)
        raise EngineDiedError(f"{error}; send it again")

    async def _run(self, request: EngineRequest, routed: RoutedRequest, message: Submit) -> str | None:
        """Runs a request at the replica that the router chooses, until it has ended there. Returns why it gives no
        answer, or ``None``. Raises ``UnavailableError`` if no replica is ready for too long.
        """
        assert self._routes is not None
        assert self._members is not None
        number = message.number
        self._runs[number] = run = _Run(request, None, asyncio.get_running_loop().create_future())
        self._routes.add(number, routed)
        try:
            run.replica = replica = await self._choose(number)
            replica.num_requests += 1
            self._handle.began(replica.id)
            self._remember(number, replica.id)
            self._watcher.request_routed(request, replica.id)
            replica.send(encoder.encode(message))
            return await run.outcome
        finally:
            del self._runs[number]
            self._routes.remove(number)
            if (used := run.replica) is not None:
                if run.outcome.cancelled():
                    used.send(encoder.encode(Cancel(number)))
                used.num_requests -= 1
                self._handle.ended(used.id)
                self._members.left(used)

    async def _choose(self, number: int) -> Replica:
        """Returns the best replica for a request. Waits while none is ready, and raises ``UnavailableError`` if that
        takes too long.
        """
        assert self._routes is not None
        assert self.facts is not None
        load_s = self.facts.load_s
        wait_s = max(_MIN_WAIT_S, _WAIT_LOADS * load_s)
        until_s = time.monotonic() + wait_s
        while not (ranked := self._routes.rank(number)):
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"no replica was ready for {wait_s:.0f} s; try again later", retry_after_s=load_s
                )
            await asyncio.sleep(_POLL_S)
        return self.replicas[ranked[0]]

    def _remember(self, number: int, replica: str) -> None:
        """Notes the replica that a request goes to."""
        self._places[number] = replica
        for remembered in (self._places, self._renumbered):
            while len(remembered) > _MAX_PLACES:
                del remembered[next(iter(remembered))]

    # --- questions

    async def _reply_to(self, message: Ask | Check, target: str | None) -> msgspec.Raw:
        """Sends a question to ``target``, by default the first replica that is ready, and returns its answer."""
        replica = next((one for one in self.replicas.values() if one.is_ready and target in (None, one.id)), None)
        if replica is None:
            raise UnavailableError("this replica is not there now; try again in a moment")
        assert self._members is not None
        try:
            return await self._questions.ask(replica, message)
        finally:
            self._members.left(replica)

    # --- what comes from replicas

    def _replicas_changed(self, ids: list[str]) -> None:
        if not self._is_stopped:
            assert self._members is not None
            self._members.changed(ids)

    def _take(self, message: FromEngine) -> None:
        """Takes what an engine sends of requests and questions."""
        if isinstance(message, Reply):
            self._questions.take(message)
            return
        self._requests.take(message)
        asyncio.get_running_loop().call_soon(self._requests.tell)  # once for all messages of this turn
        for progress in message.progress:
            if progress.end is not None:
                self._end_if_answered(progress.number)
        for refused in message.refused:
            self._end_if_answered(refused.number)

    def _end_if_answered(self, number: int) -> None:
        if (run := self._runs.get(number)) is not None and not (run.request.num_open and run.request in self._requests):
            run.end(None)

    def _lost(self, replica: Replica) -> None:
        """Ends the wait for all that the engine of ``replica`` has yet to answer."""
        error = f"the engine of replica {replica.id} ended while this request was in it"
        for run in self._runs.values():
            if run.replica is replica:
                run.end(error)
        self._questions.lose(replica, error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function`` in ``loop``, which another thread runs."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)
