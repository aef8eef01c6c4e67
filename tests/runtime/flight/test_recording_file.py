"""Recordings as files: they are read back bit for bit, and an error in a damaged file names the line."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import RecordingError
from fastgen.runtime.flight.recorder import Recorder
from fastgen.runtime.flight.recording import (
    VERSION,
    Admission,
    Arrival,
    BeamMove,
    Beams,
    Blocks,
    Copy,
    Entry,
    Event,
    Finish,
    Header,
    Recording,
    SequenceState,
    Snapshot,
    Step,
    Waiting,
    Withdrawal,
)
from fastgen.runtime.flight.recording_file import dump_recording, parse_recording, read_recording, write_recording
from tests.pages import DOCS
from tests.runtime.histories import random_history


def recorded(seed: int) -> Recording:
    history = random_history(random.Random(seed), failures=0.05)
    recorder = history.engine.recorder
    recorder.engine = replace(recorder.engine, prefix_caching=True)
    history.live(60)
    return recorder.recording("a model")


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_read(seed: int, tmp_path: Path) -> None:
    recording = recorded(seed)
    write_recording(recording, tmp_path / "flight.jsonl")
    found = read_recording(tmp_path / "flight.jsonl")
    assert found == recording
    assert repr(found.events) == repr(recording.events), "types and bits of all numbers"


def test_an_empty_recording_is_one(tmp_path: Path) -> None:
    recording = Recording(recorded(0).header, ())
    write_recording(recording, tmp_path / "flight.jsonl")
    assert read_recording(tmp_path / "flight.jsonl") == recording


Lines = list[dict[str, Any]]


def _first(lines: Lines, kind: str) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == kind)


def _move(lines: Lines, kind: str, to: int) -> None:
    line = _first(lines, kind)
    lines.remove(line)
    lines.insert(to, line)


DAMAGES: dict[str, tuple[Callable[[Lines], object], str]] = {
    "no header": (lambda lines: lines.pop(0), r":1: no flight recording of fastgen: this line is not a header"),
    "another version": (lambda lines: lines[0].update(version=99), rf":1: .*version 99, this fastgen reads {VERSION};"),
    "a size left out": (lambda lines: lines[0]["engine"].pop("block_size"), r":1: engine.block_size: Field required"),
    "a field too many": (lambda lines: lines[0].update(colour="red"), r":1: colour: Unexpected keyword"),
    "a kind unknown": (lambda lines: lines[1].update(kind="departure"), r":2: Input tag 'departure'"),
    "a number as text": (lambda lines: lines[1].update(prompt_tokens="3"), r":2: arrival.prompt_tokens: .* integer"),
    "an entry too short": (
        lambda lines: _first(lines, "step")["entries"][0].pop(),
        r": step.entries.0.4: Field required",
    ),
    "an entry's text": (
        lambda lines: _first(lines, "step")["entries"][0].__setitem__(1, "0"),
        r": step.entries.0.*integer",
    ),
    "a reason unknown": (lambda lines: _first(lines, "finish").update(reason="bored"), r": finish.reason: .*'stop'"),
    "a second arrival": (lambda lines: lines.insert(1, dict(lines[1])), r":3: request 0 arrives a second time"),
    "before its arrival": (lambda lines: _move(lines, "step", 1), r":2: sequence '0\.0' never arrived"),
    "an index too high": (
        lambda lines: _first(lines, "finish").update(sequence="0.99"),
        r": sequence '0\.99' never arrived",
    ),
    "a sequence held back that is none": (
        lambda lines: _first(lines, "step").update(held_back=["0.99"]),
        r": sequence '0\.99' never arrived",
    ),
    "a sequence postponed that is none": (
        lambda lines: _first(lines, "step").update(postponed=["0.99"]),
        r": sequence '0\.99' never arrived",
    ),
    "a step left out": (lambda lines: lines.remove(_first(lines, "step")), r": step 1 stands where 0 belongs"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_the_line_named(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "flight.jsonl"
    write_recording(recorded(0), file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    do_damage, message = DAMAGES[damage]
    do_damage(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordingError, match=message) as refusal:
        read_recording(file)
    assert str(refusal.value).startswith(f"{file}:{refusal.value.line}: ")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\x00\xff\xfe", b"[1, 2]\n", b'{"kind": "header"}\n', b"text\n", b"[" * 100_000 + b"\n"]
)
def test_foreign_files_are_not_recordings(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(RecordingError, match=":1: no flight recording of fastgen"):
        read_recording(tmp_path / "other")


def test_a_file_that_was_cut_off_says_so_wherever_it_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "flight.jsonl"
    write_recording(recorded(0), file)
    content = file.read_bytes()
    header_end = content.index(b"\n") + 1
    for end in random.sample(range(header_end + 1, len(content)), 30):
        if content[end - 1 : end] == b"\n":
            continue
        file.write_bytes(content[:end])
        with pytest.raises(RecordingError, match=f":{content[:end].count(10) + 1}: the line has no end"):
            read_recording(file)


def test_files_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"missing\.jsonl: the recording cannot be read: No such file"):
        read_recording(tmp_path / "missing.jsonl")
    with pytest.raises(RecordingError, match="the recording cannot be written: No such file"):
        write_recording(recorded(0), tmp_path / "no folder" / "flight.jsonl")


def step(**fields: Any) -> Step:
    given: dict[str, Any] = {"began_s": 0.0, "scheduled_s": 0.0, "build_s": 0.0, "ran_s": 1.0, "ended_s": 1.0}
    given |= {"size": 1, "num_padding": 0, "num_decodes": 0, "entries": (), "running": 1, "waiting": 0}
    return Step(step=0, blocks_free=1, **{**given, **fields})


def snapshot(**fields: Any) -> Snapshot:
    names = ("policy", "free", "cached", "nodes", "sequences", "decodes", "prompts", "free_slots", "updates", "waiting")
    given = dict.fromkeys((*names, "held", "forked", "copies", "private", "may_share"), ())
    return Snapshot(step=0, num_opened=1, now_s=0.0, **{**given, **fields})


def beams(request: int = 0, *, moves: tuple[BeamMove, ...] = (), given: tuple[str, ...] = ()) -> Beams:
    return Beams(request=request, step=0, moves=moves, given=given)


# By the place where an event names a sequence: the event that does.
NAMING: dict[str, Callable[[str], Event]] = {
    "entry": lambda name: step(entries=(Entry(name, 0, 1, 0, 1),)),
    "admission": lambda name: step(admitted=(Admission(name, 0, 0, 0),)),
    "preemption": lambda name: step(preempted=(name,)),
    "held back": lambda name: step(held_back=(name,)),
    "postponed": lambda name: step(postponed=(name,)),
    "end": lambda name: Finish(clock_s=1.0, sequence=name, reason="stop", num_tokens=1, step=None),
    "blocks": lambda name: Blocks(sequence=name, blocks=(1,)),
    "withdrawal": lambda name: Withdrawal(request=int(name[0]), step=0),
    "search": lambda name: beams(int(name[0])),
    "token of a beam": lambda name: beams(given=(name,)),
    "moved beam": lambda name: beams(moves=(BeamMove(name, None, ()),)),
    "parent of a beam": lambda name: beams(moves=(BeamMove("0.0", name, ()),)),
    "state": lambda name: snapshot(sequences=(SequenceState(name, 1, 1, 0, 0, (0, 0, 0), 0, (), None),)),
    "waiting": lambda name: snapshot(waiting=(Waiting(name, 0.0, (0, 0, 0)),)),
    "decodes": lambda name: snapshot(decodes=(name,)),
    "prompts": lambda name: snapshot(prompts=(name,)),
    "held": lambda name: snapshot(held=(name,)),
    "forked": lambda name: snapshot(forked=(name,)),
    "private": lambda name: snapshot(private=(name,)),
    "may share": lambda name: snapshot(may_share=(name,)),
    "copies": lambda name: snapshot(copies=((name, Copy(0, 0, 1, 2)),)),
}


@cache
def some_header() -> Header:
    return recorded(0).header


@pytest.mark.parametrize("place", NAMING)
def test_every_sequence_that_is_named_must_have_arrived(place: str) -> None:
    header = some_header()
    arrival = Arrival(clock_s=0.0, request=0, prompt_tokens=1, max_new_tokens=1)
    events = (arrival, NAMING[place]("0.0"))
    assert parse_recording(dump_recording(header, events), "file") == Recording(header, events)
    with pytest.raises(RecordingError, match=r"^file:3: sequence '9\.0' never arrived$"):
        parse_recording(dump_recording(header, (arrival, NAMING[place]("9.0"))), "file")


def test_the_documentation_states_how_much_is_recorded() -> None:
    bounds = inspect.signature(Recorder).parameters
    assert (bounds["max_steps"].default, bounds["max_bytes"].default) == (10_000, 64 << 20)
    page = " ".join((DOCS / "why.md").read_text("utf-8").split())
    assert (
        "The ring holds the last 10,000 steps, or fewer if they and their requests' tokens would take more than 64 MiB"
        in page
    )
