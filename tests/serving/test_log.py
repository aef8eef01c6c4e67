"""The log: it delays nobody, says what it dropped, and gives every message one line."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import httpx2
import pytest

from fastgen.serving.http.guard import Guard
from fastgen.serving.monitoring.log import (
    FORMAT_VARIABLE,
    JsonLines,
    TextLines,
    set_up_logging,
    set_up_logging_of_engine,
)
from fastgen.serving.monitoring.log_file import LOG_VARIABLE, move_output_to_log
from fastgen.serving.monitoring.log_queue import MAX_WAITING_BYTES, LogQueue
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from tests.serving.scripted import ScriptedService, application, scripted_codec

LINE = "x" * 1000


class Pipe:
    """A pipe into which a log is written, and that is read when the test says so."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.num_dropped = 0
        self.queue = LogQueue(self.writing, self._drop)
        self.queue.setFormatter(TextLines())

    def _drop(self) -> None:
        self.num_dropped += 1

    def log(self, text: str) -> None:
        self.queue.handle(logging.LogRecord("fastgen", logging.INFO, __file__, 0, text, (), None))

    def read_until(self, last: str) -> list[str]:
        """Returns all lines up to the next one that ends with ``last``."""
        found = []
        for line in self.lines:
            found.append(line.rstrip("\n"))
            if found[-1].endswith(last):
                return found
        raise AssertionError("the pipe was closed")

    @cached_property
    def lines(self) -> TextIO:
        return open(self.reading, closefd=False)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reading)
    end(pipe.queue)
    os.close(pipe.writing)


def end(queue: LogQueue) -> None:
    """Waits for the thread, which would otherwise write to the next file with its descriptor."""
    queue.close()
    if queue._thread is not None:
        queue._thread.join()


def test_a_reader_that_stands_still_delays_nothing_and_hears_later_what_was_dropped(pipe: Pipe) -> None:
    num_lines = 2 * MAX_WAITING_BYTES // len(LINE)
    for number in range(num_lines):  # would wait for ever at the pipe's 64 KiB
        pipe.log(f"{number} {LINE}")
    assert 0 < pipe.num_dropped < num_lines
    expected = (f"fastgen: {number} {LINE}" for number in range(num_lines))
    num_said = 0
    while num_said < pipe.num_dropped:  # in one or more pieces: the thread makes room when it writes into the pipe
        *written, notice = pipe.read_until("could not be written in time")
        assert [next(expected) for _ in written] == written
        num_here = int(notice.removeprefix("fastgen: warning: ").partition(" ")[0])
        assert notice.endswith(f" {num_here} lines of the log were dropped, because they could not be written in time")
        num_said += num_here
        collections.deque(islice(expected, num_here), maxlen=0)
    assert num_said == pipe.num_dropped
    assert [*expected] == []
    pipe.log("again")
    assert pipe.read_until("again") == ["fastgen: again"]


def test_one_line_may_be_longer_than_all_that_may_wait(pipe: Pipe) -> None:
    text = "y" * (MAX_WAITING_BYTES + 1)
    pipe.log(text)
    assert pipe.read_until("y") == [f"fastgen: {text}"]
    assert pipe.num_dropped == 0


def test_four_mebibytes_of_lines_may_wait_to_be_written() -> None:
    num_dropped = 0

    def drop() -> None:
        nonlocal num_dropped
        num_dropped += 1

    queue = LogQueue(sys.maxsize, drop)
    queue.setFormatter(TextLines())
    queue._thread = threading.current_thread()  # so that nothing is written
    line = "x" * ((1 << 20) - len("fastgen: \n"))
    for text, expected in ((line, 0), (line, 0), (line, 0), (line, 0), ("", 1), ("", 2)):
        queue.handle(logging.LogRecord("fastgen", logging.INFO, __file__, 0, text, (), None))
        assert num_dropped == expected
    assert [item for item in queue._waiting if isinstance(item, int)] == [2]
    queue.close()


def test_flush_waits_for_lines_but_not_for_a_reader_that_stands_still(pipe: Pipe) -> None:
    pipe.log("short")
    pipe.queue.flush()
    assert os.read(pipe.reading, 1000) == b"fastgen: short\n"
    for _ in range(200):
        pipe.log(LINE)
    pipe.queue.flush()  # gives up; a second time at once
    pipe.queue.flush()
    assert len(pipe.read_until("x")) == 1, "and nothing was lost"
    assert pipe.num_dropped == 0


def test_lines_that_a_full_disk_does_not_take_are_counted() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    dropped = threading.Semaphore(0)
    queue = LogQueue(full, dropped.release)
    try:
        for _ in range(3):
            queue.handle(logging.LogRecord("fastgen", logging.INFO, __file__, 0, "lost", (), None))
        for _ in range(3):
            assert dropped.acquire(timeout=20)
    finally:
        end(queue)
        os.close(full)


def test_the_server_and_uvicorn_log_by_the_queue(capfd: pytest.CaptureFixture[str]) -> None:
    queue = set_up_logging("text")
    for name in ("fastgen", "fastgen.serving.requests", "uvicorn.error"):
        logging.getLogger(name).error("of %s", name)
        logger = logging.getLogger(name.partition(".")[0])
        assert logger.handlers == [queue]
    queue.flush()
    printed = capfd.readouterr().err
    assert printed.splitlines() == [
        f"fastgen: error: of {name}" for name in ("fastgen", "fastgen.serving.requests", "uvicorn.error")
    ]


