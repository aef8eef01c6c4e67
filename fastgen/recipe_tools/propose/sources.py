"""The sources of a proposal's values: the structure, the keys of the configuration, and the nearest recipe."""

from __future__ import annotations

from typing import Final

from fastgen.models.registry.nearest import Nearness
from fastgen.models.spec import AttentionSpec, BranchSpec, LatentAttentionSpec
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.keys import Keys
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

    def number(self, meaning: str, value: int, what: str = "") -> Leaf:
        """Returns the key whose value is ``value``, else the number itself and a question."""
        key = self.keys.of_value(meaning, value)
        if key is not None:
            return leaf(key)
        return leaf(value, f"no single key states {value}{what}; which key, or which expression?")

    def size(self, value: int, what: str) -> Leaf:
        """Returns the number of features between two maps."""
        key = self.keys.of_value("intermediate_size", value)
        if key is None and value == 4 * self.structure.hidden:
            return leaf("4 * hidden_size")
        return leaf(key) if key else self.number("intermediate_size", value, f" ({what})")

    def size_text(self, value: int, *like: str) -> str:
        """Returns the key whose value is ``value`` and whose name is like one of ``like``, else the number itself."""
        return str(self.keys.of_value("", value, *like) or value)

    def norm(self, module: Module | None, where: str, *, ask: str | None = None) -> Node | None:
        if module is None:
            return None
        kind = "layer" if module.has_bias else "rms"
        question = ask
        known = module.has_bias
        if not module.has_bias and not self.keys.containing("rms", kind=float):
            known = self.keys.containing("layer_norm", kind=float) is not None
            kind = "layer" if known else self.near_norm_kind() or kind
            question = question or f"{where}: rms, or layer without a bias? The headers are the same"
        node: Node = {
            "kind": Leaf(kind, sure=known or question is None, question=question),
            "weight": leaf(module.name),
            **self.bias(module),
            "eps": self.eps(kind),
            "offset": implied(0),
        }
        if self.near_offset() and "latent" not in where and "head" not in where:
            node["offset"] = leaf(1, "the nearest recipe stores norm weights minus 1; does this model? Else 0")
        return node

    def bias(self, module: Module) -> Node:
        return {"bias": leaf(True) if module.has_bias else implied(False)}

    def eps(self, kind: str) -> Leaf:
        key = self.keys.named("eps") or self.keys.containing("eps", kind=float)
        return leaf(key) if key else leaf(1e-6 if kind == "rms" else 1e-5, "no key states eps: 1e-5 or 1e-6?")

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
