"""What docs/serving.md says of the limits of gRPC is true."""

from __future__ import annotations

import io
import socket

import pytest

from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from fastgen.serving.admission.request_limits import MAX_BIASES, MAX_MESSAGES, MAX_TOKEN_IDS
from fastgen.serving.grpc import connections, open_services, server, size
from fastgen.serving.grpc.connections import (
    connection_options,
    end_connections,
    end_listening,
    listening,
    max_calls,
    num_connections,
)
from fastgen.serving.options import ConnectionLimits, Limits
from tests.pages import DOCS

LINES = (DOCS / "serving.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            "requests that are received at once by gRPC",
            f"{MAX_LARGEST_BODIES}; {MAX_LARGEST_BODIES} of health and reflection",
        ),
        (
            "requests that are received at once by gRPC",
            f"longer than {server._PATIENCE_S:g} s ({open_services._PATIENCE_S:g} s of health and reflection)",
        ),
        ("`--write-timeout`, by gRPC", f"cut if there is none for {connections._PING_TIMEOUT_S:g} s more"),
        (
            "calls by gRPC",
            f"{connections._MAX_STREAMS} on a connection; {max_calls(Limits(max_queued_requests=7)) - 7} beside",
        ),
        (
            "by gRPC: calls that need no key",
            f"{open_services.MAX_CHECKS} of `Check`, {open_services.MAX_WATCHES} of `Watch`, "
            f"{open_services.MAX_REFLECTIONS} of reflection at once; {open_services.MAX_QUESTIONS} requests of a call",
        ),
        ("by gRPC: the time of such a call", f"{open_services.MOST_WATCH_S:g} s for `Watch`"),
        (
            "fields of a request by gRPC above 256 KiB",
            f"{size.MAX_FIELDS:,}; {MAX_TOKEN_IDS:,} token ids; {MAX_BIASES:,} biases; {MAX_MESSAGES} messages",
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
    assert dict(connection_options(limits, max_calls=55)) == {
        "grpc.max_receive_message_length": 123,
        "grpc.max_allowed_incoming_connections": 9,
        "grpc.server_handshake_timeout_ms": 2500,
        "grpc.max_connection_idle_ms": 1,
        "grpc.keepalive_time_ms": 7000,
        "grpc.http2.ping_timeout_ms": 20_000,
        "grpc.max_concurrent_streams": 1024,
        "grpc.server.max_pending_requests": 55,
        "grpc.server.max_pending_requests_hard_limit": 55,
        "grpc.http2.bdp_probe": 0,
    }


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# The states of Linux: 0A listens, 01 is connected, 06 waits after its end and has no process any more.
ROWS = {
    "tcp": [
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 701 1 00 100 0",
        "   1: 0100007F:1F90 0100007F:A0A1 01 00000000:00000000 00:00000000 00000000     0        0 702 1 00 20 4",
        "   2: 0100007F:A0A1 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 703 1 00 20 4",
        "   3: 0100007F:1F90 0100007F:A0A3 06 00000000:00000000 03:0000176F 00000000     0        0 0 3 00",
        "   4: 0100007F:0F90 0100007F:A0A4 01 00000000:00000000 00:00000000 00000000     0        0 704 1 00 20 4",
    ],
    "tcp6": [
        "   0: 00000000000000000000000001000000:1F90 00000000000000000000000001000000:A0A5 01 00000000:00000000 "
        "00:00000000 00000000     0        0 705 1 00 20 4",
    ],
}


def test_connections_are_those_that_a_process_holds_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str) -> io.StringIO:
        return io.StringIO(HEAD + "".join(f"{row}\n" for row in ROWS[name.removeprefix("/proc/self/net/")]))

    monkeypatch.setattr(connections, "open", opened, raising=False)
    assert list(connections._sockets(8080)) == [("0A", "701"), ("01", "702"), ("06", "0"), ("01", "705")]
    assert (num_connections(8080), num_connections(3984), num_connections(1)) == (2, 1, 0)


def test_a_listener_that_ends_keeps_the_connections_that_it_has_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listening(port) == {listener.fileno()}
        assert num_connections(port) == 0
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as accepted:
            assert num_connections(port) == 1
            assert listening(port) == {listener.fileno()}
            end_listening(listening(port))
            assert listening(port) == set()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            client.sendall(b"still here")
            assert accepted.recv(100) == b"still here"
            end_listening({listener.fileno()})  # once more does no harm


def test_only_connections_of_the_named_peers_are_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        clients = [socket.create_connection(server.getsockname()) for server in (listener, listener, other)]
        accepted = [server.accept()[0] for server in (listener, listener, other)]
        end_connections(port, [f"ipv4:127.0.0.1:{clients[number].getsockname()[1]}" for number in (1, 2)])
        assert clients[1].recv(100) == b""
        for client, server in ((clients[0], accepted[0]), (clients[2], accepted[2])):
            server.sendall(b"still here")
            assert client.recv(100) == b"still here"
        for each in (*clients, *accepted, *[socket.create_connection(("127.0.0.1", port))]):
            each.close()


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:40124", "127.0.0.1"),
        ("ipv4:127.0.0.1:40124", "::ffff:127.0.0.1"),
        ("ipv6:%5B::1%5D:40124", "::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:40124", "fe80::1%eth0"),
    ],
)
def test_names_of_peers_are_addresses_of_sockets(peer: str, host: str) -> None:
    assert connections._address(peer) == (connections._ip(host), 40124)


@pytest.mark.parametrize(
    ("seconds", "expected_ms"), [(0.0004, 1), (0.001, 1), (0.0016, 2), (1.0, 1000), (2.5, 2500), (600.0, 600_000)]
)
def test_times_of_grpc_are_whole_milliseconds_and_never_none(seconds: float, expected_ms: int) -> None:
    options = dict(connection_options(ConnectionLimits(keep_alive_s=seconds), max_calls=1))
    assert options["grpc.max_connection_idle_ms"] == expected_ms


def test_calls_are_bounded_by_the_queue_and_1024_beside_it() -> None:
    assert max_calls(Limits(max_queued_requests=7)) == 1031
    assert server.LEAVE_S == 1.0, "a client's first call comes sooner"
