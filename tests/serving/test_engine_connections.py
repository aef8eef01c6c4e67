"""An engine with several servers: each gets its own tokens, and the end of one does no harm to another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import msgspec
import pytest
import zmq

from fastgen.runtime.engine import Engine
from fastgen.runtime.simulated import SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Close,
    Open,
    Reply,
    Report,
    Status,
    Stop,
    Submit,
    ToEngine,
    encoder,
    has_come,
    to_server,
)
from fastgen.serving.engine.process import EngineLoop
from fastgen.serving.engine.remote_socket import RemoteAddress, connect, remote_socket

MAX_ITERATIONS = 20_000
END = 1000


@dataclass
class Server:
    """One that sends requests, and what it was sent."""

    socket: zmq.Socket[bytes]
    got: list[object] = field(default_factory=list)

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(encoder.encode(message))

    def take(self) -> None:
        while not self.socket.closed and has_come(self.socket):
            self.got.append(to_server.decode(self.socket.recv()))

    @property
    def reports(self) -> list[Report]:
        return [message for message in self.got if isinstance(message, Report)]

    @property
    def num_tokens(self) -> dict[int, int]:
        """Returns how many tokens of each request came."""
        found: dict[int, int] = {}
        for report in self.reports:
            numbers = report.tokens[::2] + [each.number for each in report.progress for _ in each.token_ids]
            for number in numbers:
                found[number] = found.get(number, 0) + 1
        return found

    @property
    def ended(self) -> set[int]:
        return {each.number for report in self.reports for each in report.progress if each.end is not None}

    def reply(self, number: int) -> Reply | None:
        return next((each for each in self.got if isinstance(each, Reply) and each.number == number), None)


@dataclass
class Process:
    """An engine's loop, and the process that started it."""

    engine: Engine
    parent: Server
    loop: EngineLoop
    context: zmq.Context[zmq.Socket[bytes]]
    servers: list[Server] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1000))

    def run(self, until: Callable[[], object]) -> None:
        """Runs the loop until the condition holds."""
        left = iter(range(MAX_ITERATIONS))

        def is_over() -> bool:
            for each in (self.parent, *self.servers):
                each.take()
            assert next(left, None) is not None, "it takes too long"
            return bool(until())

        self.loop._is_orphan = is_over
        self.loop.run()

    @property
    def status(self) -> Status:
        return [report.status for report in self.parent.reports if report.status is not None][-1]

    def let_in(self, name: str) -> Server:
        number = next(self.numbers)
        self.parent.send(Open(number, name, "127.0.0.1"))
        self.run(lambda: self.parent.reply(number))
        reply = self.parent.reply(number)
        assert reply is not None
        assert reply.error is None
        found = Server(remote_socket(self.context))
        connect(found.socket, msgspec.msgpack.decode(reply.body, type=RemoteAddress))
        self.servers.append(found)
        return found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr("fastgen.serving.engine.process.STATUS_S", 0.001)
    # A loop that is run again must find everything in place.
    monkeypatch.setattr("fastgen.serving.engine.connections.Connections.close_all", lambda self: None)
    with played() as found:
        yield found


@contextmanager
def played() -> Iterator[Process]:
    engine = SimulatedServer(
        StepCost.linear(step_s=0.0001, token_s=0.0), token_budget=64, max_num_seqs=8, num_blocks=256
    ).engine
    engine.close = lambda: None  # type: ignore[method-assign]
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://parent")
        theirs.connect("inproc://parent")
        found = Process(engine, Server(ours), EngineLoop(engine, theirs, is_orphan=lambda: False), context)
        found.loop._formats.close = lambda: None  # type: ignore[method-assign]
        yield found
        for connection in found.loop._connections:
            connection.socket.close(linger=0)
        for each in found.servers:
            each.socket.close(linger=0)


