"""The contents of a report: the runs, imported results and flight recordings of a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.lab import records
from fastgen.lab.imports.guidellm import is_guidellm
from fastgen.lab.imports.results import read_results
from fastgen.lab.imports.vllm_bench import is_vllm_bench
from fastgen.lab.metrics.summary import Summary, summarize
from fastgen.lab.records import read_run
from fastgen.runtime.flight import recording as flight
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.recording_file import read_recording


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run, fastgen's own or another tool's."""

    # The file with its raw records, as the report names it.
    file: str
    summary: Summary

    @property
    def warning(self) -> str | None:
        """Returns why its figures must not be used as they are; ``None`` if they may."""
        if self.summary.invalid:
            return f"invalid: {self.summary.invalid}"
        if self.summary.interrupted:
            return "interrupted: it was stopped before all requests were answered"
        return None

    @property
    def usable(self) -> bool:
        """Returns whether its figures may stand in a plot. An interrupted run's may: it measured fewer requests."""
        return self.summary.invalid is None


@dataclass(frozen=True, kw_only=True)
class Collection:
    """All that one report shows."""

    results: tuple[Result, ...]
    # Flight recordings by file name.
    recordings: Mapping[str, Recording] = field(default_factory=dict)
    # Files that could not be read, with the reason.
    unread: Mapping[str, str] = field(default_factory=dict)


def read_directory(directory: str | Path) -> Collection:
    """Returns the runs, the results of ``vllm bench serve`` and guidellm, and the flight recordings in ``directory``
    and below it. Other files are left out.

    A damaged file does not prevent the report: it is among the unread ones.

    :raises InvalidArgumentError: if there is no such directory, or no run, no recording and no damaged one in it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidArgumentError(f"{directory} is not a directory; name the one that `fastgen bench --output` wrote")
    results, recordings, unread = [], {}, {}
    for path in sorted(directory.rglob("*.jsonl")):
        name = path.relative_to(directory).as_posix()
        try:
            match _format(path):
                case records.FORMAT:
                    results.append(Result(file=name, summary=summarize(read_run(path))))
                case flight.FORMAT:
                    recordings[name] = read_recording(path)
        except FastgenError as error:
            unread[name] = str(error)
    for path in sorted(directory.rglob("*.json")):
        name = path.relative_to(directory).as_posix()
        if _is_foreign(path):
            try:
                results += [Result(file=name, summary=summary) for summary in read_results(path)]
            except FastgenError as error:
                unread[name] = str(error)
    if not (results or recordings or unread):
        raise InvalidArgumentError(f"{directory}: there is no run and no flight recording in it")
    return Collection(results=tuple(results), recordings=recordings, unread=unread)


def _format(path: Path) -> str | None:
    """Returns the format that the first line of a file names."""
    try:
        with path.open("rb") as lines:
            header = json.loads(lines.readline())
    except (OSError, ValueError):
        return None
    return header.get("format") if isinstance(header, dict) else None


def _is_foreign(path: Path) -> bool:
    """Returns whether a file has results of another tool. Summaries of fastgen have the same names, and a source."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return is_guidellm(found) or (is_vllm_bench(found) and "source" not in found)
