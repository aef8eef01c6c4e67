"""The server's side of the engine: the requests in it, their progress, and questions to it.

When the engine's process ends, the requests in it fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from itertools import count
from typing import Any, TypeVar

import msgspec

from fastgen.errors import GenerationError
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    EngineFacts,
    Reply,
    Report,
    SamplingPacker,
    Status,
    Submit,
)
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.engine.supervisor import EngineProcess, State
from fastgen.serving.refusals import EngineDiedError, UnavailableError

_T = TypeVar("_T")


class EngineClient:
    """Holds the requests in an engine, whose process it starts and keeps running; see :class:`EngineProcess`.

    All methods belong to one event loop.
    """

    def __init__(self, arguments: Mapping[str, Any], watcher: EngineWatcher, *, timeout_s: float):
        self._watcher = watcher
        self.process = EngineProcess(arguments, self, timeout_s=timeout_s)
        self.status = Status(0, 0, 0)
        self._numbers = count()
        self._packer = SamplingPacker()
        self._requests = OpenRequests(watcher, self.process.answered)
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._counting: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        return self.process.state

    @property
    def facts(self) -> EngineFacts | None:
        """Returns the properties of the engine, once it is loaded."""
        return self.process.facts

    @property
    def num_restarts(self) -> int:
        return self.process.num_restarts

    @property
    def num_open(self) -> int:
        """Returns the number of requests whose last message has not been taken."""
        return len(self._requests)

    @property
    def pid(self) -> int | None:
        """Returns the id of the process, or ``None`` if there is none."""
        return self.process.pid

    async def start(self) -> EngineFacts:
        """Starts the process and waits until its model is loaded. Raises ``FastgenError`` if that fails."""
        return await self.process.start()

    async def failed(self) -> str:
        """Waits until the engine is given up, since it cannot be restarted, and returns the reason."""
        assert self.process.failure is not None
        return await asyncio.shield(self.process.failure)

    def check_ready(self) -> None:
        """Raises ``UnavailableError`` if requests cannot be accepted now."""
        self.process.check_ready()

    def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        is_stream: bool,
        arrived_s: float,
        session: str | None = None,
    ) -> EngineRequest:
        """Sends a request that arrived at ``arrived_s`` of ``time.monotonic``. A refusal by the engine comes with the
        first news. ``session`` makes no difference to a single engine.
        """
        self.check_ready()
        request = EngineRequest(next(self._numbers), len(prompt_ids), sampling, arrived_s)
        self.process.send(Submit(request.number, prompt_ids, self._packer.pack(sampling), is_stream))
        self._requests.add(request)
        return request

    def cancel(self, request: EngineRequest) -> None:
        """Ends ``request``, whose result is no longer needed. The engine drops it before the next step."""
        if self._requests.drop(request) and request.num_open and self.state == "ready":
            with contextlib.suppress(UnavailableError):
                self.process.send(Cancel(request.number))

    def finish(self, request: EngineRequest) -> None:
        """Forgets ``request`` after all its news were taken."""
        self._requests.drop(request)

    async def ask(self, what: str, kind: type[_T], *, replica: str | None = None) -> _T:
        """Returns the engine's answer to ``what``, a key of ``engine_process.ANSWERS``, computed between two steps.
        Raises ``GenerationError`` if the engine cannot answer.
        """
        return msgspec.msgpack.decode(await self._reply_to(Ask(next(self._numbers), what)), type=kind)

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Returns why the engine would refuse such a request, or ``None``. Raises like :meth:`ask`."""
        asked = Check(next(self._numbers), prompt_ids, self._packer.pack(sampling))
        return msgspec.msgpack.decode(await self._reply_to(asked), type=str | None)

    def replica_views(self) -> list[ReplicaView]:
        """Returns an empty list: there is one engine."""
        return []

    def place_of(self, number: int) -> tuple[str, int] | None:
        """Returns the only engine there is, and the same number."""
        return "", number

    async def _reply_to(self, message: Ask | Check) -> msgspec.Raw:
        self.check_ready()
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._asked[message.number] = answer
        try:
            self.process.send(message)
            return await answer
        finally:
            self._asked.pop(message.number, None)
            if answer.cancelled() and self.state == "ready":  # the caller has given up
                with contextlib.suppress(UnavailableError):
                    self.process.send(Cancel(message.number))

    async def count(self) -> None:
        """Passes the engine's counters to the watcher, if the engine is running."""
        with contextlib.suppress(UnavailableError, EngineDiedError, GenerationError):
            counted = await self.ask("metrics", Metrics)
            if self.state == "ready":  # else the process has ended meanwhile, and its counters are void
                self._watcher.engine_counted(counted)

    def fail_all(self, failure: Exception) -> None:
        """Ends all requests in the engine with ``failure``."""
        for request in self._requests:
            request.fail(failure)
            self.cancel(request)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(failure)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the process, by force after ``timeout_s``. Its requests fail."""
        self.fail_all(UnavailableError("the server is ending"))
        if self._counting is not None:
            self._counting.cancel()
        await self.process.stop(timeout_s)

    # --- what comes from the process

    def engine_ready(self, facts: EngineFacts) -> None:
        """See :class:`EngineListener`, as the other methods below."""
        self._watcher.engine_ready(facts)

    def engine_sent(self, message: Report | Reply, encoded: bytes) -> None:
        if isinstance(message, Report):
            self._requests.take(message)
            if message.status is not None:
                self.status = message.status
        elif (asked := self._asked.get(message.number)) is not None and not asked.done():
            if message.error is None:
                asked.set_result(message.body)
            else:
                asked.set_exception(GenerationError(message.error))

    def engine_read(self) -> None:
        self._requests.tell()

    def engine_beat(self) -> None:
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self.count())

    def engine_ended(self, failure: Exception) -> None:
        self.fail_all(failure)
        self._watcher.engine_ended()
