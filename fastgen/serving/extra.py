"""The packages that serving needs beside fastgen's own dependencies."""

from __future__ import annotations

from importlib.util import find_spec

from fastgen.errors import FastgenError
from fastgen.version import install_command

_PACKAGES = (
    *("fastapi", "uvicorn", "uvloop", "httptools", "zmq", "msgspec", "prometheus_client", "httpx2"),
    *("grpc", "grpc_health", "grpc_reflection"),
    "llguidance",
)


def need_extra() -> None:
    """Raises ``FastgenError`` where the extra ``serve`` is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise FastgenError(f"serving needs the package {package}: {install_command('serve')}")
