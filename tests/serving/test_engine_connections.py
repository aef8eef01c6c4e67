"""An engine with several servers: each gets its own tokens, and the end of one does no harm to another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from fastgen.errors import RankError
from fastgen.runtime.engine import Engine
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.simulated import SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.serving.engine import process as engine_process
from fastgen.serving.engine.connections import Connections
from fastgen.serving.engine.formats import FormatThread, with_time_left
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Close,
    Open,
    Reply,
    Report,
    SamplingPacker,
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
from tests.serving.test_format_thread import _Grammars

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

    def next_status(self) -> Status:
        """Returns the next status that an engine without work reports."""
        self.parent.got.clear()
        self.run(lambda: self.parent.got)
        return self.status

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
    sampling = SamplingPacker().pack(SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    return Submit(number, [5, 6, 7], sampling, is_stream)


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


def test_requests_of_a_server_that_is_gone_wait_for_no_format(process: Process) -> None:
    """Neither those that wait for their format, nor those that are not looked at yet."""
    grammars: Any = _Grammars()
    grammars.used |= {ResponseFormat("regex", text) for text in "xy"}
    process.loop._formats = FormatThread(grammars)
    a, sampling = (
        process.let_in("a"),
        SamplingPacker().pack(SamplingParams(response_format=ResponseFormat("regex", "a"))),
    )
    a.send(*[Submit(number, [5], sampling, True) for number in range(3)])
    process.run(lambda: process.status.num_open == 3)
    (connection,) = [each for each in process.loop._connections if each is not process.loop._connections.parent]
    connection.submits[9] = Submit(9, [5], sampling, True)
    process.loop._close("a")
    assert process.loop._formats.num_waiting == 0
    assert process.loop._num_submits == 0
    assert not connection.submits
    assert not grammars.begun


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


def test_requests_that_come_together_begin_together(process: Process) -> None:
    process.parent.send(submit(1))
    process.run(lambda: process.parent.ended == {1})
    num_steps = process.next_status().num_steps
    assert num_steps > 0
    process.parent.send(submit(2), submit(3))
    process.run(lambda: process.parent.ended == {2, 3})
    assert process.next_status().num_steps == 2 * num_steps


@pytest.mark.parametrize(("pace_s", "num_reports"), [(0.0, 20), (1e9, 2)])
def test_only_the_later_tokens_of_a_stream_wait_for_each_other(
    process: Process, monkeypatch: pytest.MonkeyPatch, pace_s: float, num_reports: int
) -> None:
    monkeypatch.setattr("fastgen.serving.engine.process.PACE_S", pace_s)
    process.parent.send(submit(1, 20))
    process.run(lambda: process.parent.ended)
    reports = [report for report in process.parent.reports if report.tokens or report.progress]
    assert len(reports) == num_reports
    assert reports[0].tokens[::2] == [1], "the first token comes at once"
    assert process.parent.num_tokens == {1: 20}


def test_first_tokens_and_ends_of_some_streams_bring_no_tokens_of_others(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.parent.send(submit(1, 20), submit(2, 3))
    process.run(lambda: process.parent.ended == {1, 2})  # all sizes are recorded
    del process.parent.got[:]
    monkeypatch.setattr("fastgen.serving.engine.process.PACE_S", 1e9)
    process.parent.send(submit(1, 20))
    process.run(lambda: 1 in process.parent.num_tokens)
    process.parent.send(submit(2, 3), Submit(3, [5], {"max_new_tokens": 4, "n": 2, "ignore_eos": True}, True))
    process.run(lambda: process.parent.ended == {1, 2, 3})
    news = [(report.tokens[::2], [each.number for each in report.progress]) for report in process.parent.reports]
    expected = [([1], []), ([2], [3]), ([], [2]), ([], [3, 3]), ([], [3]), ([], [1])]
    assert [each for each in news if each != ([], [])] == expected
    assert process.parent.num_tokens == {1: 20, 2: 3, 3: 8}


def test_a_stream_of_several_answers_reports_what_is_new_and_each_end_once(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.serving.engine.process.PACE_S", 0.0)
    several = {"max_new_tokens": 5, "n": 2, "ignore_eos": True}
    process.next_status()
    process.parent.send(Submit(1, [5] * 200, several, True))  # a prompt of some steps
    process.run(lambda: process.status.num_answered == 2)
    progress = [each for report in process.parent.reports for each in report.progress]
    assert all(each.token_ids for each in progress)
    assert sorted(each.index for each in progress if each.end is not None) == [0, 1]
    assert [sum(len(each.token_ids) for each in progress if each.index == index) for index in (0, 1)] == [5, 5]
    assert len(progress) == 10


def test_requests_that_are_cancelled_before_they_began_leave_nothing(process: Process) -> None:
    process.next_status()
    process.parent.send(*[submit(number, END) for number in range(10)])
    process.run(lambda: process.status.num_running == 8)
    assert (process.status.num_waiting, process.status.num_open) == (2, 10)
    process.parent.send(*[Cancel(number) for number in range(10)])
    process.run(lambda: process.status.num_open == 0)
    assert (process.status.num_running, process.status.num_waiting) == (0, 0)
    assert not process.engine.has_work
    assert not known_requests(process.loop)
    assert process.loop._ended == []


def test_cancels_and_questions_wait_for_no_requests(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine queues some of many requests before each step. A cancel reaches the others before they are queued."""
    monkeypatch.setattr(engine_process, "_SUBMITTING_S", -1.0)
    process.next_status()
    process.parent.send(*[submit(number, END) for number in range(1, 5)], Cancel(3), Ask(99, "metrics"))
    process.run(lambda: process.parent.reply(99))
    assert len(process.loop._open) < 3
    process.run(lambda: process.status.num_open == 3)
    process.run(lambda: len(process.parent.num_tokens) == 3)
    assert process.loop._open.keys() == {1, 2, 4}
    process.parent.send(*[Cancel(number) for number in (1, 2, 4)])
    process.run(lambda: process.status.num_open == 0)