def test_the_engine_logs_what_is_wrong_in_the_format_of_its_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "text")
    logger, printed = logging.getLogger("fastgen"), list[list[str]]()
    for set_up in (lambda: set_up_logging("json"), set_up_logging_of_engine):
        set_up()
        logger.info("as usual")
        logger.warning("not as usual")
        logger.handlers[0].flush()
        printed.append([json.loads(line)["message"] for line in capfd.readouterr().err.splitlines()])
    assert printed == [["as usual", "not as usual"], ["not as usual"]]


def test_the_output_of_a_detached_server_goes_to_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, moved = tmp_path / "log", list[int]()
    log.write_text("loading\n")

    def move(source: int, target: int) -> None:
        moved.append(target)
        os.write(source, b"serving\n")

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup2", move)
        patch.delenv(LOG_VARIABLE, raising=False)
        move_output_to_log()
        assert moved == []
        patch.setenv(LOG_VARIABLE, str(log))
        move_output_to_log()
        assert moved == [1, 2]
    assert log.read_text() == "loading\nserving\nserving\n"


def a_record(level: int, error: BaseException | None = None) -> logging.LogRecord:
    cause = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("fastgen", level, __file__, 0, "%d lost", (3,), cause)
    record.created, record.msecs = 86_400.007, 7.9
    return record


def test_a_line_says_when_and_what_with_its_facts() -> None:
    record = a_record(logging.WARNING)
    record.facts = {"path": "/a", "status": 400}
    assert TextLines().format(record) == "fastgen: warning: 3 lost path='/a' status=400"
    assert json.loads(JsonLines().format(record)) == {
        "time": "1970-01-02T00:00:00.007Z",
        "level": "warning",
        "message": "3 lost",
        "path": "/a",
        "status": 400,
    }
    assert TextLines().format(a_record(logging.INFO)) == "fastgen: 3 lost"
    assert "exception" not in json.loads(JsonLines().format(a_record(logging.INFO)))


def test_a_line_says_where_an_error_comes_from() -> None:
    record = a_record(logging.ERROR, ZeroDivisionError("bad luck"))
    first, *_, last = TextLines().format(record).splitlines()
    assert (first, last) == ("fastgen: error: 3 lost", "ZeroDivisionError: bad luck")
    assert json.loads(JsonLines().format(record))["exception"] == "ZeroDivisionError: bad luck"


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\u202e", "\x0b", "\x1c", "\n", "\ud800"])
def test_a_json_line_is_one_line_for_every_reader(mark: str) -> None:
    record = logging.LogRecord("fastgen", logging.INFO, __file__, 0, f"a{mark}b", (), None)
    record.facts = {"body": f"c{mark}d"}
    line = JsonLines().format(record)
    assert line.splitlines() == [line]
    assert line.isascii()
    assert line.isprintable()
    assert (json.loads(line)["message"], json.loads(line)["body"]) == (f"a{mark}b", f"c{mark}d")


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "no_such_field": 1}, 400, "no_such_field: this field is not known"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
    ],
)
def test_the_log_of_requests_says_why_one_was_refused(
    capfd: pytest.CaptureFixture[str], body: dict[str, object], status: int, reason: str
) -> None:
    queue = set_up_logging("json")
    service = ScriptedService(scripted_codec(), lambda prompt_ids, sampling: ([5], "stop"))
    app = Guard(application(service), ServeOptions(log_requests=True), ServerMetrics(lambda: True), "127.0.0.1")

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json={"model": "scripted"} | body)

    answer = asyncio.run(run())
    assert answer.status_code == status
    queue.flush()
    (line,) = capfd.readouterr().err.splitlines()
    logged = json.loads(line)
    assert (logged["status"], logged["error"]) == (status, answer.json()["error"]["message"])
    assert reason in logged["error"]


def test_a_flush_waits_a_second_at_most_and_not_again_once_that_was_not_enough() -> None:
    queue, waited_s = LogQueue(sys.maxsize), list[float]()
    queue.setFormatter(TextLines())
    queue._thread = threading.current_thread()  # so that nothing is written
    changed: Any = queue._changed

    def wait_for(is_done: Callable[[], bool], timeout_s: float) -> bool:
        waited_s.append(timeout_s)
        return is_done()

    changed.wait_for = wait_for
    for _ in range(2):
        queue.flush()
    assert waited_s == [1.0, 1.0]
    queue._is_writing = True  # the last line
    queue.flush()
    assert len(waited_s) == 3
    queue._is_writing = False
    queue.flush()
    assert len(waited_s) == 3
    queue.close()


def test_a_line_is_written_piece_by_piece_as_soon_as_its_reader_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    written, awaited, is_full = bytearray(), list[object](), True

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal is_full
        assert descriptor == 77
        is_full = not is_full
        if not is_full:
            raise BlockingIOError
        written.extend(data[:4])
        return len(data[:4])

    module = "fastgen.serving.monitoring.log_queue"
    monkeypatch.setattr(f"{module}.os", SimpleNamespace(write=write))
    monkeypatch.setattr(f"{module}.select", SimpleNamespace(select=lambda *files: awaited.append(files)))
    assert LogQueue(77)._write(b"0123456789")
    assert (bytes(written), awaited) == (b"0123456789", [((), (77,), ())] * 3)


def test_an_ending_process_does_not_wait_for_its_log(pipe: Pipe) -> None:
    pipe.log("a line")
    assert pipe.queue._thread is not None
    assert pipe.queue._thread.daemon
    assert pipe.read_until("a line") == ["fastgen: a line"]
