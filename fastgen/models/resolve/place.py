"""The state of resolving: the current node of the recipe, the names it can use, and the tensors claimed so far."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fastgen.errors import RecipeError
from fastgen.models.recipe.expression_grammar import ExpressionError, Value
from fastgen.models.recipe.expressions import Expression, Scope
from fastgen.models.recipe.layout import Axes
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.spelling import shown
from fastgen.models.recipe.tree import NodePath, Tree
from fastgen.models.spec import LinearSpec, NodeRef, TensorSpec

MAX_SIZE: Final = 2**31 - 1
MAX_TENSORS: Final = 2**19


@dataclass(frozen=True)
class Place:
    """A node being resolved: its path in the recipe, the scope of its expressions, and the prefix of its tensors."""

    recipe: Recipe
    path: NodePath
    scope: Scope
    prefix: str = ""

    def __truediv__(self, key: str) -> Place:
        return Place(self.recipe, (*self.path, key), self.scope, self.prefix)

    def within(self, prefix: str, **names: Value) -> Place:
        """Returns the same node with its tensors below ``prefix`` and with ``names`` added to its scope."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{prefix}.", scope=self.scope.with_names(**names))

    def ref(self) -> NodeRef:
        return _ref(self.recipe.tree, self.path)

    def error(self, message: str) -> RecipeError:
        return self.recipe.tree.error(self.path, message)

    def keys(self) -> tuple[str, ...]:
        """Returns the keys of the mapping here, in the order in which they are written."""
        value = self.recipe.tree.find(self.path).value
        assert isinstance(value, Mapping)
        return tuple(value)

    def value(self, expression: Expression) -> Value:
        try:
            return expression.evaluate(self.scope)
        except ExpressionError as error:
            raise self.error(str(error)) from None

    def wrong(self, expression: Expression, value: Value, wanted: str) -> RecipeError:
        return self.error(f"must be {wanted}, but `{expression.text}` is {shown(value)}")

    def size(self, expression: Expression, *, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self.value(expression)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(expression, value, f"an integer from {least} to {most}")
        return value

    def optional_size(self, expression: Expression) -> int | None:
        """Evaluates to an integer or none."""
        return None if self.value(expression) is None else self.size(expression)

    def number(self, expression: Expression) -> float:
        value = self.value(expression)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.wrong(expression, value, "a finite number")
        return float(value)

    def factor(self, expression: Expression) -> float:
        """Evaluates to a factor: any number except 0."""
        value = self.number(expression)
        if value == 0:
            raise self.wrong(expression, value, "a number other than 0")
        return value

    def optional_cap(self, expression: Expression) -> float | None:
        """Evaluates to a number above 0 or none."""
        if self.value(expression) is None:
            return None
        value = self.number(expression)
        if value <= 0:
            raise self.wrong(expression, value, "a number above 0, or none")
        return value

    def flag(self, expression: Expression) -> bool:
        value = self.value(expression)
        if not isinstance(value, bool):
            raise self.wrong(expression, value, "true or false")
        return value

    def text(self, expression: Expression) -> str:
        value = self.value(expression)
        if not isinstance(value, str):
            raise self.wrong(expression, value, "a text")
        return value


@lru_cache(maxsize=4096)  # the many tensors of a mixture come from few nodes
def _ref(tree: Tree, path: NodePath) -> NodeRef:
    found = tree.find(path)
    text = "" if isinstance(found.value, Mapping) else str(found.value)
    return NodeRef(".".join(path), found.file, found.line, text)


class Tensors:
    """The tensors of a model, each claimed once, under all its spellings."""

    def __init__(self, recipe: Recipe) -> None:
        self.aliases = recipe.schema.aliases
        self.claims: dict[str, NodeRef] = {}

    def tensor(self, at: Place, name: str, shape: tuple[int, ...], *, also: tuple[str, ...] = ()) -> TensorSpec:
        """Claims the tensor ``name``, and its alternative names ``also``, for the node ``at``."""
        return TensorSpec(self.claim(at, name, also=also), shape, at.ref())

    def claim(self, at: Place, name: str, *, also: tuple[str, ...] = ()) -> tuple[str, ...]:
        names = tuple(dict.fromkeys((*self.spellings(at, name), *also)))
        for each in names:
            if each in self.claims:
                raise at.error(f"tensor {each!r} is claimed twice, first by {self.claims[each]}")
            self.claims[each] = at.ref()
        if len(self.claims) > MAX_TENSORS:
            raise at.error(f"the model has more than {MAX_TENSORS:,} tensors, including their other spellings")
        return names

    def linear(
        self,
        at: Place,
        module: str,
        bias: bool,
        in_features: int,
        out_features: int,
        *,
        layout: Axes | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> LinearSpec:
        """Claims a linear map with its own matrix; ``layout`` describes how it is stored, ``sizes`` are its names."""
        if layout is None:
            weight = self.tensor(at, f"{module}.weight", (out_features, in_features))
            bias_tensor = self.tensor(at, f"{module}.bias", (out_features,)) if bias else None
            return LinearSpec(weight, bias_tensor, in_features, out_features, at.ref())
        sizes = {**(sizes or {}), "in": in_features, "out": out_features}
        names = self._matrix_and_bias(at, module, bias)
        return self._stored(at, names, layout, sizes, in_features, out_features, None)

    def fused(
        self,
        at: Place,
        module: str,
        bias: bool,
        in_features: int,
        rows: Mapping[str, int],
        *,
        layout: Axes,
        split: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> dict[str, LinearSpec]:
        """Claims maps that share one stored matrix; ``split`` divides its axis ``part`` among them, in order."""
        names = self._matrix_and_bias(at / "fused", module, bias)
        sizes = {**sizes, "in": in_features, "part": sum(split.values())}
        linears, first = {}, 0
        for name, count in split.items():
            part = (first, first + count)
            linears[name] = self._stored(at, names, layout, sizes, in_features, rows[name], part, name=name)
            first += count
        return linears

    def _matrix_and_bias(self, at: Place, module: str, bias: bool) -> list[tuple[str, ...]]:
        return [self.claim(at, f"{module}.{kind}") for kind in ("weight", *(["bias"] if bias else []))]

    def _stored(
        self,
        at: Place,
        names: list[tuple[str, ...]],
        axes: Axes,
        sizes: Mapping[str, int],
        in_features: int,
        out_features: int,
        part: tuple[int, int] | None,
        *,
        name: str = "",
    ) -> LinearSpec:
        """Returns the map whose matrix, and bias if it has one, are stored under ``names`` with the axes ``axes``."""
        tensors = []
        kinds = ((axes, (out_features, in_features)), (axes.of_bias(), (out_features,)))
        for spellings, (stored, shape) in zip(names, kinds, strict=False):  # one entry if there is no bias
            try:
                layout, stored_shape = stored.fit(sizes, rows=out_features, part=part)
            except ValueError as error:
                raise (at / "layout").error(f"{error}" + (f" for {name}" if name else "")) from None
            node = (at / "fused" if part else at).ref()
            tensors.append(TensorSpec(spellings, shape, node, layout, stored_shape))
        node = (at / "split" / name if part else at).ref()
        return LinearSpec(tensors[0], tensors[1] if len(tensors) > 1 else None, in_features, out_features, node)

    def spellings(self, at: Place, name: str) -> tuple[str, ...]:
        """Returns the full name of the tensor ``name`` of the node ``at``, then its spellings by ``aliases``."""
        layer = at.scope.names.get("layer")
        if layer is None and "{layer}" in name:
            raise at.error(f"{name!r}: {{layer}} is defined only inside layers")
        name = at.prefix + name.replace("{layer}", str(layer))
        others = (
            spelling + name[len(prefix) :]
            for prefix, spellings in self.aliases.items()
            if name.startswith(f"{prefix}.")
            for spelling in spellings
        )
        return (name, *others)
