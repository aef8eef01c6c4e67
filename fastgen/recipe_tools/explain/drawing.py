"""Draws a recipe as one scene on a grid of character cells, from which both text and SVG are made.

The stream runs down the left side. A branch leaves it to the right, passes its boxes, and returns at a ⊕. Parallel
parts are drawn side by side and meet in a ⊕. Alternatives are drawn side by side too, but meet in a ○.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from fastgen.recipe_tools.explain.explain import Branch, Explanation, Lane, LayerKind
from fastgen.recipe_tools.explain.reading import Box
from fastgen.recipe_tools.explain.wrap import wrapped

MIN_WIDTH: Final = 40
DEFAULT_WIDTH: Final = 80
# Width of pictures, and the widest drawing by default: longer lines are hard to read.
MAX_WIDTH: Final = 96

_STREAM: Final = 5  # column of the stream
_INDENT: Final = 2  # first column of boxes on the stream
_CONTENT: Final = 10  # first column of a branch's boxes
_GAP: Final = 3  # columns between boxes side by side
_LEAST_COLUMN: Final = 12  # columns of the narrowest box
_LEAST_BESIDE: Final = 18  # fewest columns for a text beside its label; with fewer it goes below the label

Style = Literal["title", "label", "text"]


@dataclass(frozen=True)
class Span:
    """A run of text in one row, from column ``x`` on."""

    x: int
    y: int
    text: str
    style: Style


@dataclass(frozen=True)
class Rectangle:
    """A box of ``width`` by ``height`` cells, including its border, at ``(x, y)``, with texts inside.

    ``node`` is the recipe node that it shows. A ``frame`` encloses other boxes.
    """

    x: int
    y: int
    width: int
    height: int
    node: str
    spans: tuple[Span, ...]
    frame: bool = False

    @property
    def right(self) -> int:
        """The column of the right border."""
        return self.x + self.width - 1

    @property
    def bottom(self) -> int:
        """The row of the lower border."""
        return self.y + self.height - 1


@dataclass(frozen=True)
class Joint:
    """A point where wires meet: ``⊕`` adds, ``○`` takes the one that exists; a fork has no ``sign``."""

    x: int
    y: int
    sign: Literal["⊕", "○", ""]


End = Rectangle | Joint


@dataclass(frozen=True)
class Wire:
    """A path of vectors from ``start`` to ``end``: the cells at which it turns, with the first and last on the ends."""

    start: End
    end: End
    points: tuple[tuple[int, int], ...]
    arrow: bool


@dataclass
class Scene:
    """Everything that is drawn. ``width`` and ``height`` are in cells."""

    title: str
    description: str
    width: int
    height: int = 0
    rectangles: list[Rectangle] = field(default_factory=list)
    joints: list[Joint] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    labels: list[Span] = field(default_factory=list)

    def spans(self) -> list[Span]:
        """Returns all texts, from top to bottom and left to right."""
        inside = [span for rectangle in self.rectangles for span in rectangle.spans]
        return sorted(self.labels + inside, key=lambda span: (span.y, span.x))


def draw(explanation: Explanation, width: int = DEFAULT_WIDTH) -> Scene:
    """Draws the scene, ``width`` columns wide, but at least :data:`MIN_WIDTH`, and 70 for four parts side by side."""
    branches = [branch for kind in explanation.layers for branch in kind.branches]
    most = max(sum(len(lane.alternatives) for lane in branch.lanes) for branch in branches) if branches else 1
    needed = _CONTENT + _INDENT + 1 + most * (_LEAST_COLUMN + _GAP) - _GAP
    layout = _Layout(explanation, max(width, MIN_WIDTH, needed))
    layout.model(explanation)
    return layout.scene


class _Layout:
    """Places the boxes from top to bottom. ``y`` is the first free row; ``tail`` is the current end of the stream."""

    def __init__(self, explanation: Explanation, width: int):
        title = f"{explanation.recipe}: {', '.join(explanation.architectures)}"
        self.scene = Scene(title, " ".join(explanation.sentences), width)
        self.width = width
        self.y = 0
        self.tail: End | None = None

    def model(self, explanation: Explanation) -> None:
        for box in explanation.embedding:
            self.added(box) if box.added else self.on_stream(box)
        for kind in explanation.layers:
            self.layers(kind)
        for box in explanation.ending:
            self.on_stream(box)
        self.y += 1
        for box in explanation.legend:
            self.y = self.box(box, 0, self.y, self.width).bottom + 1
        self.scene.height = self.y

    # ---------------------------------------------------------------------------------------------- on the stream

    def on_stream(self, box: Box) -> None:
        """Places a box that the whole stream goes through."""
        if self.tail is not None:
            self.y += 1
        rectangle = self.box(box, _INDENT, self.y, self.width - 2 * _INDENT)
        self.flow(rectangle, rectangle.y, arrow=True)
        self.y = rectangle.bottom + 1

    def added(self, box: Box) -> None:
        """Places a box beside the stream whose output is added to it."""
        self.y += 1
        rectangle = self.box(box, _CONTENT, self.y, self.width - _CONTENT - _INDENT)
        joint = self.joint(_STREAM, rectangle.y + 1, "⊕")
        self.flow(joint, joint.y)
        self.wire(rectangle, joint, (rectangle.x, joint.y), (joint.x, joint.y))
        self.y = rectangle.bottom + 1

    def layers(self, kind: LayerKind) -> None:
        top = self.y + 1
        titles = wrapped(kind.title, self.width - _STREAM - 2 - _INDENT)
        spans = tuple(Span(_STREAM + 2, top + 1 + row, text, "title") for row, text in enumerate(titles))
        self.y = top + len(titles) + 1
        for branch in kind.branches:
            self.branch(branch)
        self.y += 1
        frame = Rectangle(0, top, self.width, self.y - top + 1, "model.layers", spans, frame=True)
        self.scene.rectangles.append(frame)
        self.y += 1

    def branch(self, branch: Branch) -> None:
        self.y += 1
        name = branch.name + (f", only if {branch.condition}" if branch.condition else "")
        for row, text in enumerate(wrapped(name, self.width - _STREAM - 2 - _INDENT - 1)):
            self.label(_STREAM + 2, self.y, text, "title" if row == 0 else "text")
            self.y += 1
        end, x = self.after(branch.after, *self.lanes(branch))
        joint = self.joint(_STREAM, end.y if isinstance(end, Joint) else end.bottom + 1, "⊕")
        self.flow(joint, joint.y)
        corner = (x, joint.y)
        points = (corner,) if isinstance(end, Joint) else ((x, end.bottom), corner)
        self.wire(end, joint, *points, (_STREAM, joint.y))
        self.y = joint.y + 1
        if branch.sum_norm is not None:
            self.on_stream(branch.sum_norm)

    # -------------------------------------------------------------------------------------------- beside the stream

    def lanes(self, branch: Branch) -> tuple[End, int]:
        """Places a branch up to where its lanes meet; returns that point and its column."""
        left, width = _CONTENT, self.width - _CONTENT - _INDENT - 1
        columns = [boxes for lane in branch.lanes for boxes in lane.alternatives]
        places = _columns(left, width, len(columns))
        source: End
        if branch.norm is not None:
            source = self.box(branch.norm, left, self.y, width)
            self.fork_into(source)
            self.y = source.bottom + 2
        elif len(columns) > 1:
            source = self.fork(self.y)
            self.y += 2
        else:
            source = self.fork(self.y + 1)
        ends = [
            self.column(boxes, source, x, column_width)
            for boxes, (x, column_width) in zip(columns, places, strict=True)
        ]
        bottom = max(end.bottom for end in ends)
        return self.meet(branch.lanes, ends, bottom + 1)

    def column(self, boxes: Sequence[Box], source: End, x: int, width: int) -> Rectangle:
        """Places boxes below one another, with ``source`` as input of the first; returns the last of them."""
        middle, y = x + width // 2, self.y
        for box in boxes:
            rectangle = self.box(box, x, y, width)
            if isinstance(source, Rectangle):
                self.wire(source, rectangle, (middle, source.bottom), (middle, rectangle.y))
            elif rectangle.y > source.y:
                self.wire(source, rectangle, (source.x, source.y), (middle, source.y), (middle, rectangle.y))
            else:
                self.wire(source, rectangle, (source.x, source.y), (rectangle.x, source.y))
            source, y = rectangle, rectangle.bottom + 2
        return rectangle

    def meet(self, lanes: Sequence[Lane], ends: Sequence[Rectangle], y: int) -> tuple[End, int]:
        """Joins alternatives and then lanes, each at the column of the first of them."""
        found: list[tuple[End, int]] = []
        remaining = list(ends)
        for lane in lanes:
            own, remaining = remaining[: len(lane.alternatives)], remaining[len(lane.alternatives) :]
            found.append(self.join([(end, _middle(end)) for end in own], y, "○"))
        if any(len(lane.alternatives) > 1 for lane in lanes):
            y += 2
        return self.join(found, y, "⊕")

    def join(self, ends: Sequence[tuple[End, int]], y: int, sign: Literal["⊕", "○"]) -> tuple[End, int]:
        """Joins all ``ends`` in row ``y``, below the first of them; a single end is returned as it is."""
        (first, x), *others = ends
        if not others:
            return first, x
        joint = self.joint(x, y, sign)
        self.wire(first, joint, (x, _lowest(first)), (x, y), arrow=False)
        for end, column in others:
            self.wire(end, joint, (column, _lowest(end)), (column, y), (x, y))
        return joint, x

    def after(self, boxes: Sequence[Box], end: End, x: int) -> tuple[End, int]:
        """Places the boxes that the sum of the lanes goes through before it is added to the stream."""
        for box in boxes:
            left, width = _CONTENT, self.width - _CONTENT - _INDENT - 1
            rectangle = self.box(box, left, _lowest(end) + 2, width)
            self.wire(end, rectangle, (x, _lowest(end)), (x, rectangle.y))
            end = rectangle
        return end, x

    def fork_into(self, rectangle: Rectangle) -> None:
        fork = self.fork(rectangle.y + 1)
        self.wire(fork, rectangle, (_STREAM, fork.y), (rectangle.x, fork.y))

    # ------------------------------------------------------------------------------------------------------- pieces

    def fork(self, y: int) -> Joint:
        """Places a point at which a branch leaves the stream."""
        fork = self.joint(_STREAM, y, "")
        self.flow(fork, y)
        return fork

    def flow(self, end: End, y: int, *, arrow: bool = False) -> None:
        """Extends the stream to ``end``, which it reaches in row ``y``."""
        if self.tail is not None:
            self.wire(self.tail, end, (_STREAM, _lowest(self.tail)), (_STREAM, y), arrow=arrow)
        self.tail = end

    def joint(self, x: int, y: int, sign: Literal["⊕", "○", ""]) -> Joint:
        joint = Joint(x, y, sign)
        self.scene.joints.append(joint)
        return joint

    def wire(self, start: End, end: End, *points: tuple[int, int], arrow: bool = True) -> None:
        turns = tuple(point for index, point in enumerate(points) if index == 0 or point != points[index - 1])
        self.scene.wires.append(Wire(start, end, turns, arrow))

    def label(self, x: int, y: int, text: str, style: Style) -> None:
        self.scene.labels.append(Span(x, y, text, style))

    def box(self, box: Box, x: int, y: int, width: int) -> Rectangle:
        """Places a box with its title at the top and one or more rows for each fact."""
        inner = width - 4
        spans = [Span(x + 2, y + 1 + row, text, "title") for row, text in enumerate(wrapped(box.title, inner))]
        column = 2 + max((len(fact.label) for fact in box.facts), default=0)
        beside = inner - column >= _LEAST_BESIDE
        row = y + 1 + len(spans)
        for fact in box.facts:
            labels = wrapped(fact.label, inner)
            spans += [Span(x + 2, row + index, text, "label") for index, text in enumerate(labels)]
            row += 0 if beside else len(labels)
            indent = column if beside else min(2, inner - 8)
            for text in wrapped(fact.text, inner - indent):
                spans.append(Span(x + 2 + indent, row, text, "text"))
                row += 1
        rectangle = Rectangle(x, y, width, row - y + 1, box.node, tuple(spans))
        self.scene.rectangles.append(rectangle)
        return rectangle


def _columns(left: int, width: int, count: int) -> list[tuple[int, int]]:
    """Returns the first column and the width of each of ``count`` boxes side by side."""
    each = (width - _GAP * (count - 1)) // count
    return [(left + index * (each + _GAP), each) for index in range(count)]


def _lowest(end: End) -> int:
    return end.bottom if isinstance(end, Rectangle) else end.y


def _middle(rectangle: Rectangle) -> int:
    return rectangle.x + rectangle.width // 2
