"""The history of a request: facts computed from a recording alone. :mod:`.why_text` puts them into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.recording import Arrival, Beams, Finish, Recording, Step, request_of
from fastgen.runtime.flight.step_times import ExpectedTimes
from fastgen.runtime.flight.time_account import Span, TimeAccount
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.step_cost.cost import StepCost


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """A step took the sequence's blocks away: the seconds until it had blocks again, and the tokens to compute
    again.
    """

    step: int
    waited_s: float
    lost_tokens: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The time between token number ``after`` (the first is 1) and the next one. ``step`` is the longest step in it."""

    after: int
    span: Span
    preempted: bool
    step: Step
    # The time that the step took, and what such a step is expected to take; ``None`` where that is not known.
    step_s: float
    expected_s: float | None


@dataclass(frozen=True, kw_only=True)
class Why:
    """The history of one sequence. Durations are in seconds."""

    sequence: str
    # Number of sequences of its request.
    completions: int
    prompt_tokens: int
    # Prompt tokens found in the prefix cache when it was first scheduled.
    cached_tokens: int
    new_tokens: int
    # ``None`` if the recording ends first.
    finish_reason: FinishReason | None
    # From its arrival until it or the recording ended.
    total_s: float
    # Sequences that were waiting when it arrived.
    ahead: int
    # From its arrival until its first token was scheduled; ``None`` if none was.
    queue_s: float | None
    ttft_s: float | None
    # From its arrival until its first token, or until its end if it has no token.
    first_token: Span
    # From its first token to its last; ``None`` with fewer than two tokens.
    other_tokens: Span | None
    # Steps in which it had tokens.
    steps: int
    # The time that these steps took, and what such steps are expected to take; ``None`` where that is not known.
    steps_s: float
    expected_s: float | None
    # Rate after the first token; ``None`` with fewer than two tokens.
    tokens_per_s: float | None
    preemptions: tuple[Preemption, ...]
    median_gap_s: float | None
    worst_gap: Gap | None


def why(recording: Recording, sequence: str, cost: StepCost | None = None) -> Why:
    """Returns the history of ``sequence``, such as ``"3.0"``; ``"3"`` is the first sequence of request 3.

    ``cost`` says what a step is expected to take. By default it is fitted to the steps of the recording.

    :raises InvalidArgumentError: if the recording does not hold it from its arrival on.
    """
    if "." not in sequence:
        sequence = f"{sequence}.0"
    arrival = recording.arrival(sequence)
    if recording.header.first_step and recording.steps and arrival.clock_s < recording.steps[0].began_s:
        raise InvalidArgumentError(
            f"request {arrival.request} came before step {recording.header.first_step}, where this recording begins: "
            "the recorder had dropped earlier steps"
        )
    ours = recording.together(sequence)
    own_steps = [step for step in recording.steps if any(entry.sequence in ours for entry in step.entries)]
    finish = recording.finishes.get(sequence)
    giving = _giving(recording, sequence, None if finish is None else finish.num_tokens)
    times_s = [step.ran_s for step in giving if step.ran_s is not None]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    end_s = finish.clock_s if finish is not None else recording.end_s
    account, times = TimeAccount(recording, ours, arrival), ExpectedTimes(recording, cost)
    ran = [step for step in own_steps if step.ran_s is not None]
    return Why(
        sequence=sequence,
        completions=arrival.n,
        prompt_tokens=arrival.prompt_tokens,
        cached_tokens=_cached_tokens(recording, sequence),
        new_tokens=len(times_s),
        finish_reason=None if finish is None else finish.reason,
        total_s=end_s - arrival.clock_s,
        ahead=_num_waiting(recording, arrival),
        queue_s=own_steps[0].scheduled_s - arrival.clock_s if own_steps else None,
        ttft_s=times_s[0] - arrival.clock_s if times_s else None,
        first_token=account.span(arrival.clock_s, times_s[0] if times_s else end_s),
        other_tokens=account.span(times_s[0], times_s[-1]) if gaps_s else None,
        steps=len(ran),
        steps_s=sum(map(times.took_s, ran)),
        expected_s=times.sum_of(ran),
        tokens_per_s=len(gaps_s) / (times_s[-1] - times_s[0]) if gaps_s and times_s[-1] > times_s[0] else None,
        preemptions=tuple(_preemptions(recording, ours, end_s)),
        median_gap_s=median(gaps_s) if gaps_s else None,
        worst_gap=_worst_gap(recording, account, times, ours, giving, gaps_s) if gaps_s else None,
    )


def _giving(recording: Recording, sequence: str, num_tokens: int | None) -> list[Step]:
    """Returns for each token of ``sequence`` the step that gave it. A beam search moves all its answers on by one token
    at once.
    """
    if len(recording.together(sequence)) == 1:
        ran = [(step, step.entry_of(sequence)) for step in recording.steps if step.ran_s is not None]
        return [step for step, entry in ran if entry is not None for _ in range(entry.num_sampled)]
    steps = {step.step: step for step in recording.steps}
    moves = [event for event in recording.events if isinstance(event, Beams)]
    return [steps[move.step] for move in moves if move.request == request_of(sequence)][:num_tokens]


def _worst_gap(
    recording: Recording,
    account: TimeAccount,
    times: ExpectedTimes,
    ours: tuple[str, ...],
    giving: list[Step],
    gaps_s: list[float],
) -> Gap:
    worst = gaps_s.index(max(gaps_s))
    earlier, later = giving[worst], giving[worst + 1]
    assert earlier.ran_s is not None
    assert later.ran_s is not None
    first = recording.steps[0].step
    steps = recording.steps[earlier.step + 1 - first : later.step + 1 - first] or (later,)
    longest = max(steps, key=lambda step: step.end_s - step.began_s)
    return Gap(
        after=worst + 1,
        span=account.span(earlier.ran_s, later.ran_s),
        preempted=any(name in ours for step in steps for name in step.preempted),
        step=longest,
        step_s=times.took_s(longest),
        expected_s=times.of(longest),
    )


def _preemptions(recording: Recording, ours: tuple[str, ...], end_s: float) -> Iterator[Preemption]:
    lost_s, lost = 0.0, None
    num_computed: dict[str, int] = {}
    for step in recording.steps:
        own = [entry for entry in step.entries if entry.sequence in ours]
        if any(name in ours for name in step.preempted):
            lost_s = step.began_s
            lost = Preemption(step=step.step, waited_s=end_s - lost_s, lost_tokens=sum(num_computed.values()))
            num_computed.clear()
        if own and step.ran_s is not None:
            num_computed |= {entry.sequence: entry.end for entry in own}
            if lost is not None:
                yield replace(lost, waited_s=step.scheduled_s - lost_s)
                lost = None
    if lost is not None:
        yield lost


def _cached_tokens(recording: Recording, sequence: str) -> int:
    admissions = (admission for step in recording.steps for admission in step.admitted)
    return next((each.cached_tokens for each in admissions if each.sequence == sequence), 0)


def _num_waiting(recording: Recording, arrival: Arrival) -> int:
    """Returns how many sequences were waiting when the request of ``arrival`` came."""
    waiting: set[str] = set()
    for event in recording.events:
        if event is arrival:
            break
        if isinstance(event, Arrival):
            waiting.update(event.sequences)
        elif isinstance(event, Step):
            waiting.update(event.preempted)
            waiting.difference_update(*(recording.together(each.sequence) for each in event.admitted))
        elif isinstance(event, Finish):
            waiting.difference_update(recording.together(event.sequence))
    return len(waiting)
