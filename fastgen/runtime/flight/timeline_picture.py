"""A recording as a picture: tokens and time of the steps, running and waiting sequences, preemptions, and the holder of
each block.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastgen.errors import InvalidArgumentError, RecordingError
from fastgen.runtime.flight import timeline
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.timeline import BlockMap, Series
from fastgen.version import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

# Okabe and Ito's colours, which remain distinct with the common kinds of colour blindness.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_REQUESTS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#56B4E9", "#F0E442", _RED)
_FREE, _CACHED, _SHARED, _OTHERS = "#FFFFFF", "#DDDDDD", "#333333", "#999999"


def draw(recording: Recording, path: str | Path) -> None:
    """Writes a picture of ``recording`` to ``path``, whose suffix (``.png``, ``.svg``) chooses the format.

    :raises InvalidArgumentError: if nothing was recorded, the suffix is another one, or matplotlib is missing.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise InvalidArgumentError(f"{path}: the picture is written as .png or .svg; end the file's name so")
    if not recording.steps:
        raise InvalidArgumentError("the recording holds no step, so there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgumentError(
            f"drawing needs matplotlib, which is not installed; {install_command('bench')}"
        ) from None
    figure = Figure(figsize=(11, 9), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(2, 1.2, 1.2, 3))
    values = timeline.series(recording)
    header = recording.header
    name = Path(header.model).name
    title = f"{name}: {len(recording.steps):,} steps, {len(recording.arrivals):,} requests"
    figure.suptitle(f"{title}, recorded from {header.started[:19].replace('T', ' ')} UTC on")
    _draw_tokens(axes[0], values, header.engine.token_budget)
    _draw_times(axes[1], values)
    _draw_sequences(axes[2], values)
    _draw_blocks(axes[3], recording, values)
    axes[3].set_xlabel("seconds since the first step")
    axes[3].set_xlim(0, values.end_s[-1] or 1)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise RecordingError(f"the picture cannot be written: {error.strerror}", file=str(path)) from error


def _draw_tokens(axes: Axes, values: Series, token_budget: int) -> None:
    edges, decodes = _outline(values, values.decodes)
    _, total = _outline(values, values.decodes + values.prompts)
    axes.fill_between(edges, decodes, color=_BLUE, linewidth=0, label="decodes")
    axes.fill_between(edges, decodes, total, color=_ORANGE, linewidth=0, label="prompt tokens")
    axes.axhline(token_budget, color="black", linewidth=0.8, linestyle="--", label=f"budget {token_budget:,}")
    _finish(axes, "tokens a step")


def _draw_times(axes: Axes, values: Series) -> None:
    axes.plot(*_line(values, (values.end_s - values.start_s) * 1e3), color=_GREEN, linewidth=0.8, label="step time")
    axes.set_ylim(bottom=0)
    _finish(axes, "ms a step")


def _draw_sequences(axes: Axes, values: Series) -> None:
    axes.plot(*_line(values, values.running), color=_BLUE, linewidth=1.2, label="running")
    axes.plot(*_line(values, values.waiting), color=_ORANGE, linewidth=1.2, label="waiting")
    preempting = values.preemptions > 0
    if preempting.any():
        label = f"preemptions ({values.preemptions.sum():,})"
        x = values.start_s[preempting]
        axes.plot(x, values.running[preempting], "v", color=_RED, markersize=5, label=label)
    axes.set_ylim(bottom=0)
    _finish(axes, "sequences")


def _draw_blocks(axes: Axes, recording: Recording, values: Series) -> None:
    num_blocks = recording.header.engine.num_blocks - 1
    axes.set_ylim(0, num_blocks)
    try:
        blocks = timeline.block_map(recording)
    except InvalidArgumentError:  # the first holders are not known, so neither are the later ones
        _draw_held(axes, values, num_blocks, len(values.start_s))
        _finish(axes, "blocks held (whose is not known:\nearlier steps are gone)")
        return
    _draw_held(axes, values, num_blocks, int(np.searchsorted(values.start_s, blocks.start_s)))
    _finish(axes, "KV cache blocks", _draw_map(axes, blocks, values))


def _draw_held(axes: Axes, values: Series, num_blocks: int, num_steps: int) -> None:
    """Draws how many blocks were held during and between the first ``num_steps`` steps."""
    edges, free = _line(values, values.blocks_free)
    axes.fill_between(
        edges[: 2 * num_steps], num_blocks - free[: 2 * num_steps], color=_OTHERS, linewidth=0, label="held"
    )


def _draw_map(axes: Axes, blocks: BlockMap, values: Series) -> list[Patch]:
    """Draws the cells; returns the entries of the legend."""
    from matplotlib.colors import ListedColormap, to_rgba
    from matplotlib.patches import Patch

    colours = (_FREE, _CACHED, _SHARED, _OTHERS, *_REQUESTS)
    extent = (blocks.start_s, float(values.end_s[-1]) or 1.0, float(len(blocks.cells)), 0.0)
    axes.imshow(
        blocks.cells,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([to_rgba(colour) for colour in colours]),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        extent=extent,
    )
    named = [f"request {request}" for request in blocks.requests]
    present = set(np.unique(blocks.cells).tolist())
    labels = enumerate(("free", "cached", "shared", "other requests", *named))
    return [
        Patch(facecolor=colours[code], edgecolor="#666666", linewidth=0.5, label=label)
        for code, label in labels
        if code in present
    ]


def _outline(values: Series, heights: Any) -> tuple[Any, Any]:
    """Returns the outline of one bar per step, from its start to its end, and zero between steps."""
    edges = np.stack([values.start_s, values.start_s, values.end_s, values.end_s], axis=1).ravel()
    zeros = np.zeros(len(heights))
    return edges, np.stack([zeros, heights, heights, zeros], axis=1).ravel()


def _line(values: Series, heights: Any) -> tuple[Any, Any]:
    """Returns a line that is level during each step and straight from one step to the next."""
    return np.stack([values.start_s, values.end_s], axis=1).ravel(), np.repeat(heights, 2)


def _finish(axes: Axes, title: str, handles: list[Patch] | None = None) -> None:
    axes.set_ylabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
