"""The pictures of a report: which of them the runs and recordings can fill, with a sentence on how to read each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastgen.lab.metrics.figures import PAPER_RATES, PERCENTS
from fastgen.lab.report import forwards, plots, step_plots
from fastgen.lab.report.points import Bars, Curve, Measured, Point, measured
from fastgen.lab.report.results import Collection, Result
from fastgen.lab.report.series import Series, load_of, series, swept
from fastgen.lab.report.timelines import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The clients at which the paper compares the gaps between tokens.
_PAPER_CLIENTS: Final = 16
# Recordings that fit on one picture of steps.
_MOST_RECORDINGS: Final = 4


@dataclass(frozen=True)
class Picture:
    """A plot with its file name and the sentence below it."""

    name: str
    title: str
    caption: str
    figure: Figure


def pictures(collection: Collection) -> Iterator[Picture]:
    """Yields the pictures for which there is something to draw.

    :raises InvalidArgumentError: if matplotlib is not installed.
    """
    found = series(collection.results)
    axis = swept(each for one in found for each in one.results)
    if axis is not None:
        yield from _load_pictures(found, *axis)
    if found:
        yield from _gap_picture(found, axis)
    if collection.recordings:
        yield from _recording_pictures(collection)


def _load_pictures(found: Sequence[Series], load: str, unit: str) -> Iterator[Picture]:
    curves = _curves(found, _throughput, _mean_latency_s, load)
    yield Picture(
        "throughput_latency",
        "Throughput and latency",
        f"Mean end-to-end latency against answered requests a second of wall clock. Numbers beside points: {unit}. "
        "Points are joined in the order of the load. Bars are 95 % intervals.",
        plots.curve_plot(curves, x="throughput (requests/s)", y="mean end-to-end latency (s)"),
    )
    panels = {
        f"SLA {sla} tokens/s": _curves(found, lambda each: _load(each, load), _effective(sla)) for sla in PAPER_RATES
    }
    yield Picture(
        "effective_throughput",
        "Effective throughput",
        "Good requests a second by the FastGen paper's rule: the first token within prompt tokens/512 s, and the "
        "moving average of the gaps below 1/SLA at every later token. Bars are 95 % intervals.",
        plots.panel_plot(panels, x=unit, y="good requests/s"),
    )
    if load == "target.replicas":
        curves = _curves(found, lambda each: _load(each, load), _throughput)
        yield Picture(
            "replicas",
            "Scaling over replicas",
            "Answered requests a second against the number of replicas. The dotted line is proportional growth.",
            plots.curve_plot(curves, x="replicas", y="throughput (requests/s)", diagonal=True),
        )


def _gap_picture(found: Sequence[Series], axis: tuple[str, str] | None) -> Iterator[Picture]:
    chosen, at = _same_load(found, axis)
    groups = [f"P{each}" for each in PERCENTS]
    bars = [
        Bars(label, tuple(measured(each.summary, f"p{rank}_itl_ms") for rank in PERCENTS)) for label, each in chosen
    ]
    if any(value is not None for each in bars for value in each.values):
        yield Picture(
            "token_gaps",
            "Gaps between tokens",
            f"Percentiles of the gaps between tokens (ITL){at}. Bars are 95 % intervals. A percentile is left out if "
            "there are too few gaps for it.",
            plots.bar_plot(groups, bars, x="percentile", y="gap between tokens (ms)"),
        )


def _same_load(found: Sequence[Series], axis: tuple[str, str] | None) -> tuple[list[tuple[str, Result]], str]:
    """Returns a run of each series at the same load: that of the paper if all have it, else the highest that all have,
    else the last of each. The text says which.
    """
    last = [(each.label, each.results[-1]) for each in found]
    if axis is None:
        return last, ""
    name, unit = axis
    by_load = [{load_of(one, name): one for one in each.results} for each in found]
    common = set.intersection(*(set(each) for each in by_load)) - {None}
    if not common:
        return last, " at the highest load of each"
    load = _PAPER_CLIENTS if _PAPER_CLIENTS in common else max(each for each in common if each is not None)
    return [(each.label, runs[load]) for each, runs in zip(found, by_load, strict=True)], f" at {load:g} {unit}"


def _recording_pictures(collection: Collection) -> Iterator[Picture]:
    drawn = {name: each for name, each in collection.recordings.items() if each.steps}
    passes = forwards.forwards(drawn.values())
    spread = "Points are medians of at least five steps, bars reach from P25 to P75."
    by_tokens, by_sequences = forwards.latency_by_tokens(passes), forwards.latency_by_sequences(passes)
    if by_tokens:
        yield Picture(
            "latency_tokens",
            "Time of a forward pass and its tokens",
            f"Each curve has steps with so many sequences. {spread}",
            plots.curve_plot(by_tokens, x="tokens in the forward pass", y="time of the forward pass (ms)", log_x=True),
        )
    if by_sequences:
        yield Picture(
            "latency_sequences",
            "Time of a forward pass and its sequences",
            f"Each curve has steps with so many tokens. {spread}",
            plots.curve_plot(by_sequences, x="sequences in the forward pass", y="time of the forward pass (ms)"),
        )
    if curves := forwards.throughput_by_tokens(passes):
        yield Picture(
            "throughput_tokens",
            "Tokens a second and the tokens of a forward pass",
            spread,
            plots.curve_plot(curves, x="tokens in the forward pass", y="throughput (tokens/s)"),
        )
    shown = dict(list(drawn.items())[:_MOST_RECORDINGS])
    if shown:
        labels = {f"{each.header.engine.policy} ({name})": Timeline.of(each) for name, each in shown.items()}
        yield Picture(
            "steps",
            "Steps over time",
            "Each bar is a step: its width is its time, its height its tokens on a logarithmic scale.",
            step_plots.policy_timeline(step_plots.same_interval(labels)),
        )
        yield Picture(
            "cache",
            "Requests and KV cache over time",
            "Above: running and waiting requests. Below: the share of the KV cache's blocks that they hold.",
            step_plots.cache_plot(labels),
        )


_Value = Callable[[Result], Measured | None]


def _curves(found: Sequence[Series], x: _Value, y: _Value, note: str = "") -> list[Curve]:
    """Returns a curve for each series; ``note`` is the load fact beside each point."""
    curves = []
    for each in found:
        points = []
        for one in each.results:
            across, up = x(one), y(one)
            if across is not None and up is not None:
                load = load_of(one, note) if note else None
                points.append(Point(across, up, "" if load is None else f"{load:g}"))
        curves.append(Curve(each.label, tuple(points)))
    return [curve for curve in curves if curve.points]


def _load(result: Result, name: str) -> Measured | None:
    value = load_of(result, name)
    return None if value is None else Measured(value)


def _throughput(result: Result) -> Measured | None:
    return measured(result.summary, "request_throughput")


def _mean_latency_s(result: Result) -> Measured | None:
    found = measured(result.summary, "mean_e2el_ms")
    return found and found.scaled(1e-3)


def _effective(tokens_per_s: int) -> _Value:
    return lambda each: measured(each.summary, f"effective_throughput_{tokens_per_s}")
