"""A request in the engine, as the server sees it: its news, and the interface of the watcher that is notified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import EngineFacts, Progress


class _Wait(asyncio.Future[None]):
    """A future that one task awaits. :meth:`end_now` lets this task go on before it returns, not in a later turn of the
    event loop.
    """

    # How the task goes on, and the context in which it does; asyncio gives them when the task begins to wait.
    _go_on: tuple[Callable[[Any], object], Context | None] | None = None

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        super().add_done_callback(callback, context=context)
        self._go_on = callback, context

    def forget(self) -> None:
        """Drops the reference to the task, which refers to this future."""
        self._go_on = None

    def end_now(self) -> None:
        """Ends the wait. If the caller is a task, the waiting task goes on in a later turn: tasks cannot be nested."""
        if self._go_on is None or asyncio.current_task() is not None:
            self.set_result(None)
            return
        callback, context = self._go_on
        self.remove_done_callback(callback)
        self.set_result(None)
        assert context is not None
        context.run(callback, self)  # the loop runs no caller in this very context, in which it could not be entered


class EngineRequest:
    """A request in the engine. Its news can be taken as they come; a failure is raised as an exception."""

    def __init__(self, number: int, num_prompt_tokens: int, sampling: SamplingParams, arrived_s: float):
        self.number, self.num_prompt_tokens, self.sampling = number, num_prompt_tokens, sampling
        # When it arrived at the server, by ``time.monotonic``.
        self.arrived_s = arrived_s
        # Whether its first token has come.
        self.has_started = False
        # Completions that have not ended.
        self.num_open = sampling.n
        # Whether any news were taken. If so, it cannot begin again.
        self.was_read = False
        self._news: list[Progress] = []
        self._failure: Exception | None = None
        self._wait: _Wait | None = None

    async def news(self) -> list[Progress]:
        """Waits for news and returns everything since the last call. Only one caller may wait at a time. Raises the
        failure of the request.
        """
        while not self._news:
            if self._failure is not None:
                raise self._failure
            await self._until_told()
        news, self._news = self._news, []
        self.was_read = True
        return news

    async def ended(self) -> None:
        """Waits until all completions have ended, or the request has failed. Takes no news, so until then it can begin
        again.
        """
        while self.num_open and self._failure is None:
            await self._until_told()

    async def _until_told(self) -> None:
        wait = self._wait = _Wait()
        try:
            await wait
        finally:
            wait.forget()
            if self._wait is wait:
                self._wait = None

    def begin_again(self, number: int) -> None:
        """Drops the news that were not taken, before the request is sent again under another ``number``. News that
        still come under the old number are then ignored.
        """
        assert not self.was_read
        self.number, self.has_started, self.num_open = number, False, self.sampling.n
        self._news.clear()

    def add(self, progress: Progress) -> None:
        """Adds news; :meth:`tell` tells who waits for them."""
        if progress.end is not None:
            self.num_open -= 1
        self._news.append(progress)

    def add_token(self, token_id: int) -> None:
        """Adds the next token of a stream that has nothing but tokens to report, as :meth:`add` does."""
        if self._news:
            self._news[-1].token_ids.append(token_id)  # the last news were not taken yet
        else:
            self._news.append(Progress(self.number, 0, [token_id], None, None))

    def tell(self) -> None:
        """Lets who waits for news go on with them before this returns, if the caller is no task."""
        if self._wait is not None and not self._wait.done():
            self._wait.end_now()

    def fail(self, failure: Exception) -> None:
        """Ends the request: ``failure`` is raised where its news are awaited."""
        self._failure = failure
        if self._wait is not None and not self._wait.done():
            self._wait.set_result(None)


class EngineWatcher(Protocol):
    """Receives the events of engines and of their requests. A server without replicas has one engine, named ``""``."""

    def engine_ready(self, facts: EngineFacts, replica: str = "") -> None:
        """An engine is ready and has no requests yet."""

    def engine_counted(self, metrics: Metrics, replica: str = "") -> None:
        """Receives the engine's counters up to now."""

    def engine_away(self, replica: str = "") -> None:
        """The engine gets no more requests for now. It may still count, or be ready again."""

    def engine_ended(self, replica: str = "") -> None:
        """The engine has ended, and all its requests with it."""

    def request_routed(self, request: EngineRequest, replica: str) -> None:
        """The request was sent to this replica. Called again if it is sent to another."""

    def request_started(self, request: EngineRequest) -> None:
        """The first token of a request came."""

    def completion_ended(self, request: EngineRequest, progress: Progress) -> None:
        """``progress`` is the last of one of its completions."""

    def request_gone(self, request: EngineRequest) -> None:
        """The request has ended, or was cancelled or refused. Called once per request."""
