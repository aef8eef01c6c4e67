"""Plots have units on every axis, the intervals they are given, and series that differ without colour."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.report import drawing, forwards, plots, step_plots
from fastgen.lab.report.points import Bars, Curve, Measured, Point
from fastgen.lab.report.timelines import Timeline
from fastgen.runtime.flight.recording import Recording
from tests.lab.report.made_runs import made_recording


def made_curves(count: int = 3) -> list[Curve]:
    return [
        Curve(
            f"curve {place}", tuple(Point(Measured(x), Measured(x * (place + 1), x, 9 * x), str(x)) for x in (1, 2, 4))
        )
        for place in range(count)
    ]


def test_styles_differ_without_colour() -> None:
    assert len({(style.marker, style.line) for style in drawing.STYLES}) == len(drawing.STYLES)
    assert len({style.hatch for style in drawing.STYLES}) == len(drawing.STYLES)


def test_a_curve_is_drawn_with_its_points_its_intervals_and_its_axes() -> None:
    (axes,) = plots.curve_plot(made_curves(), x="throughput (requests/s)", y="latency (s)").axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("throughput (requests/s)", "latency (s)")
    (line, _, (bars,)) = axes.containers[1]
    assert line.get_xydata().tolist() == [[1, 2], [2, 4], [4, 8]]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[1, 9], [2, 18], [4, 36]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["curve 0", "curve 1", "curve 2"]
    assert axes.get_ylim()[0] == 0


def test_notes_that_would_cover_each_other_are_left_out() -> None:
    crowded = Curve("crowded", tuple(Point(Measured(1 + place / 1000), Measured(1), str(place)) for place in range(99)))
    far = Curve("far", (Point(Measured(0), Measured(0), "near zero"), Point(Measured(10), Measured(10), "far")))
    (axes,) = plots.curve_plot([crowded, far], x="x (s)", y="y (s)").axes
    assert [text.get_text() for text in axes.texts] == ["0", "near zero", "far"]


def test_panels_share_axes_and_one_legend() -> None:
    figure = plots.panel_plot({str(sla): made_curves() for sla in (2, 4, 6)}, x="clients", y="requests/s")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["2", "4", "6"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert all(axes.get_xlabel() == "clients" for axes in figure.axes)
    assert len(figure.legends) == 1


def test_bars_leave_out_what_is_not_known() -> None:
    series = [Bars("a", (Measured(1, 0.5, 2), None)), Bars("b", (Measured(3), Measured(4)))]
    (axes,) = plots.bar_plot(["P50", "P99"], series, y="gap (ms)").axes
    bars = [container for container in axes.containers if hasattr(container, "patches")]
    assert [[patch.get_height() for patch in each] for each in bars] == [[1], [3, 4]]
    assert [text.get_text() for text in axes.texts] == ["1", "3", "4"]


def test_the_same_plot_has_the_same_bytes() -> None:
    first, second = (drawing.png(plots.curve_plot(made_curves(), x="x (s)", y="y (s)")) for _ in range(2))
    assert first == second


def test_steps_of_all_policies_are_drawn_over_the_same_time() -> None:
    timelines = {policy: Timeline.of(made_recording(policy)) for policy in ("splitfuse", "prefill_first", "orca")}
    shown = step_plots.same_interval(timelines, num_steps=30)
    figure = step_plots.policy_timeline(shown)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(timelines)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    highest = max(patch.get_y() + patch.get_height() for axes in figure.axes for patch in axes.patches)
    assert highest == max((each.decodes + each.prompts).max() for each in shown.values())
    assert max(len(each.start_s) for each in shown.values()) == 30


def test_the_use_of_the_cache_is_a_share_of_its_blocks() -> None:
    recording = made_recording("splitfuse")
    above, below = step_plots.cache_plot({"splitfuse": Timeline.of(recording)}).axes
    used = below.lines[0].get_ydata()
    assert used.tolist() == pytest.approx([100 * (1 - step.blocks_free / 499) for step in recording.steps])
    assert above.lines[0].get_ydata().tolist() == [step.running for step in recording.steps]


def test_a_recording_without_steps_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="holds no step"):
        Timeline.of(Recording(made_recording("orca").header, ()))


def test_a_timeline_comes_back_from_json_and_keeps_preemptions_when_thinned() -> None:
    timeline = Timeline.of(made_recording("splitfuse"))
    again = Timeline.from_json(json.loads(json.dumps(timeline.as_json())))
    assert again.start_s.tolist() == pytest.approx(timeline.start_s.tolist(), abs=1e-5)
    assert again.decodes.tolist() == timeline.decodes.tolist()
    thinned = replace(timeline, preemptions=(timeline.decodes == 3).astype(np.int64)).thinned(10)
    assert thinned.preemptions.sum() == (timeline.decodes == 3).sum() > 0
    assert len(thinned.start_s) <= 10 + thinned.preemptions.sum()
    assert (thinned.start_s[0], thinned.start_s[-1]) == (timeline.start_s[0], timeline.start_s[-1])


def test_forward_passes_have_the_times_of_their_steps() -> None:
    recording = made_recording("splitfuse")
    passes = forwards.forwards([recording])
    assert len(passes) == len(recording.steps)
    assert sum(each.seconds for each in passes) <= recording.steps[-1].end_s - recording.steps[0].began_s + 1e-9
    (curve,) = forwards.throughput_by_tokens(passes)
    largest = curve.points[-1]
    rates = [each.num_tokens / each.seconds for each in passes if each.num_tokens == largest.x.value]
    assert largest.y.value == pytest.approx(np.median(rates), rel=0.1)


def test_curves_by_sequences_hold_every_class_with_enough_steps() -> None:
    draw = random.Random(1)
    passes = [
        forwards.Forward(tokens, draw.choice((1, 8)), tokens / 1000) for tokens in (8, 64, 512) for _ in range(40)
    ]
    curves = forwards.latency_by_tokens(passes)
    assert [curve.label for curve in curves] == ["1 sequence", "8 sequences"]
    assert [[(point.x.value, point.y.value) for point in curve.points] for curve in curves] == [
        [(8, 8), (64, 64), (512, 512)]
    ] * 2
