"""Figures of matplotlib in the style of all pictures of the lab, readable without colour."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastgen.errors import InvalidArgumentError
from fastgen.version import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Dots an inch of a PNG.
_DPI: Final = 110
_WIDTH_INCHES: Final = 8.6
_GRID: Final[dict[str, Any]] = {"color": "#d9d9d9", "linewidth": 0.6}
FONT_SIZE: Final = 10


class Style(NamedTuple):
    """The look of one series. Each differs from the others in marker, line and hatch, so colour is not needed."""

    colour: str
    marker: str
    line: str
    hatch: str


# Okabe and Ito's colours, which remain distinct with the common kinds of colour blindness, in an order in which
# neighbours differ in brightness too.
STYLES: Final = (
    Style("#0072B2", "o", "-", ""),
    Style("#E69F00", "s", "--", "//"),
    Style("#000000", "^", "-.", "xx"),
    Style("#CC79A7", "D", ":", ".."),
    Style("#009E73", "v", (0, (6, 1, 1, 1, 1, 1)), "\\\\"),  # type: ignore[arg-type]  # a pattern of dashes
    Style("#56B4E9", "P", (0, (8, 2)), "++"),  # type: ignore[arg-type]
    Style("#D55E00", "X", (0, (1, 1)), "--"),  # type: ignore[arg-type]
)


def styles() -> Iterator[Style]:
    """Yields the styles in their order, again from the first when all were used."""
    return cycle(STYLES)


def new_figure(*, height: float = 4.6, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure of ``height`` inches, and its axes row by row.

    :raises InvalidArgumentError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgumentError(
            f"drawing needs matplotlib, which is not installed; {install_command('bench')}"
        ) from None
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).ravel())


def finish(axes: Axes, *, x: str, y: str, title: str = "", legend: bool = True, **place: Any) -> None:
    """Names the axes, draws the grid, and puts a legend where its series have names."""
    axes.set_xlabel(x, fontsize=FONT_SIZE)
    axes.set_ylabel(y, fontsize=FONT_SIZE)
    if title:
        axes.set_title(title, fontsize=FONT_SIZE + 1, loc="left")
    axes.grid(visible=True, **_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=FONT_SIZE - 1, handlelength=3.5, **place)


def png(figure: Figure) -> bytes:
    """Returns the figure as a PNG. The same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()
