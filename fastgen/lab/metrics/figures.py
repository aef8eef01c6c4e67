"""Figures of a summary, and their names. The names are those of ``vllm bench serve`` wherever it has the figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen.lab.metrics.intervals import Interval

# By vLLM's short name, the words for tables.
LATENCIES: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
PERCENTS: Final = (50, 90, 95, 99)
STATISTICS: Final = ("mean", "median", "std", *(f"p{percent}" for percent in PERCENTS))
# Rates at which the paper states its effective throughput, in tokens per second.
PAPER_RATES: Final = (2, 4, 6)
# Percentiles of gaps that the paper states.
PAPER_PERCENTS: Final = (50, 90, 95)

# All figures, with their units, in the order of tables and files.
UNITS: Final[dict[str, str]] = {
    "duration": "s",
    "completed": "requests",
    "failed": "requests",
    "completed_share": "",
    "total_input_tokens": "tokens",
    "total_output_tokens": "tokens",
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "request_goodput": "requests/s",
    "good_share": "",
    "max_concurrent_requests": "requests",
    **{f"{statistic}_{latency}_ms": "ms" for latency in LATENCIES for statistic in STATISTICS},
    **{f"effective_throughput_{rate}": "requests/s" for rate in PAPER_RATES},
    **{f"effective_share_{rate}": "" for rate in PAPER_RATES},
    "paper_throughput": "requests/s",
    "paper_latency_s": "s",
    **{f"paper_p{percent}_gap_ms": "ms" for percent in PAPER_PERCENTS},
}


@dataclass(frozen=True)
class Figure:
    """One figure, and the interval of 95 % in which it would lie by chance; ``None`` for what is not known.

    Counts have no interval.
    """

    value: float | None
    interval: Interval | None = None


UNKNOWN: Final = Figure(None)
