"""The engine's process compiles formats on a thread of their own, and no step waits for one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sized
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.matcher import CompiledFormat
from fastgen.serving.engine import formats
from fastgen.serving.engine.formats import FormatThread

FIRST, SECOND, THIRD, FOURTH = (ResponseFormat("regex", each) for each in "abcd")


class _Grammars:
    """Compiles no format before ``may_end`` is set; ``refused`` ones never."""

    def __init__(self) -> None:
        self.may_end, self.begun = threading.Event(), list[ResponseFormat]()
        self.present: dict[ResponseFormat, CompiledFormat] = {}
        self.refused: set[ResponseFormat] = set()
        self.used: set[ResponseFormat] = set()
        self.max_in_use, self.num_spoiled = 2, 0

    def has_room(self, num_in_use: int) -> bool:
        return num_in_use + self.num_spoiled < self.max_in_use

    def prepare(self) -> None:
        raise InvalidArgumentError("no library")

    def kept(self, response_format: ResponseFormat) -> CompiledFormat | None:
        return self.present.get(response_format)

    def keep(self, compiled: CompiledFormat) -> None:
        self.present[compiled.response_format] = compiled

    def in_use(self) -> set[ResponseFormat]:
        return set(self.used)

    def compiled(self, response_format: ResponseFormat) -> CompiledFormat:
        self.begun.append(response_format)
        assert self.may_end.wait(60)
        if response_format in self.refused:
            raise InvalidArgumentError("refused")
        return CompiledFormat(response_format, None)


@pytest.fixture
def grammars() -> Any:
    return _Grammars()


@pytest.fixture
def thread(grammars: Any) -> FormatThread:
    return FormatThread(grammars)


def proceed_until(thread: FormatThread, events: Sized, num_events: int) -> None:
    """Waits until so many requests have gone on."""
    waited = threading.Event()
    for _ in range(6000):
        thread.proceed()
        if len(events) >= num_events:
            return
        waited.wait(0.01)
    raise AssertionError(events)


def test_a_request_waits_for_its_format_and_no_other_request_does(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    thread.when_compiled(0, FIRST, lambda: events.append("constrained"))
    thread.when_compiled(1, None, lambda: events.append("free"))
    thread.proceed()
    assert events == ["free"]
    assert thread.num_waiting
    grammars.may_end.set()
    proceed_until(thread, events, 2)
    thread.when_compiled(2, FIRST, lambda: events.append("again"))
    assert events == ["free", "constrained", "again"]
    assert grammars.begun == [FIRST]
    assert not thread.num_waiting


def test_requests_with_the_same_format_wait_for_one_compilation(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    for number in range(3):
        thread.when_compiled(number, FIRST, lambda: events.append("x"))
    grammars.may_end.set()
    proceed_until(thread, events, 3)
    assert grammars.begun == [FIRST]


def test_requests_with_the_same_format_go_on_one_after_another_where_time_is_short(
    thread: FormatThread, grammars: Any
) -> None:
    events: list[int] = []
    for number in range(4):
        thread.when_compiled(number, FIRST, partial(events.append, number))
    grammars.may_end.set()
    thread._compiling[FIRST].result(20)
    thread.proceed(0.0)
    assert (events, thread.num_waiting) == ([0], 3)
    thread.cancel(2)
    thread.proceed(0.0)
    assert (events, thread.num_waiting) == ([0, 1], 1)
    thread.proceed()
    assert (events, thread.num_waiting) == ([0, 1, 3], 0)


def test_a_cancelled_request_is_forgotten_and_so_is_the_format_that_only_it_had(
    thread: FormatThread, grammars: Any
) -> None:
    events: list[str] = []
    for number, each in enumerate((FIRST, SECOND, FIRST)):
        thread.when_compiled(number, each, partial(events.append, f"{number}"))
    for number in (0, 1, 1, 7):
        thread.cancel(number)
    grammars.may_end.set()
    proceed_until(thread, events, 1)
    assert events == ["2"]
    assert not thread.num_waiting
    thread.close()
    assert SECOND not in grammars.begun


def test_a_format_more_than_may_be_in_use_waits_for_one_of_them(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.may_end.set()
    for number, each in enumerate((FIRST, SECOND, THIRD, FIRST, FOURTH)):
        # As a request does that runs from then on.
        def then(each: ResponseFormat = each) -> None:
            events.append(each.text)
            grammars.used.add(each)

        thread.when_compiled(number, each, then)
    proceed_until(thread, events, 3)
    assert sorted(events) == ["a", "a", "b"]
    for _ in range(3):
        thread.proceed()
    assert grammars.begun == [FIRST, SECOND], "nothing is compiled that may not be used"
    assert thread.num_waiting == 2
    grammars.used.remove(SECOND)
    proceed_until(thread, events, 4)
    assert events[3:] == ["c"]
    thread.when_compiled(7, FIRST, lambda: events.append("in use"))
    assert events[4:] == ["in use"], "it takes no more memory"
    grammars.used.remove(FIRST)
    proceed_until(thread, events, 6)
    assert events[5:] == ["d"]


def test_a_format_that_is_kept_waits_behind_others_for_its_use(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.may_end.set()
    grammars.keep(CompiledFormat(FOURTH, None))
    grammars.used |= {FIRST, SECOND}
    for number, each in enumerate((THIRD, FOURTH)):
        thread.when_compiled(number, each, partial(events.append, each.text))
    thread.proceed()
    assert events == []
    grammars.used.remove(FIRST)
    proceed_until(thread, events, 1)
    assert events[0] == "c"


def test_formats_in_use_are_free_to_new_requests_until_another_has_waited_long(
    thread: FormatThread, grammars: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    grammars.may_end.set()
    now_s = 100.0
    monkeypatch.setattr(formats, "time", SimpleNamespace(monotonic=lambda: now_s))
    for each in (FIRST, SECOND):
        grammars.keep(CompiledFormat(each, None))
        grammars.used.add(each)
    thread.when_compiled(0, THIRD, lambda: events.append("waited"))
    now_s = 104.0
    thread.when_compiled(1, FIRST, lambda: events.append("before"))
    assert events == ["before"]
    now_s = 106.0
    thread.when_compiled(2, FIRST, lambda: events.append("behind"))
    thread.when_compiled(3, FIRST, lambda: events.append("behind too"))
    thread.proceed()
    assert events == ["before"]
    thread.cancel(3)
    grammars.used.remove(SECOND)
    thread.proceed()
    proceed_until(thread, events, 3)
    assert sorted(events[1:]) == ["behind", "waited"]
    grammars.used.add(THIRD)
    thread.when_compiled(4, FOURTH, lambda: events.append("never"))
    now_s = 112.0
    thread.when_compiled(5, FIRST, lambda: events.append("last"))
    thread.proceed()
    assert len(events) == 3
    thread.cancel(4)
    thread.proceed()
    assert events[3:] == ["last"], "no older request waits"


def test_a_place_that_is_free_before_it_is_looked_for_is_given(thread: FormatThread, grammars: Any) -> None:
    """A request that came and went between two looks leaves the same formats in use as before."""
    events: list[str] = []
    grammars.may_end.set()
    for each in (FIRST, SECOND):
        grammars.keep(CompiledFormat(each, None))
    grammars.used.add(FIRST)
    thread.when_compiled(0, THIRD, lambda: events.append("first"))
    thread.when_compiled(1, FOURTH, lambda: None)
    proceed_until(thread, events, 1)
    thread.cancel(1)
    thread.proceed()
    thread.when_compiled(2, SECOND, lambda: grammars.used.add(SECOND))
    assert SECOND in grammars.used
    thread.when_compiled(3, FOURTH, lambda: events.append("waited"))
    grammars.used.remove(SECOND)
    proceed_until(thread, events, 2)
    assert events[1] == "waited"


def test_a_request_whose_time_is_over_takes_no_place(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.used |= {FIRST, SECOND}
    thread.when_compiled(0, THIRD, lambda: events.append("over"), until_s=0.0)
    thread.when_compiled(1, THIRD, lambda: events.append("too many"))
    grammars.may_end.set()
    for _ in range(5):
        thread.proceed()
    assert events == ["over"]
    assert not grammars.begun


def test_a_format_that_nobody_wants_any_more_is_not_compiled(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    thread.when_compiled(0, FIRST, lambda: None)
    thread.when_compiled(1, SECOND, lambda: events.append("over"), until_s=0.0)
    thread.proceed()
    assert events == ["over"]
    grammars.may_end.set()
    thread.close()
    assert SECOND not in grammars.begun


def test_the_oldest_of_all_that_wait_is_waited_for(
    thread: FormatThread, grammars: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the format before it come and go."""
    events: list[str] = []
    now_s = 100.0
    monkeypatch.setattr(formats, "time", SimpleNamespace(monotonic=lambda: now_s))
    for each in (FIRST, SECOND):
        grammars.keep(CompiledFormat(each, None))
        grammars.used.add(each)
    thread.when_compiled(0, THIRD, lambda: None)
    thread.when_compiled(1, FOURTH, lambda: None)
    now_s = 104.0
    thread.when_compiled(2, THIRD, lambda: None)
    thread.cancel(0)
    now_s = 106.0
    thread.when_compiled(3, FIRST, lambda: events.append("passed"))
    thread.proceed()
    assert events == []


