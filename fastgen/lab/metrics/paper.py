"""The FastGen paper's own figures (Holmes et al., 2024), by the rules of its published scripts."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.lab.metrics.figures import PAPER_PERCENTS, PAPER_RATES, UNKNOWN, Figure
from fastgen.lab.metrics.goodput import keeps_paper_rule
from fastgen.lab.metrics.intervals import wilson
from fastgen.lab.metrics.rates import rates
from fastgen.lab.metrics.samples import Samples, samples
from fastgen.lab.metrics.statistics import described
from fastgen.lab.records import RequestRecord


def paper_gaps_ms(records: Sequence[RequestRecord]) -> Samples:
    """Returns the gaps of which the paper states percentiles: without the first and the last request, in the order in
    which they were sent, and without the first token and the last of each other.
    """
    ordered = sorted(records, key=lambda record: record.sent_s)[1:-1]
    return samples((record.gaps_s[:-1] for record in ordered), 1e3)


def paper_figures(records: Sequence[RequestRecord]) -> dict[str, Figure]:
    """Returns the paper's figures of the answered requests ``records``.

    Its throughput is the number of clients divided by the mean latency, so it is known in closed loops only. Its
    effective throughput is good requests by wall clock, from the first request sent to the last answer's end.
    """
    return {**_effective(records), **_clients_by_latency(records), **_gaps(records)}


def _effective(records: Sequence[RequestRecord]) -> dict[str, Figure]:
    if not records:
        names = [f"effective_{what}_{rate}" for what in ("throughput", "share") for rate in PAPER_RATES]
        return dict.fromkeys(names, UNKNOWN)
    good = {rate: {one.request for one in records if keeps_paper_rule(one, rate)} for rate in PAPER_RATES}
    begin_s = min(record.sent_s for record in records)
    throughputs = rates(
        {
            f"effective_throughput_{rate}": lambda record, good=good[rate]: record.request in good  # type: ignore[misc]
            for rate in PAPER_RATES
        },
        records,
        duration_s=max(record.ended_s for record in records) - begin_s,
        begin_s=begin_s,
    )
    shares = {
        f"effective_share_{rate}": Figure(len(good[rate]) / len(records), wilson(len(good[rate]), len(records)))
        for rate in PAPER_RATES
    }
    return throughputs | shares


def _clients_by_latency(records: Sequence[RequestRecord]) -> dict[str, Figure]:
    latency = described(samples((record.e2el_s,) for record in records), ())["mean"]
    clients = {record.client for record in records}
    throughput = UNKNOWN
    if latency.value and None not in clients:
        num = len(clients)
        low, high = latency.interval or (0.0, 0.0)
        throughput = Figure(num / latency.value, (num / high, num / low) if low > 0 else None)
    return {"paper_throughput": throughput, "paper_latency_s": latency}


def _gaps(records: Sequence[RequestRecord]) -> dict[str, Figure]:
    statistics = described(paper_gaps_ms(records), PAPER_PERCENTS)
    return {f"paper_p{percent}_gap_ms": statistics[f"p{percent}"] for percent in PAPER_PERCENTS}
