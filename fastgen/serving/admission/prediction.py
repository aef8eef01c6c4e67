"""Predicts when the first token of a request would come, by simulating the engine's future steps.

The server knows for each request in its engine how long the prompt is, how many tokens were requested and whether the
first one has come. It also knows how long steps of each size take
(:class:`~fastgen.serving.admission.step_speed.StepSpeed`). From these, :meth:`Load.predict` simulates the engine's work
as SplitFuse schedules it. Sequences with a slot decode one token per step. The rest of the budget goes to the prompts
of the same or a more urgent class first, in even shares. A waiting request is admitted when an answer ends and leaves a
slot and room in the KV cache. Equal steps are simulated together, so the cost grows with the number of requests, not of
tokens.

Four things are estimates. A prompt counts with the share of its tokens that the prefix cache lately did not have.
Answers are assumed to reach the same share of their longest length as recent answers. The progress of the first prompt
and of the answers follows from the elapsed time. Preemptions are not predicted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.serving.admission.step_speed import StepSpeed

# The weight of one more answer in the mean share of their longest length that answers reach.
_LATE = 0.02


class EngineSize(NamedTuple):
    """The limits on a step and on the running sequences."""

    token_budget: int
    max_num_seqs: int
    # Capacity of the KV cache in tokens.
    num_kv_tokens: int


@dataclass(slots=True, eq=False)
class Pending:
    """A request in the engine. Each of its ``num_seqs`` sequences may generate ``num_new_tokens``."""

    num_prompt_tokens: int
    num_new_tokens: int
    num_seqs: int
    priority: int
    order: int
    # When its first token came.
    started_s: float | None = None

    @property
    def urgency(self) -> tuple[int, int]:
        return (self.priority, self.order)


class Prediction(NamedTuple):
    """The times that a request would see, in seconds."""

    ttft_s: float
    # Duration of a step in which all sequences with a slot decode and no prompt is computed.
    gap_s: float


class _Prompt(NamedTuple):
    num_pending: float
    num_seqs: int
    num_answer: float
    # Tokens in the KV cache at its first token.
    num_held: int


class Load:
    """The work that an engine has to do. All times are seconds of one clock."""

    def __init__(self, size: EngineSize):
        self._size, self._sizes = size, captured_sizes(size.token_budget)
        self.speed = StepSpeed()
        # Requests without a token, in order of urgency.
        self._waiting: list[Pending] = []
        self._started: dict[Pending, None] = {}
        self._num_submitted = 0
        # Prompt tokens of the waiting requests.
        self.num_waiting_tokens = 0
        # When the first waiting request became the first.
        self._moved_s = 0.0
        self._answer_share = 1.0
        self._computed_share = 1.0
        self._looked_up = self._hit = 0

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests without a token."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._waiting) + len(self._started)

    def submitted(
        self, num_prompt_tokens: int, num_new_tokens: int, num_seqs: int, priority: int, now_s: float
    ) -> Pending:
        """Records a request that was sent to the engine."""
        self._num_submitted += 1
        pending = Pending(num_prompt_tokens, num_new_tokens, num_seqs, priority, self._num_submitted)
        if not self._waiting:
            self._moved_s = now_s
        insort(self._waiting, pending, key=_urgency)
        self.num_waiting_tokens += num_prompt_tokens
        return pending

    def started(self, pending: Pending, now_s: float) -> None:
        """Records the first token of ``pending``."""
        if pending.started_s is None:
            self._leave_queue(pending, now_s)
            pending.started_s = now_s
            self._started[pending] = None

    def ended(self, pending: Pending, num_generated: int, *, is_whole: bool, now_s: float) -> None:
        """Records that ``pending`` has left the engine. Its first sequence generated ``num_generated`` tokens;
        ``is_whole`` means that it ended by itself.
        """
        if pending.started_s is None:
            self._leave_queue(pending, now_s)
        else:
            del self._started[pending]
        if is_whole:
            self._answer_share += _LATE * (num_generated / pending.num_new_tokens - self._answer_share)

    def observe(self, metrics: Metrics, now_s: float) -> None:
        """Takes the engine's counters since its start, as of ``now_s``."""
        self.speed.observe(metrics.step_seconds, now_s)
        looked_up = metrics.prefix_cache_lookup_tokens_total - self._looked_up
        hit = metrics.prefix_cache_hit_tokens_total - self._hit
        self._looked_up += looked_up
        self._hit += hit
        if looked_up > 0:
            self._computed_share += min(1.0, looked_up / 10_000) * (1 - hit / looked_up - self._computed_share)

    def predict(self, num_prompt_tokens: int, num_seqs: int, priority: int, now_s: float) -> Prediction | None:
        """Returns the times that a request arriving now would see, or ``None`` while too little has been measured."""
        budget, slots, room = self._size
        num_ahead = bisect_left(self._waiting, (priority + 1, 0), key=_urgency)
        prompts = [self._prompt(pending) for pending in self._waiting[:num_ahead]]
        num_own = max(1.0, self._computed_share * num_prompt_tokens)
        prompts.append(_Prompt(num_own, num_seqs, 1.0, num_prompt_tokens))
        decoding = self._decoding(now_s)
        num_then = sum(num for _, num, _ in decoding) + sum(prompt.num_seqs for prompt in prompts)
        gap_size = _size_for(self._sizes, min(slots, num_then))
        if gap_size > self.speed.most_tokens:
            return None
        steps = _Steps(self.speed, self._sizes, budget, decoding)
        ttft_s = steps.first_token_s(prompts, slots, room)
        if ttft_s is None:
            return None
        if num_ahead:
            ttft_s -= min(self._progress_s(now_s), ttft_s)
        return Prediction(ttft_s, self.speed.step_s(gap_size))

    def _leave_queue(self, pending: Pending, now_s: float) -> None:
        place = bisect_left(self._waiting, pending.urgency, key=_urgency)
        assert self._waiting[place] is pending
        del self._waiting[place]
        self.num_waiting_tokens -= pending.num_prompt_tokens
        if place == 0:
            self._moved_s = now_s

    def _prompt(self, pending: Pending) -> _Prompt:
        num_answer = max(1.0, self._answer_share * pending.num_new_tokens)
        return _Prompt(
            max(1.0, self._computed_share * pending.num_prompt_tokens),
            pending.num_seqs,
            num_answer,
            pending.num_prompt_tokens,
        )

    def _decoding(self, now_s: float) -> list[tuple[float, int, float]]:
        """Returns for each request that is being answered: steps left, sequences, and tokens held in the KV cache."""
        num_decodes = min(self._size.max_num_seqs, sum(pending.num_seqs for pending in self._started))
        if not num_decodes or not self.speed.most_tokens:
            return []
        gap_s = self.speed.step_s(_size_for(self._sizes, num_decodes))
        found = []
        for pending in self._started:
            assert pending.started_s is not None
            num_generated = 1 + (now_s - pending.started_s) / gap_s
            num_left = max(1.0, self._answer_share * pending.num_new_tokens - num_generated)
            num_held = pending.num_prompt_tokens + min(num_generated, pending.num_new_tokens) * pending.num_seqs
            found.append((num_left, pending.num_seqs, num_held))
        return found

    def _progress_s(self, now_s: float) -> float:
        """Returns how long the first waiting request has been computed, at most as long as its prompt takes without
        others; 0 if it has not begun.
        """
        if not self._waiting or sum(p.num_seqs for p in self._started) >= self._size.max_num_seqs:
            return 0.0
        first = self._prompt(self._waiting[0])
        alone_s = _Steps(self.speed, self._sizes, self._size.token_budget, self._decoding(now_s)).prompt_s(first)
        return min(now_s - self._moved_s, alone_s)


