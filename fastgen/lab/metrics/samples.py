"""Latencies of a run as arrays: each value with the request that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fastgen.lab.records import RequestRecord


@dataclass(frozen=True)
class Samples:
    """Values of one metric, and which request each is of.

    A request has one value, or several (gaps between tokens). They belong together: what is resampled is requests.
    """

    # [num_values], in milliseconds for latencies.
    values: np.ndarray
    # [num_values]: numbers of requests, from 0 and without holes.
    owners: np.ndarray

    @property
    def num_requests(self) -> int:
        """Returns how many requests have a value."""
        return int(self.owners[-1]) + 1 if self.owners.size else 0


def samples(by_request: Iterable[Sequence[float]], scale: float = 1.0) -> Samples:
    """Returns the values of ``by_request``, times ``scale``. Requests without a value are left out."""
    kept = [values for values in by_request if len(values)]
    if not kept:
        return Samples(np.zeros(0), np.zeros(0, np.int64))
    lengths = [len(values) for values in kept]
    return Samples(np.concatenate(kept).astype(np.float64) * scale, np.repeat(np.arange(len(kept)), lengths))


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, Samples]:
    """Returns the latencies of ``records`` by vLLM's name, in milliseconds.

    ``ttft``, ``tpot`` and ``e2el`` have a value for each request, ``itl`` one for each gap between tokens. An answer
    without a token has no TTFT, one of a single token neither TPOT nor gaps.
    """
    return {
        "ttft": samples((_optional(record.ttft_s) for record in records), 1e3),
        "tpot": samples((_optional(record.tpot_s) for record in records), 1e3),
        "itl": samples((record.gaps_s for record in records), 1e3),
        "e2el": samples(((record.e2el_s,) for record in records), 1e3),
    }


def _optional(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)
