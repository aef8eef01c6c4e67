"""What became of a request: facts worked out from a recording alone. :mod:`fastgen.runtime.why_text` tells them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight import Arrival, Finish, Recording, Step
from fastgen.runtime.outputs import FinishReason
from fastgen.runtime.time_account import Span, TimeAccount


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """Blocks were taken away in a step; so many seconds until it had some again, and tokens to compute once more."""

    step: int
    waited_s: float
    lost_tokens: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Between token number ``after`` (the first is 1) and the next; ``step`` is the longest step in it."""

    after: int
    span: Span
    preempted: bool
    step: Step


@dataclass(frozen=True, kw_only=True)
class Why:
    """What became of one sequence. Times are seconds; those until a moment count from its arrival."""

    sequence: str
    completions: int
    """Sequences of its request."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, found in the prefix cache when it was first scheduled."""
    new_tokens: int
    finish_reason: FinishReason | None
    """``None`` where the recording ends before it."""
    total_s: float
    """Until it ended, or the recording did."""
    ahead: int
    """Sequences that were waiting when it came."""
    queue_s: float | None
    """Until the first of its tokens was scheduled; ``None`` where none was."""
    ttft_s: float | None
    first_token: Span
    """Until its first token, or until its end where there is none."""
    other_tokens: Span | None
    """From its first token to its last; ``None`` with fewer than two."""
    steps: int
    """In which it had tokens."""
    tokens_per_s: float | None
    """After the first; ``None`` with fewer than two."""
    preemptions: tuple[Preemption, ...]
    median_gap_s: float | None
    worst_gap: Gap | None


def why(recording: Recording, sequence: str) -> Why:
    """What became of ``sequence``, such as ``"3.0"``; ``"3"`` is the first of request 3.

    :raises InvalidArgumentError: where the recording does not hold it from its arrival on.
    """
    if "." not in sequence:
        sequence = f"{sequence}.0"
    arrival = recording.arrival(sequence)
    if recording.header.first_step and recording.steps and arrival.clock_s < recording.steps[0].began_s:
        raise InvalidArgumentError(
            f"request {arrival.request} came before step {recording.header.first_step}, where this recording begins: "
            "the recorder had let go of earlier steps"
        )
    entries = recording.entries.get(sequence, [])
    giving = [step for step, entry in entries for _ in range(entry.num_sampled)]
    times_s = [step.ran_s for step in giving if step.ran_s is not None]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    finish = recording.finishes.get(sequence)
    end_s = finish.clock_s if finish is not None else recording.end_s
    account = TimeAccount(recording, sequence, arrival)
    return Why(
        sequence=sequence,
        completions=arrival.n,
        prompt_tokens=arrival.prompt_tokens,
        cached_tokens=_cached_tokens(recording, sequence),
        new_tokens=len(times_s),
        finish_reason=None if finish is None else finish.reason,
        total_s=end_s - arrival.clock_s,
        ahead=_num_waiting(recording, arrival),
        queue_s=_queue_s(recording, sequence, arrival),
        ttft_s=times_s[0] - arrival.clock_s if times_s else None,
        first_token=account.span(arrival.clock_s, times_s[0] if times_s else end_s),
        other_tokens=account.span(times_s[0], times_s[-1]) if gaps_s else None,
        steps=len(entries),
        tokens_per_s=len(gaps_s) / (times_s[-1] - times_s[0]) if gaps_s and times_s[-1] > times_s[0] else None,
        preemptions=tuple(_preemptions(recording, sequence, end_s)),
        median_gap_s=median(gaps_s) if gaps_s else None,
        worst_gap=_worst_gap(recording, account, sequence, giving, gaps_s) if gaps_s else None,
    )


def _queue_s(recording: Recording, sequence: str, arrival: Arrival) -> float | None:
    scheduled_s = (step.scheduled_s for step in recording.steps if step.entry_of(sequence) is not None)
    first_s = next(scheduled_s, None)
    return None if first_s is None else first_s - arrival.clock_s


def _worst_gap(
    recording: Recording, account: TimeAccount, sequence: str, giving: list[Step], gaps_s: list[float]
) -> Gap:
    worst = gaps_s.index(max(gaps_s))
    earlier, later = giving[worst], giving[worst + 1]
    assert earlier.ran_s is not None
    assert later.ran_s is not None
    first = recording.steps[0].step
    steps = recording.steps[earlier.step + 1 - first : later.step + 1 - first] or (later,)
    return Gap(
        after=worst + 1,
        span=account.span(earlier.ran_s, later.ran_s),
        preempted=any(sequence in step.preempted for step in steps),
        step=max(steps, key=lambda step: step.end_s - step.began_s),
    )


def _preemptions(recording: Recording, sequence: str, end_s: float) -> Iterator[Preemption]:
    num_computed, lost_s, lost = 0, 0.0, None
    for step in recording.steps:
        if sequence in step.preempted:
            lost_s = step.began_s
            lost = Preemption(step=step.step, waited_s=end_s - lost_s, lost_tokens=num_computed)
        entry = step.entry_of(sequence)
        if entry is not None and step.ran_s is not None:
            num_computed = entry.start + entry.num_tokens
            if lost is not None:
                yield replace(lost, waited_s=step.scheduled_s - lost_s)
                lost = None
    if lost is not None:
        yield lost


def _cached_tokens(recording: Recording, sequence: str) -> int:
    admissions = (admission for step in recording.steps for admission in step.admitted)
    return next((each.cached_tokens for each in admissions if each.sequence == sequence), 0)


def _num_waiting(recording: Recording, arrival: Arrival) -> int:
    """How many sequences were waiting when the request of ``arrival`` came."""
    waiting: set[str] = set()
    for event in recording.events:
        if event is arrival:
            break
        if isinstance(event, Arrival):
            waiting.update(f"{event.request}.{index}" for index in range(event.n))
        elif isinstance(event, Step):
            waiting.update(event.preempted)
            waiting.difference_update(admission.sequence for admission in event.admitted)
        elif isinstance(event, Finish):
            waiting.discard(event.sequence)
    return len(waiting)
