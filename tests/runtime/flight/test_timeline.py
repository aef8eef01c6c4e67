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
from tests.runtime.flight.test_why import arrival, recording
from tests.runtime.flight.test_why import step as step_of
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


def test_series_begin_with_the_first_step_and_count_what_each_did() -> None:
    found = timeline.series(
        recording(
            *(arrival(9.0, request, 9) for request in range(3)),
            step_of(
                0, 10.0, 12.0, ("1.0", 3, 1, 1), ("0.0", 0, 5, 0), num_decodes=1, waiting=3, blocks_free=7,
                preempted=("2.0",),
            ),
            step_of(1, 13.0, 16.0, ("0.0", 5, 4, 1)),
        )
    )  # fmt: skip
    assert {name: values.tolist() for name, values in vars(found).items()} == {
        "start_s": [0.0, 3.0],
        "end_s": [2.0, 6.0],
        "decodes": [1, 0],
        "prompts": [5, 4],
        "running": [2, 1],
        "waiting": [3, 0],
        "preemptions": [1, 0],
        "blocks_free": [7, 10],
    }
    assert all(len(values) == 0 for values in vars(timeline.series(recording())).values())


def highest(drawn: Any) -> list[float]:
    """Returns the upper edge of each area that was filled."""
    return [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in drawn.collections]


@pytest.mark.parametrize("max_steps", [10_000, 27, 0])
def test_blocks_are_drawn_from_where_their_holders_are_known(max_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = random_history(random.Random(4), prefix_caching=True)
    if max_steps == 27:
        history.record_with(max_steps=max_steps)
    history.live(80)
    recorded = history.engine.recorder.recording("m")
    if max_steps == 0:

        def refuse(recording: Recording) -> None:
            raise InvalidArgumentError("it has no snapshot")

        monkeypatch.setattr(timeline, "block_map", refuse)
    values, axes, num_blocks = timeline.series(recorded), Figure().subplots(), history.num_blocks - 1
    timeline_picture._draw_blocks(axes, recorded, values)
    assert axes.get_ylim() == (0, num_blocks)
    num_held = len(values.start_s)
    if max_steps:
        blocks, (image,) = timeline.block_map(recorded), axes.images
        assert list(image.get_extent()) == [blocks.start_s, values.end_s[-1], num_blocks, 0]
        assert image.get_clim() == (-0.5, 10.5), "four colours, and seven of requests"
        names = ["free", "cached", "shared", "other requests", *(f"request {each}" for each in blocks.requests)]
        shown = [text.get_text() for text in axes.get_legend().get_texts()]
        assert shown == [name for code, name in enumerate(names) if (blocks.cells == code).any()]
        num_held = values.start_s.tolist().index(blocks.start_s)
        assert (num_held > 0) == (max_steps == 27)
    if num_held:
        assert highest(axes) == [num_blocks - values.blocks_free[:num_held].min()]
        (path,) = axes.collections[0].get_paths()
        assert path.vertices[:, 0].max() == values.end_s[num_held - 1]


def test_the_tokens_of_a_step_are_its_decodes_and_above_them_those_of_prompts() -> None:
    found = timeline.series(shared_and_cached().engine.recorder.recording("m"))
    axes = Figure().subplots()
    timeline_picture._draw_tokens(axes, found, 16)
    assert highest(axes) == [found.decodes.max(), (found.decodes + found.prompts).max()]
    (budget,) = axes.lines
    assert list(budget.get_ydata()) == [16, 16]


def test_a_picture_spans_the_time_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    lived = shared_and_cached().engine.recorder.recording("m")
    at_one_moment = recording(arrival(2.0, 0, 9), step_of(0, 2.0, 2.0, ("0.0", 0, 9, 1)))
    monkeypatch.setattr(timeline_picture, "_draw_blocks", lambda *given: None)
    for each, end_s in ((lived, timeline.series(lived).end_s[-1]), (at_one_moment, 1.0)):
        draw(each, tmp_path / "flight.svg")
        assert [axes.get_xlim() for axes in drawn.pop().axes] == [(0.0, end_s)] * 4
