"""The distance between a run and an SLO that it misses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.records import RequestRecord, Run

# The values in milliseconds that limits are about; those of an answer without such a value keep the limit.
_VALUES_MS: Final[dict[str, Callable[[RequestRecord], float]]] = {
    "ttft_ms": lambda record: math.inf if record.ttft_s is None else 1e3 * record.ttft_s,
    "tpot_ms": lambda record: 1e3 * (record.tpot_s or 0.0),
    "itl_ms": lambda record: 1e3 * max(record.gaps_s, default=0.0),
    "e2el_ms": lambda record: 1e3 * record.e2el_s,
}


@dataclass(frozen=True)
class Shortfall:
    """A limit that too few requests keep."""

    # A field of :class:`~fastgen.lab.metrics.goodput.SLO`.
    limit: str
    allowed: float
    # The share of requests that keep this limit.
    kept_share: float
    # What the limit would have to be for the required share of requests to keep it; ``None`` where too many requests
    # failed for any limit, and for the paper's rule.
    needed: float | None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        name = self.limit.removesuffix("_ms")
        kept = f"{100 * self.kept_share:.0f} % of requests keep {name}"
        if self.needed is None:
            return f"{kept} {self.allowed:g}"
        return (
            f"{kept} {self.allowed:g} ms; it would have to be {self.needed:.3g} ms, "
            f"{self.needed - self.allowed:.3g} ms more"
        )


def shortfalls(run: Run, slo: SLO, share: float) -> list[Shortfall]:
    """Returns the limits of ``slo`` that less than ``share`` of all requests of ``run`` keep."""
    found = []
    for limit, allowed in slo.as_json().items():
        alone = SLO(**{limit: allowed})
        kept_share = sum(map(alone.is_good, run.records)) / len(run.records)
        if kept_share < share:
            found.append(Shortfall(limit, allowed, kept_share, _needed(run, limit, share)))
    return found


def _needed(run: Run, limit: str, share: float) -> float | None:
    if limit not in _VALUES_MS:
        return None
    value_ms = _VALUES_MS[limit]
    values = sorted(value_ms(record) if record.error is None else math.inf for record in run.records)
    num_good = next(count for count in range(1, len(values) + 1) if count / len(values) >= share)
    needed = values[num_good - 1]
    return needed if needed < math.inf else None
