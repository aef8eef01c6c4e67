"""What an engine counts while it runs. Plain numbers; whoever exports them prefixes the names with ``fastgen_``.

Names follow Prometheus: a counter ends in ``_total``, a histogram of times in ``_seconds``, the rest are gauges.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from fastgen.runtime.kv_cache.prefix_cache import PrefixCacheStatistics
from fastgen.runtime.requests.outputs import FinishReason

if TYPE_CHECKING:
    from fastgen.runtime.scheduling.schedule import Schedule
    from fastgen.runtime.scheduling.scheduler import Scheduler

# Two bounds an octave apart hold all times within a factor of two, from a step on a GPU to a long wait.
# From 0.12 ms to 8 s.
STEP_BOUNDS_S = tuple(2.0**power for power in range(-13, 4))
# From 1 ms to 17 min.
REQUEST_BOUNDS_S = tuple(2.0**power for power in range(-10, 11))
# Some seconds of a busy engine.
NUM_RECENT_GAPS = 16_384


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many values fell below each bound. ``counts[i]`` are those above ``bounds[i - 1]`` and up to ``bounds[i]``;
    the last one counts those above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The least bound that ``share`` of the values do not exceed; infinity above all bounds, ``None`` of none."""
        wanted = share * self.count
        bounds = zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)
        return next(bound for bound, count in bounds if count >= wanted) if self.count else None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A snapshot. Totals count since the model was loaded; times are seconds of the engine's clock."""

    # Those of which any sequence has a slot.
    requests_running: int
    # All others that have not ended.
    requests_waiting: int
    sequences_running: int
    sequences_waiting: int
    # Submitted.
    requests_total: int
    sequences_finished_total: Mapping[FinishReason, int]
    # Of the requests submitted.
    prompt_tokens_total: int
    generation_tokens_total: int
    # Forwarded by steps: of prompts, of answers, drafts that proved wrong, and once more after preemptions.
    computed_tokens_total: int
    # Forwarded for nobody, to fill a step up to its captured size.
    padding_tokens_total: int
    # Of the sequences that were looked up in the prefix cache when they were admitted, or again after a preemption.
    prefix_cache_lookup_tokens_total: int
    # Those found there, and so not computed.
    prefix_cache_hit_tokens_total: int
    # Blocks whose contents were given up for others.
    prefix_cache_evictions_total: int
    # Of sequences; each beam of a search is one.
    preemptions_total: int
    # Blocks of the KV cache.
    kv_blocks: int
    kv_blocks_held: int
    # Of those that no sequence holds: blocks whose contents the prefix cache may use again.
    kv_blocks_cached: int
    # Steps with decodes that took longer than ``itl_target_ms``; none where that was not given.
    itl_target_missed_total: int
    # Whole steps, by the captured size that their tokens fit in.
    step_seconds: Mapping[int, Histogram]
    # From submission until the first of a request's tokens was scheduled.
    queue_seconds: Histogram
    # From submission to the first token of a sequence.
    ttft_seconds: Histogram
    # Between one token of a sequence and the next.
    gap_seconds: Histogram
    # From submission until the last sequence of a request had ended.
    request_seconds: Histogram


