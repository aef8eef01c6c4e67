"""The plots of steps over time: tokens, sequences and the KV cache, from flight recordings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastgen.errors import InvalidArgumentError
from fastgen.lab.report.drawing import FONT_SIZE, STYLES, finish, new_figure
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.timeline import Series, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Where the bars begin on the logarithmic scale: below one token.
_LEAST_TOKENS = 0.7


def policy_timeline(
    recordings: Mapping[str, Recording], *, num_steps: int = 40, begin_s: float | None = None
) -> Figure:
    """Returns the tokens of steps under each policy, one row a policy, during the same interval of time.

    A bar is a step: as wide as it took, as high as it has tokens, on a logarithmic scale because a step has few decodes
    and many prompt tokens. Below are the decodes, above them the prompt tokens.
    The interval begins ``begin_s`` seconds after the first step, by default at a third of the shortest recording. It
    ends when one policy has done ``num_steps`` steps.

    :raises InvalidArgumentError: if a recording has no step.
    """
    if not recordings or not all(recording.steps for recording in recordings.values()):
        raise InvalidArgumentError("a recording holds no step, so there is nothing to draw")
    all_values = {label: series(recording) for label, recording in recordings.items()}
    if begin_s is None:
        begin_s = min(float(values.end_s[-1]) for values in all_values.values()) / 3
    end_s = min(_end_s(values, begin_s, num_steps) for values in all_values.values())
    figure, rows = new_figure(height=1.5 * len(recordings) + 0.9, rows=len(recordings), sharex=True, sharey=True)
    for axes, (label, values) in zip(rows, all_values.items(), strict=True):
        _draw_steps(axes, values, begin_s, end_s)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        finish(axes, x="time (s)" if axes is rows[-1] else "", y="tokens", title=label, legend=False)
    rows[-1].set_xlim(begin_s, end_s)
    most = max(int((values.decodes + values.prompts).max()) for values in all_values.values())
    rows[-1].set_ylim(_LEAST_TOKENS, 1.5 * most)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _end_s(values: Series, begin_s: float, num_steps: int) -> float:
    """Returns when the last of ``num_steps`` steps from ``begin_s`` on ends."""
    first = int(np.searchsorted(values.end_s, begin_s))
    return float(values.end_s[min(first + num_steps, len(values.end_s)) - 1])


def _draw_steps(axes: Axes, values: Series, begin_s: float, end_s: float) -> None:
    chosen = (values.end_s > begin_s) & (values.start_s < end_s)
    starts, ends = values.start_s[chosen], values.end_s[chosen]
    decodes, prompts = values.decodes[chosen], values.prompts[chosen]
    options: dict[str, Any] = {"width": ends - starts, "align": "edge", "linewidth": 0.4}
    axes.bar(starts, decodes, color=STYLES[0].colour, edgecolor="black", label="decodes", **options)
    hatch = {"color": "#f3e3c3", "edgecolor": "#7a6030", "hatch": "//"}
    axes.bar(starts, prompts, bottom=decodes, label="prompt tokens", **hatch, **options)


def cache_plot(recordings: Mapping[str, Recording]) -> Figure:
    """Returns the running and waiting requests and the use of the KV cache over time, one column a recording."""
    columns = len(recordings)
    figure, all_axes = new_figure(height=5.4, rows=2, columns=columns, sharex="col", sharey="row")
    for place, (label, recording) in enumerate(recordings.items()):
        _draw_requests(all_axes[place], all_axes[columns + place], recording)
        finish(all_axes[place], x="", y="" if place else "requests", title=label, legend=False)
        finish(all_axes[columns + place], x="time (s)", y="" if place else "KV cache blocks in use (%)", legend=False)
    all_axes[0].set_ylim(bottom=0)
    all_axes[columns].set_ylim(0, 105)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)
    return figure


def _draw_requests(above: Axes, below: Axes, recording: Recording) -> None:
    if not recording.steps:
        raise InvalidArgumentError("the recording holds no step, so there is nothing to draw")
    values = series(recording)
    running, waiting = STYLES[0], STYLES[1]
    above.step(values.start_s, values.running, where="post", color=running.colour, label="running", linewidth=1.4)
    above.step(
        values.start_s,
        values.waiting,
        where="post",
        color=waiting.colour,
        linestyle="--",
        label="waiting",
        linewidth=1.4,
    )
    preempting = values.preemptions > 0
    above.plot(
        values.start_s[preempting],
        values.running[preempting],
        "v",
        color="black",
        markersize=5,
        label="a running request is preempted",
    )
    capacity = recording.header.engine.num_blocks - 1
    below.plot(values.start_s, 100 * (1 - values.blocks_free / capacity), color=running.colour, linewidth=1.2)
    below.axhline(100, color="black", linewidth=0.8, linestyle=":")
    if preempting.any():
        count = int(np.sum(values.preemptions))
        below.annotate(
            f"{count:,} preemption{'s' if count > 1 else ''}",
            (0.03, 0.9),
            xycoords="axes fraction",
            fontsize=FONT_SIZE - 1,
        )
