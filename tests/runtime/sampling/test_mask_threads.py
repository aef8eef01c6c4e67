"""How long masks may take, who waits for them, and the threads that compute them."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.sampling import mask_threads
from fastgen.runtime.sampling import matcher as matching
from fastgen.runtime.sampling.mask_threads import MaskThreads, TurnThreads
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint
from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.sampling.matching_tokens import allowed, matcher, texts_of
from tests.runtime.sampling.timed_masks import ANY, TimedMasks, timed


def test_an_answer_whose_masks_take_too_long_fails(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "MAX_MASK_CPU_S", -1.0)
    subject = matcher(grammars, {"type": "regex", "pattern": "aaaaaaaa"})
    token_id = next(token_id for token_id, text in texts_of(tokenizer).items() if text == b"a")
    for _ in range(matching.MAX_SLOW_MASKS):
        assert token_id in allowed(subject)
        subject.advance(token_id)
    assert allowed(subject) == set()
    assert "took more than" in subject.error


@pytest.mark.parametrize(("counted_from_s", "fails"), [(-1.0, True), (1e9, False)])
def test_an_answer_whose_tokens_take_too_long_to_be_read_fails(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, counted_from_s: float, fails: bool
) -> None:
    monkeypatch.setattr(mask_threads, "SLOW_TAKE_CPU_S", counted_from_s)
    monkeypatch.setattr(mask_threads, "MAX_TAKEN_CPU_S", 0.0)
    monkeypatch.setattr(grammars, "_threads", MaskThreads())
    subject = matcher(grammars, {"type": "regex", "pattern": "aaaaaaaa"})
    subject.advance(next(token_id for token_id, text in texts_of(tokenizer).items() if text == b"a"))
    assert (allowed(subject) == set()) is fails
    assert ("the tokens of answers took more than" in subject.error) is fails


def test_tokens_may_take_so_much_time_at_once_and_a_share_of_the_time_that_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, threads = 1000.0, MaskThreads()
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert all(threads.may_take(0.005) for _ in range(100)), "ordinary tokens do not count"
    assert threads.may_take(0.06)
    assert not threads.may_take(0.05)
    now_s += 0.5
    assert threads.may_take(0.06), "of 0.06 s, 0.05 have been refilled"
    assert not threads.may_take(0.04)
    now_s += 10.0
    assert threads.may_take(0.09), "idle time is not saved up"
    assert not threads.may_take(0.02)


def test_tokens_may_take_a_tenth_of_a_second_at_once() -> None:
    assert MaskThreads().may_take(0.1)
    assert not MaskThreads().may_take(0.1001)


@pytest.mark.parametrize(("num_processors", "num_threads"), [(2, 2), (4, 4), (64, 4), (None, 1)])
def test_there_are_as_many_threads_as_processors_up_to_four(
    monkeypatch: pytest.MonkeyPatch, num_processors: int | None, num_threads: int
) -> None:
    monkeypatch.setattr(mask_threads, "os", SimpleNamespace(cpu_count=lambda: num_processors))
    threads = MaskThreads()
    assert (threads.threads._max_workers, threads.slow_threads._threads._max_workers) == (num_threads, num_threads)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
@pytest.mark.parametrize("own", [0, 5])
def test_a_low_priority_is_three_lower_than_that_of_the_process(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "getpriority", lambda kind, process: {os.getpid(): own}[process])
    monkeypatch.setattr(os, "setpriority", lambda *given: lowered.append(given))
    mask_threads.lower_priority(77)
    mask_threads.lower_priority()
    assert lowered == [(os.PRIO_PROCESS, each, own + 3) for each in (77, threading.get_native_id())]


@pytest.mark.parametrize(
    ("length_s", "are_wanted", "num_right"), [(0.02, True, 500), (0.02, False, 600), (0.01, True, 600)]
)
def test_slow_masks_end_answers_only_while_requests_wait_for_slots(
    monkeypatch: pytest.MonkeyPatch, length_s: float, are_wanted: bool, num_right: int
) -> None:
    """Two answers in one format: 10 s of slow masks are within the limits, those of both together."""
    masks = TimedMasks([length_s] * 600)
    monkeypatch.setattr(matching, "time", SimpleNamespace(thread_time=masks.thread_time, monotonic=lambda: 100.0))
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: 100.0))
    threads = MaskThreads()
    threads.are_slots_wanted = are_wanted
    compiled, right = CompiledFormat(ANY, masks), 0
    for _ in range(2):
        answer = Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher()
        for _ in range(300):
            right += not answer._failure and bool(answer.mask().any())
            if answer._failure:
                assert "10 s of processor time while requests waited for a slot" in answer._failure
                break
            answer._mask = None
    assert right == num_right


def test_the_time_for_slow_masks_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    threads = MaskThreads()
    threads.are_slots_wanted = True
    assert threads.may_be_slow(9.0, 0.0)
    assert not threads.may_be_slow(1.5, 0.0)
    assert threads.may_be_slow(0.9, 0.0), "what exceeded the limit is not counted"
    now_s = 2.0  # half a second more
    assert threads.may_be_slow(0.5, 0.0)
    assert not threads.may_be_slow(0.2, 0.0)


def test_masks_are_slow_together_if_those_due_take_half_a_second() -> None:
    """Each of 64 answers whose masks take 9 ms waits longer than that for its turn."""
    threads = MaskThreads()
    threads.are_slots_wanted = True
    assert all(threads.may_be_slow(0.009, 0.5) for _ in range(5000))
    assert 1050 < sum(threads.may_be_slow(0.009, 0.51) for _ in range(2000)) < 1300


def test_how_long_masks_take_that_are_due_follows_from_many() -> None:
    """One of 3 ms among many of 0.4 says little about the others."""
    masks = TimedMasks([])
    compiled = CompiledFormat(ANY, masks)
    answers = [Constraint(compiled, masks, MaskThreads(), np.zeros(1, np.int32), 0).matcher() for _ in range(256)]
    compiled.due.update(answers)
    usual_s = [compiled.due_s(0.003 if number % 50 == 49 else 0.0004) for number in range(500)]
    assert max(usual_s) < 0.2
    assert usual_s[-2] == pytest.approx(256 * 0.00042, rel=0.3)
    assert [compiled.due_s(0.009) for _ in range(400)][-1] > 2.0


def test_the_masks_of_a_format_that_are_due_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = TimedMasks([0.0] * 4)
    threads = MaskThreads()
    compiled = CompiledFormat(ANY, masks)
    answers = [Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher() for _ in range(4)]
    with compiled.lock:
        for each in answers:
            each.prepare()
        answers[0].prepare()
        assert compiled.due == set(answers)
        answers[3].drop()
    for each in answers[:-1]:
        each.mask()
    threads.threads.shutdown()
    assert not compiled.due
    answers[0].drop()
    assert not compiled.due, "what is computed is due no longer, dropped or not"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_mask_that_no_thread_can_compute_is_due_no_longer(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the queue of the threads, and is passed over there."""
    masks, threads = TimedMasks([]), MaskThreads()
    compiled = CompiledFormat(ANY, masks)
    answer = Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher()
    answer._is_slow = is_slow
    pool = threads.slow_threads._threads if is_slow else threads.threads
    pool.shutdown()
    answer.prepare()
    assert "RuntimeError" in answer._failure
    assert not compiled.due
    answer._compute()
    assert not compiled.due


