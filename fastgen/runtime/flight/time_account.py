"""Accounts for the time of a sequence: each interval of its life has exactly one cause, so the shares sum to the total.

A step in which the sequence had tokens is divided among all sequences that had tokens in it, by their numbers of
tokens. The sequence's own part counts as its own computing (or recomputing, for positions that it had reached before a
preemption); the rest counts as sharing. This is an accounting rule, not a prediction: on a memory-bound device the step
would hardly have been shorter with the sequence's own tokens alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fastgen.runtime.flight.recording import Arrival, Finish, Recording, Step, request_of
from fastgen.runtime.kv_cache.capacity import Capacity

Cause = Literal[
    "queued_step",  # until it was scheduled: the time between steps, and the scheduling of the step that admitted it
    "queued_slots",  # all slots were taken
    "queued_blocks",  # the KV cache had no free block, or its free blocks were reserved for preempted sequences
    "queued_tokens",  # prompts ahead of it used all prompt tokens of the step
    "queued_policy",  # the scheduling policy admitted no more
    "own",  # computing its own tokens, the first time
    "recomputing",  # computing them again after a preemption
    "other_prompts",  # prompts of other requests in the same steps
    "other_decodes",  # decodes of other requests in the same steps
    "passed_over",  # it had a slot, but the step's tokens went to other sequences
    "preempted",  # its blocks had been taken away, and it waited for new ones
    "between_steps",  # it had a slot, and no step ran, or the step failed
]


class Share(NamedTuple):
    """The seconds that one cause took."""

    cause: Cause
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OtherPrompts:
    """The prompts of other requests that were computed during a span: how many there were, and the longest one."""

    num_requests: int
    longest_request: int
    longest_tokens: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time and its shares, the largest first.

    ``others`` describes the prompts of other requests in those of its steps in which the sequence had a slot; it is
    ``None`` if there were none.
    """

    seconds: float
    shares: tuple[Share, ...]
    others: OtherPrompts | None

    @property
    def percentages(self) -> dict[Cause, int]:
        """Returns whole percentages that sum to 100, by largest remainders. It is empty if no time passed."""
        total = sum(share.seconds for share in self.shares)
        exact = {share.cause: 100 * share.seconds / total for share in self.shares}
        whole = {cause: int(percent) for cause, percent in exact.items()}
        largest = sorted(exact, key=lambda cause: exact[cause] - whole[cause], reverse=True)
        for cause in largest[: 100 - sum(whole.values())] if exact else []:
            whole[cause] += 1
        return whole


class _Slice(NamedTuple):
    """A time interval with one cause. If ``cause`` is ``None``, it is a ``step`` with ``num_own`` tokens of the
    sequence, ``num_again`` of which had been computed before.
    """

    start_s: float
    end_s: float
    cause: Cause | None
    step: Step | None = None
    num_own: int = 0
    num_again: int = 0


