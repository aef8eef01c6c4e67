"""The messages between a server and a replica, as MessagePack.

Those to the replica are a server's messages to its engine, and the engine's own reports and replies come back as they
are. A server gives each request and question a number that no other server uses.
"""

from __future__ import annotations

from typing import TypedDict

import msgspec

from fastgen.serving.engine.messages import Ask, Cancel, Check, EngineFacts, Reply, Report, Status, Submit
from fastgen.serving.replicas.link import LinkAddress


class AttachAnswer(TypedDict):
    """The answer of a replica to a server that asked for a link, in built-in types: servers of any version read it."""

    # The version of fastgen on the replica's machine.
    version: str
    # The host name of that machine.
    host: str
    # An :class:`Attached` of that version, as MessagePack.
    attached: bytes


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The state of a replica, sent about twice a second, also as a sign of life."""

    is_ready: bool
    status: Status
    # The counters of the engine up to now, a ``Metrics``; nil where it has not answered yet.
    metrics: msgspec.Raw
    num_restarts: int


class Attached(msgspec.Struct, array_like=True):
    """A link that a replica has opened, and the replica's state."""

    address: LinkAddress
    # Which servers it is for; see :func:`~fastgen.serving.replicas.settings.generation_of`.
    generation: str
    facts: EngineFacts
    state: Beat


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """Requests and questions that the engine has not taken, or has ended with."""

    numbers: list[int]
    error: str


ToReplica = Submit | Cancel | Ask | Check
to_replica = msgspec.msgpack.Decoder(ToReplica)
FromReplica = Report | Reply | Beat | Lost
from_replica = msgspec.msgpack.Decoder(FromReplica)
