"""What docs/serving.md says of the limits of gRPC is true."""

from __future__ import annotations

import pytest

from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from fastgen.serving.admission.request_limits import MAX_BIASES, MAX_TOKEN_IDS
from fastgen.serving.grpc import connections, open_services, server, size
from fastgen.serving.grpc.connections import connection_options, max_calls
from fastgen.serving.options import ConnectionLimits, Limits
from tests.pages import DOCS

LINES = (DOCS / "serving.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            "requests that are received at once by gRPC",
            f"{MAX_LARGEST_BODIES}; {MAX_LARGEST_BODIES} of health",
        ),
        (
            "requests that are received at once by gRPC",
            f"longer than {server._PATIENCE_S:g} s ({open_services._PATIENCE_S:g} s of health) gives its place",
        ),
        (
            "calls by gRPC",
            f"{connections._MAX_STREAMS} on a connection; {max_calls(Limits(max_queued_requests=7)) - 7} beside",
        ),
        (
            "by gRPC: calls that need no key",
            f"{open_services.MAX_CHECKS} of `Check`, {open_services.MAX_WATCHES} of `Watch`, "
            f"{open_services.MAX_REFLECTIONS} of reflection at once",
        ),
        ("by gRPC: the time of such a call", f"{open_services.MOST_WATCH_S:g} s for `Watch`"),
        (
            "fields of a request by gRPC above 256 KiB",
            f"{size.MAX_FIELDS:,}; {MAX_TOKEN_IDS:,} token ids; {MAX_BIASES:,} biases",
        ),
    ],
)
def test_the_bounds_are_those_of_the_code(row: str, said: str) -> None:
    (line,) = [line for line in LINES if line.startswith(f"| {row} |")]
    assert said in line


def test_the_limits_of_connections_reach_grpc_in_its_units() -> None:
    limits = ConnectionLimits(
        max_connections=9, max_body_bytes=123, header_timeout_s=2.5, keep_alive_s=0.0001, write_timeout_s=7.0
    )
    assert dict(connection_options(limits)) == {
        "grpc.max_receive_message_length": 123,
        "grpc.max_allowed_incoming_connections": 9,
        "grpc.server_handshake_timeout_ms": 2500,
        "grpc.max_connection_idle_ms": 1,
        "grpc.keepalive_time_ms": 7000,
        "grpc.max_concurrent_streams": 1024,
        "grpc.http2.bdp_probe": 0,
    }
