"""The gRPC server. It runs beside HTTP in the same event loop, for the same service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from grpc.aio import ServicerContext

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.request_limits import (
    MAX_BIASES,
    MAX_CHECKED,
    MAX_SESSION_LENGTH,
    MAX_TOKEN_IDS,
    SESSION_HEADER,
)
from fastgen.serving.api_keys import ApiKeys, bearer
from fastgen.serving.ending import Ending
from fastgen.serving.grpc import messages
from fastgen.serving.grpc.calls import Requests, in_statuses, receive, stream_in_statuses
from fastgen.serving.grpc.connections import (
    connection_options,
    end_listening,
    listening,
    max_calls,
    num_connections,
)
from fastgen.serving.grpc.open_services import Health, Reflection
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import (
    BadRequestError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
)
from fastgen.serving.service import Running, Service

# How long a server that is left answers the calls of connections that it has accepted: longer than a client takes from
# there to its first call.
LEAVE_S = 1.0


class GenerationServicer:
    """The methods of ``fastgen.v1.Generation``. :meth:`receive` gives them their requests."""

    def __init__(self, service: Service, keys: ApiKeys, ending: Ending, *, timeout_s: float):
        self._service, self._keys, self._ending, self._timeout_s = service, keys, ending, timeout_s

    async def receive(self, requests: Requests, kind: Any, context: ServicerContext) -> Any:
        """Returns the request of a call, a message of ``kind``, once the call has shown its API key, or what ends the
        server.

        Raises ``UnauthorizedError``, ``RequestTimeoutError``, ``TooLargeError`` and ``InvalidArgumentError``.
        """
        try:
            checks = self._ending if kind is messages.TerminateRequest else self._keys
            checks.check(_bearer(context))
            return await receive(requests, kind, timeout_s=self._timeout_s)
        except UnauthorizedError:
            self._service.metrics.refused("api_key")
            raise
        except TooLargeError:
            self._service.metrics.refused("body_size")
            raise
        except RequestTimeoutError:
            self._service.metrics.refused("body_time")
            raise

    async def generate(self, request: Any, context: ServicerContext) -> Any:
        async with await self._submit(request, self._encode_prompt, context, is_stream=False) as running:
            return messages.pack_output(await running.output())

    async def generate_stream(self, request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        async for chunk in self._stream(request, self._encode_prompt, context):
            yield chunk

    async def chat(self, request: Any, context: ServicerContext) -> Any:
        async with await self._submit(request, self._encode_chat, context, is_stream=False) as running:
            return messages.pack_output(await running.output())

    async def chat_stream(self, request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        async for chunk in self._stream(request, self._encode_chat, context):
            yield chunk

    async def check(self, request: Any, context: ServicerContext) -> Any:
        number = len(request.prompts) + len(request.chats)
        if number > MAX_CHECKED:
            raise InvalidArgumentError(f"{number} requests to be checked; at most {MAX_CHECKED} are taken at once")
        asked = [(each, self._encode_prompt) for each in request.prompts]
        asked += [(each, self._encode_chat) for each in request.chats]
        return messages.CheckResponse(errors=[await self._refusal(*each) or "" for each in asked])

    async def _refusal(self, request: Any, encode: Callable[[Any], list[int]]) -> str | None:
        """Returns why ``request`` would be refused, or ``None``."""
        try:
            return await self._service.refusal(*await asyncio.to_thread(self._read, request, encode))
        except (BadRequestError, InvalidArgumentError) as error:
            return str(error)

    async def model_info(self, request: Any, context: ServicerContext) -> Any:
        return messages.ModelInfoResponse(**self._service.info())

    async def terminate(self, request: Any, context: ServicerContext) -> Any:
        self._ending.end()
        return messages.TerminateResponse()

    async def _stream(
        self, request: Any, encode: Callable[[Any], list[int]], context: ServicerContext
    ) -> AsyncIterator[Any]:
        async with await self._submit(request, encode, context, is_stream=True) as running:
            pending: Any = None  # sent one late, because the last one also has the whole answer
            async for updates in running:
                for update in updates:
                    if pending is not None:
                        yield pending
                    pending = messages.GenerateChunk(
                        index=update.index,
                        text=update.text,
                        token_ids=update.token_ids,
                        finish_reason=messages.pack_finish_reason(update.end.reason) if update.end else None,
                    )
                if not running.finished:
                    yield pending
                    pending = None
            pending.response.CopyFrom(messages.pack_output(await running.output()))
            yield pending

    async def _submit(
        self, request: Any, encode: Callable[[Any], list[int]], context: ServicerContext, *, is_stream: bool
    ) -> Running:
        arrived_s = time.monotonic()
        prompt_ids, sampling = await asyncio.to_thread(self._read, request, encode)
        session = (_metadata(context, SESSION_HEADER) or "")[:MAX_SESSION_LENGTH] or None
        return await self._service.submit(
            prompt_ids, sampling, is_stream=is_stream, arrived_s=arrived_s, session=session
        )

    def _read(self, request: Any, encode: Callable[[Any], list[int]]) -> tuple[list[int], SamplingParams]:
        """Returns the token ids of the prompt and the sampling parameters. A large request takes long, so it is read on
        a thread.
        """
        messages.refuse_unknown_fields(request)
        if (number := len(request.sampling.logit_bias)) > MAX_BIASES:
            raise TooLargeError(f"logit_bias: this server takes at most {MAX_BIASES} biases, not {number}")
        fields = messages.sampling_fields(request.sampling)
        sampling = SamplingParams.from_fields(self._service.codec.default_sampling, **fields)
        return encode(request), sampling

    def _encode_prompt(self, request: Any) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return self._service.codec.encode(request.text)
            case "token_ids":
                if (number := len(request.token_ids.ids)) > MAX_TOKEN_IDS:
                    raise TooLargeError(f"token_ids: this server takes at most {MAX_TOKEN_IDS} ids, not {number}")
                return self._service.codec.encode(list(request.token_ids.ids))
            case _:
                raise InvalidArgumentError("prompt: text or token_ids must be set")

    def _encode_chat(self, request: Any) -> list[int]:
        return self._service.codec.encode_chat(messages.conversation(request))


class GrpcServer:
    """All gRPC services for ``service``, if ``options`` enable gRPC; nothing otherwise. With ``is_shared`` other
    processes of this user may listen at the port too.
    """

    def __init__(self, service: Service, options: ServeOptions, ending: Ending, *, is_shared: bool = False):
        self._service, self._options, self._ending, self._is_shared = service, options, ending, is_shared
        self._server: grpc.aio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._health = Health(service, timeout_s=options.connections.body_timeout_s)
        # The descriptors by which it listens.
        self._listening: set[int] = set()
        # The served address: ``host:port``, with ``grpcs://`` before it for TLS.
        self.address: str | None = None

    async def start(self) -> None:
        """Listens and serves. Raises ``InvalidArgumentError`` if that is not possible."""
        if self._options.grpc_port is None:
            return
        limits = self._options.connections
        self._server = server = grpc.aio.server(
            options=(*connection_options(limits), ("grpc.so_reuseport", int(self._is_shared))),
            maximum_concurrent_rpcs=max_calls(self._options.limits),
        )
        servicer = GenerationServicer(
            self._service, self._options.api_keys, self._ending, timeout_s=limits.body_timeout_s
        )
        reflection = Reflection(timeout_s=limits.body_timeout_s)
        server.add_generic_rpc_handlers((_handlers(servicer), self._health.handlers(), reflection.handlers()))
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        asked = f"{host}:{self._options.grpc_port}"
        others = listening(self._options.grpc_port)
        try:
            port = self._listen(server, asked)
        except RuntimeError as error:
            raise InvalidArgumentError(f"cannot listen on {asked} for gRPC: {error}") from None
        await server.start()
        self._listening = listening(port) - others
        self._service.metrics.grpc_connections.set_function(lambda: num_connections(port))
        self.address = f"{host}:{port}" if self._options.tls_cert is None else f"grpcs://{host}:{port}"

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


def _handlers(servicer: GenerationServicer) -> grpc.GenericRpcHandler:
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
        behaviour = behaviours[method.name]
        kind = messages.message_class(method.input_type.full_name)
        is_stream = method.server_streaming
        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        handlers[method.name] = make(
            stream_in_statuses(_stream_received(servicer, behaviour, kind))
            if is_stream
            else in_statuses(_received(servicer, behaviour, kind)),
            response_serializer=messages.message_class(method.output_type.full_name).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)


def _received(
    servicer: GenerationServicer, behaviour: Callable[[Any, ServicerContext], Awaitable[Any]], kind: Any
) -> Callable[[Requests, ServicerContext], Awaitable[Any]]:
    """Returns ``behaviour`` of a call whose request, a message of ``kind``, is yet to come."""

    async def run(requests: Requests, context: ServicerContext) -> Any:
        return await behaviour(await servicer.receive(requests, kind, context), context)

    return run


def _stream_received(
    servicer: GenerationServicer, behaviour: Callable[[Any, ServicerContext], AsyncIterator[Any]], kind: Any
) -> Callable[[Requests, ServicerContext], AsyncIterator[Any]]:
    async def run(requests: Requests, context: ServicerContext) -> AsyncIterator[Any]:
        async for response in behaviour(await servicer.receive(requests, kind, context), context):
            yield response

    return run


def _bearer(context: ServicerContext) -> str | None:
    """Returns the key in the call's metadata ``authorization: Bearer …``."""
    return bearer(_metadata(context, "authorization"))


def _metadata(context: ServicerContext, name: str) -> str | None:
    """Returns the call's metadata under ``name``; ``None`` if there is none, or if it is not text."""
    given = dict(context.invocation_metadata() or ()).get(name)
    return given if isinstance(given, str) else None
