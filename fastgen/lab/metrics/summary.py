"""The summary of a run: every figure with its interval. ``docs/lab-metrics.md`` defines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastgen.lab.metrics.figures import UNITS, UNKNOWN, Figure
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.intervals import wilson
from fastgen.lab.metrics.paper import paper_figures
from fastgen.lab.metrics.rates import max_concurrent_requests, rates
from fastgen.lab.metrics.samples import latencies_ms
from fastgen.lab.metrics.statistics import described
from fastgen.lab.records import Run


@dataclass(frozen=True)
class Summary:
    """The figures of one run, of fastgen's own or of another tool's."""

    # What measured: "fastgen", or another tool with its version where it says so.
    source: str
    # By the names of :data:`~fastgen.lab.metrics.figures.UNITS`; those that are missing are not known.
    figures: Mapping[str, Figure]
    # What ran where, as JSON: for fastgen's runs "target", "workload", "load", "machine", "began", "lag_s".
    about: Mapping[str, Any] = field(default_factory=dict)
    # The limits of ``request_goodput``; empty without.
    slo: Mapping[str, float] = field(default_factory=dict)
    # Why the figures must not be used; ``None`` if they may.
    invalid: str | None = None
    # Whether the run was stopped before all requests were answered.
    interrupted: bool = False

    def __getitem__(self, name: str) -> Figure:
        """Returns the figure ``name``. Raises ``KeyError`` for a name that no summary has."""
        if name not in UNITS:
            raise KeyError(name)
        return self.figures.get(name, UNKNOWN)

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON: every figure by its name, and its interval as ``NAME_interval``, both ``None`` where they
        are not known. Counts have no interval.
        """
        found: dict[str, Any] = {"source": self.source, "invalid": self.invalid, "interrupted": self.interrupted}
        found |= self.about
        found["slo"] = dict(self.slo)
        for name in UNITS:
            figure = self[name]
            found[name] = figure.value
            if name not in COUNTS:
                found[f"{name}_interval"] = None if figure.interval is None else list(figure.interval)
        return found


# Figures that are counted and not estimated.
COUNTS = frozenset(
    {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "max_concurrent_requests"}
)


def summarize(run: Run, *, slo: SLO | None = None) -> Summary:
    """Returns the summary of ``run``. Latencies, tokens and rates are those of the answered requests; failed ones count
    as such, and as not good. Without ``slo`` there is no ``request_goodput``.
    """
    header, records, complete = run.header, run.records, run.complete
    figures = {
        "duration": Figure(header.duration_s),
        "completed": Figure(len(complete)),
        "failed": Figure(len(records) - len(complete)),
        "completed_share": _share(len(complete), len(records)),
        "total_input_tokens": Figure(sum(record.num_prompt_tokens for record in complete)),
        "total_output_tokens": Figure(sum(record.num_generated for record in complete)),
        "max_concurrent_requests": Figure(max_concurrent_requests(records)),
    }
    good = {record.request for record in complete if slo is not None and slo.is_good(record)}
    figures |= rates(
        {
            "request_throughput": lambda record: 1,
            "output_throughput": lambda record: record.num_generated,
            "total_token_throughput": lambda record: record.num_prompt_tokens + record.num_generated,
            "request_goodput": lambda record: record.request in good,
        },
        complete,
        duration_s=header.duration_s,
        begin_s=0.0,
    )
    figures["good_share"] = _share(len(good), len(records))
    if slo is None:
        figures |= {"request_goodput": UNKNOWN, "good_share": UNKNOWN}
    for latency, samples in latencies_ms(complete).items():
        figures |= {f"{statistic}_{latency}_ms": figure for statistic, figure in described(samples).items()}
    return Summary(
        source="fastgen",
        figures=figures | paper_figures(complete),
        about={
            "target": header.target,
            "workload": header.workload,
            "load": header.load,
            "machine": header.machine,
            "began": header.began,
            "lag_s": header.lag_s,
        },
        slo={} if slo is None else slo.as_json(),
        invalid=header.invalid,
        interrupted=header.interrupted,
    )


def _share(count: int, total: int) -> Figure:
    return Figure(count / total, wilson(count, total)) if total else UNKNOWN
