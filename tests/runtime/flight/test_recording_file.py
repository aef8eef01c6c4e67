"""Recordings as files: they are read back bit for bit, and an error in a damaged file names the line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import RecordingError
from fastgen.runtime.flight.recording import VERSION, Recording
from fastgen.runtime.flight.recording_file import read_recording, write_recording
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
