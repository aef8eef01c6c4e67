"""Events of an engine, for observers that record and count."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.scheduling.drafts import NgramDrafter
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.step import Step


class Observer:
    """Gets the events of an engine. Each method does nothing here; a subclass overrides those it needs."""

    def arrived(self, request: Request) -> None:
        """``request`` is about to be queued. An error refuses it."""

    def scheduled(self, step: Step, scheduler: Scheduler) -> None:
        """``scheduler`` made the schedule of ``step``, and nothing of it runs yet."""

    def ran(self, step: Step) -> None:
        """The tokens of ``step`` are on the host, or it failed after its forward pass was launched."""

    def ended(self, step: Step) -> None:
        """The tokens of ``step`` were given to their sequences."""

    def withdrawn(self, request: Request, step: Step) -> None:
        """``step`` showed that the KV cache of ``request`` may be wrong, so its blocks leave the prefix cache."""

    def finished(
        self, sequence: Sequence, reason: FinishReason, now_s: float, token_times_s: SequenceOf[float], is_last: bool
    ) -> None:
        """A completion finished, which got its tokens at these times; with ``is_last`` the whole request did."""

    def beam_moves(self, beam: Sequence, parent: Sequence | None) -> None:
        """``beam`` is about to continue from ``parent``, or to be suspended if there is none."""

    def beams_moved(self, request: Request, step: Step) -> None:
        """A beam search moved by a token after ``step``: the last event of its moves."""


class Observers(Observer):
    """Passes every event on to ``each`` observer that needs it, in order."""

    def __init__(self, *each: Observer):
        self.set(*each)

    def set(self, *each: Observer) -> None:
        """Passes events on to ``each`` from now on."""
        self.each = each
        # Every step has these events, so observers that do not need them are not called.
        self._scheduled = [one for one in each if type(one).scheduled is not Observer.scheduled]
        self._ran = [one for one in each if type(one).ran is not Observer.ran]
        self._ended = [one for one in each if type(one).ended is not Observer.ended]

    def arrived(self, request: Request) -> None:
        for observer in self.each:
            observer.arrived(request)

    def scheduled(self, step: Step, scheduler: Scheduler) -> None:
        for observer in self._scheduled:
            observer.scheduled(step, scheduler)

    def ran(self, step: Step) -> None:
        for observer in self._ran:
            observer.ran(step)

    def ended(self, step: Step) -> None:
        for observer in self._ended:
            observer.ended(step)

    def withdrawn(self, request: Request, step: Step) -> None:
        for observer in self.each:
            observer.withdrawn(request, step)

    def finished(
        self, sequence: Sequence, reason: FinishReason, now_s: float, token_times_s: SequenceOf[float], is_last: bool
    ) -> None:
        for observer in self.each:
            observer.finished(sequence, reason, now_s, token_times_s, is_last)

    def beam_moves(self, beam: Sequence, parent: Sequence | None) -> None:
        for observer in self.each:
            observer.beam_moves(beam, parent)

    def beams_moved(self, request: Request, step: Step) -> None:
        for observer in self.each:
            observer.beams_moved(request, step)


class DrafterObserver(Observer):
    """Lets a drafter forget the sequences that finished."""

    def __init__(self, drafter: NgramDrafter):
        self._drafter = drafter

    def finished(
        self, sequence: Sequence, reason: FinishReason, now_s: float, token_times_s: SequenceOf[float], is_last: bool
    ) -> None:
        self._drafter.forget(sequence)
