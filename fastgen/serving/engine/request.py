"""A request that is in the engine, as the server sees it: its news, and who is told of them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import EngineFacts, Progress


class EngineRequest:
    """A request in the engine. Its news are there to be taken as they come; a failure comes as an exception."""

    def __init__(self, number: int, num_prompt_tokens: int, sampling: SamplingParams, arrived_s: float):
        self.number, self.num_prompt_tokens, self.sampling = number, num_prompt_tokens, sampling
        # When it came to the server, by ``time.monotonic``.
        self.arrived_s = arrived_s
        # Whether a token of it came.
        self.has_started = False
        # Completions that have not ended.
        self.num_open = sampling.n
        self._news: list[Progress] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def news(self) -> list[Progress]:
        """What has come since the last call, at least something; one at a time may ask. Raises what it failed with."""
        while not self._news:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, []
        return news

    def add(self, progress: Progress) -> None:
        """There are news."""
        self._news.append(progress)
        self._wake()

    def add_token(self, token_id: int) -> None:
        """The next token of a stream of which there is nothing else to tell."""
        if self._news:
            self._news[-1].token_ids.append(token_id)  # nobody has come for the last yet
        else:
            self._news.append(Progress(self.number, 0, [token_id], None, None))
            self._wake()

    def fail(self, failure: Exception) -> None:
        """End it: ``failure`` is raised where its news are awaited."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineWatcher(Protocol):
    """Hears of what happens to an engine and the requests in it."""

    def engine_ready(self, facts: EngineFacts) -> None:
        """A process is ready that has done nothing yet."""

    def engine_counted(self, metrics: Metrics) -> None:
        """What the process has counted so far."""

    def engine_ended(self) -> None:
        """The process is no more, nor anything that was in it."""

    def request_started(self, request: EngineRequest) -> None:
        """Its first token came."""

    def completion_ended(self, request: EngineRequest, progress: Progress) -> None:
        """``progress`` is the last of one of its completions."""

    def request_gone(self, request: EngineRequest) -> None:
        """It has ended, or was cancelled or refused. Told once."""
