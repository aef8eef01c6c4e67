"""The client with blocking methods."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from fastgen.errors import FastgenError
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.prompts import Conversation, Prompt
from fastgen.serving.clients.async_client import AsyncClient, AsyncStream

_T = TypeVar("_T")


class Client:
    """A client with blocking methods: an :class:`AsyncClient` in an event loop of its own, on a thread of its own."""

    def __init__(self, make: Callable[[], AsyncClient]):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastgen-client", daemon=True)
        self._thread.start()

        async def made() -> AsyncClient:
            return make()  # created in the loop that its connections will belong to

        try:
            self._inner = self._wait(made())
        except BaseException:
            self._stop()
            raise

    @overload
    def generate(self, prompts: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[GenerationOutput]: ...

    def generate(self, prompts: Any, sampling: Any = None, **fields: Any) -> Any:
        """See :meth:`AsyncClient.generate`. Ctrl-C cancels these requests."""
        return self._wait(self._inner.generate(prompts, sampling, **fields))

    @overload
    def chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any
    ) -> GenerationOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[GenerationOutput]: ...

    def chat(self, messages: Any, sampling: Any = None, **fields: Any) -> Any:
        """See :meth:`AsyncClient.chat`."""
        return self._wait(self._inner.chat(messages, sampling, **fields))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> ClientStream:
        """Answers one prompt piece by piece. The request is sent at once; closing the stream, or dropping it, cancels
        the request.
        """

        async def begin() -> AsyncStream:
            return self._inner.stream(prompt, sampling, **fields)

        return ClientStream(self, self._wait(begin()))

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any
    ) -> ClientStream:
        """Answers one conversation piece by piece; see :meth:`stream`."""

        async def begin() -> AsyncStream:
            return self._inner.stream_chat(messages, sampling, **fields)

        return ClientStream(self, self._wait(begin()))

    def info(self) -> dict[str, Any]:
        """See :meth:`AsyncClient.info`."""
        return self._wait(self._inner.info())

    def terminate_server(self) -> None:
        """See :meth:`AsyncClient.terminate_server`; this client is closed afterwards."""
        self._wait(self._inner.terminate_server())
        self.close()

    def close(self) -> None:
        """Closes this client's connections; the server continues. Closing twice does nothing."""
        if self._loop.is_closed():
            return
        self._wait(self._inner.close())
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise FastgenError("this client is closed; make another")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # matters if Ctrl-C ended the wait
            raise


class ClientStream(Iterator[GenerationChunk]):
    """The chunks of one request. After the last one, :attr:`output` is the whole answer."""

    def __init__(self, client: Client, inner: AsyncStream):
        self._client, self._inner = client, inner

    def __next__(self) -> GenerationChunk:
        chunk = self._client._wait(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    async def _next(self) -> GenerationChunk | None:
        return await anext(self._inner, None)

    @property
    def output(self) -> GenerationOutput:
        """Returns the whole answer, once the stream has ended by itself."""
        return self._inner.output

    def close(self) -> None:
        """Cancels the request if it has not finished."""
        self._client._wait(self._inner.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
