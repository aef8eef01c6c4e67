"""Counters of an engine. Plain numbers; exporters prefix the names with ``fastgen_``.

Names follow Prometheus: a counter ends in ``_total``, a histogram of times in ``_seconds``, the rest are gauges.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from fastgen.runtime.kv_cache.prefix_cache import PrefixCacheStatistics
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.observer import Observer
from fastgen.runtime.step.plan_costs import PlanCosts
from fastgen.runtime.step.step import Step

# Two bounds an octave apart hold all times within a factor of two, from a step on a GPU to a long wait.
# From 0.12 ms to 8 s.
STEP_BOUNDS_S = tuple(2.0**power for power in range(-13, 4))
# From 1 ms to 17 min.
REQUEST_BOUNDS_S = tuple(2.0**power for power in range(-10, 11))
# Gaps of some seconds of a busy engine.
NUM_RECENT_GAPS = 16_384


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The number of values between bounds. ``counts[i]`` counts values above ``bounds[i - 1]`` and up to ``bounds[i]``;
    the last one counts values above all bounds.
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
        """Returns the least bound that ``share`` of the values do not exceed. It is infinity above all bounds, and
        ``None`` if there are no values.
        """
        wanted = share * self.count
        bounds = zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)
        return next(bound for bound, count in bounds if count >= wanted) if self.count else None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A snapshot. Totals count since the model was loaded; times are seconds of the engine's clock."""

    # Requests with at least one sequence that has a slot.
    requests_running: int
    # All other requests that have not ended.
    requests_waiting: int
    sequences_running: int
    sequences_waiting: int
    # Requests submitted.
    requests_total: int
    sequences_finished_total: Mapping[FinishReason, int]
    # Prompt tokens of the requests submitted.
    prompt_tokens_total: int
    generation_tokens_total: int
    # Tokens that steps computed: prompts, answers, rejected drafts, and all of these again after preemptions.
    computed_tokens_total: int
    # Padding that filled steps up to their captured sizes.
    padding_tokens_total: int
    # Tokens of sequences that were looked up in the prefix cache, at admission and again after a preemption.
    prefix_cache_lookup_tokens_total: int
    # Tokens found there, and so not computed.
    prefix_cache_hit_tokens_total: int
    # Cached blocks that were evicted to be reused.
    prefix_cache_evictions_total: int
    # Preemptions of sequences; each beam of a search counts.
    preemptions_total: int
    # Blocks of the KV cache.
    kv_blocks: int
    # Blocks that sequences hold, or that are reserved for them.
    kv_blocks_held: int
    # Blocks that no sequence holds, and whose contents the prefix cache can still use.
    kv_blocks_cached: int
    # Steps with decodes that took longer than ``itl_target_ms``; 0 if there is no target.
    itl_target_missed_total: int
    # Processes that share the model, and what the first one spent on plans for the others.
    ranks: int
    rank_plans_total: int
    rank_plan_bytes_total: int
    rank_plan_seconds_total: float
    # Times of steps, by the captured size that their tokens fit in.
    step_seconds: Mapping[int, Histogram]
    # From submission until the first token of a request was scheduled.
    queue_seconds: Histogram
    # From submission to the first token of a sequence.
    ttft_seconds: Histogram
    # Between one token of a sequence and the next.
    gap_seconds: Histogram
    # From submission until the last sequence of a request had ended.
    request_seconds: Histogram


class EngineMetrics(Observer):
    """The counters behind :class:`Metrics`."""

    def __init__(self, scheduler: Scheduler, *, ranks: int = 1, plan_costs: Callable[[], PlanCosts] = PlanCosts):
        self._scheduler, self._ranks, self._plan_costs = scheduler, ranks, plan_costs
        self._requests = self._prompt_tokens = self._generation_tokens = 0
        self._computed_tokens = self._padding_tokens = self._preemptions = self._targets_missed = 0
        self._finished: Counter[FinishReason] = Counter()
        self._steps: dict[int, _Tally] = {}
        self._queue, self._ttft = _Tally(REQUEST_BOUNDS_S), _Tally(REQUEST_BOUNDS_S)
        self._gap, self._request = _Tally(STEP_BOUNDS_S), _Tally(REQUEST_BOUNDS_S)
        self.recent_gaps = RecentValues(NUM_RECENT_GAPS)

    def arrived(self, request: Request) -> None:
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids)

    def scheduled(self, step: Step, scheduler: Scheduler) -> None:
        """Counts even a step that fails: its preemptions have happened, and its requests left the queue."""
        self._preemptions += len(step.schedule.preempted)
        for request in step.admitted:
            self._queue.add(step.scheduled_s - request.arrival_s)

    def ended(self, step: Step) -> None:
        assert step.ran_s is not None
        for sequence, previous_s in step.given:
            if previous_s is None:
                self._ttft.add(step.ran_s - sequence.request.arrival_s)
            else:
                self._add_gap(step.ran_s - previous_s)
        self._generation_tokens += len(step.given)
        schedule = step.schedule
        self._computed_tokens += schedule.num_tokens
        self._padding_tokens += step.num_padding
        target_s = self._scheduler.policy.itl_target_s
        if target_s is not None and schedule.decodes:
            self._targets_missed += step.took_s > target_s
        if schedule.size not in self._steps:
            self._steps[schedule.size] = _Tally(STEP_BOUNDS_S)
        self._steps[schedule.size].add(step.took_s)

    def finished(
        self, sequence: Sequence, reason: FinishReason, now_s: float, token_times_s: SequenceOf[float], is_last: bool
    ) -> None:
        request = sequence.request
        if request.has_beams:  # a beam search gives a completion all its tokens at once, with the times it found them
            self._generation_tokens += len(token_times_s)
            for first_s in token_times_s[:1]:
                self._ttft.add(first_s - request.arrival_s)
            for earlier_s, later_s in pairwise(token_times_s):
                self._add_gap(later_s - earlier_s)
        self._finished[reason] += 1
        if is_last:
            self._request.add(now_s - request.arrival_s)

    def snapshot(self) -> Metrics:
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        cache = scheduler.kv.prefix_cache
        prefix_cache = PrefixCacheStatistics() if cache is None else cache.statistics
        running = {sequence.request.request_id for sequence in scheduler.running}
        waiting, plans = scheduler.waiting.request_ids - running, self._plan_costs()
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
            kv_blocks_held=pool.capacity - scheduler.reservations.num_free,
            kv_blocks_cached=pool.num_cached,
            itl_target_missed_total=self._targets_missed,
            ranks=self._ranks,
            rank_plans_total=plans.num_plans,
            rank_plan_bytes_total=plans.num_bytes,
            rank_plan_seconds_total=plans.took_s,
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
    """The last ``max_values`` values, for exact quantiles. Those of a histogram are rounded up to its bounds."""

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
        """Returns for each of ``shares`` the least value that this share of the values do not exceed. Returns an empty
        list if there are no values.
        """
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
