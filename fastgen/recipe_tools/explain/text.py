"""Writes a scene as lines of text with box-drawing characters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from fastgen.recipe_tools.explain.drawing import Joint, Rectangle, Scene, Style

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_LINES: Final = {  # by the directions of the lines in a cell
    **{0: " ", _UP: "│", _DOWN: "│", _LEFT: "─", _RIGHT: "─", _UP | _DOWN: "│", _LEFT | _RIGHT: "─"},
    **{_DOWN | _RIGHT: "┌", _DOWN | _LEFT: "┐", _UP | _RIGHT: "└", _UP | _LEFT: "┘"},
    **{_UP | _DOWN | _RIGHT: "├", _UP | _DOWN | _LEFT: "┤", _DOWN | _LEFT | _RIGHT: "┬", _UP | _LEFT | _RIGHT: "┴"},
    _UP | _DOWN | _LEFT | _RIGHT: "┼",
}
_HEADS: Final = {(0, 1): "▼", (0, -1): "▲", (1, 0): "▶", (-1, 0): "◀"}

Cell = tuple[str, Style | None]


def as_text(scene: Scene) -> str:
    """Returns the drawing, one line per row, each with at most ``scene.width`` characters."""
    return "".join("".join(character for character, _ in row).rstrip() + "\n" for row in cells(scene))


def cells(scene: Scene) -> list[list[Cell]]:
    """Returns the characters of every row, with the style of those that are text."""
    rows = _lines(scene)
    for span in scene.spans():
        for offset, character in enumerate(span.text):
            rows[span.y][span.x + offset] = (character, span.style)
    return rows


def _lines(scene: Scene) -> list[list[Cell]]:
    directions = [[0] * scene.width for _ in range(scene.height)]
    signs: dict[tuple[int, int], str] = {}
    for rectangle in scene.rectangles:
        if rectangle.frame:
            signs.update(_frame(rectangle))
        else:
            right, bottom = rectangle.right, rectangle.bottom
            corners = [(rectangle.x, rectangle.y), (right, rectangle.y), (right, bottom), (rectangle.x, bottom)]
            for start, end in pairwise([*corners, corners[0]]):
                _stroke(directions, start, end)
    for wire in scene.wires:
        path = list(wire.points)
        for start, end in pairwise(path):
            for cell in _between(start, end):
                signs.pop(cell, None)  # the wire passes through a frame
        (x0, y0), (x1, y1) = path[-2:]
        step = ((x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0))
        before = (x1 - step[0], y1 - step[1])
        for start, end in pairwise([*path[:-1], before]):
            _stroke(directions, start, end)
        if wire.arrow:
            signs[before] = _HEADS[step]
        elif isinstance(wire.end, Joint):
            _stroke(directions, before, (x1, y1))
    signs.update({(joint.x, joint.y): joint.sign for joint in scene.joints if joint.sign})
    rows: list[list[Cell]] = [[(_LINES[cell], None) for cell in row] for row in directions]
    for (x, y), sign in signs.items():
        rows[y][x] = (sign, None)
    return rows


def _stroke(directions: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    (x0, y0), (x1, y1) = start, end
    for y in range(min(y0, y1), max(y0, y1)):
        directions[y][x0] |= _DOWN
        directions[y + 1][x0] |= _UP
    for x in range(min(x0, x1), max(x0, x1)):
        directions[y0][x] |= _RIGHT
        directions[y0][x + 1] |= _LEFT


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    (x0, y0), (x1, y1) = start, end
    for y in range(min(y0, y1), max(y0, y1) + 1):
        for x in range(min(x0, x1), max(x0, x1) + 1):
            yield x, y


def _frame(rectangle: Rectangle) -> dict[tuple[int, int], str]:
    left, right, top, bottom = rectangle.x, rectangle.right, rectangle.y, rectangle.bottom
    signs = {(x, y): "╌" for x in range(left, right + 1) for y in (top, bottom)}
    signs |= {(x, y): "╎" for x in (left, right) for y in range(top, bottom + 1)}
    return signs | {(left, top): "╭", (right, top): "╮", (left, bottom): "╰", (right, bottom): "╯"}
