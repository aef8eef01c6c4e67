"""A reproduction: what it runs, what its file keeps, and the section and pictures that a page shows of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastgen.errors import InvalidArgumentError, RecordingError
from fastgen.lab.machine import machine_facts
from fastgen.lab.metrics.summary import summarize
from fastgen.lab.records import Run
from fastgen.lab.report.drawing import png
from fastgen.lab.report.points import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
# Figures of a run that a file keeps, by the names of summaries.
_KEPT: Final = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "mean_e2el_ms",
    "p90_e2el_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    *(f"p{percent}_itl_ms" for percent in (50, 90, 95, 99)),
    *(f"effective_{what}_{rate}" for rate in (2, 4, 6) for what in ("throughput", "share")),
    "paper_throughput",
    "paper_latency_s",
    *(f"paper_p{percent}_gap_ms" for percent in (50, 90, 95)),
)
# Significant digits of figures in files: more than any interval resolves.
_DIGITS: Final = 5


@dataclass(frozen=True)
class Setting:
    """The size of a run of a reproduction, and its checkpoint."""

    # Few requests and loads: enough to see that it works, too few for its figures.
    small: bool = False
    # Directory of the checkpoint for what is measured on this machine.
    model: str | None = None

    def measured_model(self) -> str:
        """Returns the checkpoint to measure.

        :raises InvalidArgumentError: if none was given.
        """
        if self.model is None:
            raise InvalidArgumentError(
                "this reproduction measures a model on this machine: name its directory, or a built-in, with --model"
            )
        return self.model


@dataclass(frozen=True)
class Reproduction:
    """One reproduction of a published measurement."""

    name: str
    title: str
    # Returns JSON.
    run: Callable[[Setting], dict[str, Any]]
    # Returns a section in Markdown, without its heading, from what ``run`` returned.
    section: Callable[[Result], str]
    # Returns pictures by name, from what ``run`` returned.
    pictures: Callable[[Result], dict[str, Figure]]


def kept(run: Run) -> dict[str, Any]:
    """Returns the figures of a run for a file: value, and the ends of its interval where there is one."""
    summary = summarize(run)
    found: dict[str, Any] = {}
    for name in _KEPT:
        figure = summary[name]
        if figure.value is not None:
            found[name] = [rounded(each) for each in (figure.value, *(figure.interval or ()))]
    return found


def measured(figures: Mapping[str, Any], name: str) -> Measured | None:
    """Returns a figure that :func:`kept` wrote; ``None`` if it was not known."""
    found = figures.get(name)
    return None if found is None else Measured(*found)


def value(figures: Mapping[str, Any], name: str) -> float:
    """Returns the value of a figure that :func:`kept` wrote; NaN if it was not known."""
    found = figures.get(name)
    return float("nan") if found is None else float(found[0])


def rounded(number: float) -> float:
    """Returns ``number`` with so many digits as files have."""
    return float(f"{number:.{_DIGITS}g}")


def write_result(reproduction: Reproduction, result: Result, path: str | Path) -> None:
    """Writes what a reproduction returned to ``path``, with the machine and the date.

    :raises RecordingError: if it cannot be written.
    """
    content = {
        "reproduction": reproduction.name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_facts(),
        "result": result,
    }
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RecordingError(f"the result cannot be written: {error.strerror}", file=str(path)) from error


def read_result(path: str | Path) -> dict[str, Any]:
    """Returns what :func:`write_result` wrote."""
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return content


def write_pictures(reproduction: Reproduction, result: Result, directory: str | Path) -> list[Path]:
    """Writes the pictures of a result to ``directory`` as ``lab_NAME.png``; returns the files.

    :raises InvalidArgumentError: if matplotlib is not installed.
    :raises RecordingError: if a file cannot be written.
    """
    written = []
    for name, figure in reproduction.pictures(result).items():
        path = Path(directory) / f"lab_{name}.png"
        try:
            path.write_bytes(png(figure))
        except OSError as error:
            raise RecordingError(f"the picture cannot be written: {error.strerror}", file=str(path)) from error
        written.append(path)
    return written
