"""The sockets between replicas and a server: what arrives, what is refused, and what is noticed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import zmq

from fastgen.serving.engine.messages import Report, Status, encoder
from fastgen.serving.replicas.inbox import Inbox, Outbox
from fastgen.serving.replicas.messages import Beat, FromReplica, InboxAddress
from tests.serving.replicas.played import until

REPORT = Report([7, 42], [], [], [], None)
WAIT_S = 20.0


def run(test: object) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await test  # type: ignore[misc]

    asyncio.run(limited())


def an_inbox() -> tuple[Inbox, list[tuple[str, FromReplica]]]:
    got: list[tuple[str, FromReplica]] = []
    return Inbox("server", "127.0.0.1", lambda replica, message: got.append((replica, message))), got


def test_messages_arrive_in_their_order_with_the_id_of_their_replica() -> None:
    async def test() -> None:
        inbox, got = an_inbox()
        with zmq.Context() as context:
            outboxes = [Outbox(context, inbox.address, name, lambda: None) for name in "ab"]
            beat = Beat(True, Status(1, 2, 3), msgspec.Raw(encoder.encode(None)), 4)
            for outbox in outboxes:
                outbox.send(encoder.encode(REPORT))
                outbox.send(encoder.encode(beat))
            await until(lambda: len(got) == 4)
            assert sorted(replica for replica, _ in got) == ["a", "a", "b", "b"]
            assert [message for replica, message in got if replica == "b"] == [REPORT, beat]
            for outbox in outboxes:
                outbox.close()
        inbox.close()

    run(test())


def test_what_cannot_be_read_is_dropped() -> None:
    async def test() -> None:
        inbox, got = an_inbox()
        with zmq.Context() as context:
            outbox = Outbox(context, inbox.address, "a", lambda: None)
            outbox.send(b"\xc1 no message")
            outbox.send(encoder.encode(REPORT))
            await until(lambda: got)
            assert got == [("a", REPORT)]
            outbox.close()
        inbox.close()

    run(test())


def test_nothing_comes_from_a_socket_that_does_not_know_the_key() -> None:
    async def test() -> None:
        inbox, got = an_inbox()
        with zmq.Context() as context:
            other_key, _ = zmq.curve_keypair()
            strange: InboxAddress = replace(inbox.address, public_key=other_key)
            stranger = Outbox(context, strange, "stranger", lambda: None)
            stranger.send(encoder.encode(REPORT))
            plain = context.socket(zmq.PUSH)
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(inbox.address.endpoint)
            plain.send_multipart((b"plain", encoder.encode(REPORT)), zmq.NOBLOCK)
            known = Outbox(context, inbox.address, "known", lambda: None)
            known.send(encoder.encode(REPORT))
            await until(lambda: got)
            known.send(encoder.encode(REPORT))
            await until(lambda: len(got) == 2)
            assert got == [("known", REPORT)] * 2
            plain.close()
            stranger.close()
            known.close()
        inbox.close()

    run(test())


def test_the_end_of_a_server_is_noticed() -> None:
    async def test() -> None:
        inbox, got = an_inbox()
        with zmq.Context() as context:
            lost: list[str] = []
            outbox = Outbox(context, inbox.address, "a", lambda: lost.append("a"))
            outbox.send(encoder.encode(REPORT))
            await until(lambda: got)
            assert lost == []
            inbox.close()
            await until(lambda: lost)
            outbox.close()

    run(test())
