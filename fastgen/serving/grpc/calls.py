"""The beginning and the end of a call: its request, received in time, and the status that its error becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.admission.json_limits import FREE_BYTES
from fastgen.serving.grpc.size import check_num_fields
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

# The requests of a call, encoded. Handlers read the one request of a call themselves, as if it were a stream of
# requests: so they can check the key first, and they know how long it takes and whether it can be decoded.
Requests = AsyncIterator[bytes]
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


async def receive(requests: Requests, kind: Any, *, timeout_s: float) -> Any:
    """Returns the request of a call, a message of ``kind``.

    Raises ``RequestTimeoutError``, ``TooLargeError`` and ``InvalidArgumentError``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            async for request in requests:
                if len(request) > FREE_BYTES:
                    await asyncio.to_thread(check_num_fields, request, kind.DESCRIPTOR)
                return decoded(request, kind)
    except TimeoutError:
        raise RequestTimeoutError(f"the request did not come within {timeout_s:g} s") from None
    raise InvalidArgumentError("the call has no request")


def decoded(request: bytes, kind: Any) -> Any:
    """Returns the message of ``kind`` in ``request``. Raises ``InvalidArgumentError``."""
    try:
        return kind.FromString(request)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None


def in_statuses(
    behaviour: Callable[[Requests, ServicerContext], Awaitable[Any]],
) -> Callable[[Requests, ServicerContext], Awaitable[Any]]:
    """Returns a handler that turns the errors that ``behaviour`` raises on purpose into statuses."""

    async def run(requests: Requests, context: ServicerContext) -> Any:
        try:
            return await behaviour(requests, context)
        except FastgenError as error:
            await _abort(context, error)

    return run


def stream_in_statuses(
    behaviour: Callable[[Requests, ServicerContext], AsyncIterator[Any]],
) -> Callable[[Requests, ServicerContext], AsyncIterator[Any]]:
    """Returns the same for a ``behaviour`` with a stream of answers."""

    async def run(requests: Requests, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(requests, context):
                yield response
        except FastgenError as error:
            await _abort(context, error)

    return run


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
