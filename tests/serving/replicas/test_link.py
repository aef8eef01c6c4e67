"""The connection between a server and a replica: what arrives, what is refused, and what is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import zmq

from fastgen.serving.engine.messages import Cancel, Reply, Report, Submit, encoder, from_server
from fastgen.serving.engine.remote_socket import RemoteAddress
from fastgen.serving.replicas import link
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import from_engine
from tests.serving.replicas.played import until

REPORT = Report([7, 42], [], [], [], None)
SUBMIT = Submit(7, [1, 2, 3], msgspec.Raw(encoder.encode({"temperature": 0.5})), True)
WAIT_S = 20.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    asyncio.run(limited())


@dataclass
class End:
    """One end of a link, with what came and how often the other end was lost."""

    link: Link
    got: list[object] = field(default_factory=list)
    num_lost: int = 0


def an_end(context: zmq.Context[zmq.Socket[bytes]], decoder: msgspec.msgpack.Decoder[Any]) -> End:
    def lost() -> None:
        end.num_lost += 1

    end = End(Link(context, decoder, lambda message: end.got.append(message), lost))
    return end


def both_ends(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[End, End, RemoteAddress]:
    """Returns the server's end and the replica's, connected."""
    replica, server = an_end(context, from_server), an_end(context, from_engine)
    address = replica.link.listen("127.0.0.1")
    server.link.connect(address)
    return server, replica, address


def test_messages_arrive_in_their_order_at_both_ends() -> None:
    async def test() -> None:
        with zmq.Context() as context:
            server, replica, _ = both_ends(context)
            server.link.send(encoder.encode(SUBMIT))  # at once: it waits until the link is made
            server.link.send(encoder.encode(Cancel(7)))
            await until(lambda: len(replica.got) == 2)
            reply = Reply(7, msgspec.Raw(encoder.encode(None)), None)
            replica.link.send(encoder.encode(REPORT))
            replica.link.send(encoder.encode(reply))
            await until(lambda: len(server.got) == 2)
            assert replica.got == [SUBMIT, Cancel(7)]
            assert server.got == [REPORT, reply]
            server.link.close()
            replica.link.close()
            assert (server.num_lost, replica.num_lost) == (0, 0)

    run(test)


def test_what_cannot_be_read_is_dropped() -> None:
    async def test() -> None:
        with zmq.Context() as context:
            server, replica, _ = both_ends(context)
            server.link.send(b"\xc1 no message")
            server.link.send(encoder.encode(REPORT))  # replicas send these, and never get them
            server.link.send(encoder.encode(SUBMIT))
            await until(lambda: replica.got)
            assert replica.got == [SUBMIT]
            server.link.close()
            replica.link.close()

    run(test)


def test_a_replica_takes_nothing_without_its_key_and_one_server_only() -> None:
    async def test() -> None:
        with zmq.Context() as context:
            replica, server = an_end(context, from_server), an_end(context, from_engine)
            address = replica.link.listen("127.0.0.1")
            other_key, _ = zmq.curve_keypair()
            stranger, second = an_end(context, from_engine), an_end(context, from_engine)
            stranger.link.connect(replace(address, public_key=other_key))
            stranger.link.send(encoder.encode(Cancel(1)))
            plain = context.socket(zmq.PAIR)
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(address.endpoint)
            plain.send(encoder.encode(Cancel(2)), zmq.NOBLOCK)
            await until(lambda: stranger.num_lost)
            server.link.connect(address)
            server.link.send(encoder.encode(SUBMIT))
            await until(lambda: replica.got)
            second.link.connect(address)
            second.link.send(encoder.encode(Cancel(3)))
            for _ in range(20):
                server.link.send(encoder.encode(Cancel(7)))
                await asyncio.sleep(0.01)
            await until(lambda: len(replica.got) == 21)
            assert replica.got == [SUBMIT, *[Cancel(7)] * 20]
            assert (server.num_lost, replica.num_lost) == (0, 0)
            plain.close()
            for end in (server, replica, second):
                end.link.close()

    run(test)


@pytest.mark.parametrize("first", ["server", "replica"])
def test_the_loss_of_one_end_is_noticed_at_the_other(first: str) -> None:
    async def test() -> None:
        with zmq.Context() as context:
            server, replica, _ = both_ends(context)
            server.link.send(encoder.encode(SUBMIT))
            await until(lambda: replica.got)
            replica.link.send(encoder.encode(REPORT))
            await until(lambda: server.got)
            gone, left = (server, replica) if first == "server" else (replica, server)
            gone.link.close()

            def is_lost() -> bool:
                replica.link.send(encoder.encode(REPORT))  # by which a replica notices, as twice a second
                return left.num_lost > 0

            await until(is_lost)
            left.link.send(encoder.encode(SUBMIT))  # goes nowhere, and does no harm
            assert (gone.num_lost, left.num_lost) == (0, 1)

    run(test)


def test_a_server_that_never_comes_and_a_replica_that_is_not_there_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_CONNECT_S", 0.05)

    async def test() -> None:
        with zmq.Context() as context:
            replica, server = an_end(context, from_server), an_end(context, from_engine)
            address = replica.link.listen("127.0.0.1")
            await until(lambda: replica.num_lost)
            server.link.connect(address)
            await until(lambda: server.num_lost)
            assert (server.num_lost, replica.num_lost) == (1, 1)

    run(test)


def test_a_replica_that_has_reached_its_server_does_not_give_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        later: list[Callable[[], None]] = []
        with zmq.Context() as context:
            replica, server = an_end(context, from_server), an_end(context, from_engine)
            with monkeypatch.context() as patch:
                patch.setattr(asyncio.get_running_loop(), "call_later", lambda delay_s, call: later.append(call))
                address = replica.link.listen("127.0.0.1")
            server.link.connect(address)
            server.link.send(encoder.encode(SUBMIT))
            await until(lambda: replica.got)
            replica.link.send(encoder.encode(REPORT))
            (give_up,) = later
            give_up()
            server.link.send(encoder.encode(Cancel(7)))
            await until(lambda: len(replica.got) == 2)
            assert (server.num_lost, replica.num_lost) == (0, 0)
            server.link.close()
            replica.link.close()

    run(test)


def test_what_a_replica_sends_before_its_server_has_come_is_dropped_and_is_no_loss() -> None:
    async def test() -> None:
        with zmq.Context() as context:
            replica, server = an_end(context, from_server), an_end(context, from_engine)
            address = replica.link.listen("127.0.0.1")
            replica.link.send(encoder.encode(Report([1, 2], [], [], [], None)))
            for _ in range(3):
                await asyncio.sleep(0)
            server.link.connect(address)
            server.link.send(encoder.encode(SUBMIT))
            await until(lambda: replica.got)
            replica.link.send(encoder.encode(REPORT))
            await until(lambda: server.got)
            assert (server.got, replica.num_lost) == ([REPORT], 0)
            server.link.close()
            replica.link.close()

    run(test)


def test_a_server_takes_each_way_not_to_reach_a_replica_for_a_loss() -> None:
    failures = (
        *(zmq.Event.DISCONNECTED, zmq.Event.CONNECT_RETRIED, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL),
        *(zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_AUTH),
    )
    assert all(link._FAILED & each for each in failures)
    assert link._FAILED.bit_count() == len(failures)
    assert not link._FAILED & (zmq.Event.CONNECTED | zmq.Event.CONNECT_DELAYED | zmq.Event.HANDSHAKE_SUCCEEDED)
