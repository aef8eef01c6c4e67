"""The connections of an engine's process: with the process that started it, and with servers that it has let in."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from fastgen.serving.engine.messages import (
    Progress,
    Refused,
    Report,
    RequestDecoder,
    Status,
    Submit,
    ToServer,
    encoder,
    from_server,
    has_come,
    to_engine,
)
from fastgen.serving.engine.remote_socket import RemoteAddress, listen, remote_socket

_log = logging.getLogger(__name__)


class Connection:
    """A connection by which requests come, and what is to be reported of them. ``decoder`` reads the messages."""

    def __init__(self, socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[Any]):
        self.socket, self._decoder = socket, RequestDecoder(decoder)
        # Requests that are not queued yet, by their numbers.
        self.submits: dict[int, Submit] = {}
        # The next report; see :class:`~fastgen.serving.engine.messages.Report`.
        self.tokens: list[int] = []
        self.progress: list[Progress] = []
        self.started: list[int] = []
        self.refused: list[Refused] = []

    @property
    def is_open(self) -> bool:
        return not self.socket.closed

    def messages(self) -> Iterator[Any]:
        """Yields the messages that have come. One that cannot be read is dropped."""
        while not self.socket.closed and has_come(self.socket):
            encoded = self.socket.recv()
            try:
                yield self._decoder.decode(encoded)
            except msgspec.DecodeError as error:
                _log.error("a message to the engine cannot be read and is dropped: %s", error)

    def send(self, message: ToServer) -> None:
        """Sends a message. A step never waits for it: where the other end is gone, it is dropped."""
        if not self.socket.closed:
            with contextlib.suppress(zmq.Again):
                self.socket.send(encoder.encode(message), zmq.NOBLOCK)

    def report(self, status: Status | None) -> None:
        """Sends the next report, if there is anything to report."""
        if self.tokens or self.progress or self.started or self.refused or status is not None:
            self.send(Report(self.tokens, self.progress, self.started, self.refused, status))
            self.tokens, self.progress, self.started, self.refused = [], [], [], []


class Connections:
    """Holds the connection ``parent``, with the process that started this one, and those of servers."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self.parent = Connection(socket, to_engine)
        self._context = socket.context
        self._servers: dict[str, Connection] = {}
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)

    def __iter__(self) -> Iterator[Connection]:
        return iter([self.parent, *self._servers.values()])

    def wait(self, timeout_s: float) -> None:
        """Waits until a message comes, or until ``timeout_s`` seconds have passed."""
        self._poller.poll(math.ceil(1000 * timeout_s))

    def open(self, server: str, host: str) -> RemoteAddress:
        """Waits for ``server`` at ``host``, an address of this machine."""
        socket = remote_socket(self._context)
        try:
            address = listen(socket, host)
        except zmq.ZMQError:
            socket.close()
            raise
        self._servers[server] = Connection(socket, from_server)
        self._poller.register(socket, zmq.POLLIN)
        return address

    def close(self, server: str) -> Connection | None:
        """Closes the connection with ``server`` and returns it, if there is one."""
        if (connection := self._servers.pop(server, None)) is not None:
            self._poller.unregister(connection.socket)
            connection.socket.close()
        return connection

    def close_all(self) -> None:
        """Closes the connections with servers, after their last messages were sent or a second has passed."""
        for connection in self._servers.values():
            connection.socket.close(linger=1000)
        self._servers.clear()
