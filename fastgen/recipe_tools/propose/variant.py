"""Writes a proposal as a difference from a known recipe, without what that recipe already says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from fastgen.models.recipe.expression_grammar import ExpressionError
from fastgen.models.recipe.expressions import Scope, constant, parse_expression
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.schema import Config
from fastgen.recipe_tools.propose.nodes import Leaf, Node, Path, written

# Keys whose values are not expressions.
_TEXTS: Final = frozenset(
    (
        *("kind", "weight", "tokens", "at", "layout", "over", "rounding", "scoring", "scaled"),
        *("q", "k", "v", "fused", "gate", "up", "down", "correction", "shared_gate"),
    )
)
_SECTIONS: Final = frozenset(
    (
        *("norm", "output_norm", "sum_norm", "final_norm", "q_norm", "k_norm", "attention", "latent_attention"),
        *("mlp", "moe", "positions", "project", "shared", "q_latent", "rotary", "alibi"),
    )
)
# Keys that follow from the structure of a checkpoint: if a proposal lacks one, the model has none.
_MODULES: Final = frozenset(
    ("q", "k", "v", "fused", "gate", "up", "split", "layout", "correction", "shared_gate", "fraction", "dim")
)
# Keys that a recipe may leave out, and the values that then hold.
_OPTIONAL: Final[dict[str, tuple[Any, ...]]] = {
    "scale": (1, None),
    "softcap": (None,),
    "sliding_window": (None,),
    "offset": (0,),
    "bias": (False,),
}
_MISSING: Final = object()


class Difference:
    """Finds the nodes of a proposal that differ from the recipe ``nearest`` for a model with this ``config``.

    The difference only shortens a proposal: nothing is inherited that the proposal does not say, and a line with a
    question is always written.
    """

    def __init__(self, nearest: Recipe, config: Mapping[str, Any], num_layers: int):
        self.recipe, self.num_layers = nearest, num_layers
        self.tree: Mapping[str, Any] = nearest.tree.plain()
        self.scope = Scope(config)
        numbers = {name: self._evaluate(self.tree["config"].get(name)) for name in Config.model_fields}
        self.in_config = self.scope
        self.scope = self.scope.with_names(**{name: value for name, value in numbers.items() if value is not _MISSING})
        defined = {name: self._evaluate(value) for name, value in self.tree.get("define", {}).items()}
        self.scope = self.scope.with_names(**{name: value for name, value in defined.items() if value is not _MISSING})

    def of(self, proposal: Node) -> Node:
        """Returns the part of ``proposal`` that the nearest recipe does not say."""
        aliases: Node = {"aliases": Leaf(None)} if self.tree.get("aliases") else {}
        return aliases | self._below(proposal, self.tree, ())

    def _below(self, proposal: Node, known: Mapping[str, Any], path: Path) -> Node:
        found: Node = {}
        for key, mine in proposal.items():
            theirs = known.get(key, _MISSING)
            at = (*path, key)
            if isinstance(mine, Leaf):
                if (line := self._leaf(mine, theirs, at)) is not None:
                    found[key] = line
            elif isinstance(theirs, Mapping):
                inner = self._below(mine, theirs, at)
                if "when" in theirs and "when" not in mine and not self._is(theirs["when"], True):
                    inner["when"] = Leaf(True)
                if inner:
                    found[key] = inner
            else:
                found[key] = written(mine)
        for key in known.keys() - proposal.keys():
            if self._is_gone(key, known[key], path):
                found[key] = Leaf(None)
        return found

    def _leaf(self, mine: Leaf, theirs: Any, path: Path) -> Leaf | None:
        if theirs is _MISSING:
            return None if mine.implied else mine
        if mine.question is None and self._same(mine.value, theirs, path):
            return None
        if path == ("requires",) and isinstance(mine.value, tuple):
            return Leaf(tuple(dict.fromkeys((*theirs, *mine.value))))
        return mine

    def _is_gone(self, key: str, theirs: Any, path: Path) -> bool:
        if isinstance(theirs, Mapping) and "when" in theirs and self._is(theirs["when"], False):
            return False
        if key in _OPTIONAL and path[:1] == ("model",):
            return any(value not in _OPTIONAL[key] for value in self._values(theirs))
        below_residual = len(path) == 3 and path[-1] == "residual"
        return path[:1] == ("model",) and (below_residual or key in _SECTIONS or key in _MODULES)

    def _is_supported(self, value: Any, path: Path) -> bool:
        """Returns whether ``value`` fits this model: it mentions no key, or a key that this model has."""
        if not isinstance(value, str) or path[-1] in _TEXTS:
            return True
        asked = set(self._keys_in(value))
        return not asked or any(key in self.scope.config for key in asked)

    def _keys_in(self, value: str) -> Iterator[str]:
        """Yields the keys of ``config.json`` that an expression of the recipe mentions, itself or by a name of
        `define`."""
        for name, *_ in parse_expression(value).paths:
            meant = self.tree.get("define", {}).get(name)
            if isinstance(meant, str):
                yield from (key for key, *_ in parse_expression(meant).paths if key not in Config.model_fields)
            elif name not in self.scope.names and name != "layer":
                yield name

    def _is(self, value: Any, wanted: bool) -> bool:
        return self._values(value) == [wanted] * self.num_layers

    def _same(self, mine: Any, theirs: Any, path: Path) -> bool:
        if mine == theirs and type(mine) is type(theirs):
            return True
        key, parent = path[-1], path[-2] if len(path) > 1 else ""
        if isinstance(theirs, Mapping) or isinstance(mine, tuple) or (key in _TEXTS and parent != "split"):
            return False
        if parent == "config":
            values = [self._evaluate(value, self.in_config) for value in (mine, theirs)]
            return values[0] == values[1] and _MISSING not in values and self._reads_as_much(mine, theirs, path)
        values_mine, values_theirs = self._values(mine), self._values(theirs)
        equal = values_mine == values_theirs and _MISSING not in values_mine
        return equal and self._reads_as_much(mine, theirs, path)

    def _reads_as_much(self, mine: Any, theirs: Any, path: Path) -> bool:
        """Returns whether ``theirs`` reads its value from the configuration if ``mine`` does, not from a default."""
        reads = isinstance(mine, str) and any(name[0] in self.scope.config for name in parse_expression(mine).paths)
        return not reads or self._is_supported(theirs, path)

    def _values(self, value: Any) -> list[Any]:
        return [self._evaluate(value, self.scope.with_names(layer=layer)) for layer in range(self.num_layers)]

    def _evaluate(self, value: Any, scope: Scope | None = None) -> Any:
        try:
            expression = parse_expression(value) if isinstance(value, str) else constant(value)
            return expression.evaluate(scope or self.scope)
        except (ExpressionError, ValueError, TypeError):
            return _MISSING
