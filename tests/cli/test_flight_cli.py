"""``fastgen why``, ``replay`` and ``timeline``: what they print of a recording, and how they fail."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fastgen.runtime.flight.recording import Recording, Step
from fastgen.runtime.flight.recording_file import read_recording, write_recording
from tests.cli.conftest import Run
from tests.runtime.histories import History


@pytest.fixture
def file(tmp_path: Path) -> Path:
    history = History(random.Random(0), num_blocks=21, token_budget=16, max_num_seqs=2)
    for _ in range(4):
        history.engine.submit([7] * 30, history.sampling(max_new_tokens=9, ignore_eos=True))
    history.finish()
    path = tmp_path / "flight.jsonl"
    write_recording(history.engine.recorder.recording("m"), path)
    return path


def test_why_tells_in_sentences_and_in_json(run: Run, file: Path) -> None:
    done = run("why", "3", "--recording", str(file))
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("Request 3: a prompt of 30 tokens, 9 new tokens in ")
    assert "% queued for a slot" in done.out
    facts = json.loads(run("why", "3.0", "--recording", str(file), "--json").out)
    assert (facts["sequence"], facts["new_tokens"], facts["finish_reason"]) == ("3.0", 9, "length")
    assert sum(seconds for _, seconds in facts["first_token"]["shares"]) == pytest.approx(facts["ttft_s"])


def test_replay_says_whether_every_decision_is_the_same(run: Run, file: Path) -> None:
    same = run("replay", str(file))
    recording = read_recording(file)
    assert (same.status, same.err) == (0, "")
    assert same.out == f"{len(recording.steps)} steps of 4 requests: every decision is the same\n"
    assert json.loads(run("replay", str(file), "--json").out) == {"steps": len(recording.steps), "equal": True}

    def changed(event: object) -> object:
        return replace(event, waiting=event.waiting + 1) if isinstance(event, Step) and event.step == 5 else event

    write_recording(Recording(recording.header, tuple(map(changed, recording.events))), file)  # type: ignore[arg-type]
    waiting = recording.steps[5].waiting
    other = run("replay", str(file))
    assert other.status == 1
    assert other.out.splitlines() == [
        "step 5 is the first that differs",
        "  waiting",
        f"    recorded {waiting + 1}",
        f"    now      {waiting}",
    ]
    facts = json.loads(run("replay", str(file), "--json").out)
    assert (facts["equal"], facts["difference"]["fields"]) == (False, ["waiting"])


def test_timeline_writes_a_picture(run: Run, file: Path, tmp_path: Path) -> None:
    done = run("timeline", str(file), "--out", str(tmp_path / "flight.png"))
    assert (done.status, done.out, done.err) == (0, "", "")
    assert (tmp_path / "flight.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_said_in_a_line(run: Run, file: Path, tmp_path: Path) -> None:
    missing = run("why", "0", "--recording", str(tmp_path / "none.jsonl"))
    assert missing.status == 1
    assert (
        missing.err == f"fastgen: {tmp_path / 'none.jsonl'}: the recording cannot be read: No such file or directory\n"
    )
    unknown = run("why", "99", "--recording", str(file))
    assert unknown.err == "fastgen: the recording holds requests 0 to 3, but no sequence '99.0'\n"
    foreign = tmp_path / "other.jsonl"
    foreign.write_text('{"a": 1}\n')
    assert run("replay", str(foreign)).err == (
        f"fastgen: {foreign}:1: no flight recording of fastgen: this line is not a header\n"
    )
    assert run("why", "0").status == 2
