"""A call: its request, decoded, its answers, sent, and the status that its error becomes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Self, cast

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.grpc.receiving import Requests
from fastgen.serving.grpc.sending import Sending
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
    forget_frames,
)

# What a method does: it reads requests, and yields one answer or a stream of them, encoded.
Behaviour = Callable[[Requests, ServicerContext], AsyncGenerator[bytes, None]]
# The status of a call, its message, and the metadata behind it.
_End = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
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


def decoded(request: bytes, kind: Any) -> Any:
    """Returns the message of ``kind`` in ``request``. Raises ``InvalidArgumentError``."""
    try:
        return kind.FromString(request)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None


def handler_of(behaviour: Behaviour, sending: Sending) -> grpc.RpcMethodHandler:
    """Returns a handler that sends the answers of ``behaviour``, and turns the errors that it raises on purpose into
    statuses.

    It is a handler of streams for each method: only with these a server learns when an answer has been taken. Clients
    see no difference.
    """

    async def run(_: object, context: ServicerContext) -> None:
        end: _End | None = None
        try:
            async with aclosing(behaviour(_Reading(context), context)) as answers:
                async for answer in answers:
                    await sending.send(context, answer)
        except FastgenError as error:
            end = _end_of(error)
            forget_frames(error)
        # gRPC's error of an abort keeps itself until the garbage is collected, and with it the error that is handled
        # where it is raised, whose frames hold the request. So none is handled here.
        if end is not None:
            await context.abort(*end)

    return grpc.stream_stream_rpc_method_handler(run)


class _Reading:
    """The requests of a call. gRPC's own iterator keeps itself, and the last request, until the garbage is
    collected.
    """

    def __init__(self, context: ServicerContext):
        self._context = context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return cast(bytes, request)


def _end_of(error: FastgenError) -> _End:
    """Returns how ``error`` ends a call."""
    status = grpc.StatusCode.INTERNAL
    if isinstance(error, InvalidArgumentError):
        status = grpc.StatusCode.INVALID_ARGUMENT
    for kind, its in _STATUSES.items():
        if isinstance(error, kind):
            status = its
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, OverloadedError | UnavailableError):
        trailing = (("retry-after-ms", str(round(1000 * error.retry_after_s))),)
    return status, _details(str(error)), trailing


def _details(text: str) -> str:
    """Returns ``text`` as the message of a status, which a header carries.

    A client hears a longer one as ``RESOURCE_EXHAUSTED``, and gRPC never ends the call of one that is not Unicode.
    """
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= _MOST_DETAILS:
        return encoded.decode()
    return encoded[:_MOST_DETAILS].decode(errors="ignore") + "…"
