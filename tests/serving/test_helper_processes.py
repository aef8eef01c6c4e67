"""Helper processes: how many there are, and what becomes of them. Here each of them gives back what it is sent."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fastgen.errors import FastgenError
from fastgen.serving.isolated.processes import HelperProcesses
from fastgen.serving.refusals import UnavailableError


def running(command: str, *, max_processes: int) -> HelperProcesses:
    processes = HelperProcesses("", b"the beginning", max_processes=max_processes)
    processes._command = [command]
    return processes


@pytest.fixture
def processes() -> Iterator[HelperProcesses]:
    processes = running("cat", max_processes=2)
    yield processes
    processes.close()


def test_no_more_are_started_than_there_may_be_and_each_is_used_again(processes: HelperProcesses) -> None:
    for _ in range(3):
        processes.start()
    started = {*processes._processes}
    assert len(started) == 2
    for text in (b"", b"one", b"x" * 10_000):
        assert processes.ask(text) == text
    assert processes._processes == started


def test_closing_them_ends_those_at_work_and_starts_no_more(processes: HelperProcesses) -> None:
    processes.start()
    working = processes._take()
    processes.close()
    assert working._process.wait(10) == -signal.SIGKILL
    working.end()
    with pytest.raises(UnavailableError, match="the server is ending"):
        processes.ask(b"one more")


def test_one_that_cannot_begin_is_an_error_each_time() -> None:
    processes = running("false", max_processes=1)
    for _ in range(2):
        with pytest.raises(FastgenError, match="ended with status 1 before it was ready"):
            processes.start()
    assert not processes._processes
