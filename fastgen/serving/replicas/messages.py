"""The messages from a replica to a server, and the calls in the other direction.

Calls go through Ray. The messages go over a socket, each in two frames: the replica's id, and a :data:`FromReplica` as
MessagePack. The engine's own reports are passed on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fastgen.serving.engine.messages import EngineFacts, Report, Status


@dataclass(frozen=True)
class InboxAddress:
    """Where a server receives what replicas send to it."""

    # Of the server's process; another process has another.
    server: str
    # Such as ``tcp://10.0.0.7:40123``.
    endpoint: str
    # The public key of the socket (CURVE). Only those that know it can send to it.
    public_key: bytes


@dataclass(frozen=True)
class Attached:
    """The answer of a replica to a server that it will send to from now on."""

    facts: EngineFacts
    # The host name of the replica's machine.
    host: str
    # Of fastgen on that machine.
    version: str


@dataclass(frozen=True)
class Answered:
    """How a call ended: with ``body``, the answer as MessagePack, or with the reason that there is none."""

    body: bytes = b""
    error: str | None = None
    # Whether the engine ended before it had answered.
    has_died: bool = False


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The state of a replica, sent about twice a second, also as a sign of life."""

    is_ready: bool
    status: Status
    # The counters of the engine up to now, a ``Metrics``; nil where it has not answered yet.
    metrics: msgspec.Raw
    num_restarts: int


FromReplica = Report | Beat
from_replica = msgspec.msgpack.Decoder(FromReplica)
