"""The sources of a proposal's values: the structure, the keys of the configuration, and the nearest recipe.

The first two are evidence. Whatever comes from the nearest recipe, or is only usual, gets a question.
"""

from __future__ import annotations

from typing import Final

from fastgen.models.registry.nearest import Nearness
from fastgen.models.spec import AttentionSpec, BranchSpec, LatentAttentionSpec
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.keys import MEANINGS, Key, Keys
from fastgen.recipe_tools.propose.nodes import Leaf, Node, implied, leaf
from fastgen.recipe_tools.propose.structure import Structure

# Smallest share of common folded tensors at which rare choices are taken from the nearest recipe.
_VERY_NEAR: Final = 0.8


class Sources:
    """The sources of a proposal's values, and the nodes that several parts share: numbers and norms."""

    def __init__(self, structure: Structure, keys: Keys, nearest: Nearness | None):
        self.structure, self.keys = structure, keys
        self.nearest = nearest.spec if nearest is not None else None
        self.very_near = self.nearest if nearest is not None and nearest.structure >= _VERY_NEAR else None
        self.requires: list[str] = []

    def near_attentions(self) -> tuple[AttentionSpec | LatentAttentionSpec, ...]:
        return tuple(self.nearest.attentions()) if self.nearest is not None else ()

    # ------------------------------------------------------------------------------------------------------- keys

    def found(self, meaning: str, template: str = "{}", *asked: str | None) -> Leaf | None:
        """Returns an expression over the key of this meaning, with a question if its name does not say so."""
        key = self.keys.find(meaning)
        return (
            None
            if key is None
            else leaf(template.format(key.name), self.uncertainty(key, MEANINGS[meaning].what), *asked)
        )

    def uncertainty(self, key: Key, what: str) -> str | None:
        """Returns the question of a key that may mean ``what``, ``None`` if its name says that it does."""
        if key.sure:
            return None
        return f"{key.name} = {self.keys.values[key.name]} may be {what}; is it?"

    def named(self, meaning: str, what: str) -> Leaf | None:
        """Returns the key that is a spelling of ``meaning``, with a question if others state another value."""
        key = self.keys.named(meaning)
        stated = ", ".join(f"{name} = {self.keys.values[name]}" for name in self.keys.conflicts(meaning))
        return None if key is None else leaf(key, stated and f"{stated}: which is {what}, and in which layers?")

    def number(self, meaning: str, value: int, what: str) -> Leaf:
        """Returns the key whose value is ``value``, else the number itself; a question if no name says which."""
        key = self.keys.of_value(meaning, value)
        if key is not None:
            return leaf(key.name, self.uncertainty(key, what))
        return leaf(value, f"no single key states {value}, {what}; which key, or which expression?")

    def size(self, value: int, *meanings: str) -> Leaf:
        """Returns the number of features between two maps, which is that of one of ``meanings``."""
        what = "the features between up and down"
        found = [self.keys.of_value(meaning, value) for meaning in meanings]
        sure = next((key for key in found if key is not None and key.sure), None)
        if sure is not None:
            return leaf(sure.name)
        if value == 4 * self.structure.hidden:
            key = self.keys.of_value("hidden_size", self.structure.hidden)
            return leaf(f"4 * {key.name if key else self.structure.hidden}")
        return self.number(meanings[0], value, what)

    # ------------------------------------------------------------------------------------------------------ norms

    def norm(self, module: Module | None, where: str, *, place: str | None = None) -> Node | None:
        """Returns the node of a norm; ``place`` is a question about its place."""
        if module is None:
            return None
        kind, ask = ("layer", None) if module.has_bias else self.kind_without_bias(where)
        node: Node = {
            "kind": leaf(kind, ask),
            "weight": leaf(module.name, place),
            **self.bias(module),
            "eps": self.eps(kind),
            "offset": implied(0),
        }
        if self.near_offset():
            node["offset"] = leaf(1, "the nearest recipe stores norm weights minus 1; does this model? Else 0")
        return node

    def kind_without_bias(self, where: str) -> tuple[str, str | None]:
        """Returns the kind of a norm without a bias, and a question unless a key's name says it."""
        if self.keys.containing("rms", kind=float):
            return "rms", None
        named = "layer" if self.keys.containing("layer_norm", kind=float) else None
        kind = named or self.near_norm_kind() or "rms"
        return kind, f"{where}: rms, or layer without a bias? The headers are the same"

    def bias(self, module: Module) -> Node:
        return {"bias": leaf(True) if module.has_bias else implied(False)}

    def eps(self, kind: str) -> Leaf:
        if named := self.named("eps", "the eps of this norm"):
            return named
        key = self.keys.containing("eps", kind=float)
        usual = leaf(1e-6 if kind == "rms" else 1e-5, "no key states eps: 1e-5 or 1e-6?")
        return leaf(key, self.uncertainty(Key(key, sure=False), "the eps of this norm")) if key else usual

    def near_norm_kind(self) -> str | None:
        branches = self.near_branches()
        norms = [
            norm for branch in branches for norm in (branch.norm, branch.output_norm, *(p.norm for p in branch.parts))
        ]
        return next((norm.kind for norm in norms if norm is not None and norm.bias is None), None)

    def near_offset(self) -> bool:
        norm = self.very_near.final_norm if self.very_near is not None else None
        return (
            norm is not None
            and norm.offset == 1
            and not (self.structure.final_norm and self.structure.final_norm.has_bias)
        )

    def near_branches(self) -> tuple[BranchSpec, ...]:
        return self.nearest.layers[0].branches if self.nearest is not None else ()
