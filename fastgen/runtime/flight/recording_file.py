"""Flight recordings as files: JSON Lines with a header line and one event per line, read strictly.

Each line is an object. Its ``kind`` names a class of :mod:`fastgen.runtime.flight.recording`, and it has all fields of
that class. The small records inside it (entries, admissions, block entries) are arrays in the order of their fields.
Numbers are written so that reading them gives the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, TypeAdapter

from fastgen.errors import RecordingError
from fastgen.json_lines import checked_line
from fastgen.runtime.flight.recording import (
    FORMAT,
    VERSION,
    Arrival,
    Beams,
    Blocks,
    Event,
    Finish,
    Header,
    Recording,
    Snapshot,
    Step,
    Withdrawal,
)


def write_recording(recording: Recording, path: str | Path) -> None:
    """Writes ``recording`` to the file ``path``, replacing an existing file.

    :raises RecordingError: if the file cannot be written.
    """
    try:
        with Path(path).open("wb") as out:
            out.writelines(_lines(recording.header, recording.events))
    except OSError as error:
        raise RecordingError(f"the recording cannot be written: {error.strerror}", file=str(path)) from error


def dump_recording(header: Header, events: Iterable[Event]) -> bytes:
    """Returns a recording as :func:`write_recording` writes it."""
    return b"".join(_lines(header, events))


def _lines(header: Header, events: Iterable[Event]) -> Iterator[bytes]:
    of_event, of_header = _adapters()
    yield of_header.dump_json(header) + b"\n"
    for event in events:
        yield of_event.dump_json(event) + b"\n"


def read_recording(path: str | Path) -> Recording:
    """Returns the recording in the file ``path``.

    :raises RecordingError: if the file does not exist, is not a recording, has another version, or is damaged; the
        message names the line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RecordingError(f"the recording cannot be read: {error.strerror}", file=str(path)) from error
    return parse_recording(data, str(path))


def parse_recording(data: bytes, source: str) -> Recording:
    """Returns the recording in ``data``, which comes from ``source``. Raises ``RecordingError`` as
    :func:`read_recording` does.
    """
    lines = data.split(b"\n")
    header = _read_header(lines[0], source)
    if lines.pop() != b"":
        raise RecordingError("the line has no end: the file was cut off", file=source, line=len(lines) + 1)
    return Recording(header, tuple(_read_events(lines[1:], header, source)))


def _read_header(line: bytes, path: str) -> Header:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RecordingError("no flight recording of fastgen: this line is not a header", file=path, line=1)
    if found.get("version") != VERSION:
        raise RecordingError(
            f"the recording has format version {found.get('version')}, this fastgen reads {VERSION}; use the fastgen "
            f"that made it ({found.get('fastgen')})",
            file=path,
            line=1,
        )
    header: Header = checked_line(_adapters()[1], line, path, 1)
    return header


def _read_events(lines: list[bytes], header: Header, path: str) -> Iterator[Event]:
    """Returns the events after checking that they are consistent: each named request has arrived, and steps are
    consecutive.
    """
    events, _ = _adapters()
    arrived: set[int] = set()
    known: set[str] = set()
    next_step = header.first_step
    for number, line in enumerate(lines, start=2):
        event: Event = checked_line(events, line, path, number)
        if isinstance(event, Arrival):
            if event.request in arrived:
                raise RecordingError(f"request {event.request} arrives a second time", file=path, line=number)
            arrived.add(event.request)
            known.update(event.sequences)
        for sequence in _sequences(event):
            if sequence not in known:
                raise RecordingError(f"sequence {sequence!r} never arrived", file=path, line=number)
        if isinstance(event, Step):
            if event.step != next_step:
                raise RecordingError(f"step {event.step} stands where {next_step} belongs", file=path, line=number)
            next_step += 1
        yield event


def _sequences(event: Event) -> Iterator[str]:
    if isinstance(event, Step):
        yield from (entry.sequence for entry in event.entries)
        yield from (admission.sequence for admission in event.admitted)
        yield from (*event.preempted, *(event.held_back or ()), *event.postponed)
    elif isinstance(event, Finish | Blocks):
        yield event.sequence
    elif isinstance(event, Snapshot):
        yield from (state.sequence for state in event.sequences)
        yield from (each.sequence for each in event.waiting)
        yield from (name for names in (event.decodes, event.prompts, event.held, event.forked) for name in names)
        yield from (name for names in (event.private, event.may_share) for name in names)
        yield from (name for name, _ in event.copies)
    elif isinstance(event, Withdrawal):
        yield f"{event.request}.0"
    elif isinstance(event, Beams):
        yield f"{event.request}.0"
        yield from event.given
        yield from (name for move in event.moves for name in (move.sequence, move.parent) if name is not None)


@cache
def _adapters() -> tuple[TypeAdapter[Any], TypeAdapter[Header]]:
    return TypeAdapter(Annotated[Event, Discriminator("kind")]), TypeAdapter(Header)
