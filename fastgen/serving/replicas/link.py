"""One end of a connection between a server and a replica or its engine, for an event loop.

A replica opens a socket for each server that asks for one, and passes its address and key to the server through Ray.
Both ends notice when the other is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from fastgen.serving.engine.messages import has_come
from fastgen.serving.engine.remote_socket import RemoteAddress, connect, listen, remote_socket

# How long a replica waits for a server that asked for a socket.
_CONNECT_S = 10.0
# The events at the server's end that mean that there is no replica at the other.
_FAILED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_log = logging.getLogger(__name__)


class Link:
    """One end of the connection: :meth:`listen` makes the replica's, :meth:`connect` the server's.

    Messages are MessagePack. ``on_message`` is called with each that comes, as ``decoder`` reads it; one that cannot be
    read is dropped. ``on_lost`` is called once if the other end is gone or cannot be reached, and the
    link is closed then. All methods belong to one event loop.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ):
        self._decoder, self._on_message, self._on_lost = decoder, on_message, on_lost
        self._socket = remote_socket(context)
        self._loop = asyncio.get_running_loop()
        self._monitor: zmq.Socket[bytes] | None = None
        # Whether a message could be sent.
        self._is_connected = False
        self._will_receive = False

    def listen(self, host: str) -> RemoteAddress:
        """Waits for one server at ``host``, an address of this machine that the server's machine reaches."""
        address = listen(self._socket, host)
        self._loop.call_later(_CONNECT_S, self._give_up)
        self._begin()
        return address

    def connect(self, address: RemoteAddress) -> None:
        """Connects to the other end at ``address``. Messages can be sent at once."""
        self._monitor = self._socket.get_monitor_socket(_FAILED)
        self._loop.add_reader(self._monitor.fileno(), self._take_failure)
        connect(self._socket, address)
        self._loop.call_soon(self._take_failure)  # descriptors signal changes only
        self._begin()

    def send(self, encoded: bytes) -> None:
        """Sends a message. It is dropped where the other end is gone, or has yet to connect. A replica's end notices
        here that the server is gone.
        """
        if self._socket.closed:
            return
        try:
            self._socket.send(encoded, zmq.NOBLOCK)
        except zmq.Again:
            if self._is_connected:
                self._loop.call_soon(self._lose)
            return
        self._is_connected = True
        # The descriptor signals changes only, and sending may have consumed a signal.
        if not self._will_receive:
            self._will_receive = True
            self._loop.call_soon(self.receive)

    def close(self) -> None:
        """Closes this end. The other one notices, and ``on_lost`` of this one is not called any more."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()

    def _begin(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self.receive)
        self._loop.call_soon(self.receive)  # descriptors signal changes only

    def _take_failure(self) -> None:
        if self._monitor is not None and not self._monitor.closed and has_come(self._monitor):
            self._lose()

    def receive(self) -> None:
        """Takes all messages that have come."""
        self._will_receive = False
        while not self._socket.closed and has_come(self._socket):
            encoded = self._socket.recv()
            try:
                message = self._decoder.decode(encoded)
            except msgspec.DecodeError as error:
                _log.error("a message between a server and a replica cannot be read and is dropped: %s", error)
                continue
            self._on_message(message)

    def _give_up(self) -> None:
        if not self._is_connected:
            self._lose()

    def _lose(self) -> None:
        if not self._socket.closed:
            self.receive()  # the last messages of the other end
            self.close()
            self._on_lost()
