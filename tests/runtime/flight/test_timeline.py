"""The picture of a recording: its cells name the holders of blocks, and undrawable recordings are refused."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fastgen.errors import InvalidArgumentError, RecordingError
from fastgen.runtime.flight import timeline, timeline_picture
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.timeline import CACHED, FREE, OTHERS, SHARED
from fastgen.runtime.flight.timeline_picture import draw
from fastgen.runtime.step.step import Step
from tests.runtime.histories import History, random_history


def shared_and_cached() -> History:
    """Runs one prompt, another one, and the first one twice at once, with 20 blocks of 4 tokens."""
    history = History(random.Random(0), num_blocks=21, token_budget=16, max_num_seqs=2, prefix_caching=True)
    for prompts in ([7], [5], [7, 7]):
        for token_id in prompts:
            history.engine.submit([token_id] * 9, history.sampling(max_new_tokens=3, ignore_eos=True))
        history.finish()
    return history


def test_the_block_map_shows_the_holders() -> None:
    history = shared_and_cached()
    recording = history.engine.recorder.recording("m")
    found = timeline.block_map(recording, num_columns=len(recording.steps) * 200, num_requests=2)
    assert found.cells.shape == (20, len(recording.steps)), "no more columns than steps"
    codes = {code: (found.cells == code).sum() for code in range(6)}
    assert codes[CACHED] > 0
    assert codes[SHARED] > 0
    assert codes[FREE] > codes[CACHED]
    assert codes[OTHERS] > 0, "of four requests two are named"
    assert len(found.requests) == 2


@pytest.mark.parametrize("max_steps", [10_000, 24])
@pytest.mark.parametrize("seed", range(8))
def test_cells_recounted_from_the_block_tables(seed: int, max_steps: int) -> None:
    """Every step takes the same time, so that each has a column of its own. If the first steps are gone, the map begins
    with the first snapshot.
    """
    columns: list[dict[int, set[int]]] = []
    history = random_history(random.Random(seed), prefix_caching=seed % 2 == 0)
    history.engine.recorder.max_steps = max_steps

    def launch(step: Step, *, launch: Any = history.device.launch) -> None:
        holders: dict[int, set[int]] = {}
        for seq in history.engine.scheduler.running:
            for table in seq.block_tables:
                for block in table:
                    holders.setdefault(block, set()).add(seq.key[0])
        columns.append(holders)
        launch(step)

    history.device.launch = launch  # type: ignore[method-assign]
    history.live(80)
    recording = history.engine.recorder.recording("m")
    found = timeline.block_map(recording, num_requests=3)
    first = int(np.searchsorted(timeline.series(recording).start_s, found.start_s))
    assert (recording.header.first_step > 0) == (max_steps < 80)
    shown = timeline._columns(recording.steps[first:], len(recording.steps) - first)
    assert found.cells.shape[1] == sum(map(len, shown.values()))
    for step, places in shown.items():
        for place in places:
            for block in range(1, history.num_blocks):
                holders, cell = columns[step].get(block, set()), found.cells[block - 1, place]
                if len(holders) > 1:
                    assert cell == SHARED
                elif holders:
                    (request,) = holders
                    named = [OTHERS + 1 + place for place, each in enumerate(found.requests) if each == request]
                    # A windowed group may have freed some blocks when the step was committed.
                    left_behind = (FREE, CACHED) if any(history.windows) else ()
                    assert cell in (*(named or [OTHERS]), *left_behind)
                else:
                    assert cell in (FREE, CACHED)


def test_columns_are_equal_parts_of_the_time() -> None:
    """Each shows the holders after the step in which its middle lies, or behind which it lies."""
    steps: Any = [
        SimpleNamespace(step=number, began_s=began_s, end_s=end_s)
        for number, began_s, end_s in ((7, 10.0, 11.0), (8, 11.0, 12.0), (9, 15.0, 18.0))
    ]
    assert timeline._columns(steps, 5) == {7: [0], 9: [1, 2, 3, 4]}
    assert timeline._columns(steps, 8) == {7: [0], 8: [1], 9: [2, 3, 4, 5, 6, 7]}


def test_tokens_are_bars_and_times_are_in_milliseconds() -> None:
    found = timeline.series(shared_and_cached().engine.recorder.recording("m"))
    times = Figure().subplots()
    timeline_picture._draw_times(times, found)
    (line,) = times.lines
    assert np.allclose(line.get_ydata(), np.repeat(1000 * (found.end_s - found.start_s), 2))
    assert np.array_equal(line.get_xdata(), np.stack([found.start_s, found.end_s], axis=1).ravel())
    edges, heights = timeline_picture._outline(found, found.decodes + found.prompts)
    for index, (start_s, end_s) in enumerate(zip(found.start_s, found.end_s, strict=True)):
        assert edges[4 * index : 4 * index + 4].tolist() == [start_s, start_s, end_s, end_s]
        num_tokens = found.decodes[index] + found.prompts[index]
        assert heights[4 * index : 4 * index + 4].tolist() == [0, num_tokens, num_tokens, 0]


def test_series_are_the_steps() -> None:
    recording = shared_and_cached().engine.recorder.recording("m")
    found = timeline.series(recording)
    assert (found.decodes + found.prompts).tolist() == [step.num_tokens for step in recording.steps]
    assert found.running.tolist() == [step.running for step in recording.steps]
    assert found.start_s[0] == 0.0
    assert np.all(found.end_s[:-1] <= found.start_s[1:])


SIGNATURES = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml"}


@pytest.mark.parametrize("suffix", SIGNATURES)
@pytest.mark.parametrize("first_steps_are_gone", [False, True])
def test_a_picture_is_drawn(suffix: str, first_steps_are_gone: bool, tmp_path: Path) -> None:
    history = random_history(random.Random(4), failures=0.05, prefix_caching=True)
    if first_steps_are_gone:
        history.record_with(max_steps=10)
    history.live(80)
    picture = tmp_path / f"flight{suffix}"
    draw(history.engine.recorder.recording("a/model"), picture)
    content = picture.read_bytes()
    assert content.startswith(SIGNATURES[suffix])
    if suffix == ".svg":
        assert (b"request" in content or b"block" in content) is True
    else:
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert (width, height) == (1320, 1080)


def test_preemptions_are_marked_where_they_happened() -> None:
    found = timeline.series(shared_and_cached().engine.recorder.recording("m"))
    for at in ([], [0, 2]):
        preemptions = np.zeros_like(found.preemptions)
        preemptions[at] = 3
        axes = Figure().subplots()
        timeline_picture._draw_sequences(axes, replace(found, preemptions=preemptions))
        marks = {str(line.get_label()): line.get_xdata() for line in axes.lines if line.get_marker() == "v"}
        assert list(marks) == ([f"preemptions ({3 * len(at)})"] if at else [])
        assert all(np.array_equal(x, found.start_s[at]) for x in marks.values())


def test_an_undrawable_recording_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = shared_and_cached().engine.recorder.recording("m")
    with pytest.raises(InvalidArgumentError, match=r"flight\.gif: the picture is written as \.png or \.svg"):
        draw(recording, tmp_path / "flight.gif")
    with pytest.raises(InvalidArgumentError, match="holds no step"):
        draw(Recording(recording.header, ()), tmp_path / "flight.png")
    with pytest.raises(RecordingError, match="the picture cannot be written: No such file"):
        draw(recording, tmp_path / "missing" / "flight.png")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match=r"needs matplotlib.*pip install 'fastgen-llm\[bench\]'"):
        draw(recording, tmp_path / "flight.png")
