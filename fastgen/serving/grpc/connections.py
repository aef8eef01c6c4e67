"""Connections to the gRPC port: how many there may be, how long each may idle, how many there are, and their ends."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Container, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

from fastgen.serving.options import ConnectionLimits, Limits

# Most open calls of one connection. A client's further calls wait in the client.
_MAX_STREAMS = 1024
# Calls of all connections together that may be open beside the queued ones.
_MAX_CALLS_BESIDE_QUEUED = 1024
# How long a silent connection has for a sign of life once it is asked for one.
_PING_TIMEOUT_S = 20.0
_LISTENING = "0A"


def connection_options(limits: ConnectionLimits, max_calls: int) -> tuple[tuple[str, int], ...]:
    """Returns the options of a gRPC server that keep to ``limits``, and let ``max_calls`` wait for the event loop.

    A connection is counted from the moment it is accepted. It is closed if TLS and HTTP/2 are not agreed on within
    ``header_timeout_s``, if it has no call for ``keep_alive_s``, and if its client does not answer pings. Of more calls
    than may wait gRPC ends some with ``CANCELLED``, which gives no reason; by default of more than 1000.
    """
    return (
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", _in_ms(limits.header_timeout_s)),
        ("grpc.max_connection_idle_ms", _in_ms(limits.keep_alive_s)),
        ("grpc.keepalive_time_ms", _in_ms(limits.write_timeout_s)),
        ("grpc.http2.ping_timeout_ms", _in_ms(_PING_TIMEOUT_S)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.server.max_pending_requests", max_calls),
        ("grpc.server.max_pending_requests_hard_limit", max_calls),
        # Buffers of what is sent before it is received keep their 64 KiB, however fast a client sends.
        ("grpc.http2.bdp_probe", 0),
    )


def max_calls(limits: Limits) -> int:
    """Returns how many calls may be open, of all connections together."""
    return limits.max_queued_requests + _MAX_CALLS_BESIDE_QUEUED


def num_connections(port: int) -> int:
    """Returns how many connections to ``port`` processes of this machine hold, where Linux reports it; otherwise 0."""
    return sum(state != _LISTENING and inode != "0" for state, inode in _sockets(port))


def listening(port: int) -> set[int]:
    """Returns the descriptors by which this process listens at ``port``, where Linux reports them; otherwise none."""
    return _descriptors({inode for state, inode in _sockets(port) if state == _LISTENING})


def end_listening(descriptors: Iterable[int]) -> None:
    """Ends listening by these descriptors. Accepted connections remain; the clients of others connect anew."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.shutdown(socket.SHUT_RDWR)


def end_connections(port: int, peers: Iterable[str]) -> None:
    """Ends the connections of ``peers``, as gRPC names them, to this process's ``port``, where Linux reports them."""
    addresses = {_address(peer) for peer in peers}
    for descriptor in _descriptors({inode for state, inode in _sockets(port) if state != _LISTENING}):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            host, remote_port, *_ = connection.getpeername()
            if (_ip(host), remote_port) in addresses:
                connection.shutdown(socket.SHUT_RDWR)


def _address(peer: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Returns the address in a name such as ``ipv4:127.0.0.1:40124`` or ``ipv6:%5B::1%5D:40124``."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _ip(host.strip("[]")), int(port)


def _ip(host: str) -> IPv4Address | IPv6Address:
    """Returns the address without its scope. One of version 4 has its own form, also at a socket of version 6."""
    ip = ip_address(host.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


def _descriptors(inodes: Container[str]) -> set[int]:
    """Returns this process's descriptors of these sockets, where Linux reports them; otherwise none."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was that of the directory
                kind, _, inode = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")
                if kind == "socket" and inode.strip("[]") in inodes:
                    found.add(int(descriptor))
    return found


def _sockets(port: int) -> Iterator[tuple[str, str]]:
    """Yields state and inode of each TCP socket of this machine at ``port``."""
    suffix = f":{port:04X}"
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as rows:
            next(rows)
            for row in rows:
                fields = row.split()
                if fields[1].endswith(suffix):
                    yield fields[3], fields[9]


def _in_ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
