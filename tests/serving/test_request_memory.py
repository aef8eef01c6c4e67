"""The line at a server's start about the memory that open requests may take."""

from __future__ import annotations

from fastgen.serving.admission.request_memory import request_memory
from fastgen.serving.options import ConnectionLimits, ServeOptions


def test_the_line_names_what_requests_may_take() -> None:
    connections = ConnectionLimits(max_body_bytes=3 << 20)
    assert request_memory(ServeOptions(connections=connections), 24 << 30) == (
        "requests may take beside that, at most: log-probabilities 1,536.00 MiB, bodies by HTTP 48.00 MiB, "
        "their formats 3,000.00 MiB"
    )
    assert request_memory(ServeOptions(connections=connections, grpc_port=0), 1 << 30) == (
        "requests may take beside that, at most: log-probabilities 64.00 MiB, bodies by HTTP 48.00 MiB, "
        "bodies by gRPC 144.00 MiB, their formats 480.00 MiB"
    )
