"""The records of a run: one for each request, and a header that says what ran where. As a file, JSON Lines.

All times of a run are seconds since it began, by one monotonic clock: the load generator's, or the simulated device's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import TypeAdapter

from fastgen.errors import RecordingError
from fastgen.json_lines import checked_line

FORMAT: Final = "fastgen run"
VERSION: Final = 1
# Strict for files: no number as a string, and no unknown field.
_STRICT = {"extra": "forbid", "strict": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """The record of one request.

    ``token_times_s`` has the time at which each token of the answer arrived. Tokens that arrived together have the same
    time. A request without an ``error`` is complete.
    """

    __pydantic_config__: ClassVar = _STRICT
    # Its place in the workload, from 0.
    request: int
    # The client of a closed loop that sent it, from 0; ``None`` in open loops.
    client: int | None = None
    session: str | None = None
    num_prompt_tokens: int
    # Tokens that were asked for.
    num_new_tokens: int
    # When it should have been sent. In a closed loop that is when its client had become free.
    due_s: float
    # When it was sent.
    sent_s: float
    token_times_s: tuple[float, ...]
    # When its answer ended or failed.
    ended_s: float
    # Tokens of the prompt that the prefix cache held; ``None`` where the target does not say.
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    # Why it failed, or was refused; ``None`` if it was answered.
    error: str | None = None

    @property
    def num_generated(self) -> int:
        """Returns how many tokens the answer has."""
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Returns the time from sending it to its first token; ``None`` if there was none."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def e2el_s(self) -> float:
        """Returns the end-to-end latency: from sending it to the end of its answer."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Returns the time per output token after the first; ``None`` for fewer than two tokens."""
        if len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Returns the gaps between tokens (inter-token latencies), the first token's left out."""
        times = self.token_times_s
        return tuple(after - before for before, after in pairwise(times))


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """Says what ran, where, and whether its figures may be used."""

    __pydantic_config__: ClassVar = _STRICT
    format: Literal["fastgen run"] = FORMAT
    version: Literal[1] = VERSION
    # What was loaded: an engine, an endpoint or a simulated device, with its settings.
    target: dict[str, Any]
    # The workload's facts, with its name.
    workload: dict[str, Any]
    # How requests were sent: open or closed loop, rate, clients, seed.
    load: dict[str, Any]
    # Processor or GPU, cores, versions, commit; the same for every run of a process.
    machine: dict[str, Any]
    # When the run began, in ISO 8601, UTC.
    began: str
    # From its beginning to the end of the last answer, in seconds.
    duration_s: float
    # How late requests were sent, by percentile ("p50", "p90", "p99"), in seconds; empty in virtual time.
    lag_s: dict[str, float] = field(default_factory=dict)
    # Why the figures must not be used, e.g. a late load generator; ``None`` if they may.
    invalid: str | None = None
    # Whether it was stopped before all requests were answered.
    interrupted: bool = False


@dataclass(frozen=True)
class Run:
    """One run: its header, and the records in the order of the requests."""

    header: RunHeader
    records: tuple[RequestRecord, ...] = field(repr=False)

    @property
    def complete(self) -> tuple[RequestRecord, ...]:
        """Returns the records of the requests that were answered."""
        return tuple(record for record in self.records if record.error is None)


def write_run(run: Run, path: str | Path) -> None:
    """Writes ``run`` to the file ``path``, replacing an existing file. Raises ``RecordingError`` if it cannot."""
    of_header, of_record = _adapters()
    try:
        with Path(path).open("wb") as out:
            out.write(of_header.dump_json(run.header) + b"\n")
            out.writelines(of_record.dump_json(record) + b"\n" for record in run.records)
    except OSError as error:
        raise RecordingError(f"the run cannot be written: {error.strerror}", file=str(path)) from error


def read_run(path: str | Path) -> Run:
    """Returns the run in the file ``path``.

    :raises RecordingError: if the file does not exist, is not a run, or is damaged; the message names the line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RecordingError(f"the run cannot be read: {error.strerror}", file=str(path)) from error
    lines = data.split(b"\n")
    try:
        found = json.loads(lines[0])
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RecordingError("no run of fastgen bench: this line is not a header", file=str(path), line=1)
    if lines.pop() != b"":
        raise RecordingError("the line has no end: the file was cut off", file=str(path), line=len(lines) + 1)
    of_header, of_record = _adapters()
    header: RunHeader = checked_line(of_header, lines[0], str(path), 1)
    records = [checked_line(of_record, line, str(path), number) for number, line in enumerate(lines[1:], start=2)]
    return Run(header, tuple(records))


@cache
def _adapters() -> tuple[TypeAdapter[RunHeader], TypeAdapter[RequestRecord]]:
    return TypeAdapter(RunHeader), TypeAdapter(RequestRecord)
