"""A gRPC server in this process, for a service that refuses everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastgen import SamplingParams
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.ending import Ending
from fastgen.serving.grpc.server import GrpcServer
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ConnectionLimits, ServeOptions
from fastgen.serving.refusals import RefusedError


class Refusing:
    """A service that refuses everything with ``error``, in ``state``."""

    state = "draining"
    error: RefusedError

    def __init__(self) -> None:
        self.metrics = ServerMetrics(lambda: True)

    class codec:  # noqa: N801
        default_sampling = SamplingParams()

        @staticmethod
        def encode(prompt: Any) -> list[int]:
            return [1]

        encode_plain = encode

    async def submit(self, *arguments: Any, **more: Any) -> Any:
        raise self.error


@asynccontextmanager
async def served(service: Any, api_keys: ApiKeys | None = None, **limits: Any) -> AsyncIterator[str]:
    """Returns the address of ``service``."""
    connections = ConnectionLimits(**limits)
    options = ServeOptions(grpc_port=0, api_keys=api_keys or ApiKeys(), connections=connections)
    server = GrpcServer(service, options, Ending("token", ApiKeys(), lambda: None))
    await server.start()
    try:
        yield str(server.address)
    finally:
        await server.stop(0.0)
