"""The drawing: one connected scene without collisions; text and SVG have exactly its content."""

from __future__ import annotations

import itertools
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from fastgen.models.recipe.recipe import load_recipe
from fastgen.recipe_tools.explain.drawing import MIN_WIDTH, Joint, Rectangle, Scene, Wire, draw
from fastgen.recipe_tools.explain.explain import Explanation, explain
from fastgen.recipe_tools.explain.svg import CELL_HEIGHT, CELL_WIDTH, FONT_SIZE, as_svg
from fastgen.recipe_tools.explain.text import as_text
from fastgen.recipe_tools.explain.wrap import wrapped
from fastgen.verify.edits import replaced
from tests.recipe_tools.published import CONFIGS

RECIPES = {
    file.stem: load_recipe(file) for file in sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
}

EVERYTHING = """
name: everything
architectures: [Everything]
config: {vocab_size: v, hidden_size: h, num_layers: l, num_heads: n, num_kv_heads: k, head_dim: d, max_positions: none}
model:
  embedding:
    tokens: wte
    scale: 2
    project: {weight: into, size: e, bias: b}
    positions: {weight: wpe, offset: o, rows: r, when: p}
    norm: &norm {kind: layer, weight: ln, bias: b, eps: eps, when: w}
  layers:
    at: h.{layer}
    residual:
      all:
        norm: *norm
        attention: &attention
          norm: *norm
          qkv: {q: q, k: k, v: v, bias: b}
          rotary: {theta: theta, dim: 4}
          alibi: {rounding: float32, scaled: false, when: a}
          output: {weight: o, bias: b}
          when: not latent
        latent_attention:
          when: latent
          nope_dim: 8
          rope_dim: 4
          v_head_dim: 6
          q: {weight: q2, when: true}
          kv_latent: {rank: 5, down: down, norm: {kind: rms, weight: kvn, eps: 1}, fused: kv,
                      layout: (num_heads part) in, split: {v: 6, k: 8}}
          rotary: {theta: 10, kind: interleaved}
          bias: false
          output: {weight: o2, bias: false}
        mlp: &mlp {kind: plain, size: s, activation: act, up: up, down: dn, bias: b, when: layer == 0}
        moe:
          norm: *norm
          router: {weight: rt, top_k: 2, scoring: sigmoid, normalize: z, scale: 3, num_groups: 4, top_groups: 2}
          experts: {at: "x.{expert}", count: 8, kind: gated, size: s, activation: a, gate: g, up: u, down: dd, bias: b}
          shared: {kind: plain, size: s, activation: act, up: su, down: sd, bias: false, when: shares}
          shared_gate: sg
          when: layer != 0
        output_norm: *norm
        scale: 1 / 3
        sum_norm: *norm
        when: layer in [0, 1]
      bare: {attention: *attention, sum_norm: *norm}
      two:
        mlp: *mlp
        moe:
          router: {weight: rt, top_k: 2, scoring: softmax, normalize: true}
          experts: {at: "y.{expert}", count: 8, kind: plain, size: s, activation: act, up: u, down: dd, bias: b}
          when: layer != 0
  final_norm: *norm
  head: {weight: lm_head, tied: t, bias: b, scale: 1/2, softcap: c, project: {weight: out, size: e}}
"""


