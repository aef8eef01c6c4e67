"""The plots of steps over time: tokens, sequences and the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastgen.lab.report.drawing import FONT_SIZE, STYLES, finish, new_figure
from fastgen.lab.report.timelines import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Where the bars begin on the logarithmic scale: below one token.
_LEAST_TOKENS = 0.7


def same_interval(timelines: Mapping[str, Timeline], *, num_steps: int = 40) -> dict[str, Timeline]:
    """Returns the steps of one interval of time. It begins at a third of the shortest timeline, and ends when one of
    them has done ``num_steps`` steps.
    """
    begin_s = min(float(each.end_s[-1]) for each in timelines.values()) / 3
    end_s = min(_end_s(each, begin_s, num_steps) for each in timelines.values())
    return {label: each.between(begin_s, end_s) for label, each in timelines.items()}


def policy_timeline(timelines: Mapping[str, Timeline]) -> Figure:
    """Returns the tokens of steps under each policy, one row a policy, on one axis of time.

    A bar is a step: as wide as it took, as high as it has tokens, on a logarithmic scale because a step has few decodes
    and many prompt tokens. Below are the decodes, above them the prompt tokens.
    """
    figure, rows = new_figure(height=1.5 * len(timelines) + 0.9, rows=len(timelines), sharex=True, sharey=True)
    for axes, (label, steps) in zip(rows, timelines.items(), strict=True):
        _draw_steps(axes, steps)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        finish(axes, x="time (s)" if axes is rows[-1] else "", y="tokens", title=label, legend=False)
    found = [each for each in timelines.values() if len(each.start_s)]
    rows[-1].set_xlim(max(float(each.start_s[0]) for each in found), min(float(each.end_s[-1]) for each in found))
    most = max(int((each.decodes + each.prompts).max()) for each in found)
    rows[-1].set_ylim(_LEAST_TOKENS, 1.5 * most)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _end_s(steps: Timeline, begin_s: float, num_steps: int) -> float:
    """Returns when the last of ``num_steps`` steps from ``begin_s`` on ends."""
    first = int(np.searchsorted(steps.end_s, begin_s))
    return float(steps.end_s[min(first + num_steps, len(steps.end_s)) - 1])


def _draw_steps(axes: Axes, steps: Timeline) -> None:
    options: dict[str, Any] = {"width": steps.end_s - steps.start_s, "align": "edge", "linewidth": 0.4}
    axes.bar(steps.start_s, steps.decodes, color=STYLES[0].colour, edgecolor="black", label="decodes", **options)
    hatch: dict[str, Any] = {"color": "#f3e3c3", "edgecolor": "#7a6030", "hatch": "//"}
    axes.bar(steps.start_s, steps.prompts, bottom=steps.decodes, label="prompt tokens", **hatch, **options)


def cache_plot(timelines: Mapping[str, Timeline]) -> Figure:
    """Returns the running and waiting requests and the use of the KV cache over time, one column a timeline."""
    columns = len(timelines)
    figure, all_axes = new_figure(height=5.4, rows=2, columns=columns, sharex="col", sharey="row")
    from matplotlib.ticker import MaxNLocator  # after the check that matplotlib is there

    for place, (label, steps) in enumerate(timelines.items()):
        above, below = all_axes[place], all_axes[columns + place]
        _draw_requests(above, steps)
        _draw_use(below, steps)
        finish(above, x="", y="" if place else "requests", title=label, legend=False)
        finish(below, x="time (s)", y="" if place else "KV cache blocks in use (%)", legend=False)
    all_axes[0].set_ylim(bottom=0)
    all_axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    all_axes[columns].set_ylim(0, 108)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)
    return figure


def _draw_requests(axes: Axes, steps: Timeline) -> None:
    running, waiting = STYLES[0], STYLES[1]
    options: dict[str, Any] = {"where": "post", "linewidth": 1.4}
    axes.step(steps.start_s, steps.running, color=running.colour, label="running", **options)
    axes.step(steps.start_s, steps.waiting, color=waiting.colour, linestyle="--", label="waiting", **options)
    preempting = steps.preemptions > 0
    label = "a running request is preempted"
    axes.plot(steps.start_s[preempting], steps.running[preempting], "v", color="black", markersize=5, label=label)


def _draw_use(axes: Axes, steps: Timeline) -> None:
    axes.plot(steps.start_s, 100 * steps.used, color=STYLES[0].colour, linewidth=1.2)
    axes.axhline(100, color="black", linewidth=0.8, linestyle=":")
    if count := int(steps.preemptions.sum()):
        text = f"{count:,} preemption{'s' if count > 1 else ''}"
        axes.annotate(text, (0.03, 0.82), xycoords="axes fraction", fontsize=FONT_SIZE - 1)