def submit(number: int, num_tokens: int = 5, *, is_stream: bool = True) -> Submit:
    return Submit(number, [5, 6, 7], {"max_new_tokens": num_tokens, "ignore_eos": True}, is_stream)


def known_requests(loop: EngineLoop) -> set[int]:
    """Returns the requests of which the loop holds anything."""
    return {*loop._open, *loop._by_request_id, *loop._streams, *loop._without_token}


def test_each_server_is_told_of_its_own_requests_only(process: Process) -> None:
    a, b = process.let_in("a"), process.let_in("b")
    a.send(submit(1), submit(2, is_stream=False))
    b.send(submit(3, 7))
    process.parent.send(submit(4, 6))
    process.run(lambda: a.ended == {1, 2} and b.ended == {3} and process.parent.ended == {4})
    assert (a.num_tokens, b.num_tokens, process.parent.num_tokens) == ({1: 5, 2: 5}, {3: 7}, {4: 6})
    assert [number for report in a.reports for number in report.started] == [2]
    assert all(report.status is None for server in (a, b) for report in server.reports)
    process.run(lambda: process.status.num_open == 0)
    assert process.status.num_answered == 4
    assert not known_requests(process.loop)


def test_a_question_is_answered_to_the_server_that_asked_it(process: Process) -> None:
    a, b = process.let_in("a"), process.let_in("b")
    a.send(Ask(7, "metrics"))
    b.send(Ask(8, "recording"))
    process.run(lambda: a.reply(7) and b.reply(8))
    assert (a.reply(8), b.reply(7)) == (None, None)
    assert process.parent.reply(7) is process.parent.reply(8) is None


def test_the_requests_of_a_server_that_is_gone_end_and_those_of_others_do_not(process: Process) -> None:
    a, b = process.let_in("a"), process.let_in("b")
    a.send(*[submit(number, END) for number in range(4)])
    b.send(submit(9, END))
    process.run(lambda: process.status.num_open == 5)
    process.parent.send(Close("a"), Close("never let in"))
    process.run(lambda: b.ended)
    assert b.num_tokens == {9: END}
    assert not a.ended
    process.run(lambda: process.status.num_open == 0)
    assert not process.engine.has_work
    assert not known_requests(process.loop)


def test_a_server_that_was_let_in_anew_has_no_requests_from_before(process: Process) -> None:
    first = process.let_in("a")
    first.send(submit(1, END))
    process.run(lambda: first.num_tokens)
    process.parent.send(Close("a"))
    second = process.let_in("a")
    second.send(submit(2))
    process.run(lambda: second.ended)
    assert second.num_tokens == {2: 5}
    assert first.ended == set()


def test_a_server_that_has_vanished_holds_up_no_step(process: Process) -> None:
    a, b = process.let_in("a"), process.let_in("b")
    a.send(submit(1, END))
    process.run(lambda: a.num_tokens)
    a.socket.close(linger=0)  # and the process that let it in has yet to notice
    b.send(submit(2, END))
    process.run(lambda: b.ended)
    assert b.num_tokens == {2: END}


def test_a_server_may_neither_stop_the_engine_nor_let_others_in(process: Process) -> None:
    a = process.let_in("a")
    a.send(Stop(), Open(5, "b", "127.0.0.1"), Close("a"))
    a.socket.send(b"\xc1 no message")
    a.send(Cancel(99), submit(1))
    process.run(lambda: a.ended)
    assert a.num_tokens == {1: 5}
    assert a.reply(5) is process.parent.reply(5) is None


def test_a_socket_that_cannot_be_opened_is_told(process: Process) -> None:
    process.parent.send(Open(7, "a", "203.0.113.1"))  # an address of no machine here
    process.run(lambda: process.parent.reply(7))
    reply = process.parent.reply(7)
    assert reply is not None
    assert "Cannot assign requested address" in str(reply.error)
    process.parent.send(submit(1))
    process.run(lambda: process.parent.ended == {1})
