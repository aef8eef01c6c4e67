"""Formats are compiled in a process that can be stopped, before the engine's process sees them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec
import pytest

from fastgen.runtime.requests.response_format import ResponseFormat, parse_response_format
from fastgen.serving.isolated.grammars import process, trial
from fastgen.serving.isolated.grammars.queue import MAX_WAITING, TrialQueue
from fastgen.serving.isolated.grammars.trial import MAX_PROCESSES, FormatTrials, Model, Trial
from fastgen.serving.isolated.processes import HelperEndedError
from fastgen.serving.refusals import OverloadedError, UnavailableError
from tests.serving.scripted import scripted_codec


@pytest.fixture(scope="module")
def trials() -> Iterator[FormatTrials]:
    tokenizer = scripted_codec().tokenizer
    trials = FormatTrials(tokenizer, len(tokenizer))
    yield trials
    trials.processes.close()


def refusal(trials: FormatTrials, schema: dict[str, object]) -> str | None:
    response_format = parse_response_format({"type": "json_schema", "schema": schema})
    assert response_format is not None
    found = trials.refusal(response_format)
    assert trials.knows(response_format)
    assert trials.refusal(response_format) == found
    return found


def test_a_format_that_takes_too_long_to_compile_is_refused_and_the_next_is_not(trials: FormatTrials) -> None:
    assert refusal(trials, {"type": "integer", "multipleOf": 7}) is None
    both = [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]
    endless = refusal(trials, {"allOf": both})
    assert endless is not None
    assert endless.endswith("is refused: it takes more than 0.5 s of processor time to compile")
    assert refusal(trials, {"type": "boolean"}) is None


def test_what_the_library_refuses_is_told_as_the_engine_would(trials: FormatTrials) -> None:
    found = refusal(trials, {"type": "string", "format": "nobody knows"})
    assert found is not None
    assert found.startswith("response_format (json_schema) is refused: ")
    assert "nobody knows" in found


def test_any_object_needs_no_trial(trials: FormatTrials) -> None:
    response_format = parse_response_format({"type": "json_object"})
    assert response_format is not None
    assert trials.knows(response_format)


class _SlowTrials:
    """Refuses every format, once ``may_end`` is set."""

    def __init__(self) -> None:
        self.may_end, self.begun = threading.Event(), list[ResponseFormat]()
        self._tried: set[ResponseFormat] = set()

    def knows(self, response_format: ResponseFormat) -> bool:
        return response_format in self._tried

    def refusal(self, response_format: ResponseFormat) -> str | None:
        if response_format not in self._tried:
            self.begun.append(response_format)
            assert self.may_end.wait(60)
            self._tried.add(response_format)
        return f"{response_format.text} is refused"


async def _queued(trials: _SlowTrials, num: int) -> tuple[TrialQueue, list[asyncio.Task[str | None]]]:
    """Returns a queue of ``num`` different formats. As many as possible are being tried."""
    queue: Any = TrialQueue(cast(FormatTrials, trials))
    tasks = [asyncio.create_task(queue.refusal(ResponseFormat("regex", f"{number}"))) for number in range(num)]
    while len(trials.begun) < min(num, MAX_PROCESSES):
        await asyncio.sleep(0)
    return queue, tasks


def test_formats_that_wait_for_their_trial_hold_no_thread() -> None:
    async def run() -> None:
        trials = _SlowTrials()
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            _, tasks = await _queued(trials, 8)
            try:
                async with asyncio.timeout(30):
                    assert await asyncio.to_thread(lambda: "tokens") == "tokens"
            finally:
                trials.may_end.set()
            assert await asyncio.gather(*tasks) == [f"{number} is refused" for number in range(8)]

    asyncio.run(run())


def test_only_so_many_formats_wait_and_one_whose_client_leaves_makes_room() -> None:
    async def run() -> None:
        trials = _SlowTrials()
        queue, tasks = await _queued(trials, MAX_PROCESSES + MAX_WAITING)
        try:
            with pytest.raises(OverloadedError, match="at most 16 wait") as refused:
                await queue.refusal(ResponseFormat("regex", "one more"))
            assert refused.value.retry_after_s == 12.0, "16 take 1.5 s each, of two processes"
            tasks.pop().cancel()
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(queue.refusal(ResponseFormat("regex", "one more"))))
            tasks.pop(0).cancel()  # its trial has begun: its place is free when that ends
        finally:
            trials.may_end.set()
        found = await asyncio.gather(*tasks)
        assert found[-1] == "one more is refused"
        async with asyncio.timeout(60):
            for _ in range(MAX_PROCESSES):  # every place is free again
                await queue._queue._free.acquire()
        assert queue._queue._num_waiting == 0

    asyncio.run(run())


def test_a_format_that_several_requests_wait_for_is_tried_once() -> None:
    async def run() -> None:
        trials = _SlowTrials()
        trials.may_end.set()
        queue: Any = TrialQueue(cast(FormatTrials, trials))
        same = ResponseFormat("regex", "a")
        assert set(await asyncio.gather(*(queue.refusal(same) for _ in range(5)))) == {"a is refused"}
        assert trials.begun == [same]

    asyncio.run(run())


def test_calls_for_one_format_take_one_place_until_the_last_of_them_leaves() -> None:
    async def run() -> None:
        trials = _SlowTrials()
        queue, others = await _queued(trials, MAX_PROCESSES)
        same = ResponseFormat("regex", "same")
        calls = [asyncio.create_task(queue.refusal(same)) for _ in range(3 * MAX_WAITING)]
        await asyncio.sleep(0.01)
        assert queue._queue._num_waiting == 1
        calls.pop().cancel()
        await asyncio.sleep(0.01)
        assert queue._queue._num_waiting == 1
        trials.may_end.set()
        assert set(await asyncio.gather(*others, *calls)) == {"0 is refused", "1 is refused", "same is refused"}
        assert trials.begun.count(same) == 1
        assert not queue._trying

        trials.may_end.clear()
        others = [asyncio.create_task(queue.refusal(ResponseFormat("regex", each))) for each in "ab"]
        calls = [asyncio.create_task(queue.refusal(ResponseFormat("regex", "left"))) for _ in range(2)]
        await asyncio.sleep(0.01)
        for each in calls:
            each.cancel()
        await asyncio.sleep(0.01)
        assert queue._queue._num_waiting == 0
        trials.may_end.set()
        await asyncio.gather(*others)
        assert await queue.refusal(ResponseFormat("regex", "left")) == "left is refused"

    asyncio.run(run())


def test_the_formats_that_were_tried_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MAX_KEPT", 2)
    tokenizer = scripted_codec().tokenizer
    trials = FormatTrials(tokenizer, len(tokenizer))
    monkeypatch.setattr(trials.processes, "ask", lambda request: msgspec.msgpack.encode(None))
    formats = [ResponseFormat("regex", text) for text in "abc"]
    assert [trials.refusal(each) for each in formats] == [None] * 3
    assert [trials.knows(each) for each in formats] == [False, True, True]


@pytest.mark.parametrize(("status", "is_remembered"), [(1, False), (-signal.SIGPROF, True), (-signal.SIGABRT, True)])
def test_a_process_that_fails_by_itself_says_nothing_of_the_format(
    status: int, is_remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, of = scripted_codec().tokenizer, ResponseFormat("regex", "a")
    trials, statuses = FormatTrials(tokenizer, len(tokenizer)), [status]

    def ask(request: bytes) -> bytes:
        if statuses:
            raise HelperEndedError(statuses.pop())
        return msgspec.msgpack.encode(None)

    monkeypatch.setattr(trials.processes, "ask", ask)
    if is_remembered:
        first = trials.refusal(of)
        assert first is not None
        assert trials.refusal(of) == first
    else:
        with pytest.raises(UnavailableError, match="failed with status 1; try again"):
            trials.refusal(of)
        assert not trials.knows(of)
        assert trials.refusal(of) is None


class _PanicError(BaseException):
    """Stands for a panic of the library."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("can't start new thread"), None),
        (MemoryError(), "response_format (regex) is refused: it takes more than 1024 MiB of memory to compile"),
        (_PanicError("no such state"), "response_format (regex) is refused: _PanicError: no such state"),
        (IndexError("of fastgen's own"), "response_format (regex) is refused: IndexError: of fastgen's own"),
    ],
)
def test_the_process_tells_what_is_of_the_format(
    error: BaseException, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = scripted_codec().tokenizer
    model = Model(tokenizer.backend_tokenizer.to_str(), len(tokenizer))
    answer = process.begin(msgspec.msgpack.encode(model))

    def compiled(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(process.Grammars, "compiled", compiled)
    asked = msgspec.msgpack.encode(Trial("regex", "a"))
    if reason is None:
        with pytest.raises(RuntimeError):
            answer(asked)
    else:
        assert msgspec.msgpack.decode(answer(asked)) == reason
