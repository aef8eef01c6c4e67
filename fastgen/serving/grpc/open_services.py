"""The services that need no API key: health and reflection.

A client without a key must not take what others need. So each of their methods has few calls at once, and each call has
little time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fastgen.serving.admission.bodies import MAX_OPEN_BODY_BYTES
from fastgen.serving.grpc import messages
from fastgen.serving.grpc.calls import decoded, in_statuses, stream_in_statuses
from fastgen.serving.grpc.receiving import Receiving, Requests
from fastgen.serving.refusals import OverloadedError, RequestTimeoutError, TooLargeError, UnavailableError
from fastgen.serving.service import Service

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# Most calls of each method that may be open at once.
MAX_CHECKS = MAX_WATCHES = 256
MAX_REFLECTIONS = 16
# How long the request of a call of health may take to come while another waits to be received. It has a few bytes, so
# it is there at once.
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


class Health:
    """The standard health service; it reports the present state. Each request must come within ``timeout_s``."""

    def __init__(self, service: Service, *, timeout_s: float):
        self._service = service
        self._receiving = Receiving(timeout_s=timeout_s, patience_s=_PATIENCE_S)
        self._checks, self._watches = _Method("Check", MAX_CHECKS), _Method("Watch", MAX_WATCHES)
        # Set once clients are to go to another server, and once this one ends.
        self.is_left = self.is_ending = False

    def handlers(self) -> grpc.GenericRpcHandler:
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(in_statuses(self._check), response_serializer=serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(
                stream_in_statuses(self._watch), response_serializer=serialize
            ),
        }
        return grpc.method_handlers_generic_handler(HEALTH, handlers)

    async def _check(self, requests: Requests, context: ServicerContext) -> Any:
        with self._checks.call():
            name = await self._name(requests)
            if (status := self._status(name)) is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"service {name[:_MOST_NAME]!r} is not served here")
            return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, requests: Requests, context: ServicerContext) -> AsyncIterator[Any]:
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
                    yield health_pb2.HealthCheckResponse(status=status)
                    reported = status
                await asyncio.sleep(_WATCH_S)
        raise RequestTimeoutError(f"one call reports the state for {MOST_WATCH_S:g} s; make another")

    async def _name(self, requests: Requests) -> str:
        request = await self._receiving.first(requests)
        if len(request) > MAX_OPEN_BODY_BYTES:
            raise TooLargeError(f"a request of health may have {MAX_OPEN_BODY_BYTES} bytes")
        name: str = decoded(request, health_pb2.HealthCheckRequest).service
        return name

    def _status(self, name: str) -> Any:
        if name not in ("", messages.SERVICE):
            return None
        response = health_pb2.HealthCheckResponse
        is_serving = self._service.state == "ready" and not self.is_left
        return response.SERVING if is_serving else response.NOT_SERVING


class Reflection:
    """The standard reflection service. A call has ``timeout_s`` for all of its requests."""

    def __init__(self, *, timeout_s: float):
        self._timeout_s = timeout_s
        self._calls = _Method("ServerReflectionInfo", MAX_REFLECTIONS)
        self._answers = reflection.aio.ReflectionServicer(
            (messages.SERVICE, HEALTH, reflection.SERVICE_NAME),
            pool=messages.pool_with(health_pb2, reflection_pb2),
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        handler = grpc.stream_stream_rpc_method_handler(
            stream_in_statuses(self._reflect),
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})

    async def _reflect(self, requests: Requests, context: ServicerContext) -> AsyncIterator[Any]:
        with self._calls.call():
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for answer in self._answers.ServerReflectionInfo(_each_decoded(requests), context):
                        yield answer
            except TimeoutError:
                raise RequestTimeoutError(f"a call of reflection has {self._timeout_s:g} s; make another") from None


async def _each_decoded(requests: Requests) -> AsyncIterator[Any]:
    async for request in requests:
        yield decoded(request, reflection_pb2.ServerReflectionRequest)
