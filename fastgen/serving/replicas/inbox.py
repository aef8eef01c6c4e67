"""The sockets between replicas and a server: encrypted, and closed to all that do not know the server's key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from fastgen.serving.engine.messages import has_come
from fastgen.serving.replicas.messages import FromReplica, InboxAddress, from_replica

# A peer that says nothing for this long, not even in answer to a heartbeat, is gone.
_HEARTBEAT_MS, _SILENCE_MS = 2000, 10_000
# Most bytes in one message: an answer with as many log-probabilities as a server takes has fewer.
_MAX_MESSAGE_BYTES = 1 << 30
# What the monitor of a socket tells of a server that is gone, or was never there.
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_log = logging.getLogger(__name__)


class Inbox:
    """Receives what replicas send to a server. ``on_message`` is called with the replica's id and the message.

    ``host`` is an address of this machine that the replicas' machines reach. All methods belong to one event loop.
    """

    def __init__(self, server: str, host: str, on_message: Callable[[str, FromReplica], None]):
        self._on_message = on_message
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.PULL)
        public_key, secret_key = zmq.curve_keypair()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        _set_heartbeat(socket)
        port = socket.bind_to_random_port(f"tcp://{host}")
        self.address = InboxAddress(server, f"tcp://{host}:{port}", public_key)
        asyncio.get_running_loop().add_reader(socket.fileno(), self._receive)
        asyncio.get_running_loop().call_soon(self._receive)  # its descriptor signals changes only

    def _receive(self) -> None:
        while not self._socket.closed and has_come(self._socket):
            replica, encoded = self._socket.recv_multipart()
            try:
                message = from_replica.decode(encoded)
            except msgspec.DecodeError as error:
                _log.error("a message of replica %s cannot be read and is dropped: %s", replica.decode(), error)
                continue
            self._on_message(replica.decode(), message)

    def close(self) -> None:
        """Receives nothing more."""
        if not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()


class Outbox:
    """Sends to the inbox at ``address`` what the replica ``replica`` has for it. ``on_lost`` is called once if the
    server at the other end is gone. All methods belong to one event loop.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: InboxAddress, replica: str, on_lost: Callable[[], None]
    ):
        self._replica, self._on_lost = replica.encode(), on_lost
        self._socket = socket = context.socket(zmq.PUSH)
        public_key, secret_key = zmq.curve_keypair()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # the queue is bounded by the answers
        socket.setsockopt(zmq.CURVE_SERVERKEY, address.public_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        _set_heartbeat(socket)
        self._monitor = socket.get_monitor_socket(_LOST)
        asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._watch)
        socket.connect(address.endpoint)
        asyncio.get_running_loop().call_soon(self._watch)  # its descriptor signals changes only

    def send(self, encoded: bytes) -> None:
        """Sends a :data:`FromReplica`."""
        self._socket.send_multipart((self._replica, encoded), zmq.NOBLOCK)

    def _watch(self) -> None:
        while not self._monitor.closed and has_come(self._monitor):
            if recv_monitor_message(self._monitor)["event"] & _LOST:
                self._on_lost()
                return

    def close(self) -> None:
        """Sends nothing more."""
        if not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()


def _set_heartbeat(socket: zmq.Socket[bytes]) -> None:
    """Has both ends notice when the other's machine is gone."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _SILENCE_MS)
