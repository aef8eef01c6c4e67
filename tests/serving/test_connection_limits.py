"""Each limit of a connection to the byte, the request and the second, without sockets and without waiting."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from fastgen.collector import collector_off
from fastgen.serving.http.connection import LimitedConnection, close_slow
from fastgen.serving.http.unsent import UnsentAnswers
from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import Refusal
from tests.serving.local_server import Application, on_uvloop, post

NOW_S = 1000.0
CHUNKED = b"POST /never HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"


class Transport(asyncio.Transport):
    """Keeps what a connection writes, and how it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_aborted = False
        self.num_waiting = 1 << 20
        self.on_written: Callable[[], None] = lambda: None

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def write(self, data: Any) -> None:
        self.written += data
        self.on_written()

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Played(LimitedConnection):
    """A connection that a test plays, and what it refused."""

    def __init__(self, limits: ConnectionLimits, unsent: UnsentAnswers | None = None):
        self.refused: list[Refusal] = []
        self.played = Transport()
        self.application = Application()
        config = uvicorn.Config(self.application, lifespan="off", log_config=None)
        super().__init__(limits, self.refused.append, unsent or UnsentAnswers(), config, ServerState(), {})
        self.connection_made(self.played)


@asynccontextmanager
async def connected(**limits: Any) -> AsyncIterator[Played]:
    connection = Played(ConnectionLimits(**limits))
    try:
        async with asyncio.timeout(20):
            yield connection
    finally:
        for task in connection.tasks:
            task.cancel()
        if connection.tasks:
            await asyncio.wait(connection.tasks)


def head(num_bytes: int) -> bytes:
    """Returns a request without a body that has this many bytes in its path, and in names, values and separators of
    its fields.
    """
    num_fixed = len("/never") + len("host: localhost\r\n") + len("x: \r\n")
    return b"GET /never HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (num_bytes - num_fixed) + b"\r\n\r\n"


@pytest.mark.parametrize("num_bytes", [65_536, 65_537])
def test_a_head_may_have_64_kib(num_bytes: int) -> None:
    async def run() -> None:
        async with connected() as connection:
            connection.data_received(head(num_bytes))
            is_taken = num_bytes == 65_536
            assert connection.refused == ([] if is_taken else ["head_size"])
            assert len(connection.tasks) == is_taken, "what is refused is not run"
            assert connection.played.written.startswith(b"" if is_taken else b"HTTP/1.1 413 ")
            assert connection.played.is_closed is not is_taken

    on_uvloop(run())


@pytest.mark.parametrize("before", [b"", CHUNKED], ids=["head", "behind a body"])
def test_what_completes_nothing_may_have_64_kib(before: bytes) -> None:
    async def run() -> None:
        async with connected() as connection:
            if before:
                connection.data_received(before)
            begin = b"x: " if before else b"GET /never HTTP/1.1\r\nx: "
            connection.data_received(begin + b"a" * (65_536 - len(begin)))
            assert connection.refused == []
            connection.data_received(b"a")
            assert connection.refused == ["head_size"]
            assert connection.played.written.startswith(b"HTTP/1.1 413 ")

    on_uvloop(run())


def test_64_requests_may_wait_for_the_answer_before_theirs() -> None:
    async def run() -> None:
        async with connected() as connection:
            connection.data_received(head(100) * 65)
            assert connection.refused == []
            connection.data_received(head(100))
            connection.close_if_slow(time.monotonic() + 1000)
            assert connection.refused == ["pipelined"]
            assert not connection.played.is_closing(), "they are answered first, however long that takes"

    on_uvloop(run())


@pytest.mark.parametrize("num_more", [0, 1])
def test_the_heads_of_waiting_requests_may_have_64_kib(num_more: int) -> None:
    async def run() -> None:
        async with connected() as connection:
            for num_bytes in (60_000, *[16_384] * 3, 16_384 + num_more):
                assert connection.refused == []
                connection.data_received(head(num_bytes))
            assert connection.refused == ["pipelined"] * num_more

    on_uvloop(run())