class _Steps:
    """Simulates the future steps. ``decoding`` has, for each request that is being answered, the steps left, its
    sequences and the tokens that it holds.
    """

    def __init__(
        self, speed: StepSpeed, sizes: tuple[int, ...], budget: int, decoding: Iterable[tuple[float, int, float]]
    ):
        self._speed, self._sizes, self._budget = speed, sizes, budget
        # For each request that is being answered: the step at which it ends, its sequences, and the tokens that it
        # would have held before the first step, had it grown by one for each sequence in every step.
        self._ends = list(decoding)
        heapify(self._ends)
        self._num_decodes = sum(num_seqs for _, num_seqs, _ in self._ends)
        self._num_held = sum(held for _, _, held in self._ends)
        self._num_steps = 0.0

    def prompt_s(self, prompt: _Prompt) -> float:
        """Returns how many seconds it takes to compute ``prompt`` beside the present decodes."""
        num_tokens, step_s = self._share(prompt.num_pending)
        return step_s * math.ceil(prompt.num_pending / num_tokens)

    def first_token_s(self, prompts: list[_Prompt], slots: int, room: int) -> float | None:
        """Returns when the last of the ordered ``prompts`` has its first token, or ``None`` if a step would be too
        large to predict.
        """
        left = [prompt.num_pending for prompt in prompts]
        num_pending, num_admitted, num_in_slots, num_done, time_s = sum(left), 0, 0, 0, 0.0
        while num_done < len(prompts):
            while num_admitted < len(prompts):
                new = prompts[num_admitted]
                is_empty = not self._num_decodes and not num_in_slots
                has_room = self._num_held + new.num_held <= room
                # One slot is enough for the first token, whatever the number of its sequences.
                if not is_empty and not (has_room and self._num_decodes + num_in_slots < slots):
                    break
                num_admitted += 1
                num_in_slots += new.num_seqs
                self._num_held += new.num_held
            num_steps = math.ceil(self._ends[0][0] - self._num_steps) if self._ends else math.inf
            if num_done == num_admitted:  # no request with a slot waits for its first token: the next end frees a slot
                step_s = self._speed.step_s(_size_for(self._sizes, self._num_decodes))
                num_tokens = 0.0
            else:
                num_tokens, step_s = self._share(num_pending)
                if num_tokens + self._num_decodes > self._speed.most_tokens:
                    return None
                num_steps = min(num_steps, max(1, math.floor(left[num_done] / num_tokens)))
            time_s += num_steps * step_s
            self._num_steps += num_steps
            self._num_held += num_steps * self._num_decodes
            computed = num_tokens * num_steps
            while computed > 0 and num_done < num_admitted:
                taken = min(computed, left[num_done])
                left[num_done] -= taken
                computed -= taken
                num_pending -= taken
                if left[num_done] > 1e-6:
                    break
                done = prompts[num_done]
                num_done += 1
                num_in_slots -= done.num_seqs
                self._begin(done)
            self._end()
        return time_s

    def _begin(self, prompt: _Prompt) -> None:
        num_held = prompt.num_held - self._num_steps * prompt.num_seqs
        heappush(self._ends, (self._num_steps + prompt.num_answer, prompt.num_seqs, num_held))
        self._num_decodes += prompt.num_seqs

    def _end(self) -> None:
        """Removes the requests whose last step is over."""
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, num_seqs, num_held = heappop(self._ends)
            self._num_decodes -= num_seqs
            self._num_held -= num_held + self._num_steps * num_seqs

    def _share(self, num_pending: float) -> tuple[float, float]:
        """Returns the prompt tokens of a step, of ``num_pending`` in total, and the seconds that it takes; see
        ``even_share``. Its rule for many passes takes as long.
        """
        num_places = max(1, self._budget - self._num_decodes)
        share = num_pending / math.ceil(num_pending / num_places)
        size = _size_for(self._sizes, math.ceil(self._num_decodes + share))
        return max(1.0, min(num_pending, size - self._num_decodes)), self._speed.step_s(size)


def _urgency(pending: Pending) -> tuple[int, int]:
    return pending.urgency


def _size_for(sizes: Sequence[int], num_tokens: int) -> int:
    """Returns the smallest of the ascending ``sizes`` that holds ``num_tokens``, or the largest if none does."""
    return sizes[min(bisect_left(sizes, num_tokens), len(sizes) - 1)]
