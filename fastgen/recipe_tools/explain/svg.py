"""Writes a scene as an SVG picture: self-contained, without scripts, readable on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from fastgen.recipe_tools.explain.drawing import Rectangle, Scene, Span, Wire

CELL_WIDTH: Final = 8.4
CELL_HEIGHT: Final = 18.0
# Common monospaced fonts give a character 0.6 of this size, which is less than a cell, so text stays inside.
FONT_SIZE: Final = 13.0

_MARGIN: Final = 12.0
_RADIUS: Final = 8.0  # of a joint's circle
_STYLE: Final = """
text { font: %(size)gpx ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; }
.title { font-weight: bold; }
.label { fill: #59636e; }
.ground { fill: #ffffff; }
.frame { fill: #f6f8fa; stroke: #818b98; stroke-dasharray: 5 4; }
.box { fill: #ffffff; stroke: #818b98; }
.norm { fill: #fff8e1; stroke: #b08800; }
.attention { fill: #e8f1fd; stroke: #1f6feb; }
.feed-forward { fill: #e9f7ec; stroke: #2da44e; }
.wire { fill: none; stroke: #424a53; stroke-width: 1.5; stroke-linejoin: round; }
.head { fill: #424a53; }
.joint { fill: #ffffff; stroke: #424a53; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.label { fill: #9198a1; }
.ground { fill: #0d1117; }
.frame { fill: #151b23; stroke: #656c76; }
.box { fill: #0d1117; stroke: #656c76; }
.norm { fill: #2b2411; stroke: #d29922; }
.attention { fill: #10233f; stroke: #4493f8; }
.feed-forward { fill: #12261a; stroke: #3fb950; }
.wire { stroke: #b1bac4; }
.head { fill: #b1bac4; }
.joint { fill: #0d1117; stroke: #b1bac4; }
}
"""
_CLASSES: Final = {  # by the last key of the box's node
    **dict.fromkeys(("norm", "output_norm", "sum_norm", "final_norm"), "norm"),
    **dict.fromkeys(("attention", "latent_attention"), "attention"),
    **dict.fromkeys(("mlp", "moe"), "feed-forward"),
}


def as_svg(scene: Scene) -> str:
    """Returns the picture as an XML document in UTF-8, sized to its content."""
    width = scene.width * CELL_WIDTH + 2 * _MARGIN
    height = scene.height * CELL_HEIGHT + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title description">\n'
        f'<title id="title">{escape(scene.title)}</title>\n'
        f'<desc id="description">{escape(scene.description)}</desc>\n'
        f"<style>{_STYLE % {'size': FONT_SIZE}}</style>\n"
        f'<rect class="ground" width="{width:g}" height="{height:g}"/>\n' + "\n".join(_elements(scene)) + "\n</svg>\n"
    )


def _elements(scene: Scene) -> Iterator[str]:
    for rectangle in sorted(scene.rectangles, key=lambda each: not each.frame):
        yield _rectangle(rectangle)
    for wire in scene.wires:
        yield from _wire(wire)
    for joint in scene.joints:
        x, y = _center(joint.x, joint.y)
        if joint.sign:
            yield f'<circle class="joint" cx="{x:g}" cy="{y:g}" r="{_RADIUS:g}"/>'
        if joint.sign == "⊕":
            arm = _RADIUS - 3
            yield f'<path class="wire" d="M{x - arm:g} {y:g}H{x + arm:g}M{x:g} {y - arm:g}V{y + arm:g}"/>'
    for span in scene.spans():
        yield _text(span)


def _center(x: int, y: int) -> tuple[float, float]:
    """Returns the center of a cell."""
    return round(_MARGIN + (x + 0.5) * CELL_WIDTH, 2), round(_MARGIN + (y + 0.5) * CELL_HEIGHT, 2)


def _rectangle(rectangle: Rectangle) -> str:
    kind = "frame" if rectangle.frame else _CLASSES.get(rectangle.node.rpartition(".")[2], "box")
    left, top = _center(rectangle.x, rectangle.y)
    right, bottom = _center(rectangle.right, rectangle.bottom)
    size = f'width="{right - left:g}" height="{bottom - top:g}" rx="5"'
    return f'<rect class="{kind}" x="{left:g}" y="{top:g}" {size}/>'


def _wire(wire: Wire) -> Iterator[str]:
    points = [_center(*point) for point in wire.points]
    (x0, y0), (x1, y1) = points[-2:]
    along = ((x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0))
    inset = 0 if isinstance(wire.end, Rectangle) or not wire.end.sign else _RADIUS
    tip = (x1 - inset * along[0], y1 - inset * along[1])
    path = "".join(f"L{x:g} {y:g}" for x, y in [*points[1:-1], tip])
    yield f'<path class="wire" d="M{points[0][0]:g} {points[0][1]:g}{path}"/>'
    if wire.arrow:
        (dx, dy), (x, y) = along, tip
        sides = [(x - 8 * dx + sign * 4 * dy, y - 8 * dy + sign * 4 * dx) for sign in (1, -1)]
        corners = "L".join(f"{a:g} {b:g}" for a, b in [(x, y), *sides])
        yield f'<path class="head" d="M{corners}Z"/>'


def _text(span: Span) -> str:
    x, y = _MARGIN + span.x * CELL_WIDTH, _MARGIN + (span.y + 0.5) * CELL_HEIGHT + FONT_SIZE / 3
    return f'<text class="{span.style}" x="{x:g}" y="{y:g}">{escape(span.text)}</text>'
