"""A recipe in the making: nested mappings whose leaves know whether headers say them, and what is to be asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None
Path = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A value of a recipe. It is ``sure`` if headers or the configuration say so, else a default that may yield.

    ``question`` is what a person has to answer here. An ``implied`` value is what the language takes anyway; it is
    written only where an inherited one would be another. A ``commented`` one is no part of the recipe, but suggested.
    """

    value: Scalar | tuple[Scalar, ...]
    sure: bool = True
    question: str | None = None
    implied: bool = False
    commented: bool = False


# A mapping from keys to leaves and nodes.
Node = dict[str, Any]


def leaf(value: Scalar | tuple[Scalar, ...], question: str | None = None) -> Leaf:
    """What headers say; with a ``question``, what they leave open."""
    return Leaf(value, sure=question is None, question=question)


def assumed(value: Scalar) -> Leaf:
    """A default that the nearest recipe may overrule, and that needs no question where it does not."""
    return Leaf(value, sure=False)


def implied(value: Scalar) -> Leaf:
    return Leaf(value, implied=True)


def questions(node: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[str, str]]:
    """Every question with the dotted path of its node."""
    for key, child in node.items():
        if isinstance(child, Leaf):
            if child.question:
                yield ".".join((*at, key)), child.question
        else:
            yield from questions(child, (*at, key))


def is_commented(node: Mapping[str, Any]) -> bool:
    """Whether nothing in ``node`` is a part of the recipe."""
    return all(child.commented if isinstance(child, Leaf) else is_commented(child) for child in node.values())


def written(node: Mapping[str, Any]) -> Node:
    """``node`` without what is implied, and without mappings that are then empty."""
    kept: Node = {}
    for key, child in node.items():
        if isinstance(child, Leaf):
            if not child.implied:
                kept[key] = child
        elif inner := written(child):
            kept[key] = inner
    return kept