Scenes = list[tuple[Explanation, Scene]]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Draws every recipe at several widths, without and with a configuration, and one recipe with all features."""
    file = tmp_path_factory.mktemp("recipes") / "everything.yaml"
    file.write_text(EVERYTHING)
    found = [(explain(load_recipe(file)), width) for width in (40, 71, 80, 96)]
    for index, (name, config) in enumerate(CONFIGS.values()):
        found.append((explain(RECIPES[name]), (40, 80, 96)[index % 3]))
        found.append((explain(RECIPES[name], config), (80, 96, 40)[index % 3]))
    return [(each, draw(each, width)) for each, width in found]


# ------------------------------------------------------------------------------------------------------------- scene


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return a.x <= b.right and b.x <= a.right and a.y <= b.bottom and b.y <= a.bottom


def test_no_two_boxes_overlap_and_no_text_leaves_its_box(scenes: Scenes) -> None:
    for explanation, scene in scenes:
        boxes = [each for each in scene.rectangles if not each.frame]
        frames = [each for each in scene.rectangles if each.frame]
        for a, b in [*itertools.combinations(boxes, 2), *itertools.combinations(frames, 2)]:
            assert not overlap(a, b), f"{explanation.recipe} at {scene.width}: {a.node} and {b.node}"
        for frame, box in itertools.product(frames, boxes):
            inside = frame.x < box.x and box.right < frame.right and frame.y < box.y and box.bottom < frame.bottom
            assert inside == box.node.startswith("model.layers") or not overlap(frame, box)
            assert inside or not overlap(frame, box)
        for each in scene.rectangles:
            assert each.x >= 0
            assert each.y >= 0
            assert each.right < scene.width
            assert each.bottom < scene.height
            for span in each.spans:
                assert each.x + 2 <= span.x
                assert span.x + len(span.text) <= each.right - (0 if each.frame else 1)
                assert each.y < span.y < each.bottom
        taken = [(span.x + offset, span.y) for span in scene.spans() for offset in range(len(span.text))]
        assert len(taken) == len(set(taken))
        for label in scene.labels:
            columns = range(label.x, label.x + len(label.text))
            assert label.x + len(label.text) < scene.width
            assert not any(box.y <= label.y <= box.bottom and {box.x, box.right} & {*columns} for box in boxes)


def test_all_texts_are_as_wide_as_they_are_long(scenes: Scenes) -> None:
    for _, scene in scenes:
        for character in {character for span in scene.spans() for character in span.text}:
            assert unicodedata.east_asian_width(character) not in "WF"
            assert unicodedata.category(character)[0] in "LNPSZ", repr(character)
            assert unicodedata.combining(character) == 0


def cells_of(wire: Wire) -> list[tuple[int, int]]:
    cells = []
    for (x0, y0), (x1, y1) in itertools.pairwise(wire.points):
        assert (x0 == x1) != (y0 == y1), wire
        steps = max(abs(x1 - x0), abs(y1 - y0))
        cells += [(x0 + (x1 - x0) * step // steps, y0 + (y1 - y0) * step // steps) for step in range(steps + 1)]
    return cells


def touches(end: Rectangle | Joint, point: tuple[int, int]) -> bool:
    x, y = point
    if isinstance(end, Joint):
        return (x, y) == (end.x, end.y)
    on_side = x in (end.x, end.right) and end.y < y < end.bottom
    return on_side or (y in (end.y, end.bottom) and end.x < x < end.right)


def test_wires_go_from_one_thing_to_another_and_through_none(scenes: Scenes) -> None:
    for explanation, scene in scenes:
        texts = {(span.x + offset, span.y) for span in scene.spans() for offset in range(len(span.text))}
        boxes = [each for each in scene.rectangles if not each.frame]
        for wire in scene.wires:
            assert any(wire.start is each for each in [*boxes, *scene.joints])
            assert any(wire.end is each for each in [*boxes, *scene.joints])
            assert touches(wire.start, wire.points[0]), f"{explanation.recipe}: {wire}"
            assert touches(wire.end, wire.points[-1]), f"{explanation.recipe}: {wire}"
            cells = cells_of(wire)
            assert not texts & {*cells}
            for x, y in cells[1:-1]:
                assert not any(box.x <= x <= box.right and box.y <= y <= box.bottom for box in boxes), wire


def test_everything_is_on_the_way_from_the_token_to_the_logits(scenes: Scenes) -> None:
    for explanation, scene in scenes:
        boxes = [each for each in scene.rectangles if not each.frame]
        legend = {box.node for box in explanation.legend}
        model = [each for each in boxes if each.node not in legend]
        assert [each.node for each in model if each.node.startswith("model.")] == [each.node for each in model]
        assert sorted(each.node for each in model) == sorted(box.node for box in explanation.boxes())
        after: dict[int, list[Any]] = {}
        before: dict[int, list[Any]] = {}
        for wire in scene.wires:
            after.setdefault(id(wire.start), []).append(wire.end)
            before.setdefault(id(wire.end), []).append(wire.start)
        added = {box.node for box in explanation.embedding if box.added}
        sources = [each for each in model if each.node == "model.embedding" or each.node in added]
        (head,) = (each for each in model if each.node == "model.head")
        everywhere = {id(each) for each in [*model, *scene.joints]}
        assert reachable(sources, after) == everywhere
        assert reachable([head], before) == everywhere


def reachable(start: list[Any], edges: dict[int, list[Any]]) -> set[int]:
    found: set[int] = set()
    waiting = list(start)
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found.add(id(each))
            waiting += edges.get(id(each), [])
    return found


def test_sums_meet_in_a_plus_and_alternatives_in_a_circle(scenes: Scenes) -> None:
    for explanation, scene in scenes:
        signs = [joint.sign for joint in scene.joints]
        branches = [branch for kind in explanation.layers for branch in kind.branches]
        side_by_side = sum(len(branch.lanes) > 1 for branch in branches)
        alternatives = sum(len(lane.alternatives) > 1 for branch in branches for lane in branch.lanes)
        added = sum(box.added for box in explanation.embedding)
        assert signs.count("⊕") == len(branches) + side_by_side + added
        assert signs.count("○") == alternatives
        assert signs.count("") == len(branches)


def test_nothing_is_lost_when_it_is_broken_into_lines(scenes: Scenes) -> None:
    for explanation, scene in scenes:
        boxes = [each for each in scene.rectangles if not each.frame]
        said = [(box.title, box.facts) for box in (*explanation.boxes(), *explanation.legend)]
        for rectangle, (title, facts) in zip(boxes, said, strict=True):
            texts = "".join(span.text for span in rectangle.spans if span.style == "text").replace(" ", "")
            assert texts == "".join(fact.text for fact in facts).replace(" ", "")
            titles = "".join(span.text for span in rectangle.spans if span.style == "title")
            assert titles.replace(" ", "") == title.replace(" ", "")
            labels = "".join(span.text for span in rectangle.spans if span.style == "label").replace(" ", "")
            assert labels == "".join(fact.label for fact in facts).replace(" ", "")


@pytest.mark.parametrize("width", [1, 2, 5, 17, 80])
def test_lines_are_broken_only_where_they_must(width: int) -> None:
    texts = [
        "",
        "a",
        "one two three",
        "x" * 50,
        "model.layers.self_attention.query_key_value",
        "first('a.b', 'c') | d(1)",
    ]
    for text in texts:
        lines = wrapped(text, width)
        assert all(len(line) <= width and line == line.strip() for line in lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        for line, following in itertools.pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > width or line[-1] in ".,_|/()-"
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("self_attention.query_key_value", 20) == ["self_attention.", "query_key_value"]


# -------------------------------------------------------------------------------------------------------------- text


def test_the_text_is_the_scene(scenes: Scenes) -> None:
    for explanation, scene in scenes:
        lines = as_text(scene).split("\n")[:-1]
        assert len(lines) == scene.height
        assert max(map(len, lines)) <= scene.width
        rows = [line.ljust(scene.width) for line in lines]
        for span in scene.spans():
            assert rows[span.y][span.x : span.x + len(span.text)] == span.text
        for box in scene.rectangles:
            if box.frame:
                continue
            top, bottom = rows[box.y][box.x : box.right + 1], rows[box.bottom][box.x : box.right + 1]
            assert re.fullmatch("┌[─┴]+┐", top), f"{explanation.recipe}: {top}"
            assert re.fullmatch("└[─┬]+┘", bottom)
            assert {rows[y][box.x] for y in range(box.y + 1, box.bottom)} <= {*"│┤"}
            assert {rows[y][box.right] for y in range(box.y + 1, box.bottom)} == {"│"}
        signs = [row[joint.x] for joint in scene.joints if joint.sign for row in [rows[joint.y]]]
        assert signs == [joint.sign for joint in scene.joints if joint.sign]
        assert sum(row.count(head) for row in rows for head in "▼▶◀") == sum(wire.arrow for wire in scene.wires)


def test_no_width_is_less_than_the_least() -> None:
    assert draw(explain(RECIPES["falcon"]), 3).width == MIN_WIDTH


SMALL = """\
name: small
architectures: [Small]
config: {vocab_size: 10, hidden_size: 8, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 4, max_positions: none}
model:
  embedding: {tokens: wte}
  layers:
    at: h.{layer}
    residual:
      both:
        norm: {kind: rms, weight: ln, eps: eps}
        attention: {qkv: {q: q, k: k, v: v, bias: false}, sliding_window: 16, output: {weight: o, bias: false}}
        mlp: {kind: plain, size: 32, activation: act, up: up, down: down, bias: false, when: layer != 0}
  head: {weight: lm_head, tied: true}
