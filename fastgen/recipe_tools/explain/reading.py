"""Reads a recipe for people: expressions as they are written, or with a configuration their values.

The result is facts in boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastgen.models.recipe.expression_grammar import ExpressionError, Value
from fastgen.models.recipe.expressions import Expression, Scope
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.spelling import shown
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, RotarySpec
from fastgen.recipe_tools.explain.plain_text import printable

# Most characters of an expression or a value in a drawing; longer ones are cut.
MAX_CHARACTERS: Final = 400


@dataclass(frozen=True)
class Fact:
    """One entry of a box: ``text``, with ``label`` in a column before it."""

    label: str
    text: str


@dataclass(frozen=True)
class Box:
    """An operation on a vector. ``node`` is its path in the recipe.

    The output of an ``added`` box is added to the stream; the output of any other box replaces its input.
    """

    title: str
    node: str
    facts: tuple[Fact, ...]
    added: bool = False


class Reader:
    """Turns expressions into text: as they are written, or with ``scopes``, one for each layer, their values.

    ``layers`` are the same layers of the resolved model.
    """

    def __init__(self, recipe: Recipe, scopes: Sequence[Scope] = (), layers: Sequence[LayerSpec] = ()):
        self.tree = recipe.tree
        self.numbers = recipe.schema.config
        self.scopes = scopes
        parts = [each.part for layer in layers for branch in layer.branches for each in branch.parts]
        rotaries = [part.rotary for part in parts if isinstance(part, AttentionSpec | LatentAttentionSpec)]
        self.rotaries: dict[str, RotarySpec] = {rotary.node.path: rotary for rotary in rotaries if rotary is not None}

    def values(self, expression: Expression) -> list[Value] | None:
        """Returns its value in each layer, or its constant value; ``None`` if it needs a configuration and has none."""
        scopes = self.scopes if expression.paths else (Scope({}),)
        try:
            return [expression.evaluate(scope) for scope in scopes] or None
        except ExpressionError:  # a node that some of these layers do not have, or an expression without a value
            return None

    @staticmethod
    def source(expression: Expression) -> str:
        """Returns the expression as it is written."""
        return _cut(expression.text)

    def text(self, expression: Expression) -> str:
        values = self.values(expression)
        if values is None:
            return self.source(expression)
        texts = list(dict.fromkeys(map(value_text, values)))
        if len(texts) == 1:
            return texts[0]
        return f"{texts[0]} … {texts[-1]}, by layer: {self.source(expression)}"

    def flag(self, expression: Expression) -> bool | None:
        """Returns whether it is true; ``None`` if that depends on the layer or on the configuration."""
        values = self.values(expression)
        return values[0] if values and all(value is values[0] for value in values) else None

    def is_always(self, expression: Expression, value: float | None) -> bool:
        """Returns whether it is known to be ``value``, a number or none, in every layer."""
        values = self.values(expression)
        return values is not None and all(each == value and not isinstance(each, bool) for each in values)

    def number(self, name: str) -> str:
        """Returns one of the numbers in ``config:`` as text, or its name if there is no configuration."""
        return self.text(getattr(self.numbers, name)) if self.scopes else name

    def keys(self, node: str) -> tuple[str, ...]:
        """Returns the keys of the mapping at a path, in the order in which they are written."""
        value = self.tree.find(tuple(node.split("."))).value
        return tuple(value) if isinstance(value, Mapping) else ()

    def there(self, node: Any) -> bool:
        """Returns whether a node is present, or may be."""
        return node is not None and self.flag(node.when) is not False

    def when(self, node: Any) -> list[Fact]:
        return [] if self.flag(node.when) else [Fact("only if", self.text(node.when))]

    def only(self, node: Any) -> str:
        """Returns the condition of a node as the end of a sentence."""
        return "" if self.flag(node.when) else f"; only if {self.text(node.when)}"

    def bias(self, expression: Expression, label: str = "bias") -> list[Fact]:
        flag = self.flag(expression)
        if flag is False:
            return []
        return [Fact(label, "yes" if flag else f"if {self.text(expression)}")]


def value_text(value: Value) -> str:
    """Returns a value of the configuration as text, bounded and safe to print."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return _cut(f"{value:,}") if abs(value) < 2**63 else shown(value)
        case float():
            return f"{value:.6g}"
        case str():
            return _cut(value)
    return _cut(shown(value))


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
