"""Sequences that a step leaves out, and how long it waits before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.step import late_masks
from fastgen.runtime.step.late_masks import without_mask

NOW_S = 100.0


class FakeMatcher:
    """Has its mask at once, after a wait, or never; notes what is asked of it."""

    def __init__(self, comes: str) -> None:
        self.comes = comes
        self.deadlines_s: list[float] = []
        self.waits_s: list[float] = []

    def is_ready(self, deadline_s: float) -> bool:
        self.deadlines_s.append(deadline_s)
        return self.comes == "at once" or (self.comes == "after a wait" and bool(self.waits_s))

    def wait(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_masks, "time", SimpleNamespace(monotonic=lambda: NOW_S))


def sequence(comes: str | None = None) -> tuple[Sequence, FakeMatcher]:
    """Returns a sequence, constrained if its mask comes at all, and its matcher."""
    (found,), matcher = Request(0, [1], SamplingParams(), 0.0).sequences, FakeMatcher(comes or "")
    if comes is not None:
        found.matcher = cast(Any, matcher)
    return found, matcher


def test_a_step_leaves_out_those_whose_mask_is_not_there_and_waits_for_all_together() -> None:
    (ready, first), (late, second), (other, third) = (sequence(comes) for comes in ("at once", "never", "at once"))
    assert without_mask([ready, late, other]) == {late}
    for each in (first, second, third):
        assert each.deadlines_s == [NOW_S + 0.03]
        assert not each.waits_s


def test_a_step_with_nothing_else_waits_once_more() -> None:
    (first, waited), (second, other) = sequence("after a wait"), sequence("never")
    assert without_mask([first, second]) == {second}
    assert (waited.waits_s, other.waits_s) == ([0.03], [])
    assert waited.deadlines_s == other.deadlines_s == [NOW_S + 0.03, 0.0]


def test_a_step_that_makes_progress_elsewhere_does_not_wait_once_more() -> None:
    (late, matcher), (free, _) = sequence("after a wait"), sequence()
    assert without_mask([free, late]) == {late}
    assert not matcher.waits_s
    assert without_mask([free]) == frozenset()