"""


def test_a_small_recipe_in_full(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    assert as_text(draw(explain(load_recipe(file)), 64)) == (Path(__file__).parent / "small.txt").read_text()


# --------------------------------------------------------------------------------------------------------------- SVG

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_the_scene(scenes: Scenes) -> None:
    for _, scene in scenes:
        root = ElementTree.fromstring(as_svg(scene))
        texts = root.findall(f"{SVG}text")
        assert [text.text for text in texts] == [span.text for span in scene.spans()]
        assert root.find(f"{SVG}title").text == scene.title
        assert root.find(f"{SVG}desc").text == scene.description
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "circle", "path", "text"}
        assert not any(name.startswith("on") or "href" in name for element in root.iter() for name in element.attrib)
        width, height = float(root.get("width")), float(root.get("height"))
        boxes = root.findall(f"{SVG}rect")
        assert len(boxes) == 1 + len(scene.rectangles)
        assert len(root.findall(f"{SVG}circle")) == sum(bool(joint.sign) for joint in scene.joints)
        edges = [[float(box.get(key, "0")) for key in ("x", "y", "width", "height")] for box in boxes]
        assert all(x + w <= width and y + h <= height for x, y, w, h in edges)
        for text, span in zip(texts, scene.spans(), strict=True):
            right = float(text.get("x")) + 0.62 * FONT_SIZE * len(span.text)  # the widest of common monospaced fonts
            around = [
                x + w for x, y, w, h in edges[1:] if x <= float(text.get("x")) and y <= float(text.get("y")) <= y + h
            ]
            assert any(right <= edge for edge in around), span
        assert CELL_WIDTH > 0.62 * FONT_SIZE
        assert CELL_HEIGHT > 1.2 * FONT_SIZE


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", '&amp;"quoted"', "]]>", "\x1b[31m\x00\r\n", "日本語\u202e", "\ud800", "x" * 5000],
)
def test_text_from_a_file_is_escaped(text: str) -> None:
    config = CONFIGS["llama"][1] | {"hidden_act": text}
    explanation = explain(RECIPES["llama"], config)
    scene = draw(explanation, 80)
    check_harmless(scene)
    if text.isascii() and text.isprintable() and len(text) < 100:
        assert text in as_text(scene)


@pytest.mark.parametrize("quoted", ["'<script>'", "'a' ~ 1", "'&lt;b&gt;'", "x == '<' and '\"' != y"])
def test_an_expression_is_only_text(quoted: str) -> None:
    changes = {("model", "layers", "residual", "attend", "norm", "when"): quoted, ("define", "other"): quoted}
    changed = replaced(RECIPES["llama"], changes)
    if changed is None:  # not an expression
        assert "~" in quoted
        return
    scene = draw(explain(changed), 80)
    check_harmless(scene)
    assert quoted in as_text(scene)


def check_harmless(scene: Scene) -> None:
    svg = as_svg(scene)
    ElementTree.fromstring(svg)
    svg.encode()
    assert "<script" not in svg
    for whole in (svg, as_text(scene)):
        assert all(character.isprintable() or character == "\n" for character in whole)
    assert max(map(len, as_text(scene).split("\n"))) <= scene.width
