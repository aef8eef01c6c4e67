"""Sockets to a server on any machine: encrypted, and closed to all that do not have the listener's key."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

# An end that says nothing for this long, not even in answer to a heartbeat, is gone.
_HEARTBEAT_MS, _SILENCE_MS = 2000, 10_000
# Most bytes in one message: an answer with as many log-probabilities as a server takes has fewer.
_MAX_MESSAGE_BYTES = 1 << 30
_OPTIONS = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 0,  # the queues are bounded by the requests and their answers
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
    zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: _SILENCE_MS,
    zmq.HEARTBEAT_TTL: _SILENCE_MS,
}


@dataclass(frozen=True)
class RemoteAddress:
    """The address at which a socket waits for one server."""

    # Such as ``tcp://10.0.0.7:40123``.
    endpoint: str
    # The public key of the socket (CURVE). Only those that have it can connect.
    public_key: bytes


def remote_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Returns a socket for :func:`listen` or :func:`connect`."""
    socket = context.socket(zmq.PAIR)
    for option, value in _OPTIONS.items():
        socket.setsockopt(option, value)
    return socket


def listen(socket: zmq.Socket[bytes], host: str) -> RemoteAddress:
    """Waits for one server at ``host``, an address of this machine that the server's machine reaches."""
    public_key, secret_key = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    port = socket.bind_to_random_port(f"tcp://{host}")
    return RemoteAddress(f"tcp://{host}:{port}", public_key)


def connect(socket: zmq.Socket[bytes], address: RemoteAddress) -> None:
    """Connects to the socket that listens at ``address``. Messages can be sent at once."""
    public_key, secret_key = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, address.public_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.connect(address.endpoint)
