"""The gRPC server. It runs beside HTTP in the same event loop, for the same service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.json_limits import FREE_BYTES
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
from fastgen.serving.grpc.connections import (
    connection_options,
    end_listening,
    listening,
    max_calls,
    num_connections,
)
from fastgen.serving.grpc.size import check_num_fields
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import (
    BadRequestError,
    EngineDiedError,
    OverloadedError,
    RefusedError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
)
from fastgen.serving.service import Running, Service

# Any other error is ``INTERNAL``.
_STATUSES: dict[type[RefusedError], grpc.StatusCode] = {
    BadRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    TooLargeError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnauthorizedError: grpc.StatusCode.UNAUTHENTICATED,
    RequestTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    EngineDiedError: grpc.StatusCode.ABORTED,
}
# Most bytes of a status's message. As a header each may become three, and clients take 8 KiB of headers.
_MOST_DETAILS = 2048
# Most characters that are repeated of a service's name.
_MOST_NAME = 100
# How often the health service checks for a change to report to its watchers.
_WATCH_S = 0.1
# How long a server that is left answers the calls of connections that it has accepted: longer than a client takes from
# there to its first call.
LEAVE_S = 1.0


class GenerationServicer:
    """The methods of ``fastgen.v1.Generation``. :meth:`receive` gives them their requests."""

    def __init__(self, service: Service, keys: ApiKeys, ending: Ending, *, timeout_s: float):
        self._service, self._keys, self._ending, self._timeout_s = service, keys, ending, timeout_s

    async def receive(self, requests: AsyncIterator[bytes], kind: Any, context: ServicerContext) -> Any:
        """Returns the request of a call, a message of ``kind``, once the call has shown its API key.

        Raises ``UnauthorizedError``, ``RequestTimeoutError``, ``TooLargeError`` and ``InvalidArgumentError``.
        """
        try:
            if kind is not messages.TerminateRequest:  # which takes another token too
                self._keys.check(_bearer(context))
            async with asyncio.timeout(self._timeout_s):
                async for request in requests:
                    if len(request) > FREE_BYTES:
                        await asyncio.to_thread(check_num_fields, request, kind.DESCRIPTOR)
                    return _decoded(request, kind)
        except UnauthorizedError:
            self._service.metrics.refused("api_key")
            raise
        except TooLargeError:
            self._service.metrics.refused("body_size")
            raise
        except TimeoutError:
            self._service.metrics.refused("body_time")
            raise RequestTimeoutError(f"the request did not come within {self._timeout_s:g} s") from None
        raise InvalidArgumentError("the call has no request")

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
        self._ending.ask(_bearer(context))
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


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard health service; it reports the present state."""

    def __init__(self, service: Service):
        self._service = service
        # Set once clients are to go to another server.
        self.is_left = False

    async def Check(self, request: Any, context: ServicerContext) -> Any:  # noqa: N802 (the name is the protocol's)
        if (status := self._status(request.service)) is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service {request.service[:_MOST_NAME]!r} is not served here"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: ServicerContext) -> AsyncIterator[Any]:  # noqa: N802
        reported = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != reported:
                yield health_pb2.HealthCheckResponse(status=status)
                reported = status
            await asyncio.sleep(_WATCH_S)

    def _status(self, name: str) -> Any:
        if name not in ("", messages.SERVICE):
            return None
        response = health_pb2.HealthCheckResponse
        is_serving = self._service.state == "ready" and not self.is_left
        return response.SERVING if is_serving else response.NOT_SERVING


class GrpcServer:
    """All gRPC services for ``service``, if ``options`` enable gRPC; nothing otherwise. With ``is_shared`` other
    processes of this user may listen at the port too.
    """

    def __init__(self, service: Service, options: ServeOptions, ending: Ending, *, is_shared: bool = False):
        self._service, self._options, self._ending, self._is_shared = service, options, ending, is_shared
        self._server: grpc.aio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._health = HealthServicer(service)
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
        server.add_generic_rpc_handlers((_handlers(servicer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (messages.SERVICE, health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=messages.pool_with(health_pb2, reflection_pb2))
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
        # Handlers read the one request of a call themselves, as if it were a stream of requests: first they check the
        # key, and they know how long it takes and whether it can be decoded.
        is_stream = method.server_streaming
        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        handlers[method.name] = make(
            _stream_in_statuses(servicer, behaviour, kind) if is_stream else _in_statuses(servicer, behaviour, kind),
            response_serializer=messages.message_class(method.output_type.full_name).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)


def _in_statuses(
    servicer: GenerationServicer, behaviour: Callable[[Any, ServicerContext], Awaitable[Any]], kind: Any
) -> Callable[[AsyncIterator[bytes], ServicerContext], Awaitable[Any]]:
    """Returns a handler that receives requests of ``kind`` for ``behaviour`` and turns the errors that it raises on
    purpose into statuses.
    """

    async def run(requests: AsyncIterator[bytes], context: ServicerContext) -> Any:
        try:
            return await behaviour(await servicer.receive(requests, kind, context), context)
        except FastgenError as error:
            await _abort(context, error)

    return run


def _stream_in_statuses(
    servicer: GenerationServicer, behaviour: Callable[[Any, ServicerContext], AsyncIterator[Any]], kind: Any
) -> Callable[[AsyncIterator[bytes], ServicerContext], AsyncIterator[Any]]:
    async def run(requests: AsyncIterator[bytes], context: ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(await servicer.receive(requests, kind, context), context):
                yield response
        except FastgenError as error:
            await _abort(context, error)

    return run


def _decoded(request: bytes, kind: Any) -> Any:
    try:
        return kind.FromString(request)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None


async def _abort(context: ServicerContext, error: FastgenError) -> NoReturn:
    status = grpc.StatusCode.INTERNAL
    if isinstance(error, InvalidArgumentError):
        status = grpc.StatusCode.INVALID_ARGUMENT
    for kind, its in _STATUSES.items():
        if isinstance(error, kind):
            status = its
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, OverloadedError | UnavailableError):
        trailing = (("retry-after-ms", str(round(1000 * error.retry_after_s))),)
    await context.abort(status, _details(str(error)), trailing)
    raise AssertionError("abort raises")


def _details(text: str) -> str:
    """Returns ``text`` as the message of a status, which a header carries.

    A client hears a longer one as ``RESOURCE_EXHAUSTED``, and gRPC never ends the call of one that is not Unicode.
    """
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= _MOST_DETAILS:
        return encoded.decode()
    return encoded[:_MOST_DETAILS].decode(errors="ignore") + "…"


def _bearer(context: ServicerContext) -> str | None:
    """Returns the key in the call's metadata ``authorization: Bearer …``."""
    return bearer(_metadata(context, "authorization"))


def _metadata(context: ServicerContext, name: str) -> str | None:
    """Returns the call's metadata under ``name``; ``None`` if there is none, or if it is not text."""
    given = dict(context.invocation_metadata() or ()).get(name)
    return given if isinstance(given, str) else None
