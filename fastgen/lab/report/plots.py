"""The plots of measurements: curves, bars, and times of forward passes. Each returns a figure of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastgen.lab.report.drawing import FONT_SIZE, Style, finish, new_figure, styles
from fastgen.lab.report.points import Bars, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Share of the place of a group that its bars fill.
_GROUP_WIDTH = 0.8
# Notes of points are left out nearer to another note of the curve than this share of an axis.
_NOTE_DISTANCE = 0.045


def curve_plot(
    curves: Sequence[Curve],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    diagonal: bool = False,
) -> Figure:
    """Returns a plot of ``curves`` with their intervals and notes.

    ``diagonal`` adds the line on which y is proportional to x, through the first point of the first curve.
    """
    figure, (axes,) = new_figure()
    draw_curves(axes, curves)
    if diagonal:
        _draw_proportional(axes, curves[0])
    axes.set_ylim(bottom=0)
    if log_x:
        _scale_by_octaves(axes)
    else:
        axes.set_xlim(left=0)
        _draw_notes(axes, curves)
    finish(axes, x=x, y=y)
    return figure


def panel_plot(
    panels: Mapping[str, Sequence[Curve]],
    *,
    x: str,
    y: str,
    columns: int = 3,
    share_x: bool = True,
    share_y: bool = True,
) -> Figure:
    """Returns one plot for each title of ``panels``, side by side, with one legend. They have the same axes, unless
    ``share_x`` or ``share_y`` is false.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, all_axes = new_figure(height=3.4 * rows + 0.6, rows=rows, columns=columns, sharex=share_x, sharey=share_y)
    for place, (axes, (title, curves)) in enumerate(zip(all_axes, panels.items(), strict=False)):
        draw_curves(axes, curves)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        is_last_row = place + columns >= len(panels)
        finish(axes, x=x if is_last_row else "", y=y if place % columns == 0 else "", title=title, legend=False)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, handlelength=3.5
    )
    return figure


def draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draws each curve in a style of its own, with error bars."""
    for curve, style in zip(curves, styles(), strict=False):
        points = curve.points
        if not points:
            continue
        xs, ys = [point.x for point in points], [point.y for point in points]
        axes.errorbar(
            [each.value for each in xs],
            [each.value for each in ys],
            xerr=_errors([each.errors for each in xs]),
            yerr=_errors([each.errors for each in ys]),
            label=curve.label,
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            markersize=6,
            markerfacecolor="white" if curve.is_reference else style.colour,
            linewidth=1.5,
            elinewidth=1.0,
            capsize=3,
        )


def _draw_notes(axes: Axes, curves: Sequence[Curve]) -> None:
    """Writes the notes beside the points, where there is room. The limits of ``axes`` must be final."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for curve, style in zip(curves, styles(), strict=False):
        last = (-1.0, -1.0)
        for point in curve.points:
            place = (point.x.value - left) / (right - left), (point.y.value - bottom) / (top - bottom)
            if point.note and max(abs(place[0] - last[0]), abs(place[1] - last[1])) > _NOTE_DISTANCE:
                last = place
                axes.annotate(
                    point.note,
                    (point.x.value, point.y.value),
                    xytext=(7, -12),
                    textcoords="offset points",
                    fontsize=FONT_SIZE - 2,
                    color=style.colour,
                )


def bar_plot(groups: Sequence[str], series: Sequence[Bars], *, x: str = "", y: str, title: str = "") -> Figure:
    """Returns bars for each of ``groups``, those of one series in one style, with intervals and their values."""
    figure, (axes,) = new_figure()
    width = _GROUP_WIDTH / max(len(series), 1)
    for place, (bars, style) in enumerate(zip(series, styles(), strict=False)):
        _draw_bars(axes, bars, (place + 0.5) * width - _GROUP_WIDTH / 2, width, style)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.12)
    finish(axes, x=x, y=y, title=title)
    axes.grid(visible=False, axis="x")
    return figure


def _draw_bars(axes: Axes, bars: Bars, offset: float, width: float, style: Style) -> None:
    known = [(place, value) for place, value in enumerate(bars.values) if value is not None]
    drawn = axes.bar(
        [place + offset for place, _ in known],
        [value.value for _, value in known],
        width * 0.92,
        yerr=_errors([value.errors for _, value in known]),
        label=bars.label,
        color="white",
        edgecolor=style.colour,
        hatch=style.hatch or None,
        linewidth=1.2,
        error_kw={"elinewidth": 1.0, "capsize": 3},
    )
    if not style.hatch:
        for patch in drawn:
            patch.set_facecolor(style.colour)
    axes.bar_label(drawn, [_short(value.value) for _, value in known], fontsize=FONT_SIZE - 2, padding=2)


def _draw_proportional(axes: Axes, curve: Curve) -> None:
    first, last = curve.points[0], curve.points[-1]
    ends = (first.x.value, last.x.value)
    slope = first.y.value / first.x.value
    axes.plot(ends, [slope * end for end in ends], color="#777777", linewidth=1, linestyle=":", label="proportional")


def _scale_by_octaves(axes: Axes) -> None:
    """Makes the horizontal axis logarithmic, with powers of 2 as its ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.6g}")


def _errors(pairs: Sequence[tuple[float, float]]) -> list[list[float]] | None:
    if not any(below or above for below, above in pairs):
        return None
    return [[below for below, _ in pairs], [above for _, above in pairs]]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
