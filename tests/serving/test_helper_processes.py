"""Helper processes: how many there are, and what becomes of them. Here each of them gives back what it is sent."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import FastgenError
from fastgen.serving.isolated.encoding.encoder import TextEncoder
from fastgen.serving.isolated.processes import LOW_PRIORITY, HelperEndedError, HelperProcesses, _Process
from fastgen.serving.isolated.templates.renderer import TemplateRenderer
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


def test_they_have_a_low_priority(processes: HelperProcesses) -> None:
    processes.start()
    (process,) = processes._processes
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == max(own, LOW_PRIORITY)


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


def test_one_that_is_killed_before_it_is_ready_is_to_be_tried_again(processes: HelperProcesses) -> None:
    processes._command = ["sh", "-c", "kill -KILL $$"]
    with pytest.raises(UnavailableError, match=r"-c kill -KILL \$\$ was killed before it was ready"):
        processes.ask(b"one")
    assert not processes._processes


def test_one_that_the_system_refuses_is_to_be_tried_again(
    processes: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(UnavailableError, match=r"cannot be started now: .*Resource temporarily unavailable"):
            processes.ask(b"one")
    assert processes.ask(b"one") == b"one"


def test_what_its_successor_meets_is_not_told_to_who_ended_it(
    processes: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the text that took too long, whether or not the next process can begin."""
    processes.start()
    (process,) = processes._processes
    processes._command = ["false"]
    process._process.send_signal(signal.SIGPROF)
    process._process.wait()
    monkeypatch.setattr(processes, "_take", lambda: process)
    with pytest.raises(HelperEndedError) as caught:
        processes.ask(b"one")
    assert caught.value.took_too_long


def test_one_has_two_minutes_to_begin_and_half_a_minute_for_an_answer(
    processes: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bytes, float]] = []
    ask = _Process.ask

    def note(process: _Process, request: bytes, timeout_s: float) -> bytes | None:
        asked.append((request, timeout_s))
        return ask(process, request, timeout_s)

    monkeypatch.setattr(_Process, "ask", note)
    assert processes.ask(b"one") == b"one"
    assert asked == [(b"the beginning", 120.0), (b"one", 30.0)]


def test_work_waits_50_ms_for_one_and_not_at_all_where_there_is_none(
    processes: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []
    get = processes._idle.get

    def note(*, timeout: float) -> _Process:
        waited_s.append(timeout)
        return get(timeout=timeout)

    monkeypatch.setattr(processes._idle, "get", note)
    for _ in range(2):
        assert processes.ask(b"one") == b"one"
    assert waited_s == [0, 0.05, 0.05]


@pytest.mark.parametrize(
    ("kind", "max_cpu_s", "max_memory_bytes"),
    [("templates", 2.0, 512 << 20), ("encoding", 2.0, 1 << 30), ("grammars", 0.5, 1 << 30)],
)
def test_each_kind_has_its_processor_time_and_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, max_cpu_s: float, max_memory_bytes: int
) -> None:
    limits: list[dict[str, Any]] = []
    module = f"fastgen.serving.isolated.{kind}.process"
    monkeypatch.setattr("fastgen.serving.isolated.processes.answer_all", lambda begin, **more: limits.append(more))
    monkeypatch.delitem(sys.modules, module, raising=False)
    library: Any = SimpleNamespace(render_jinja_template=None)
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", library)  # takes a second to import
    runpy.run_module(module, run_name="__main__")
    assert limits == [{"max_cpu_s": max_cpu_s, "max_memory_bytes": max_memory_bytes}]


def test_there_are_at_most_four_for_templates_and_four_for_texts() -> None:
    tokenizer: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: ""))
    for kind in (TemplateRenderer(tokenizer), TextEncoder(tokenizer)):
        assert kind.processes._max_processes == 4
