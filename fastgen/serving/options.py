"""How a model is served: where, to whom, and how much of it. What the model is and how it runs are ``load``'s."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The arguments of ``fastgen serve`` beside those of ``fastgen.load``."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any that is free."""
    grpc_port: int | None = None
    """Where gRPC is served; by default it is not."""
    model_name: str | None = None
    """What clients call the model; by default as it was asked for."""
    tool_format: str | None = None
    """How the model writes calls of tools, a key of ``tool_formats.TOOL_FORMATS``; by default its template says it."""
    drain_timeout_s: float = 30.0
    """How long requests may take to finish once the server was told to end."""