def test_whether_a_format_can_be_compiled_is_told_whatever_is_in_use(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.used |= {FIRST, SECOND}
    thread.when_compiled(0, THIRD, lambda: events.append("never"))
    for number, each in enumerate((THIRD, FOURTH, FOURTH, None), 1):
        thread.check(number, each, partial(events.append, f"{number}"))
    assert events == ["4"]
    assert thread.num_waiting == 4
    thread.cancel(2)
    grammars.may_end.set()
    proceed_until(thread, events, 3)
    assert events == ["4", "1", "3"]
    assert sorted(grammars.begun, key=lambda each: each.text) == [THIRD, FOURTH], "once for all questions"
    thread.check(9, THIRD, lambda: events.append("kept"))
    assert events[3:] == ["kept"]


def test_one_question_at_a_time_has_a_format_compiled(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    for number, each in enumerate((FIRST, SECOND, THIRD)):
        thread.check(number, each, partial(events.append, each.text))
    thread.proceed()
    thread.when_compiled(7, FOURTH, lambda: events.append("request"))
    thread.cancel(1)
    grammars.may_end.set()
    proceed_until(thread, events, 3)
    assert grammars.begun == [FIRST, FOURTH, THIRD]
    assert events == ["a", "request", "c"]


def test_a_question_that_nobody_asks_any_more_is_not_compiled(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    thread.when_compiled(0, FIRST, lambda: events.append("request"))
    for number in (1, 2):
        thread.check(number, SECOND, lambda: events.append("never"))
    thread.proceed()
    thread.cancel(1)
    assert thread._checking is not None
    thread.cancel(2)
    assert thread._checking is None
    grammars.may_end.set()
    proceed_until(thread, events, 1)
    thread.close()
    assert grammars.begun == [FIRST]


def test_a_format_that_is_spoiled_before_its_request_has_it_is_compiled_again(
    thread: FormatThread, grammars: Any
) -> None:
    events: list[str] = []
    for number in range(2):
        thread.when_compiled(number, FIRST, partial(events.append, f"{number}"))
    grammars.may_end.set()
    compiled = thread._compiling[FIRST].result(20)
    thread.proceed(0.0)
    assert events == ["0"]
    compiled.is_spoiled = True
    grammars.present.clear()
    thread.proceed(0.0)
    assert events == ["0"]
    proceed_until(thread, events, 2)
    assert grammars.begun == [FIRST, FIRST]
    assert not thread.num_waiting


def test_a_format_that_is_shared_no_longer_keeps_its_place(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.may_end.set()
    grammars.used, grammars.num_spoiled = {FIRST}, 1
    thread.when_compiled(0, SECOND, lambda: events.append("second"))
    assert thread.is_full
    for _ in range(3):
        thread.proceed()
    assert not events
    grammars.num_spoiled = 0
    proceed_until(thread, events, 1)
    assert not thread.is_full


def test_requests_wait_for_none_where_no_thread_can_start(thread: FormatThread, grammars: Any) -> None:
    """The engine refuses them then."""
    events: list[str] = []
    thread.close()
    thread.when_compiled(0, FIRST, lambda: events.append("request"))
    thread.check(1, SECOND, lambda: events.append("question"))
    for _ in range(2):
        thread.proceed()
    assert sorted(events) == ["question", "request"]
    assert not thread.num_waiting


def test_a_question_whose_format_is_kept_by_now_has_it_compiled_no_more(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    for number, each in enumerate((FIRST, SECOND)):
        thread.check(number, each, partial(events.append, each.text))
    thread.proceed()
    grammars.keep(CompiledFormat(SECOND, None))
    grammars.may_end.set()
    proceed_until(thread, events, 2)
    assert grammars.begun == [FIRST]


def test_questions_of_an_owner_that_is_gone_are_forgotten(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    gone = object()
    for number, each in enumerate((FIRST, SECOND, SECOND)):
        thread.check(number, each, lambda: events.append("never"), owner=gone)
    thread.check(9, THIRD, lambda: events.append("other"))
    thread.proceed()
    thread.cancel_all(gone)
    assert thread.num_waiting == 1
    grammars.may_end.set()
    proceed_until(thread, events, 1)
    assert events == ["other"]
    assert SECOND not in grammars.begun


def test_whether_there_is_room_is_asked_until_there_is_none(thread: FormatThread, grammars: Any) -> None:
    """The question takes time, and thousands of formats may wait."""
    asked: list[int] = []
    grammars.used |= {FIRST, SECOND}
    grammars.has_room = lambda num_in_use: bool(asked.append(num_in_use))
    for number in range(50):
        thread.when_compiled(number, ResponseFormat("regex", f"x{number}"), lambda: None)
    asked.clear()
    thread.proceed()
    assert len(asked) <= 2


def test_a_question_shares_a_compilation_and_keeps_it(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    for number, each in enumerate((FIRST, SECOND)):
        thread.when_compiled(number, each, lambda: events.append("never"))
    thread.check(7, SECOND, lambda: events.append("answered"))
    thread.proceed()
    thread.cancel(1)
    thread.cancel(0)
    grammars.may_end.set()
    proceed_until(thread, events, 1)
    assert events == ["answered"]
    assert grammars.begun.count(SECOND) == 1


def test_requests_of_an_owner_that_is_gone_are_forgotten(thread: FormatThread, grammars: Any) -> None:
    events: list[int] = []
    grammars.used |= {FIRST, SECOND}
    gone, other = object(), object()
    for number, owner in enumerate((gone, other, gone)):
        thread.when_compiled(number, THIRD, partial(events.append, number), owner=owner)
    thread.cancel_all(gone)
    assert thread.num_waiting == 1
    thread._ready[9] = thread._remove(1)  # it waits no longer, and is not called yet
    thread.when_compiled(4, THIRD, lambda: events.append(4), owner=gone)
    thread._ready[4] = thread._remove(4)
    thread.cancel_all(gone)
    assert thread._ready.keys() == {9}
    grammars.used.clear()
    grammars.may_end.set()
    proceed_until(thread, events, 1)
    assert events == [1]


def test_a_request_that_leaves_takes_no_compilation_from_another(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    for number, each in enumerate((FIRST, SECOND, SECOND)):
        thread.when_compiled(number, each, partial(events.append, f"{number}"))
    thread.cancel(1)
    grammars.may_end.set()
    proceed_until(thread, events, 2)
    assert events == ["0", "2"]
    assert grammars.begun == [FIRST, SECOND]


def test_a_kept_format_stays_until_the_request_that_waited_for_it_has_it(thread: FormatThread, grammars: Any) -> None:
    held: list[object] = []
    grammars.used |= {FIRST, SECOND}
    for number in range(2):
        thread.when_compiled(number, THIRD, lambda: held.append(gone()))
    grammars.keep(CompiledFormat(THIRD, None))
    gone = weakref.ref(grammars.present[THIRD])
    grammars.used.clear()
    thread.proceed(0.0)
    grammars.present.clear()
    thread.proceed()
    assert len(held) == 2
    assert None not in held


def test_a_request_whose_time_is_over_waits_no_longer(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.used |= {FIRST, SECOND}
    thread.when_compiled(0, THIRD, lambda: events.append("late"), until_s=time.monotonic() + 0.05)
    thread.when_compiled(1, FOURTH, lambda: events.append("never"))
    thread.proceed()
    assert events == []
    proceed_until(thread, events, 1)
    assert events == ["late"]
    assert not grammars.begun
    assert thread.num_waiting == 1


def test_a_format_stays_until_the_request_that_waited_for_it_has_it(thread: FormatThread, grammars: Any) -> None:
    held = None

    def then() -> None:
        nonlocal held
        held = gone()

    thread.when_compiled(0, FIRST, lambda: None)
    thread.when_compiled(1, FIRST, then)
    grammars.may_end.set()
    gone = weakref.ref(thread._compiling[FIRST].result(20))
    thread.proceed(0.0)
    grammars.present.clear()  # others are kept in place of it
    thread.proceed()
    assert held is not None
    held = None
    assert gone() is None


def test_what_cannot_be_compiled_goes_on_and_fails_with_the_reason_there(thread: FormatThread, grammars: Any) -> None:
    events: list[str] = []
    grammars.refused.add(FIRST)
    thread.when_compiled(0, FIRST, lambda: events.append("asked"))
    grammars.may_end.set()
    proceed_until(thread, events, 1)
    assert grammars.present == {}


def test_a_model_that_follows_no_format_has_none_to_wait_for() -> None:
    events: list[str] = []
    FormatThread(None).when_compiled(0, FIRST, lambda: events.append("refused by the engine"))
    assert events


def test_what_is_not_compiled_when_the_engine_ends_is_neither_begun_nor_waited_for(
    thread: FormatThread, grammars: Any
) -> None:
    for number, each in enumerate((FIRST, SECOND)):
        thread.when_compiled(number, each, lambda: None)
    while not grammars.begun:
        threading.Event().wait(0.001)
    thread.close()
    assert not thread._compiling[FIRST].done()
    assert thread._compiling[SECOND].cancelled()
    grammars.may_end.set()
