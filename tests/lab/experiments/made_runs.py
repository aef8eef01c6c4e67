"""Runs that are made by arithmetic, for experiments that only ask for runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastgen.lab.records import RequestRecord, Run, RunHeader


def record(number: int, *, ttft_s: float, error: str | None = None, **fields: Any) -> RequestRecord:
    begin_s = number / 10
    given: dict[str, Any] = {
        "request": number,
        "num_prompt_tokens": 8,
        "num_new_tokens": 3,
        "due_s": begin_s,
        "sent_s": begin_s,
        "token_times_s": tuple(begin_s + ttft_s + token / 100 for token in range(3)),
        "ended_s": begin_s + ttft_s + 0.02,
        "error": error,
    }
    return RequestRecord(**given | fields)


def run(records: Sequence[RequestRecord], **fields: Any) -> Run:
    given: dict[str, Any] = {
        "target": {"kind": "made"},
        "workload": {"name": "made"},
        "load": {"loop": "open"},
        "machine": {},
        "began": "2026-01-01T00:00:00Z",
        "duration_s": max((each.ended_s for each in records), default=0.0),
    }
    return Run(RunHeader(**given | fields), tuple(records))
