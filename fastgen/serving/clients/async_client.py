"""The client for asyncio, whose methods are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast, overload

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.prompts import Conversation, Prompt, as_conversations, as_prompts, name_prompt
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.clients.requests import ClientRequest, Transport, as_requests, batches, of_messages, of_prompt
from fastgen.serving.refusals import OverloadedError

_MAX_CONCURRENCY = 64  # requests of one call that the server has at the same time
_MAX_CHECKED = 16  # requests checked by one message, which must not grow too large
_MAX_REFUSALS = 100  # tries of a request in a row, while no other request of its call is answered
_T = TypeVar("_T")


class AsyncClient:
    """A client for asyncio. Its methods and their results are those of :class:`~fastgen.runtime.llm.LLM`."""

    def __init__(self, transport: Transport, deployment: Deployment | None = None):
        self._transport, self._deployment = transport, deployment

    @overload
    async def generate(
        self, prompts: Prompt, sampling: SamplingParams | None = None, **fields: Any
    ) -> GenerationOutput: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[GenerationOutput]: ...

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answers one prompt, or several at once; see :meth:`LLM.generate <fastgen.runtime.llm.LLM.generate>`.

        Several prompts are all checked before any of them is sent. If the server refuses one later, because it stays
        overloaded for too long or is ending, the call and all its requests end.
        """
        items, single = as_prompts(prompts)
        outputs = await self._run(as_requests(items, sampling, fields, of_prompt))
        return outputs[0] if single else outputs

    @overload
    async def chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any
    ) -> GenerationOutput: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[GenerationOutput]: ...

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answers one conversation, or several at once, as :meth:`generate` does for prompts."""
        items, single = as_conversations(messages)
        outputs = await self._run(as_requests(items, sampling, fields, of_messages))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> AsyncStream:
        """Answers one prompt piece by piece. It must be called in the event loop. The request is sent at once; closing
        the stream, or dropping it, cancels the request.
        """
        items, single = as_prompts(prompt)
        if not single:
            raise InvalidArgumentError("stream takes one prompt: a string or a list of token ids")
        return AsyncStream(self._transport.stream(*as_requests(items, sampling, fields, of_prompt)))

    def stream_chat(self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any) -> AsyncStream:
        """Answers one conversation piece by piece; see :meth:`stream`."""
        items, single = as_conversations(messages)
        if not single:
            raise InvalidArgumentError("stream_chat takes one conversation: a list of {'role': …, 'content': …}")
        return AsyncStream(self._transport.stream(*as_requests(items, sampling, fields, of_messages)))

    async def info(self) -> dict[str, Any]:
        """Returns what is served: ``model``, ``version``, ``state``, and the engine's sizes."""
        return await self._transport.info()

    async def terminate_server(self) -> None:
        """Ends the server after its running requests are answered. A client made from an address needs an API key for
        this.
        """
        await self._transport.terminate(None if self._deployment is None else self._deployment.token)
        if self._deployment is not None:
            await asyncio.to_thread(self._deployment.wait_until_gone)

    async def close(self) -> None:
        """Closes this client's connections. The server continues."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _check(self, requests: list[ClientRequest]) -> None:
        num_checked = 0
        for batch in batches(requests, _MAX_CHECKED):
            for index, why in enumerate(await self._transport.check(batch), num_checked):
                if why is not None:
                    error = InvalidArgumentError(why)
                    name_prompt(error, index, len(requests))
                    raise error
            num_checked += len(batch)

    async def _run(self, requests: list[ClientRequest]) -> list[GenerationOutput]:
        if len(requests) > 1:
            await self._check(requests)
        places, num_answered = asyncio.Semaphore(_MAX_CONCURRENCY), 0

        async def one(index: int, request: ClientRequest) -> GenerationOutput:
            nonlocal num_answered
            async with places:
                num_refusals, num_before = 0, num_answered
                while True:
                    try:
                        output = await self._transport.generate(request)
                        num_answered += 1
                        return output
                    except InvalidArgumentError as error:
                        name_prompt(error, index, len(requests))
                        raise
                    except OverloadedError as error:
                        num_refusals = num_refusals + 1 if num_before == num_answered else 1
                        num_before = num_answered
                        if len(requests) == 1 or num_refusals == _MAX_REFUSALS:
                            raise
                        await asyncio.sleep(error.retry_after_s)  # the other requests of this call are part of the load

        tasks = [asyncio.ensure_future(one(index, request)) for index, request in enumerate(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class AsyncStream(AsyncIterator[GenerationChunk]):
    """The chunks of one request. After the last one, :attr:`output` is the whole answer."""

    def __init__(self, items: AsyncIterator[GenerationChunk | GenerationOutput]):
        self._items = items
        self._output: GenerationOutput | None = None
        self._first: asyncio.Task[GenerationChunk | GenerationOutput] | None = None
        self._loop = asyncio.get_running_loop()
        self._first = self._loop.create_task(_next(items))
        self._first.add_done_callback(_mark_retrieved)

    async def __anext__(self) -> GenerationChunk:
        first, self._first = self._first, None
        item = await (anext(self._items) if first is None else first)
        if isinstance(item, GenerationChunk):
            return item
        self._output = item
        await self.aclose()
        raise StopAsyncIteration

    @property
    def output(self) -> GenerationOutput:
        """Returns the whole answer, once the stream has ended by itself."""
        if self._output is None:
            raise FastgenError("the stream has not ended; take its chunks before asking for the output")
        return self._output

    async def aclose(self) -> None:
        """Cancels the request if it has not finished."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait({self._first})
            self._first = None
        await cast(Any, self._items).aclose()

    def __del__(self) -> None:
        if self._first is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._first.cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _next(items: AsyncIterator[_T]) -> _T:
    return await anext(items)


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Marks the exception of ``task`` as retrieved, so that asyncio does not log it for a caller that dropped the
    stream.
    """
    if not task.cancelled():
        task.exception()
