"""The nodes of a proposal: nested mappings whose leaves hold values and questions to a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None
Path = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A value of a recipe, with the ``question`` that a person has to answer here.

    Without a question the value follows from the checkpoint's names, shapes and configuration. An ``implied`` value is
    the default of the language; it is written only if the inherited value differs. A ``commented`` value is only a
    suggestion, not part of the recipe.
    """

    value: Scalar | tuple[Scalar, ...]
    question: str | None = None
    implied: bool = False
    commented: bool = False


# A mapping from keys to leaves and nodes.
Node = dict[str, Any]


def leaf(value: Scalar | tuple[Scalar, ...], *asked: str | None) -> Leaf:
    """Returns a value with the questions of ``asked`` that are not ``None``."""
    return Leaf(value, question=joined(*asked))


def implied(value: Scalar) -> Leaf:
    return Leaf(value, implied=True)


def joined(*asked: str | None) -> str | None:
    """Returns several questions as one; ``None`` if there are none."""
    whole = ""
    for each in dict.fromkeys(each for each in asked if each):
        whole += f"{' Also: ' if whole.endswith('?') else '; also: '}{each}" if whole else each
    return whole or None


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
