"""Clients of a server: :func:`client` and, for asyncio, :func:`async_client`. Their methods are those of ``LLM``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastgen.errors import InvalidArgumentError
from fastgen.serving.clients.async_client import AsyncClient
from fastgen.serving.clients.client import Client
from fastgen.serving.clients.deployments import Deployment, deployment_at, find_deployment
from fastgen.serving.clients.requests import Transport
from fastgen.serving.extra import need_extra

Protocols = Literal["http", "grpc"]


def client(model: str | Path, *, api_key: str | None = None, protocol: Protocols = "http") -> Client:
    """Returns a client of a server.

    ``model`` is an address (``"http://host:port"``; with ``protocol="grpc"``, ``"host:port"``, or either address of a
    server on this machine). Otherwise it is the name of a server on this machine, or the model that one serves.

    Raises ``InvalidArgumentError`` if there is no such server, or several.
    """
    return Client(lambda: async_client(model, api_key=api_key, protocol=protocol))


def async_client(model: str | Path, *, api_key: str | None = None, protocol: Protocols = "http") -> AsyncClient:
    """Returns a client for asyncio: like :func:`client`, with coroutines as methods."""
    return connect(find_server(str(model)), api_key=api_key, protocol=protocol)


def find_server(name: str) -> Deployment | str:
    """Returns the deployment at an address or with a name, or an address where this machine knows of none. Raises
    ``InvalidArgumentError`` for a name that no server has.
    """
    return deployment_at(name) or name if is_address(name) else find_deployment(name)


def connect(server: Deployment | str, *, api_key: str | None, protocol: Protocols) -> AsyncClient:
    """Returns a client of the server at an address, or of a deployment on this machine, which the client may end."""
    need_extra()
    deployment = server if isinstance(server, Deployment) else None
    certificate = deployment.certificate if deployment else None
    if protocol == "http":
        from fastgen.serving.clients.http import HttpTransport

        transport: Transport = HttpTransport(deployment.address if deployment else str(server), api_key, certificate)
        return AsyncClient(transport, deployment)
    if protocol != "grpc":
        raise InvalidArgumentError(f"protocol={protocol!r}: expected 'http' or 'grpc'")
    from fastgen.serving.clients.grpc import GrpcTransport

    address = deployment.grpc_address if deployment else str(server)
    if address is not None and address.startswith(("http://", "https://")):
        raise InvalidArgumentError(f"{address} is an address of HTTP; that of gRPC is such as host:port")
    if address is None:
        raise InvalidArgumentError("this server has no gRPC; start it with a grpc_port, or use protocol='http'")
    return AsyncClient(GrpcTransport(address, api_key, certificate), deployment)


def is_address(model: str) -> bool:
    """Returns whether ``model`` is an address, rather than the name of a server or a model."""
    host, colon, port = model.rpartition(":")
    return model.startswith(("http://", "https://", "grpc://", "grpcs://")) or bool(host and colon and port.isdecimal())
