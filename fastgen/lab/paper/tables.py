"""Tables in Markdown, and numbers in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fastgen.lab.report.table import number

_UNKNOWN = "–"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def three(value: float | None) -> str:
    """Returns a number with three digits, and a dash for what is not known."""
    return _UNKNOWN if value is None or math.isnan(value) else number(value)


def share(value: float) -> str:
    """Returns a share in percent, such as ``3.2 %``."""
    if math.isnan(value):
        return _UNKNOWN
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"
