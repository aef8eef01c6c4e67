"""Sends a client's requests to a server by gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc

from fastgen.errors import FastgenError, GenerationError, InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.serving.api_keys import sendable_key
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.grpc import messages
from fastgen.serving.refusals import (
    EngineDiedError,
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
)


class GrpcTransport:
    """Talks to the server at ``address``: ``host:port``, with ``grpcs://`` before it for TLS. ``certificate`` is a file
    with a certificate to trust.
    """

    def __init__(self, address: str, api_key: str | None, certificate: str | None = None):
        self._address = address
        key = None if api_key is None else sendable_key(api_key, "api_key")
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        target = address.removeprefix("grpcs://").removeprefix("grpc://")
        options = (("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0))
        if address.startswith("grpcs://"):
            roots = None if certificate is None else Path(certificate).read_bytes()
            self._channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.aio.insecure_channel(target, options)
        self._calls = {
            method.name: (self._channel.unary_stream if method.server_streaming else self._channel.unary_unary)(
                f"/{messages.SERVICE}/{method.name}",
                request_serializer=messages.message_class(method.input_type.full_name).SerializeToString,
                response_deserializer=messages.message_class(method.output_type.full_name).FromString,
            )
            for method in messages.pool.FindServiceByName(messages.SERVICE).methods
        }

    async def generate(self, request: ClientRequest) -> GenerationOutput:
        method = "Generate" if request.messages is None else "Chat"
        return messages.unpack_output(await self._unary(method, _message(request)))

    async def stream(self, request: ClientRequest) -> AsyncIterator[GenerationChunk | GenerationOutput]:
        method = "GenerateStream" if request.messages is None else "ChatStream"
        call = self._calls[method](_message(request), metadata=self._metadata)
        try:
            async for chunk in call:
                yield messages.unpack_chunk(chunk)
                if chunk.HasField("response"):
                    yield messages.unpack_output(chunk.response)
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        finally:
            call.cancel()

    async def check(self, requests: Sequence[ClientRequest]) -> list[str | None]:
        asked = messages.CheckRequest()
        for index, request in enumerate(requests):  # requests of one call are all of one kind
            try:
                (asked.prompts if request.messages is None else asked.chats).append(_message(request))
            except InvalidArgumentError as error:  # it cannot even be encoded
                return [*[None] * index, str(error)]
        return [why or None for why in (await self._unary("Check", asked)).errors]

    async def info(self) -> dict[str, Any]:
        response = await self._unary("ModelInfo", messages.ModelInfoRequest())
        return {field.name: getattr(response, field.name) for field in response.DESCRIPTOR.fields}

    async def terminate(self, token: str | None) -> None:
        metadata = self._metadata if token is None else (("authorization", f"Bearer {token}"),)
        await self._unary("Terminate", messages.TerminateRequest(), metadata)

    async def close(self) -> None:
        await self._channel.close()

    async def _unary(self, method: str, message: Any, metadata: Any = None) -> Any:
        try:
            return await self._calls[method](message, metadata=self._metadata if metadata is None else metadata)
        except grpc.aio.AioRpcError as error:
            self._fail(error)

    def _fail(self, error: grpc.aio.AioRpcError) -> NoReturn:
        """Raises the Python error for the server's status."""
        message = error.details() or error.code().name
        trailing = dict(error.trailing_metadata() or ())
        retry_after_s = float(trailing.get("retry-after-ms", 1000)) / 1000
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidArgumentError(message) from None
            case grpc.StatusCode.UNAUTHENTICATED:
                raise UnauthorizedError(message) from None
            case grpc.StatusCode.NOT_FOUND:
                raise UnknownModelError(message) from None
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in message:  # gRPC itself says so
                raise TooLargeError(message) from None
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise OverloadedError(message, retry_after_s=retry_after_s) from None
            case grpc.StatusCode.UNAVAILABLE if "retry-after-ms" in trailing:
                raise UnavailableError(message, retry_after_s=retry_after_s) from None
            case grpc.StatusCode.UNAVAILABLE:
                raise FastgenError(f"no server answers at {self._address}: {message}") from error
            case grpc.StatusCode.ABORTED:
                raise EngineDiedError(message) from None
        raise GenerationError(message) from error


def _message(request: ClientRequest) -> Any:
    if request.messages is not None:
        chat = messages.ChatRequest()
        messages.set_conversation(chat, request.messages)
        messages.set_sampling(chat.sampling, request.fields)
        return chat
    generate = messages.GenerateRequest()
    try:
        if isinstance(request.prompt, str):
            generate.text = request.prompt
        else:
            generate.token_ids.SetInParent()
            generate.token_ids.ids.extend(request.prompt or ())
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"the prompt cannot be sent by gRPC: {error}") from None
    messages.set_sampling(generate.sampling, request.fields)
    return generate
