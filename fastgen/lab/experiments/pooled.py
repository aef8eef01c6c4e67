"""Several runs of one kind as one, for figures over all of their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastgen.lab.records import RequestRecord, Run


def pooled(runs: Sequence[Run]) -> Run:
    """Returns the records of all ``runs``, as if each had begun when the one before had ended.

    The header is that of the first run. Its duration is that of all, its lag the largest; it is invalid or interrupted
    if one of them is.
    """
    records: list[RequestRecord] = []
    begin_s = 0.0
    for number, run in enumerate(runs):
        first = len(records)
        records += (_moved(record, number, first, begin_s) for record in run.records)
        begin_s += run.header.duration_s
    lags_s = [run.header.lag_s for run in runs]
    names = dict.fromkeys(name for lag_s in lags_s for name in lag_s)
    header = replace(
        runs[0].header,
        load={**runs[0].header.load, "runs": len(runs)},
        duration_s=begin_s,
        lag_s={name: max(lag_s.get(name, 0.0) for lag_s in lags_s) for name in names},
        invalid=next((run.header.invalid for run in runs if run.header.invalid is not None), None),
        interrupted=any(run.header.interrupted for run in runs),
    )
    return Run(header, tuple(records))


def _moved(record: RequestRecord, run: int, first: int, begin_s: float) -> RequestRecord:
    return replace(
        record,
        request=first + record.request,
        session=None if record.session is None else f"{run}.{record.session}",
        due_s=record.due_s + begin_s,
        sent_s=record.sent_s + begin_s,
        token_times_s=tuple(time_s + begin_s for time_s in record.token_times_s),
        ended_s=record.ended_s + begin_s,
    )
