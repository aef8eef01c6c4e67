"""The gRPC server. It runs beside HTTP in the same event loop, for the same service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc.aio import ServicerContext

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.bodies import Bodies, CountedBody
from fastgen.serving.admission.json_limits import FREE_BYTES
from fastgen.serving.admission.request_limits import (
    MAX_BIASES,
    MAX_CHECKED,
    MAX_MESSAGES,
    MAX_SESSION_LENGTH,
    MAX_TOKEN_IDS,
    SESSION_HEADER,
)
from fastgen.serving.admission.turns import at_once
from fastgen.serving.answers import Update
from fastgen.serving.api_keys import ApiKeys, bearer
from fastgen.serving.ending import Ending
from fastgen.serving.grpc import messages
from fastgen.serving.grpc.calls import Behaviour, decoded, handler_of
from fastgen.serving.grpc.connections import (
    connection_options,
    end_listening,
    listening,
    max_calls,
    num_connections,
)
from fastgen.serving.grpc.open_services import Health, Reflection, open_receiving
from fastgen.serving.grpc.receiving import Receiving, Requests
from fastgen.serving.grpc.sending import Sending
from fastgen.serving.grpc.size import check_num_fields
from fastgen.serving.isolated.queue import in_turn
from fastgen.serving.isolated.texts import encode_chat
from fastgen.serving.options import ConnectionLimits, ServeOptions
from fastgen.serving.refusals import (
    BadRequestError,
    OverloadedError,
    Refusal,
    RefusedError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
)
from fastgen.serving.service import Running, Service
from fastgen.serving.threads import on_thread

# How long a server that is left answers the calls of connections that it has accepted: longer than a client takes from
# there to its first call.
LEAVE_S = 1.0
# How long a request may take to come while another waits to be received.
_PATIENCE_S = 1.0
# The reasons of refusals before a request is decoded, as the metrics name them.
_REASONS: dict[type[RefusedError], Refusal] = {
    UnauthorizedError: "api_key",
    RequestTimeoutError: "body_time",
    OverloadedError: "bodies",
    TooLargeError: "body_size",
    UnavailableError: "unavailable",
}


_Encode = Callable[[Any], Awaitable[list[int]]]


class GenerationServicer:
    """The methods of ``fastgen.v1.Generation``. :meth:`received` gives them their requests. They yield their answers,
    encoded.
    """

    def __init__(self, service: Service, keys: ApiKeys, ending: Ending, limits: ConnectionLimits):
        self._service, self._keys, self._ending = service, keys, ending
        self._receiving = Receiving(timeout_s=limits.body_timeout_s, patience_s=_PATIENCE_S)
        self._bodies = Bodies(limits)

    @asynccontextmanager
    async def received(self, requests: Requests, kind: Any, context: ServicerContext) -> AsyncIterator[Any]:
        """Yields the request of a call, a message of ``kind``, once the call has shown its API key, or what ends the
        server. Its bytes count until the context is left.

        Raises ``UnauthorizedError``, ``RequestTimeoutError``, ``OverloadedError``, ``TooLargeError``,
        ``UnavailableError`` and ``InvalidArgumentError``.
        """
        with CountedBody(self._bodies) as body:
            try:
                checks = self._ending if kind is messages.TerminateRequest else self._keys
                checks.check(_bearer(context))
                encoded = await self._receiving.first(requests)
                body.count(len(encoded))
                if len(encoded) > FREE_BYTES:
                    await on_thread(partial(check_num_fields, encoded, kind.DESCRIPTOR))
            except RefusedError as error:
                self._service.metrics.refused(_REASONS[type(error)])
                raise
            yield decoded(encoded, kind)

    def generate(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        return self._answer(request, self._encode_prompt, context)

    def generate_stream(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        return self._stream(request, self._encode_prompt, context)

    def chat(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        return self._answer(request, self._encode_chat, context)

    def chat_stream(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        return self._stream(request, self._encode_chat, context)

    async def check(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        number = len(request.prompts) + len(request.chats)
        if number > MAX_CHECKED:
            raise InvalidArgumentError(f"{number} requests to be checked; at most {MAX_CHECKED} are taken at once")
        _check_num_ids(request.prompts)
        asked = [(each, self._encode_prompt) for each in request.prompts]
        asked += [(each, self._encode_chat) for each in request.chats]
        yield messages.CheckResponse(errors=[await self._refusal(*each) or "" for each in asked]).SerializeToString()

    async def _refusal(self, request: Any, encode: _Encode) -> str | None:
        """Returns why ``request`` would be refused, or ``None``."""
        try:
            return await self._service.refusal(*await self._read(request, encode))
        except (BadRequestError, InvalidArgumentError) as error:
            return str(error)

    async def model_info(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        yield messages.ModelInfoResponse(**self._service.info()).SerializeToString()

    async def terminate(self, request: Any, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        self._ending.end()
        yield messages.TerminateResponse().SerializeToString()

    async def _answer(self, request: Any, encode: _Encode, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        async with await self._submit(request, encode, context, is_stream=False) as running:
            yield await self._whole(running, messages.encoding_output)

    async def _stream(self, request: Any, encode: _Encode, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        async with await self._submit(request, encode, context, is_stream=True) as running:
            pending: bytes | None = None  # sent one late, because the last one also has the whole answer
            async for updates in running:
                for update in updates:
                    if pending is not None:
                        yield pending
                    pending = _chunk(update)
                if pending is not None and not running.finished:
                    yield pending
                    pending = None
            assert pending is not None
            yield await self._whole(running, partial(messages.encoding_last_chunk, pending))

    async def _whole(
        self, running: Running, encoding: Callable[[GenerationOutput], Generator[None, None, bytes]]
    ) -> bytes:
        """Waits for the whole answer, and returns it encoded."""
        work = encoding(await running.output())
        return await self._service.turns.run(work) if running.is_large else at_once(work)

    async def _submit(self, request: Any, encode: _Encode, context: ServicerContext, *, is_stream: bool) -> Running:
        arrived_s = time.monotonic()
        prompt_ids, sampling = await self._read(request, encode)
        session = (_metadata(context, SESSION_HEADER) or "")[:MAX_SESSION_LENGTH] or None
        return await self._service.submit(
            prompt_ids, sampling, is_stream=is_stream, arrived_s=arrived_s, session=session
        )

    async def _read(self, request: Any, encode: _Encode) -> tuple[list[int], SamplingParams]:
        """Returns the token ids of the prompt and the sampling parameters. A large request takes long, so it is read on
        other threads.
        """
        sampling = await on_thread(partial(self._sampling, request))
        return await encode(request), sampling

    def _sampling(self, request: Any) -> SamplingParams:
        messages.refuse_unknown_fields(request)
        if (number := len(request.sampling.logit_bias)) > MAX_BIASES:
            raise TooLargeError(f"logit_bias: this server takes at most {MAX_BIASES} biases, not {number}")
        fields = messages.sampling_fields(request.sampling)
        return SamplingParams.from_fields(self._service.codec.default_sampling, **fields)

    async def _encode_prompt(self, request: Any) -> list[int]:
        codec = self._service.codec
        match request.WhichOneof("prompt"):
            case "text":
                return await in_turn(codec.encode_plain, lambda: codec.encode(request.text))
            case "token_ids":
                _check_num_ids([request])
                return await on_thread(lambda: codec.encode(list(request.token_ids.ids)))
            case _:
                raise InvalidArgumentError("prompt: text or token_ids must be set")

    async def _encode_chat(self, request: Any) -> list[int]:
        if not request.messages:
            raise InvalidArgumentError("messages: give at least one")
        if (number := len(request.messages)) > MAX_MESSAGES:
            raise TooLargeError(f"messages: this server takes at most {MAX_MESSAGES} messages, not {number}")
        return await encode_chat(self._service.codec, await on_thread(partial(messages.conversation, request)))


class GrpcServer:
    """All gRPC services for ``service``, if ``options`` enable gRPC; nothing otherwise. With ``is_shared`` other
    processes of this user may listen at the port too.

    It listens at ``address``, in numbers, or else at ``options.host``. gRPC does not take all spellings of a host that
    the system does, such as ``127.1`` or none.
    """

    def __init__(
        self,
        service: Service,
        options: ServeOptions,
        ending: Ending,
        *,
        address: str | None = None,
        is_shared: bool = False,
    ):
        self._service, self._options, self._ending, self._is_shared = service, options, ending, is_shared
        self._host = options.host if address is None else address
        self._server: grpc.aio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._sending = Sending(timeout_s=options.connections.write_timeout_s)
        self._open_receiving = open_receiving(options.connections.body_timeout_s)
        self._health = Health(service, self._open_receiving, self._sending)
        self._ending_slow: asyncio.Task[None] | None = None
        # The descriptors by which it listens.
        self._listening: set[int] = set()
        # The served address: ``host:port``, with ``grpcs://`` before it for TLS.
        self.address: str | None = None

    async def start(self) -> None:
        """Listens and serves. Raises ``InvalidArgumentError`` if that is not possible."""
        if self._options.grpc_port is None:
            return
        limits, most_calls = self._options.connections, max_calls(self._options.limits)
        self._server = server = grpc.aio.server(
            options=(*connection_options(limits, most_calls), ("grpc.so_reuseport", int(self._is_shared))),
            maximum_concurrent_rpcs=most_calls,
        )
        servicer = GenerationServicer(self._service, self._options.api_keys, self._ending, limits)
        reflection = Reflection(self._open_receiving, self._sending, timeout_s=limits.body_timeout_s)
        handlers = (_handlers(servicer, self._sending), self._health.handlers(), reflection.handlers())
        server.add_generic_rpc_handlers(handlers)
        host = f"[{self._host}]" if ":" in self._host else self._host
        asked = f"{host}:{self._options.grpc_port}"
        others = listening(self._options.grpc_port)
        try:
            port = self._listen(server, asked)
        except RuntimeError as error:
            raise InvalidArgumentError(f"cannot listen on {asked} for gRPC: {error}") from None
        await server.start()
        self._listening = listening(port) - others
        self._ending_slow = asyncio.create_task(self._sending.end_slow(port))
        self._service.metrics.grpc_connections.set_function(lambda: num_connections(port))
        # A certificate may be for the name alone. Other spellings, such as `127.1`, are no names.
        is_name = self._options.host[:1].isalpha() and ":" not in self._options.host
        announced = f"{self._options.host if is_name else host}:{port}"
        self.address = announced if self._options.tls_cert is None else f"grpcs://{announced}"

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        certificate, key = self._options.tls_cert, self._options.tls_key
        if certificate is None or key is None:
            return int(server.add_insecure_port(address))
        pair = (key.read_bytes(), certificate.read_bytes())
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))

    async def leave(self, timeout_s: float) -> None:
        """Lets clients go to the server that replaces this one: accepts no more connections, and answers calls of the
        open ones for ``LEAVE_S``. Then begins to :meth:`stop`.

        gRPC stops to listen and to take calls in one instant, so it would cancel the calls of connections that it has
        just accepted. It has no way to do the first alone, and logs an error when its listener ends.
        """
        if self._server is not None:
            self._health.is_left = True
            end_listening(self._listening)
            await asyncio.sleep(LEAVE_S)
            self._leaving = asyncio.create_task(self.stop(timeout_s))

    async def stop(self, timeout_s: float) -> None:
        """Accepts no more calls, and cuts off the open ones after ``timeout_s``. After it is cancelled, another call
        may set a shorter time.
        """
        if self._server is not None:
            self._health.is_ending = True
            await asyncio.shield(self._server.stop(timeout_s))
        if self._ending_slow is not None:
            self._ending_slow.cancel()


def _check_num_ids(requests: Iterable[Any]) -> None:
    """Raises ``TooLargeError`` if the prompts of these have too many token ids together."""
    if (number := sum(len(each.token_ids.ids) for each in requests)) > MAX_TOKEN_IDS:
        raise TooLargeError(f"token_ids: this server takes at most {MAX_TOKEN_IDS} ids, not {number}")


def _handlers(servicer: GenerationServicer, sending: Sending) -> grpc.GenericRpcHandler:
    behaviours: Mapping[str, Any] = {
        "Generate": servicer.generate,
        "GenerateStream": servicer.generate_stream,
        "Chat": servicer.chat,
        "ChatStream": servicer.chat_stream,
        "Check": servicer.check,
        "ModelInfo": servicer.model_info,
        "Terminate": servicer.terminate,
    }
    handlers = {}
    for method in messages.pool.FindServiceByName(messages.SERVICE).methods:
        kind = messages.message_class(method.input_type.full_name)
        handlers[method.name] = handler_of(_received(servicer, behaviours[method.name], kind), sending)
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)


def _received(
    servicer: GenerationServicer,
    behaviour: Callable[[Any, ServicerContext], AsyncGenerator[bytes, None]],
    kind: Any,
) -> Behaviour:
    """Returns ``behaviour`` of a call whose request, a message of ``kind``, is yet to come."""

    async def run(requests: Requests, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        async with (
            servicer.received(requests, kind, context) as request,
            aclosing(behaviour(request, context)) as answers,
        ):
            async for answer in answers:
                yield answer

    return run


def _chunk(update: Update) -> bytes:
    """Returns an encoded ``GenerateChunk`` with the progress of a completion."""
    chunk: bytes = messages.GenerateChunk(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=messages.pack_finish_reason(update.end.reason) if update.end else None,
    ).SerializeToString()
    return chunk


def _bearer(context: ServicerContext) -> str | None:
    """Returns the key in the call's metadata ``authorization: Bearer …``."""
    return bearer(_metadata(context, "authorization"))


def _metadata(context: ServicerContext, name: str) -> str | None:
    """Returns the call's metadata under ``name``; ``None`` if there is none, or if it is not text."""
    given = dict(context.invocation_metadata() or ()).get(name)
    return given if isinstance(given, str) else None
