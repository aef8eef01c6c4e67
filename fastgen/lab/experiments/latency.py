"""The latency of one batch: requests of one shape that are sent at once, again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastgen.lab.experiments.serve import AtOnce, serve
from fastgen.lab.load.generator import Runs
from fastgen.lab.metrics.figures import Figure
from fastgen.lab.metrics.samples import samples
from fastgen.lab.metrics.statistics import described
from fastgen.lab.records import Run
from fastgen.lab.workloads.synthetic import FixedLengths

# Those of ``vllm bench latency``.
PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Latency:
    """The runs of a batch, each of which sent it once."""

    runs: tuple[Run, ...] = field(repr=False)

    @property
    def latencies_s(self) -> list[float]:
        """Returns for each batch that was answered the time from sending it to the end of its last answer."""
        return [
            max(record.ended_s for record in run.records) - min(record.sent_s for record in run.records)
            for run in self.runs
            if run.records and len(run.complete) == len(run.records)
        ]

    @property
    def figures(self) -> dict[str, Figure]:
        """Returns ``mean``, ``std`` and percentiles in seconds, with intervals."""
        return described(samples([value] for value in self.latencies_s), PERCENTS)

    def as_json(self) -> dict[str, Any]:
        """Returns it with the names of ``vllm bench latency``, in seconds. Percentiles of too few batches are null."""
        figures = self.figures
        mean = figures["mean"]
        return {
            "avg_latency": mean.value,
            "avg_latency_interval": None if mean.interval is None else list(mean.interval),
            "latencies": self.latencies_s,
            "percentiles": {str(percent): figures[f"p{percent}"].value for percent in PERCENTS},
            "batches_with_errors": len(self.runs) - len(self.latencies_s),
        }


def latency(
    runs: Runs,
    *,
    batch_size: int,
    num_prompt_tokens: int,
    num_new_tokens: int,
    vocab_size: int,
    num_warm_ups: int = 3,
    num_repeats: int = 10,
    seed: int = 0,
) -> Latency:
    """Measures a batch ``num_repeats`` times, after ``num_warm_ups`` times that do not count.

    Each time has prompts of its own, so that no prefix cache knows them. Ctrl-C ends it with what was measured.
    """
    workload = FixedLengths(num_prompt_tokens=num_prompt_tokens, num_new_tokens=num_new_tokens, num_requests=batch_size)
    found: list[Run] = []
    for repeat in range(num_warm_ups + num_repeats):
        run = serve(runs, workload, AtOnce(), vocab_size=vocab_size, seed=seed + repeat, num_warm_ups=0)
        if repeat >= num_warm_ups:
            found.append(run)
        if run.header.interrupted:
            break
    return Latency(tuple(found))
