"""How a model is served: where, to whom, and how much of it. What the model is and how it runs are ``load``'s."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from fastgen.errors import InvalidArgumentError
from fastgen.serving.admission.admission import Limits
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.tools.formats import tool_format_named


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What a connection may cost."""

    # How many may be open at once.
    max_connections: int = 1024
    # Of one request.
    max_body_bytes: int = 16 << 20
    # From a connection's or a request's beginning to the end of the request's head.
    header_timeout_s: float = 10.0
    # From there to the end of its body.
    body_timeout_s: float = 60.0
    # For a client to take anything of what waits for it; after that the connection is cut.
    write_timeout_s: float = 30.0
    # For a client to send another request on the same connection.
    keep_alive_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InvalidArgumentError(f"{name}={value!r}: expected a number above 0")


LogFormat = Literal["text", "json"]
# What browsers say that a page is from; of another form none would ever match.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+")


def parse_log_format(name: str) -> LogFormat:
    """``name``, if it is one."""
    if name in get_args(LogFormat):
        return cast(LogFormat, name)
    raise InvalidArgumentError(f"log_format={name!r}: expected 'text' or 'json'")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The arguments of ``fastgen serve`` beside those of ``fastgen.load``."""

    host: str = "127.0.0.1"
    # 0 takes any that is free.
    port: int = 8000
    # Where gRPC is served, on the same host; by default it is not. 0 takes any that is free.
    grpc_port: int | None = None
    # What clients call the model; by default as it was asked for.
    name: str | None = None
    # How the model writes calls of tools, a key of ``tool_formats.TOOL_FORMATS``; by default its template says it.
    tool_format: str | None = None
    limits: Limits = field(default_factory=Limits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    # A certificate and those that it rests on, PEM; with its key the server speaks TLS, by HTTP and by gRPC.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # The sites whose pages may ask this server; by default none but its own.
    allow_origins: tuple[str, ...] = ()
    # How long requests may take to finish once the server was told to end.
    drain_timeout_s: float = 30.0
    # For how long an engine may be silent before it is ended and started again.
    engine_timeout_s: float = 60.0
    log_format: LogFormat = "text"
    # A line for each request.
    log_requests: bool = False
    # With what was asked in it.
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise InvalidArgumentError(f"{name}={port}: expected a port, 1 to 65535, or 0 for any that is free")
        if self.tool_format is not None:
            tool_format_named(self.tool_format)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgumentError("tls_cert and tls_key go together: a certificate and its private key")
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidArgumentError(
                    f"allow_origins={origin!r}: expected a site as browsers say it, such as https://example.org or "
                    "http://localhost:3000, in small letters and with nothing behind, or * for all"
                )
        if self.log_prompts and not self.log_requests:
            raise InvalidArgumentError("log_prompts goes with log_requests, whose lines the prompts are put into")