def test_a_request_that_is_cancelled_while_its_format_is_compiled_never_begins(process: Process) -> None:
    grammars: Any = _Grammars()
    process.loop._formats = FormatThread(grammars)
    process.loop._formats.close = lambda: None  # type: ignore[method-assign]
    sampling = SamplingPacker().pack(SamplingParams(response_format=ResponseFormat("regex", "a")))
    process.next_status()
    process.parent.send(Submit(1, [5], sampling, True))
    process.run(lambda: grammars.begun)
    process.run(lambda: process.status.num_open == 1)
    process.parent.send(Cancel(1))
    process.run(lambda: process.status.num_open == 0)
    process.parent.send(Submit(2, [5], sampling, True))
    grammars.may_end.set()
    process.run(lambda: any(report.refused for report in process.parent.reports))  # by this engine without a tokenizer
    assert [each.number for report in process.parent.reports for each in report.refused] == [2]


def test_a_request_whose_time_is_over_before_its_format_may_be_used_ends_so(process: Process) -> None:
    """The format is not compiled for it, and the time that it waited counts."""
    grammars: Any = _Grammars()
    grammars.used |= {ResponseFormat("regex", text) for text in "xy"}
    process.loop._formats = FormatThread(grammars)
    asked = SamplingParams(max_new_tokens=100, response_format=ResponseFormat("regex", "a"), timeout_s=0.05)
    process.next_status()
    process.parent.send(Submit(1, [5], SamplingPacker().pack(asked), True))
    process.run(lambda: any(report.progress for report in process.parent.reports))
    (progress,) = [each for report in process.parent.reports for each in report.progress]
    assert progress.token_ids == []
    assert progress.end is not None
    assert progress.end.reason == "timeout"
    assert not grammars.begun


def test_slots_are_wanted_too_while_requests_wait_for_formats_of_others(process: Process) -> None:
    """Then answers with slow masks have to make room."""
    wanted: list[bool] = []
    grammars: Any = _Grammars()
    grammars.used |= {ResponseFormat("regex", text) for text in "xy"}
    grammars.slots_are_wanted, grammars.constraint = wanted.append, lambda sampling: None
    grammars.shed = lambda: None
    process.loop._formats = FormatThread(grammars)
    process.next_status()
    process.engine.grammars = grammars
    process.parent.send(submit(1, END))
    process.run(lambda: len(wanted) > 3)
    assert not any(wanted)
    asked = SamplingPacker().pack(SamplingParams(response_format=ResponseFormat("regex", "a")))
    process.parent.send(Submit(2, [5], asked, True))
    process.run(lambda: wanted[-1])
    process.parent.send(Cancel(2))
    process.run(lambda: not wanted[-1])
    process.parent.send(*[submit(number, END) for number in range(3, 12)])
    process.run(lambda: wanted[-1])


def test_the_time_for_which_a_request_waits_for_its_format_counts() -> None:
    asked = SamplingParams(timeout_s=9.0, seed=4, response_format=ResponseFormat("regex", "a"))
    left = with_time_left(asked, 5.5)
    assert (left.timeout_s, left.seed, left.response_format) == (3.5, 4, asked.response_format)
    over = with_time_left(asked, 9.5)
    assert over.timeout_s is not None
    assert 0 < over.timeout_s < 1e-6
    assert over.response_format is None
    assert with_time_left(asked, 0.0005) is asked, "equal parameters of many prompts stay one object"
    short = with_time_left(SamplingParams(timeout_s=1e-5, response_format=asked.response_format), 0.0005)
    assert short.response_format is None, "its time is over, though it waited for a moment only"
    plain = SamplingParams(timeout_s=9.0)
    assert with_time_left(plain, 5.5) is plain