@pytest.mark.parametrize("num_more", [0, 1])
def test_the_heads_of_waiting_requests_may_have_1024_fields(num_more: int) -> None:
    async def run() -> None:
        async with connected() as connection:
            for num_fields in (256, *[205] * 4, 204 + num_more):
                assert connection.refused == []
                fields = b"x: \r\n" * (num_fields - 1)
                connection.data_received(b"GET /never HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
            assert connection.refused == ["pipelined"] * num_more

    on_uvloop(run())


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_head_may_have_256_fields(num_more: int) -> None:
    async def run() -> None:
        async with connected() as connection:
            fields = b"x: \r\n" * (255 + num_more)
            connection.data_received(b"GET /never HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
            assert connection.refused == ["head_size"] * num_more
            assert len(connection.tasks) == 1 - num_more

    on_uvloop(run())


@pytest.mark.parametrize("hosts", [b"", b"host: localhost\r\nhost: localhost\r\n"])
def test_a_request_with_another_number_of_hosts_is_not_run(hosts: bytes) -> None:
    async def run() -> None:
        async with connected() as connection:
            connection.data_received(b"GET /never HTTP/1.1\r\n" + hosts + b"\r\n")
            assert connection.refused == ["not_http"]
            assert not connection.tasks

    on_uvloop(run())


@pytest.mark.parametrize(("sent", "status"), [(b"", b""), (b"GET /ne", b"HTTP/1.1 408 ")])
def test_a_head_has_its_time_to_the_end(monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes) -> None:
    monkeypatch.setattr("fastgen.serving.http.connection.time.monotonic", lambda: NOW_S)

    async def run() -> None:
        async with connected(header_timeout_s=10) as connection:
            if sent:
                connection.data_received(sent)
            connection.close_if_slow(NOW_S + 10)
            assert not connection.played.is_closing()
            connection.close_if_slow(NOW_S + 10.5)
            assert connection.played.is_closed
            assert connection.played.written.startswith(status)
            assert connection.refused == (["head_time"] if status else [])

    on_uvloop(run())


def test_a_head_is_not_late_while_the_server_reads_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops where large bodies wait for the answers before theirs."""
    now_s = NOW_S
    monkeypatch.setattr("fastgen.serving.http.connection.time.monotonic", lambda: now_s)

    async def run() -> None:
        nonlocal now_s
        async with connected(header_timeout_s=10) as connection:
            connection.data_received(post("/later", b"") + post("/echo", bytes(70_000)) + b"GET /ne")
            for _ in range(5):
                now_s += 8
                connection.close_if_slow(now_s)
            connection.application.let_go.set()
            while connection.flow.read_paused:
                await asyncio.sleep(0)
            connection.close_if_slow(now_s + 10)
            assert connection.refused == []
            connection.close_if_slow(now_s + 10.5)
            assert connection.refused == ["head_time"]

    on_uvloop(run())


def test_a_client_has_the_time_to_take_its_answer_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.serving.http.connection.time.monotonic", lambda: NOW_S)

    async def run() -> None:
        async with connected(write_timeout_s=10) as connection:
            connection.data_received(post("/never", b""))
            for later_s in (20, 40):  # nothing waits for it
                connection.close_if_slow(NOW_S + later_s)
            assert not connection.played.is_closing()
            connection.pause_writing()
            connection.close_if_slow(NOW_S + 10)
            assert not connection.played.is_closing()
            connection.played.num_waiting -= 65_536  # takes as much as it must
            connection.close_if_slow(NOW_S + 10)
            connection.played.num_waiting -= 65_535
            connection.close_if_slow(NOW_S + 20)
            assert not connection.played.is_closing()
            connection.close_if_slow(NOW_S + 20.5)
            assert connection.played.is_aborted

    on_uvloop(run())


def test_answers_that_are_not_taken_are_bounded_over_all_connections() -> None:
    async def run() -> None:
        unsent = UnsentAnswers(max_bytes=3 << 20)
        first, second, third, fourth = (Played(ConnectionLimits(), unsent) for _ in range(4))
        for each in (first, second, third):
            each.pause_writing()
        first.resume_writing()
        second.connection_lost(None)
        fourth.played.num_waiting = 2 << 20
        fourth.pause_writing()
        assert not any(each.played.is_aborted for each in (first, second, third, fourth))
        first.pause_writing()
        assert [each.played.is_aborted for each in (first, second, third, fourth)] == [False, False, False, True]

    on_uvloop(run())


def test_an_answer_is_given_to_the_transport_as_the_client_takes_it_and_counted_meanwhile() -> None:
    body = bytes(300_000)

    async def run() -> None:
        async with connected() as connection:
            connection.played.num_waiting = 0
            connection.pause_writing()
            connection.data_received(post("/echo", body))
            await asyncio.sleep(0)
            assert connection.num_unsent == 0, "it is not made yet"
            while not connection.application.bodies:
                await asyncio.sleep(0)
            assert connection.played.written == b""
            connection.played.on_written = connection.pause_writing
            connection.resume_writing()
            for _ in range(5):
                before = len(connection.played.written)
                await asyncio.sleep(0.01)
                assert connection.num_unsent == len(body)
                assert len(connection.played.written) - before < 65_600
                connection.resume_writing()
            while not connection.played.written.endswith(b"\r\n0\r\n\r\n"):
                await asyncio.sleep(0)
            assert connection.played.written.count(b"\0") == len(body)
            assert connection.num_unsent == 0

    on_uvloop(run())


def test_nothing_is_sent_to_a_client_that_is_cut_while_a_pipelined_answer_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with connected() as connection:
            connection.data_received(post("/later", bytes(100_000)) + post("/later", b""))
            while not connection.application.bodies:
                await asyncio.sleep(0)
            connection.pause_writing()
            connection.application.let_go.set()
            await asyncio.sleep(0.01)
            assert connection.played.written == b""
            connection.abort()
            connection.connection_lost(None)
            await asyncio.sleep(0.01)
            assert connection.played.written == b""

    on_uvloop(run())
    assert not caplog.records


def test_an_answer_to_a_client_that_has_left_is_not_counted() -> None:
    async def run() -> None:
        async with connected() as connection:
            connection.data_received(post("/later", bytes(100_000)))
            while not connection.application.bodies:
                await asyncio.sleep(0)
            connection.abort()
            connection.connection_lost(None)
            connection._hold(100_000)
            assert not connection._unsent._waiting

    on_uvloop(run())


def test_a_client_that_takes_what_the_system_holds_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    num_in_the_system = 1 << 22
    monkeypatch.setattr("fastgen.serving.http.connection.time.monotonic", lambda: NOW_S)
    monkeypatch.setattr("fastgen.serving.http.connection.unacknowledged", lambda connected: num_in_the_system)

    async def run() -> None:
        nonlocal num_in_the_system
        async with connected(write_timeout_s=10) as connection:
            connection.data_received(post("/never", b""))
            connection.pause_writing()
            for turn in range(1, 4):
                num_in_the_system -= 65_536
                connection.close_if_slow(NOW_S + 10 * turn)
            assert not connection.played.is_closing()
            connection.close_if_slow(NOW_S + 41)
            assert connection.played.is_aborted

    on_uvloop(run())


def test_requests_are_freed_without_the_collector() -> None:
    """A server collects garbage rarely, and a body may be large."""

    async def run() -> None:
        async with connected() as connection:
            cycles = []
            with collector_off():
                for number in range(1, 4):
                    connection.data_received(post("/echo", b"abc"))
                    cycles.append(weakref.ref(connection.cycle))
                    while len(connection.application.bodies) < number or not connection.cycle.response_complete:
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.01)
            assert cycles[0]() is None

    on_uvloop(run())


def test_a_connection_is_not_idle_while_a_request_is_coming() -> None:
    async def run() -> None:
        async with connected() as connection:
            request = post("/echo", b"abc")
            connection.data_received(request)
            while connection.timeout_keep_alive_task is None:  # after which an idle connection would be closed
                await asyncio.sleep(0)
            connection.data_received(request[:10])
            assert connection.timeout_keep_alive_task is None

    on_uvloop(run())


@pytest.mark.parametrize(("header_timeout_s", "write_timeout_s"), [(1.0, 8.0), (8.0, 1.0), (60.0, 60.0)])
def test_slow_clients_are_looked_for_four_times_within_their_time_and_every_second(
    monkeypatch: pytest.MonkeyPatch, header_timeout_s: float, write_timeout_s: float
) -> None:
    async def sleep(seconds: float) -> None:
        assert 0 < seconds <= min(header_timeout_s / 4, write_timeout_s / 4, 1.0)
        raise asyncio.CancelledError

    limits = ConnectionLimits(header_timeout_s=header_timeout_s, write_timeout_s=write_timeout_s)
    monkeypatch.setattr("fastgen.serving.http.connection.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(close_slow(ServerState(), limits))
