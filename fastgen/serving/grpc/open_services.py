"""The services that need no API key: health and reflection.

A client without a key must not take what others need. So each of their methods has few calls at once, each call has
little time, and requests are small. gRPC has no limit for the requests of some methods alone, so a large one is refused
once it is received; all methods together receive few at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fastgen.serving.admission.bodies import MAX_OPEN_BODY_BYTES
from fastgen.serving.grpc import messages
from fastgen.serving.grpc.calls import decoded, handler_of
from fastgen.serving.grpc.receiving import Receiving, Requests
from fastgen.serving.grpc.sending import Sending
from fastgen.serving.refusals import OverloadedError, RequestTimeoutError, TooLargeError, UnavailableError
from fastgen.serving.service import Service

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# Most calls of each method that may be open at once.
MAX_CHECKS = MAX_WATCHES = 256
MAX_REFLECTIONS = 16
# Most requests of one call of reflection: many times what describes all services.
MAX_QUESTIONS = 64
# How long a request may take to come while another waits to be received. It has a few bytes, so it is there at once.
_PATIENCE_S = 0.1
# The longest time of one call of Watch.
MOST_WATCH_S = 600.0
# How often the state is looked at for those who watch it.
_WATCH_S = 0.1
# Most characters that are repeated of a service's name.
_MOST_NAME = 100


class _Method:
    """The calls of one method that are open: at most ``most`` at once."""

    def __init__(self, name: str, most: int):
        self._name, self._most = name, most
        self._num_open = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call while it is open. Raises ``OverloadedError`` if there are enough."""
        if self._num_open >= self._most:
            raise OverloadedError(
                f"{self._most} calls of {self._name} are open, which is all that this server takes", retry_after_s=1.0
            )
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


def open_receiving(timeout_s: float) -> Receiving:
    """Returns what receives the requests of all of these services. Each must come within ``timeout_s``."""
    return Receiving(timeout_s=timeout_s, patience_s=_PATIENCE_S)


class Health:
    """The standard health service; it reports the present state."""

    def __init__(self, service: Service, receiving: Receiving, sending: Sending):
        self._service, self._receiving, self._sending = service, receiving, sending
        self._checks, self._watches = _Method("Check", MAX_CHECKS), _Method("Watch", MAX_WATCHES)
        # Set once clients are to go to another server, and once this one ends.
        self.is_left = self.is_ending = False

    def handlers(self) -> grpc.GenericRpcHandler:
        behaviours = {"Check": self._check, "Watch": self._watch}
        handlers = {name: handler_of(behaviour, self._sending) for name, behaviour in behaviours.items()}
        return grpc.method_handlers_generic_handler(HEALTH, handlers)

    async def _check(self, requests: Requests, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        with self._checks.call():
            name = await self._name(requests)
            if (status := self._status(name)) is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"service {name[:_MOST_NAME]!r} is not served here")
            yield health_pb2.HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, requests: Requests, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        with self._watches.call():
            name, reported = await self._name(requests), None
            end_s = time.monotonic() + MOST_WATCH_S
            while time.monotonic() < end_s:
                if self.is_ending:
                    raise UnavailableError("the server is ending")
                status = self._status(name)
                if status is None:
                    status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != reported:
                    yield health_pb2.HealthCheckResponse(status=status).SerializeToString()
                    reported = status
                await asyncio.sleep(_WATCH_S)
        raise RequestTimeoutError(f"one call reports the state for {MOST_WATCH_S:g} s; make another")

    async def _name(self, requests: Requests) -> str:
        request = await self._receiving.first(requests)
        name: str = _decoded(request, health_pb2.HealthCheckRequest).service
        return name

    def _status(self, name: str) -> Any:
        if name not in ("", messages.SERVICE):
            return None
        response = health_pb2.HealthCheckResponse
        is_serving = self._service.state == "ready" and not self.is_left
        return response.SERVING if is_serving else response.NOT_SERVING


class Reflection:
    """The standard reflection service. A call has ``timeout_s`` for all of its requests."""

    def __init__(self, receiving: Receiving, sending: Sending, *, timeout_s: float):
        self._receiving, self._sending, self._timeout_s = receiving, sending, timeout_s
        self._calls = _Method("ServerReflectionInfo", MAX_REFLECTIONS)
        self._answers = reflection.aio.ReflectionServicer(
            (messages.SERVICE, HEALTH, reflection.SERVICE_NAME),
            pool=messages.pool_with(health_pb2, reflection_pb2),
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        handler = handler_of(self._reflect, self._sending)
        return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})

    async def _reflect(self, requests: Requests, context: ServicerContext) -> AsyncGenerator[bytes, None]:
        with self._calls.call():
            async for answer in self._answers.ServerReflectionInfo(self._questions(requests), context):
                yield answer.SerializeToString()

    async def _questions(self, requests: Requests) -> AsyncIterator[Any]:
        """Yields the requests of a call."""
        end_s, num_questions = asyncio.get_running_loop().time() + self._timeout_s, 0
        while (request := await self._next(requests, end_s)) is not None:
            num_questions += 1
            if num_questions > MAX_QUESTIONS:
                raise OverloadedError(
                    f"a call of reflection may have {MAX_QUESTIONS} requests; make another", retry_after_s=0.0
                )
            yield _decoded(request, reflection_pb2.ServerReflectionRequest)

    async def _next(self, requests: Requests, end_s: float) -> bytes | None:
        """Returns the next request of a call that ends at ``end_s``, or ``None`` if it has no more."""
        try:
            async with asyncio.timeout_at(end_s):
                return await self._receiving.next(requests)
        except TimeoutError:
            raise RequestTimeoutError(f"a call of reflection has {self._timeout_s:g} s; make another") from None


def _decoded(request: bytes, kind: Any) -> Any:
    """Returns the message of ``kind`` in a request that needs no key. Raises ``TooLargeError`` and
    ``InvalidArgumentError``.
    """
    if len(request) > MAX_OPEN_BODY_BYTES:
        raise TooLargeError(f"a {kind.DESCRIPTOR.name} may have {MAX_OPEN_BODY_BYTES} bytes")
    return decoded(request, kind)
