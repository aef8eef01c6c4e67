"""Tables of results: the rows that terminal and HTML share, and the terminal's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastgen.lab.report.points import Measured, measured
from fastgen.lab.report.results import Result
from fastgen.lab.report.series import load_of, series, swept

# Name of a figure in JSON, its heading, and its unit.
COLUMNS: Final = (
    ("request_throughput", "throughput", "requests/s"),
    ("output_throughput", "output", "tokens/s"),
    ("median_ttft_ms", "TTFT P50", "ms"),
    ("p99_ttft_ms", "TTFT P99", "ms"),
    ("median_tpot_ms", "TPOT P50", "ms"),
    ("p99_itl_ms", "ITL P99", "ms"),
    ("mean_e2el_ms", "E2E mean", "ms"),
)
_UNKNOWN: Final = "–"
# Columns of a table that goes to a file or a pipe.
_FILE_WIDTH: Final = 120
# Half of an interval, in percent of the figure, below which its size is not printed.
_LEAST_PERCENT: Final = 0.1


@dataclass(frozen=True)
class Row:
    """One run as text."""

    label: str
    load: str
    # Answered of sent requests.
    requests: str
    # One for each of ``COLUMNS``.
    figures: tuple[Measured | None, ...]
    file: str
    warning: str | None


def headings() -> tuple[str, ...]:
    """Returns the headings of :attr:`Row.figures`, with their units."""
    return tuple(f"{heading}, {unit}" for _, heading, unit in COLUMNS)


def rows(results: Sequence[Result]) -> list[Row]:
    """Returns one row for each result, in series; those whose figures must not be used come last."""
    axis = swept(results)
    ordered = [(one.label, each) for one in series(results) for each in one.results]
    ordered += [("not used", each) for each in results if not each.usable]
    return [_row(label, each, axis[0] if axis else None) for label, each in ordered]


def _row(label: str, result: Result, load: str | None) -> Row:
    value = load_of(result, load) if load else None
    summary = result.summary
    answered, failed = int(summary["completed"].value or 0), int(summary["failed"].value or 0)
    return Row(
        label=label,
        load=_UNKNOWN if value is None else f"{value:g}",
        requests=f"{answered:,} of {answered + failed:,}",
        figures=tuple(measured(summary, name) for name, _, _ in COLUMNS),
        file=result.file,
        warning=result.warning,
    )


def with_interval(value: Measured | None) -> str:
    """Returns a figure for people, such as ``12.3 [11.9, 12.8]``."""
    if value is None:
        return _UNKNOWN
    if value.low is None or value.high is None:
        return number(value.value)
    return f"{number(value.value)} [{number(value.low)}, {number(value.high)}]"


def _with_share(value: Measured | None) -> str:
    """Returns a figure for a narrow column: half of its interval stands below it, as a share."""
    if value is None or not value.value or value.low is None or value.high is None:
        return with_interval(value)
    share = 50 * (value.high - value.low) / abs(value.value)
    return f"{number(value.value)}\n{f'±{share:.2g}' if share > _LEAST_PERCENT else f'±<{_LEAST_PERCENT}'} %"


def number(value: float) -> str:
    """Returns ``value`` with three digits, and without exponent."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def print_table(results: Sequence[Result], console: Console | None = None) -> None:
    """Prints a row for each result. Warnings about runs stand below the table."""
    found = rows(results)
    axis = swept(results)
    table = Table(title="± half of the 95 % interval", title_justify="left", box=None, pad_edge=False)
    table.add_column("run", overflow="fold", min_width=12)
    table.add_column(axis[1] if axis else "load", justify="right")
    table.add_column("answered", justify="right")
    for heading in headings():
        table.add_column(heading.replace(", ", "\n"), justify="right", overflow="fold")
    for number_of_row, row in enumerate(found, start=1):
        mark = f" ({number_of_row})" if row.warning else ""
        table.add_row(escape(row.label + mark), row.load, row.requests, *map(_with_share, row.figures))
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_FILE_WIDTH)
    console.print(table)
    for number_of_row, row in enumerate(found, start=1):
        if row.warning:
            console.print(f"({number_of_row}) {row.file}: {row.warning}", markup=False, highlight=False)


def facts_lines(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields names and values of a header's facts, nested ones with dots in their names."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{below}", text) for below, text in facts_lines(value))
        elif value is not None:
            yield name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