def test_the_mask_of_an_answer_that_has_ended_is_not_computed() -> None:
    masks = TimedMasks([0.0] * 2)
    threads = MaskThreads()
    compiled = CompiledFormat(ANY, masks)
    first, second = (Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher() for _ in range(2))
    second._is_slow = first._is_slow = True
    with compiled.lock:
        first.prepare()
        second.prepare()
        second.drop()
    first.mask()
    threads.slow_threads._threads.shutdown()
    assert len(masks.lengths_s) == 1
    assert not compiled.due


def test_formats_with_slow_masks_take_turns() -> None:
    """One mask of each format at a time, in turns; what is cancelled is left out."""
    threads, may_go, order = TurnThreads(), threading.Event(), list[str]()
    threads._threads = ThreadPoolExecutor(1)

    def compute(name: str) -> Mask:
        assert may_go.wait(60)
        order.append(name)
        return np.zeros(1, np.int32)

    asked = [threads.submit(name[0], partial(compute, name)) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    assert asked[2].cancel()
    may_go.set()
    for each in asked:
        if not each.cancelled():
            each.result(60)
    threads._threads.shutdown()
    assert order in (["a1", "a2", "b1", "c1", "b2", "a4"], ["a1", "b1", "c1", "a2", "b2", "a4"])
    assert not threads._queues
    assert not threads._under_way


def test_masks_of_one_format_hold_one_thread() -> None:
    threads, held, may_go, done = TurnThreads(), threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    threads._threads = ThreadPoolExecutor(2)

    def slow() -> Mask:
        held.release()
        assert may_go.wait(60)
        return np.zeros(1, np.int32)

    def fast() -> Mask:
        done.release()
        return np.zeros(1, np.int32)

    asked = [threads.submit("slow", slow) for _ in range(3)]
    assert held.acquire(timeout=60)
    asked.append(threads.submit("fast", fast))
    assert done.acquire(timeout=60), "the other thread waits for no slow mask"
    assert not held.acquire(timeout=0.05), "no second mask of the format has begun"
    may_go.set()
    for each in asked:
        each.result(60)


def test_a_mask_that_fails_keeps_no_others_of_its_format_back() -> None:
    threads = TurnThreads()

    def fail() -> Mask:
        raise MemoryError

    failed = threads.submit("a", fail)
    assert isinstance(failed.exception(60), MemoryError)
    assert threads.submit("a", lambda: np.ones(1, np.int32)).result(60).any()


def test_tokens_of_all_answers_together_wait_little_for_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, threads, lock = 1000.0, MaskThreads(), threading.Lock()
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert threads.acquire(lock), "it is free"
    waits_s: list[float] = []

    class Held:
        def acquire(self, *, timeout: float) -> bool:
            if timeout:
                waits_s.append(timeout)
            return False

    held: Any = Held()
    assert not any(threads.acquire(held) for _ in range(60))
    assert waits_s == [0.002] * 5
    for _ in range(500):
        now_s += 0.001
        assert not threads.acquire(held)
    assert 28 <= len(waits_s) <= 31, "a tenth of the time"


class _Awaited:
    """A mask that notes how long it is waited for."""

    def __init__(self, *, has_come: bool) -> None:
        self.has_come, self.waits_s = has_come, list[float | None]()

    def result(self, timeout_s: float | None = None) -> Mask:
        self.waits_s.append(timeout_s)
        if not self.has_come:
            raise TimeoutError
        return np.zeros(1, np.int32)


def test_a_mask_is_waited_for_until_the_deadline_and_not_at_all_after_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject, mask = timed(monkeypatch, []), _Awaited(has_come=True)
    monkeypatch.setattr(matching, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(subject, "_overdue", lambda mask: mask)
    subject._mask = mask  # type: ignore[assignment]
    assert subject.is_ready(100.25)
    assert subject.is_ready(99.0), "it is there although the time is up"
    subject._is_slow = True
    assert subject.is_ready(100.25)
    subject.wait(0.5)
    subject.mask()
    assert mask.waits_s == [0.25, 0.0, 0.0, 0.5, pytest.approx(0.1), None]
    assert not subject.is_late
    mask.has_come = False
    assert not subject.is_ready(100.25)
    assert subject.is_late
    mask.has_come = subject.is_complete = True
    assert not subject.is_ready(100.25), "the answer is complete"
    assert subject.is_late


def test_threads_are_replaced_once() -> None:
    threads = MaskThreads()
    busy = threads.threads
    threads.replace(busy)
    fresh = threads.threads
    assert fresh is not busy
    with pytest.raises(RuntimeError, match="after shutdown"):
        busy.submit(int)
    threads.replace(busy)
    assert threads.threads is fresh
    assert fresh.submit(int).result() == 0


@pytest.mark.parametrize(("length_s", "is_slow"), [(0.01, False), (0.0101, True)])
def test_no_step_waits_for_a_mask_after_one_that_took_more_than_ten_milliseconds(
    monkeypatch: pytest.MonkeyPatch, length_s: float, is_slow: bool
) -> None:
    subject = timed(monkeypatch, [length_s, 0.0, 0.0])
    threads = subject._constraint.threads
    assert allowed(subject, 32) == {1, 2}
    subject.advance(1)
    assert subject._pool is (threads.slow_threads if is_slow else threads.threads)
    subject.mask()
    subject.advance(1)
    assert subject._pool is threads.threads, "the mask after it took no time"


@pytest.mark.parametrize(
    ("lengths_s", "fails"),
    [
        ([0.1001, 0.0, 0.1001, 0.1001, 0.0], False),
        ([0.1001, 0.1001, 0.0, 0.1001, 0.1001], True),
        ([0.1] * 5, False),
    ],
)
def test_the_fourth_mask_that_takes_more_than_a_tenth_of_a_second_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch, lengths_s: list[float], fails: bool
) -> None:
    subject = timed(monkeypatch, lengths_s)
    for _ in range(4):
        assert allowed(subject, 32) == {1, 2}
        subject.advance(1)
    assert allowed(subject, 32) == (set() if fails else {1, 2})
    assert ("of 4 tokens each took more than 0.1 s of processor time" in subject._failure) is fails


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_mask_that_takes_too_long_is_abandoned_and_delays_no_other(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, is_asked_first: bool
) -> None:
    monkeypatch.setattr(mask_threads, "MAX_THREADS", 1)
    monkeypatch.setattr(matching, "MAX_MASK_CPU_S", 0.01)
    monkeypatch.setattr(matching, "MAX_AWAITED_CPU_S", 0.05)
    endless, honest = (matcher(grammars, {"type": "regex", "pattern": each}) for each in ("aaaa", "bbbb"))
    vocabulary, threads = endless._constraint.source, endless._constraint.threads
    threads.replace(threads.threads)
    find, is_over = vocabulary.next_tokens, threading.Event()

    def find_or_never(state: Any) -> tuple[Mask, bool]:
        while state is endless._state and not is_over.is_set():
            pass
        return find(state)

    monkeypatch.setattr(vocabulary, "next_tokens", find_or_never)
    try:
        for each in (endless, honest):
            each.prepare()
        masks = {each: allowed(each) for each in ((endless, honest) if is_asked_first else (honest, endless))}
        assert masks[endless] == set()
        assert masks[honest]
        assert endless.error == "TimeoutError: a token took more than 0.05 s of processor time"
        assert not honest.error
        if sys.platform == "linux":
            assert endless._began is not None
            assert (
                os.getpriority(os.PRIO_PROCESS, endless._began[0]) >= os.getpriority(os.PRIO_PROCESS, os.getpid()) + 3
            ), "it takes little time from others"
    finally:
        is_over.set()