class TimeAccount:
    """The life of ``sequences`` (one sequence, or the beams of one search) cut into slices without gaps, from their
    arrival on.
    """

    def __init__(self, recording: Recording, sequences: Container[str], arrival: Arrival):
        self._recording, self._sequences, self._arrival = recording, sequences, arrival
        self._slices = list(self._cut())

    def span(self, start_s: float, end_s: float) -> Span:
        """Returns how the time between ``start_s`` and ``end_s`` is divided."""
        seconds: dict[Cause, float] = defaultdict(float)
        with_prompts: set[int] = set()  # requests whose prompts were computed
        for piece in self._slices:
            length_s = min(piece.end_s, end_s) - max(piece.start_s, start_s)
            if length_s <= 0:
                continue
            if piece.step is not None:
                with_prompts.update(request_of(entry.sequence) for entry in piece.step.prompts)
            if piece.cause is not None:
                seconds[piece.cause] += length_s
            else:
                for cause, num_tokens in self._tokens_by_cause(piece):
                    assert piece.step is not None
                    seconds[cause] += length_s * num_tokens / piece.step.num_tokens
        shares = [Share(cause, length_s) for cause, length_s in seconds.items() if length_s > 0]
        return Span(
            seconds=end_s - start_s,
            shares=tuple(sorted(shares, key=lambda share: -share.seconds)),
            others=self._others(with_prompts - {self._arrival.request}),
        )

    def _tokens_by_cause(self, piece: _Slice) -> list[tuple[Cause, int]]:
        assert piece.step is not None
        num_prompt = sum(each.num_tokens for each in piece.step.prompts if each.sequence not in self._sequences)
        return [
            ("recomputing", piece.num_again),
            ("own", piece.num_own - piece.num_again),
            ("other_decodes", piece.step.num_tokens - piece.num_own - num_prompt),
            ("other_prompts", num_prompt),
        ]

    def _others(self, requests: set[int]) -> OtherPrompts | None:
        """Summarizes the other ``requests`` whose prompts were computed."""
        if not requests:
            return None
        arrivals = self._recording.arrivals
        longest = max(requests, key=lambda request: (arrivals[request].prompt_tokens, -request))
        return OtherPrompts(
            num_requests=len(requests),
            longest_request=longest,
            longest_tokens=arrivals[longest].prompt_tokens,
        )

    def _cut(self) -> Iterator[_Slice]:
        cursor_s = self._arrival.clock_s
        furthest: dict[str, int] = {}
        waits: Cause | None = "queued_step"  # why it waits while no step runs; None once it has a slot
        for step, is_kept in self._steps_since_arrival():
            if any(name in self._sequences for name in step.preempted):
                waits = "preempted"
            # A step launched ahead began while the previous one ran: that time belongs to the previous one.
            began_s = max(step.began_s, cursor_s)
            yield _Slice(cursor_s, began_s, waits or "between_steps")
            cursor_s = max(step.end_s, cursor_s)
            own = [entry for entry in step.entries if entry.sequence in self._sequences]
            if own:
                first_s = began_s if waits is None else max(step.scheduled_s, began_s)
                yield _Slice(began_s, first_s, waits)
                waits = None
                if step.ran_s is None:
                    yield _Slice(first_s, cursor_s, "between_steps")
                    continue
                num_again = 0
                for entry in own:
                    before = furthest.get(entry.sequence, 0)
                    num_again += max(0, min(entry.start + entry.num_tokens, before) - entry.start)
                    furthest[entry.sequence] = max(before, entry.end)
                yield _Slice(first_s, cursor_s, None, step, sum(entry.num_tokens for entry in own), num_again)
            elif waits is None:
                yield _Slice(began_s, cursor_s, "passed_over", step)
            else:
                cause = waits if waits == "preempted" else self._queued_for(step, is_kept)
                yield _Slice(began_s, cursor_s, cause)
        yield _Slice(cursor_s, float("inf"), waits or "between_steps")

    def _steps_since_arrival(self) -> Iterator[tuple[Step, bool]]:
        """Yields each step, and whether a preempted sequence was still waiting after it: nothing is admitted ahead of
        such a sequence.
        """
        has_come, waiting = False, set[str]()
        for event in self._recording.events:
            has_come |= event is self._arrival
            if isinstance(event, Finish):
                waiting.difference_update(self._recording.together(event.sequence))
            elif isinstance(event, Step):
                waiting.update(event.preempted)
                waiting.difference_update(*(self._recording.together(each.sequence) for each in event.admitted))
                if has_come:
                    yield event, bool(waiting)

    def _num_reserved(self) -> int:
        """Returns how many blocks are reserved for a sequence of this request."""
        engine, arrival = self._recording.header.engine, self._arrival
        num_tokens = arrival.prompt_tokens + arrival.max_new_tokens - 1
        if engine.kv_reservation == "context" and engine.max_model_len is not None:
            num_tokens = engine.max_model_len - 1
        return Capacity(engine.num_blocks - 1, engine.block_size, engine.windows, engine.max_chunk).blocks_needed(
            num_tokens
        )

    def _queued_for(self, step: Step, is_kept: bool) -> Cause:
        """Returns why ``step`` admitted no more than it did."""
        engine = self._recording.header.engine
        if step.preempted or is_kept or step.blocks_free < len(engine.windows):
            return "queued_blocks"
        if step.running == engine.max_num_seqs:
            return "queued_slots"
        if engine.kv_reservation and step.blocks_free < self._num_reserved():
            return "queued_blocks"
        is_full = step.num_tokens == step.size or any(not entry.num_sampled for entry in step.prompts)
        return "queued_tokens" if is_full else "queued_policy"
