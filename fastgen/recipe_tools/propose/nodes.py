"""The nodes of a proposal: nested mappings whose leaves hold values and questions to a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None
Path = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A value of a recipe. It is ``sure`` if it follows from headers or configuration, else a default.

    ``question`` is what a person has to answer here. An ``implied`` value is the default of the language; it is written
    only if the inherited value differs. A ``commented`` value is only a suggestion, not part of the recipe.
    """

    value: Scalar | tuple[Scalar, ...]
    sure: bool = True
    question: str | None = None
    implied: bool = False
    commented: bool = False


# A mapping from keys to leaves and nodes.
Node = dict[str, Any]


def leaf(value: Scalar | tuple[Scalar, ...], question: str | None = None) -> Leaf:
    """Returns a value that follows from headers, or with a ``question`` one that they leave open."""
    return Leaf(value, sure=question is None, question=question)


def assumed(value: Scalar) -> Leaf:
    """Returns a default that the nearest recipe may override and that needs no question otherwise."""
    return Leaf(value, sure=False)


def implied(value: Scalar) -> Leaf:
    return Leaf(value, implied=True)


def questions(node: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[str, str]]:
    """Yields every question with the dotted path of its node."""
    for key, child in node.items():
        if isinstance(child, Leaf):
            if child.question:
                yield ".".join((*at, key)), child.question
        else:
            yield from questions(child, (*at, key))


def is_commented(node: Mapping[str, Any]) -> bool:
    """Returns whether everything in ``node`` is only a suggestion."""
    return all(child.commented if isinstance(child, Leaf) else is_commented(child) for child in node.values())


def written(node: Mapping[str, Any]) -> Node:
    """Returns ``node`` without implied values, and without mappings that are then empty."""
    kept: Node = {}
    for key, child in node.items():
        if isinstance(child, Leaf):
            if not child.implied:
                kept[key] = child
        elif inner := written(child):
            kept[key] = inner
    return kept
