"""However much there is to do in a turn of the event loop, tokens are handed on within milliseconds."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
import uvloop
import zmq

from fastgen.serving.admission.turns import Turns
from fastgen.serving.breaks import BREAKS, Breaks
from fastgen.serving.engine.messages import Reply, Report, Stop, encoder
from fastgen.serving.engine.supervisor import EngineProcess
from tests.serving.local_server import Served, check, post

# The shortest time between two breaks.
EVERY_S = 0.005
# How long the work takes that is done between breaks.
WORK_S = 0.001


class Worked:
    """Counts pieces of work between two breaks."""

    def __init__(self) -> None:
        self.num_since, self.most = 0, 0

    def work(self) -> None:
        end_s = time.monotonic() + WORK_S
        while time.monotonic() < end_s:
            pass
        self.num_since += 1
        self.most = max(self.most, self.num_since)

    def take(self) -> None:
        self.num_since = 0


@contextmanager
def taken_by(taker: Any) -> Iterator[None]:
    BREAKS.add(taker)
    try:
        yield
    finally:
        BREAKS.remove(taker)


class Clock:
    """Plays ``time.monotonic`` for breaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        monkeypatch.setattr("fastgen.serving.breaks.time.monotonic", lambda: self.now_s)


def test_breaks_follow_each_other_after_some_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, breaks, taken = Clock(monkeypatch), Breaks(), list[float]()
    breaks.add(lambda: taken.append(clock.now_s))
    for next_s in (100.0, 100.004, 100.006, 100.010, 100.012):
        clock.now_s = next_s
        breaks.take()
    assert taken == [100.0, 100.006, 100.012]
    clock.now_s = 100.018
    breaks.take_now()
    clock.now_s = 100.022
    breaks.take()
    assert len(taken) == 4, "what had come was taken 4 ms before"


@pytest.mark.parametrize("takes_s", [0.003, 0.008, 0.05])
def test_breaks_that_take_long_leave_half_of_the_time(takes_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, breaks = Clock(monkeypatch), Breaks()
    began_s, break_s = clock.now_s, 0.0

    def taker() -> None:
        nonlocal break_s
        clock.now_s += takes_s
        break_s += takes_s

    breaks.add(taker)
    while clock.now_s < began_s + 10.0:
        clock.now_s += 0.0001  # a small piece of work
        breaks.take()
    assert 0.2 < break_s / (clock.now_s - began_s) < 0.51


def test_all_takers_take_in_a_break_until_they_are_removed() -> None:
    breaks, taken = Breaks(), list[str]()

    def first() -> None:
        taken.append("first")
        breaks.remove(first)

    breaks.add(first)
    breaks.add(lambda: taken.append("second"))
    breaks.take_now()
    breaks.take_now()
    assert taken == ["first", "second", "second"]


def test_many_requests_of_one_turn_have_breaks_between_them() -> None:
    worked = Worked()

    async def test(server: Served) -> None:
        inner = server.app.__class__.__call__

        async def work(app: Any, scope: Any, receive: Any, send: Any) -> None:
            worked.work()
            await inner(app, scope, receive, send)

        clients = [await server.connect() for _ in range(60)]
        with pytest.MonkeyPatch.context() as patch, taken_by(worked.take):
            patch.setattr(server.app.__class__, "__call__", work)
            for client in clients:
                client.writer.write(post("/echo", b"small"))
            for client in clients:
                assert (await client.response())[0] == 200
                client.writer.close()

    check(test)
    assert 0 < worked.most <= EVERY_S / WORK_S + 1


def test_callers_that_wait_for_one_turn_have_breaks_between_them() -> None:
    worked, num_at_once = Worked(), 50

    async def caller(turns: Turns) -> None:
        await turns.wait()
        worked.work()

    async def test() -> None:
        turns = Turns(num_at_once)
        await asyncio.gather(*(caller(turns) for _ in range(2 * num_at_once)))  # the first do not have to wait

    with taken_by(worked.take), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
    assert worked.most <= num_at_once + EVERY_S / WORK_S + 1


def test_a_connection_that_is_closed_in_a_break_takes_no_request() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        while not server.http.server_state.connections:
            await asyncio.sleep(0.001)

        def close() -> None:
            for connection in server.http.server_state.connections:
                connection.transport.close()

        await asyncio.sleep(2 * EVERY_S)
        with taken_by(close):
            client.writer.write(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with suppress(ConnectionError):
                assert await client.reader.read() == b""
            await asyncio.sleep(0.05)
        assert server.app.bodies == []

    check(test)


class Listener:
    """Notes what comes from an engine's process."""

    def __init__(self) -> None:
        self.sent: list[Report | Reply] = []
        self.num_read = 0

    def engine_sent(self, message: Report | Reply, encoded: bytes) -> None:
        self.sent.append(message)

    def engine_read(self) -> None:
        self.num_read += 1


def test_what_an_engine_sends_is_taken_in_breaks() -> None:
    listener: Any = Listener()

    async def test() -> None:
        process = EngineProcess({}, listener, timeout_s=10.0)
        process._open_socket()
        with process._context.socket(zmq.PAIR) as engine:
            engine.connect(process._address())
            engine.send(encoder.encode(Report([3, 4], [], [], [], None)))
            await asyncio.sleep(0.05)
            assert len(listener.sent) == 1, "the loop takes it where nothing else is to be done"
            for token_id in (5, 6):
                engine.send(encoder.encode(Report([3, token_id], [], [], [], None)))
            time.sleep(0.05)  # both are here, and the loop does not go on
            BREAKS.take()
            assert [report.tokens for report in listener.sent] == [[3, 4], [3, 5], [3, 6]]
            engine.send(encoder.encode(Report([3, 7], [], [], [], None)))
            await asyncio.sleep(0.05)
            assert len(listener.sent) == 4, "a break leaves the loop's own look as it was"
        process._close_socket()
        process._context.term()
        assert process._directory is not None
        process._directory.remove()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
    BREAKS.take_now()  # it is no longer asked
    assert not BREAKS._takers


def test_a_socket_that_cannot_be_watched_is_closed() -> None:
    async def test() -> None:
        process = EngineProcess({}, cast(Any, Listener()), timeout_s=10.0)

        class Loop:
            def add_reader(self, *arguments: object) -> None:
                raise OSError(errno.ENOSPC, "no space left on device")

            def remove_reader(self, descriptor: int) -> None:
                """Does nothing, as a loop does with a descriptor that it does not watch."""

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("asyncio.get_running_loop", Loop)
            with pytest.raises(OSError, match="no space"):
                process._open_socket()
            process._close_socket()
        process._context.term()
        assert process._directory is not None
        process._directory.remove()

    asyncio.run(test())
    assert not BREAKS._takers


def test_all_takers_have_a_break_when_something_comes_and_after_something_is_sent() -> None:
    async def test() -> None:
        process = EngineProcess({}, cast(Any, Listener()), timeout_s=10.0)
        process._open_socket()
        with process._context.socket(zmq.PAIR) as engine:
            engine.connect(process._address())
            engine.send(encoder.encode(Report([3, 4], [], [], [], None)))
            await asyncio.sleep(0.05)
            assert breaks
            breaks.clear()
            process.send(Stop())
            await asyncio.sleep(0.05)
            assert breaks
        process._close_socket()
        process._context.term()
        assert process._directory is not None
        process._directory.remove()

    breaks: list[float] = []
    with taken_by(lambda: breaks.append(time.monotonic())), asyncio.Runner() as runner:
        runner.run(test())