class EngineMetrics:
    """The counters behind :class:`Metrics`, which the engine moves on."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._requests = self._prompt_tokens = self._generation_tokens = 0
        self._computed_tokens = self._padding_tokens = self._preemptions = self._targets_missed = 0
        self._finished: Counter[FinishReason] = Counter()
        self._steps: dict[int, _Tally] = {}
        self._queue, self._ttft = _Tally(REQUEST_BOUNDS_S), _Tally(REQUEST_BOUNDS_S)
        self._gap, self._request = _Tally(STEP_BOUNDS_S), _Tally(REQUEST_BOUNDS_S)
        self.recent_gaps = RecentValues(NUM_RECENT_GAPS)

    def arrived(self, num_prompt_tokens: int) -> None:
        """A request was queued."""
        self._requests += 1
        self._prompt_tokens += num_prompt_tokens

    def preempted(self, num_sequences: int) -> None:
        """So many lost their slots for a step, whether or not that runs to its end."""
        self._preemptions += num_sequences

    def left_queue(self, seconds: float) -> None:
        """A request's first token was scheduled, so long after it came."""
        self._queue.add(seconds)

    def gave_token(self, arrival_s: float, token_times_s: list[float]) -> None:
        """A sequence was given a token; these are the times of all it has."""
        self._generation_tokens += 1
        if len(token_times_s) == 1:
            self._ttft.add(token_times_s[0] - arrival_s)
        else:
            self._add_gap(token_times_s[-1] - token_times_s[-2])

    def gave_answer(self, arrival_s: float, token_times_s: list[float]) -> None:
        """A beam search gave a sequence all of its tokens at once, found at these times."""
        self._generation_tokens += len(token_times_s)
        for first_s in token_times_s[:1]:
            self._ttft.add(first_s - arrival_s)
        for earlier_s, later_s in pairwise(token_times_s):
            self._add_gap(later_s - earlier_s)

    def stepped(self, schedule: Schedule, num_padding: int, step_s: float) -> None:
        """A step was run to its end; since the one before, or since it began, this took ``step_s``."""
        self._computed_tokens += schedule.num_tokens
        self._padding_tokens += num_padding
        target_s = self._scheduler.policy.itl_target_s
        if target_s is not None and schedule.decodes:
            self._targets_missed += step_s > target_s
        if schedule.size not in self._steps:
            self._steps[schedule.size] = _Tally(STEP_BOUNDS_S)
        self._steps[schedule.size].add(step_s)

    def finished(self, reason: FinishReason, request_s: float | None) -> None:
        """A sequence ended; with it its whole request, after ``request_s``, or not."""
        self._finished[reason] += 1
        if request_s is not None:
            self._request.add(request_s)

    def snapshot(self) -> Metrics:
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        cache = scheduler.kv.prefix_cache
        prefix_cache = PrefixCacheStatistics() if cache is None else cache.statistics
        running = {sequence.request.request_id for sequence in scheduler.running}
        waiting = scheduler.waiting.request_ids - running
        return Metrics(
            requests_running=len(running),
            requests_waiting=len(waiting),
            sequences_running=len(scheduler.running),
            sequences_waiting=scheduler.num_waiting,
            requests_total=self._requests,
            sequences_finished_total=dict(self._finished),
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            computed_tokens_total=self._computed_tokens,
            padding_tokens_total=self._padding_tokens,
            prefix_cache_lookup_tokens_total=prefix_cache.lookup_tokens,
            prefix_cache_hit_tokens_total=prefix_cache.hit_tokens,
            prefix_cache_evictions_total=prefix_cache.evictions,
            preemptions_total=self._preemptions,
            kv_blocks=pool.capacity,
            kv_blocks_held=pool.capacity - scheduler.kv.num_free,
            kv_blocks_cached=pool.num_cached,
            itl_target_missed_total=self._targets_missed,
            step_seconds={size: tally.histogram() for size, tally in sorted(self._steps.items())},
            queue_seconds=self._queue.histogram(),
            ttft_seconds=self._ttft.histogram(),
            gap_seconds=self._gap.histogram(),
            request_seconds=self._request.histogram(),
        )

    def _add_gap(self, gap_s: float) -> None:
        self._gap.add(gap_s)
        self.recent_gaps.add(gap_s)


class RecentValues:
    """The last ``max_values`` values, for quantiles that are exact where a histogram's are of its bounds."""

    __slots__ = ("_num_added", "_values")

    def __init__(self, max_values: int):
        self._values = array("d", [0.0]) * max_values
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, len(self._values))

    def add(self, value: float) -> None:
        self._values[self._num_added % len(self._values)] = value
        self._num_added += 1

    def quantiles(self, *shares: float) -> list[float]:
        """For each of ``shares`` the least value that this share of the values do not exceed; of none, nothing."""
        if not self._num_added:
            return []
        values = np.frombuffer(self._values)[: len(self)]
        return np.quantile(values, shares, method="inverted_cdf").tolist()  # type: ignore[no-any-return]


class _Tally:
    """A histogram that grows."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self) -> Histogram:
        return Histogram(bounds=self.bounds, counts=tuple(self.counts), sum=self.sum)
