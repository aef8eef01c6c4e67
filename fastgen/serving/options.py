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
    """Where gRPC is served, on the same host; by default it is not. 0 takes any that is free."""
    name: str | None = None
    """What clients call the model; by default as it was asked for."""
    api_key_file: str | None = None
    """A file of keys, one a line, of which clients need one; that in ``FASTGEN_API_KEY`` counts too."""
    tls_cert_file: str | None = None
    """A certificate chain (PEM); with it both HTTP and gRPC speak TLS."""
    tls_key_file: str | None = None
    """Its private key (PEM)."""
    drain_timeout_s: float = 30.0
    """How long requests may take to finish once the server was told to end."""