@pytest.mark.parametrize(
    ("has_work", "idle_s", "num_waiting", "waits_s"),
    [
        (False, 0.0, 0, [0.25]),
        (False, 0.0, 1, [0.002]),
        (True, 0.0, 1, []),
        (True, 0.1, 0, [0.1]),
        (True, 60.0, 0, [0.25]),
        (True, 0.001, 1, [0.001]),
    ],
)
def test_an_engine_sleeps_as_long_as_nothing_can_happen(
    monkeypatch: pytest.MonkeyPatch, has_work: bool, idle_s: float, num_waiting: int, waits_s: list[float]
) -> None:
    """``idle_s`` is for how long its policy waits, and ``num_waiting`` the number of requests that wait for formats."""
    waited_s: list[float] = []
    with played() as process, monkeypatch.context() as patch:
        patch.setattr(process.loop, "_engine", SimpleNamespace(has_work=has_work, idle_s=idle_s))
        patch.setattr(process.loop, "_formats", SimpleNamespace(num_waiting=num_waiting, proceed=lambda until_s: None))
        patch.setattr(process.loop._connections, "wait", waited_s.append)
        process.loop._receive()
    assert waited_s == waits_s


def test_a_wait_is_told_in_milliseconds_and_is_no_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_ms: list[int] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        connections = Connections(socket)
        monkeypatch.setattr(connections, "_poller", SimpleNamespace(poll=waited_ms.append))
        for timeout_s in (0.25, 0.0001):
            connections.wait(timeout_s)
    assert waited_ms == [250, 1]


def test_a_server_wakes_the_engine_and_gets_its_last_messages() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as parent, remote_socket(context) as ours:
        connections = Connections(parent)
        connect(ours, connections.open("a", "127.0.0.1"))
        ours.send(encoder.encode(Ask(1, "live")))
        _, server = connections
        assert connections._poller.poll(10_000) == [(server.socket, zmq.POLLIN)]
        assert [*server.messages()] == [Ask(1, "live")]
        for number in range(100):
            server.send(Reply(number, msgspec.Raw(encoder.encode("x" * 20_000)), None))
        connections.close_all()
        assert not server.is_open
        for number in range(100):
            assert ours.poll(10_000)
            assert to_server.decode(ours.recv()).number == number


def test_an_engine_that_is_told_to_stop_closes_all_it_has(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for name, owner, method in (
        ("engine", process.engine, "close"),
        ("formats", process.loop._formats, "close"),
        ("connections", process.loop._connections, "close_all"),
    ):
        monkeypatch.setattr(owner, method, lambda name=name: closed.append(name))
    process.parent.send(submit(1, END), Stop())
    process.run(lambda: False)
    assert sorted(closed) == ["connections", "engine", "formats"]


def test_an_engine_that_has_lost_a_rank_ends_with_the_reason(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.engine.runner, "lost", "rank 1 does not answer")
    with pytest.raises(RankError, match="rank 1 does not answer"):
        process.run(lambda: False)


def test_a_socket_to_a_server_takes_what_comes_and_notices_silence_after_ten_seconds() -> None:
    with zmq.Context() as context, remote_socket(context) as socket:
        for option, value in (
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10_000),
            (zmq.HEARTBEAT_TTL, 10_000),
            (zmq.MAXMSGSIZE, 1 << 30),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
        ):
            assert socket.getsockopt(option) == value


def test_the_later_tokens_of_a_stream_wait_for_five_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("fastgen.serving.engine.process.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with played() as process:
        process.parent.send(submit(1, 20))
        num_tokens = []
        for clock.now_s in (1000.0, 1000.1, 1000.104, 1000.106, 1000.11, 1000.112):
            process.parent.got.clear()
            process.loop._receive()
            process.engine.step()
            process.loop._report()
            process.parent.take()
            num_tokens.append(process.parent.num_tokens.get(1, 0))
        process.engine.cancel_all()
    assert num_tokens == [1, 1, 0, 2, 0, 2]


def test_a_status_comes_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, reported_s = 1000.0, list[float]()
    monkeypatch.setattr("fastgen.serving.engine.process.time", SimpleNamespace(monotonic=lambda: now_s))
    with played() as process:
        for number in range(9):
            now_s = 1000.0 + number / 8
            process.loop._report()
            process.parent.take()
            if len(process.parent.reports) > len(reported_s):
                reported_s.append(now_s)
    assert reported_s == [1000.0, 1000.25, 1000.5, 1000.75, 1001.0]
