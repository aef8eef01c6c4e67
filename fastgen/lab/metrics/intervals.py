"""Intervals of 95 %: by the bootstrap for latencies and rates, by Wilson's formula for shares.

The bootstrap (Efron, 1979) draws the requests of a run with replacement, as many as there are, a thousand times, and
takes the middle 95 % of what the statistic becomes. Whole requests are drawn, so the gaps of one answer stay together.
Rates are resampled by blocks of consecutive completions (Politis and Romano, 1992, the circular form), because answers
of one batch end together. The intervals speak of chance within one run. What differs from run to run, such as a busy
machine, they do not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fastgen.lab.metrics.samples import Samples

Interval = tuple[float, float]

# Requests below which there is no interval: too few to draw from.
MIN_REQUESTS = 10
# Blocks of completions below which a rate has no interval.
MIN_BLOCKS = 4
NUM_RESAMPLES = 1000
# Drawn requests that are held at a time, so that memory stays bounded.
_BATCH = 4_000_000
# The normal quantile of a two-sided interval of 95 %.
_Z = 1.959963984540054


def wilson(count: int, total: int) -> Interval | None:
    """Returns Wilson's interval (1927) of the share ``count / total``; ``None`` if ``total`` is 0."""
    if total == 0:
        return None
    share, z2 = count / total, _Z * _Z
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))


def latency_intervals(samples: Samples, percents: Sequence[float], seed: int = 0) -> list[Interval] | None:
    """Returns the intervals of the mean, of the standard deviation and of each percentile, in this order; ``None`` for
    fewer than :data:`MIN_REQUESTS` requests.
    """
    if samples.num_requests < MIN_REQUESTS:
        return None
    order = np.argsort(samples.values, kind="stable")
    values, owners = samples.values[order], samples.owners[order]
    center = float(values.mean())
    count, total, squares = (
        np.bincount(owners, weights, samples.num_requests)
        for weights in (None, values - center, (values - center) ** 2)
    )
    found = []
    for drawn in _drawn_requests(samples.num_requests, seed):
        num_values = drawn @ count
        mean = drawn @ total / num_values
        spread = np.sqrt(np.maximum(drawn @ squares / num_values - mean**2, 0.0))
        found.append(np.stack([mean + center, spread, *_percentiles(values, owners, drawn, num_values, percents)]))
    return _middle(np.concatenate(found, axis=1))


def rate_intervals(amounts: np.ndarray, waits_s: np.ndarray, block: int, seed: int = 0) -> list[Interval] | None:
    """Returns the interval of each rate ``amounts[k].sum() / waits_s.sum()``; ``None`` for fewer than
    :data:`MIN_BLOCKS` blocks.

    :param amounts: [num_rates, num_completions]: what each completion brought, such as its tokens.
    :param waits_s: [num_completions]: seconds since the completion before, in order of time.
    :param block: completions that are drawn together.
    """
    num = waits_s.size
    if num < MIN_BLOCKS * block or waits_s.sum() <= 0:
        return None
    both = np.concatenate([amounts, waits_s[None]])
    sums = np.cumsum(np.concatenate([np.zeros((len(both), 1)), both, both[:, :block]], axis=1), axis=1)
    starts = np.random.default_rng(seed).integers(0, num, (NUM_RESAMPLES, math.ceil(num / block)))
    drawn = (sums[:, starts + block] - sums[:, starts]).sum(axis=2)
    return _middle(drawn[:-1] / np.maximum(drawn[-1], np.finfo(float).tiny))


def _drawn_requests(num_requests: int, seed: int) -> Iterator[np.ndarray]:
    """Yields arrays [resamples, num_requests] of how often each request was drawn; together all resamples."""
    draw = np.random.default_rng(seed)
    batch = max(1, _BATCH // num_requests)
    for begin in range(0, NUM_RESAMPLES, batch):
        rows = min(batch, NUM_RESAMPLES - begin)
        picks = draw.integers(0, num_requests, (rows, num_requests)) + np.arange(rows)[:, None] * num_requests
        yield np.bincount(picks.ravel(), minlength=rows * num_requests).reshape(rows, num_requests).astype(np.float64)


def _percentiles(
    values: np.ndarray, owners: np.ndarray, drawn: np.ndarray, num_values: np.ndarray, percents: Sequence[float]
) -> list[np.ndarray]:
    """Returns each percentile of every resample, [resamples]. ``values`` are sorted; the value ``i`` is in a resample
    as often as its request ``owners[i]`` was drawn.
    """
    size = math.isqrt(values.size - 1) + 1
    blocks = -(-values.size // size)
    # The values in blocks of about √n: find the block that has a rank first, and the value within it then.
    padded = np.full(blocks * size, drawn.shape[1])
    padded[: values.size] = owners
    with_none = np.concatenate([drawn, np.zeros((len(drawn), 1))], axis=1)
    in_block = np.zeros((drawn.shape[1] + 1, blocks))
    np.add.at(in_block, (padded, np.arange(padded.size) // size), 1.0)
    ends = np.cumsum(with_none @ in_block, axis=1)

    def ranked(rank: np.ndarray) -> np.ndarray:
        block = np.minimum((ends <= rank[:, None]).sum(axis=1), blocks - 1)
        before = np.where(block > 0, np.take_along_axis(ends, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
        places = block[:, None] * size + np.arange(size)
        inside = before[:, None] + np.cumsum(np.take_along_axis(with_none, padded[places], axis=1), axis=1)
        place = block * size + (inside <= rank[:, None]).sum(axis=1)
        found: np.ndarray = values[np.minimum(place, values.size - 1)]
        return found

    results = []
    for percent in percents:
        rank = percent / 100 * (num_values - 1)
        low = np.floor(rank)
        below, above = ranked(low), ranked(np.minimum(low + 1, num_values - 1))
        results.append(below + (above - below) * (rank - low))
    return results


def _middle(statistics: np.ndarray) -> list[Interval]:
    """Returns the middle 95 % of each row."""
    low, high = np.percentile(statistics, (2.5, 97.5), axis=1)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
