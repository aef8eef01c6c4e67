"""Writes the differences of two recipes as lines: ``-`` for A, ``+`` for B, each with its file and line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.tree import Scalar, Tree
from fastgen.recipe_tools.diff.diff import Difference
from fastgen.recipe_tools.diff.specs import SpecDifference
from fastgen.recipe_tools.explain.plain_text import from_here, printable, yaml_scalar


@dataclass(frozen=True)
class Line:
    """One line of output. Its style is the side (``-`` or ``+``), or ``title`` for the node that differs."""

    text: str
    style: Literal["-", "+", "title", "text"]


Side = Literal["-", "+"]
# The side, the node, and the text to write for it.
Row = tuple[Side, Tree | None, str]


def lines_of(a: Recipe, b: Recipe, differences: Iterable[Difference | SpecDifference]) -> Iterator[Line]:
    """Yields two lines that name the compared recipes, and then a paragraph for each difference."""
    width = max(len(a.name), len(b.name))
    yield Line(f"--- {a.name:{width}}  {from_here(a.file)}", "-")
    yield Line(f"+++ {b.name:{width}}  {from_here(b.file)}", "+")
    differences = list(differences)
    labels = _Labels(differences)
    for difference in differences:
        yield Line("", "text")
        if isinstance(difference, SpecDifference):
            yield Line(difference.place or "the whole", "title")
            yield from (Line(f"  - {text}", "-") for text in difference.a)
            yield from (Line(f"  + {text}", "+") for text in difference.b)
        else:
            yield Line(_title(difference, a, b), "title")
            yield from _paragraph(difference, labels)


def _title(difference: Difference, a: Recipe, b: Recipe) -> str:
    path = printable(".".join(difference.path))
    match difference.kind:
        case "only in a":
            return f"{path}: only in {_name(a, b, '-')}"
        case "only in b":
            return f"{path}: only in {_name(a, b, '+')}"
        case "reordered":
            return f"{path}: in another order"
    return path


def _name(a: Recipe, b: Recipe, side: Side) -> str:
    if a.name == b.name:
        return "the first" if side == "-" else "the second"
    return a.name if side == "-" else b.name


class _Labels:
    """The labels of files before each line: their names, or their paths if two files have the same name."""

    def __init__(self, differences: Iterable[Difference | SpecDifference]):
        trees = [tree for each in differences if isinstance(each, Difference) for tree in (each.a, each.b) if tree]
        files = {node.file for tree in trees for node in _nodes(tree)}
        names = Counter(Path(file).name for file in files)
        self.labels = {file: Path(file).name if names[Path(file).name] == 1 else file for file in files}

    def place(self, tree: Tree) -> str:
        label = self.labels[tree.file]
        return f"{printable(label) if label != tree.file else from_here(label)}:{tree.line}"


def _nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in _children(tree):
        yield from _nodes(child)


def _children(tree: Tree) -> Iterable[Tree]:
    if isinstance(tree.value, Mapping):
        return tree.value.values()
    return tree.value if isinstance(tree.value, tuple) else ()


def _paragraph(difference: Difference, labels: _Labels) -> Iterator[Line]:
    rows = list(_rows(difference))
    places = [labels.place(tree) if tree is not None else "" for _, tree, _ in rows]
    width = max(map(len, places))
    for (side, _, text), place in zip(rows, places, strict=True):
        yield Line(f"  {side} {place:{width}}  {text}".rstrip(), side)


def _rows(difference: Difference) -> Iterator[Row]:
    a, b = difference.a, difference.b
    sides: tuple[tuple[Side, Tree | None, Tree | None], ...] = (("-", a, b), ("+", b, a))
    for side, tree, other in sides:
        if tree is None:
            continue
        if difference.kind == "reordered":
            assert isinstance(tree.value, Mapping)
            yield side, tree, ", ".join(map(printable, tree.value))
        elif isinstance(tree.value, tuple) and other is not None and isinstance(other.value, tuple):
            yield from _items(side, tree, other)
        else:
            yield from _written(side, tree)


def _items(side: Side, tree: Tree, other: Tree) -> Iterator[Row]:
    """Yields the items of a list that the other side lacks; all items if only their order differs."""
    assert isinstance(tree.value, tuple)
    assert isinstance(other.value, tuple)
    theirs = Counter(map(_inline, other.value))
    same = theirs == Counter(map(_inline, tree.value))
    for item in tree.value:
        text = _inline(item)
        if not same and theirs[text]:
            theirs[text] -= 1
        else:
            yield side, item, text


def _written(side: Side, tree: Tree, indent: str = "") -> Iterator[Row]:
    """Yields a subtree, with a line for each of its scalars and lists."""
    if not isinstance(tree.value, Mapping):
        yield side, tree, _inline(tree)
        return
    for key, child in tree.value.items():
        if isinstance(child.value, Mapping) and child.value:
            yield side, child, f"{indent}{_scalar(key)}:"
            yield from _written(side, child, indent + "  ")
        else:
            yield side, child, f"{indent}{_scalar(key)}: {_inline(child)}"


def _inline(tree: Tree) -> str:
    if isinstance(tree.value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_inline(child)}" for key, child in tree.value.items()) + "}"
    if isinstance(tree.value, tuple):
        return "[" + ", ".join(map(_inline, tree.value)) + "]"
    return _scalar(tree.value)


def _scalar(value: Scalar) -> str:
    """Returns the scalar as YAML, quoted and escaped if it would otherwise not be printable ASCII."""
    text = yaml_scalar(value)
    return text if printable(text) == text else json.dumps(value)
