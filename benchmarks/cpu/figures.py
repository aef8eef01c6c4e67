"""The figures that are recorded of one run of a workload."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import Any

from benchmarks.cpu.engine_process import Run
from benchmarks.cpu.workloads import Request

_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


def figures(requests: list[Request], run: Run) -> dict[str, Any]:
    """Returns seconds, tokens, and over all requests quantiles of the time to the first token and of later gaps."""
    first = [each[0] for each in run.times if each]
    gaps = [after - before for each in run.times for before, after in pairwise(each)]
    return {
        "seconds": run.seconds,
        "prompt_tokens": sum(len(each.prompt) for each in requests),
        "new_tokens": sum(len(each) for each in run.tokens),
        "first_token_s": quantiles(first),
        "gap_s": quantiles(gaps),
        "decode_rate": decode_rate(run.times),
        "answer": hashlib.sha256(json.dumps(run.tokens).encode()).hexdigest()[:16],
        "peak_bytes": run.peak_bytes,
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Returns interpolated quantiles; none where there are no values."""
    ordered = sorted(values)
    found = {}
    for name, share in _SHARES.items() if ordered else ():
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found[name] = round(ordered[low] + (place - low) * (ordered[high] - ordered[low]), 6)
    return found


def decode_rate(times: list[list[float]]) -> float | None:
    """Returns tokens a second after every request has its first; ``None`` where there are no later ones."""
    if not all(times):
        return None
    begin, end = max(each[0] for each in times), max(each[-1] for each in times)
    later = sum(each > begin for every in times for each in every)
    return later / (end - begin) if end > begin else None
