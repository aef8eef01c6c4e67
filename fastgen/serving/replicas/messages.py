"""The messages from a replica's actor to servers, as MessagePack. Servers send requests to its engine's process."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from fastgen.serving.engine.messages import EngineFacts, Reply, Report, Status
from fastgen.serving.engine.remote_socket import RemoteAddress


class AttachAnswer(TypedDict):
    """The answer of a replica to a server that asked for a link, in built-in types: servers of any version read it."""

    # The version of fastgen on the replica's machine.
    version: str
    # The host name of that machine.
    host: str
    # An :class:`Attached` of that version, as MessagePack.
    attached: bytes


class Beat(msgspec.Struct, array_like=True):
    """The state of a replica, sent to a server about twice a second, also as a sign of life."""

    # Where its engine waits for this server. ``None`` while there is no engine; another one has another address.
    engine: RemoteAddress | None
    status: Status
    # The counters of the engine up to now, a ``Metrics``; nil where it has not answered yet.
    metrics: msgspec.Raw
    num_restarts: int


class Attached(msgspec.Struct, array_like=True):
    """A link that a replica has opened, and the replica's state."""

    address: RemoteAddress
    # Which servers it is for; see :func:`~fastgen.serving.replicas.settings.generation_of`.
    generation: str
    facts: EngineFacts
    state: Beat


beat_decoder = msgspec.msgpack.Decoder(Beat)
FromEngine = Report | Reply
from_engine = msgspec.msgpack.Decoder(FromEngine)
