"""Proposes the feed-forward, dense or a mixture of experts."""

from __future__ import annotations

from fastgen.models.spec import MoeSpec
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.keys import MEANINGS, Key
from fastgen.recipe_tools.propose.matching import Match
from fastgen.recipe_tools.propose.nodes import Leaf, Node, leaf
from fastgen.recipe_tools.propose.sources import Sources
from fastgen.recipe_tools.propose.words import say_which_is_gate, words

_ON_SCORES = (
    "is this added to the scores, for the choice of experts only? The language has no factor on what experts add, nor "
    "one on scores"
)


def _is_correction(correction: tuple[Module, str]) -> bool:
    """Returns whether the name says that it corrects the choice of experts."""
    module, last = correction
    return bool({"correction", "bias"} & set(words(f"{module.name}.{last}")))


class FeedForwardNodes(Sources):
    """Writes the nodes of the feed-forwards."""

    def forwards(self) -> Node:
        """Returns the dense feed-forward and the mixture, each with its layers if there are both."""
        structure = self.structure
        node: Node = {}
        if structure.forward is not None:
            node["mlp"] = self.feed_forward(structure.forward)
        if structure.mixture is not None:
            node["moe"] = self.moe()
        if len(node) == 2:
            dense = next(iter(structure.forward.roles.values())).layers if structure.forward else frozenset()
            node["mlp"]["when"], node["moe"]["when"] = self.layers_of(sorted(dense))
        return node

    def layers_of(self, dense: list[int]) -> tuple[Leaf, Leaf]:
        if dense == list(range(len(dense))):
            key = self.keys.of_value("dense layers", len(dense))
            named = key is not None and (key.sure or "dense" in key.name)
            count = key.name if key is not None and named else len(dense)
            unsure = self.uncertainty(key, MEANINGS["dense layers"].what) if key is not None and named else None
            return leaf(f"layer < {count}", unsure), leaf(f"layer >= {count}")
        return leaf(f"layer in {dense}"), leaf(f"not layer in {dense}")

    def feed_forward(self, match: Match, *sizes: str) -> Node:
        """Returns the node of one feed-forward, whose size is a key of one of the meanings ``sizes``."""
        size = match.size("down")[1]
        modules = list(match.roles.values())
        kind = "plain" if match.kind == "plain" else "gated"
        node: Node = {
            "kind": leaf(kind),
            "size": self.size(size, *(sizes or ("intermediate_size",))),
            "activation": self.activation(kind),
        }
        rivals = self.rivals(match)
        ask = f"which is {' and which '.join(rivals)}? The shapes are the same"
        if match.kind == "fused":
            node["fused"] = leaf(match.roles["gate_up"].name)
            node["layout"] = leaf(
                "in (part out)" if match.transposed else "(part out) in", "gate first, or up first (split)?"
            )
            node["split"] = {"gate": leaf(1), "up": leaf(1)}
        else:
            for role in ("gate", "up"):
                if role in match.roles:
                    node[role] = leaf(match.roles[role].name, ask if role in rivals else None)
            if match.transposed:
                node["layout"] = leaf("in out")
        node["down"] = leaf(match.roles["down"].name)
        node["bias"] = leaf(all(module.has_bias for module in modules))
        return node

    @staticmethod
    def rivals(match: Match) -> tuple[str, ...]:
        """Returns the roles of modules that could be swapped; gate and up can, unless names say which is the gate."""
        if match.rivals or match.kind != "gated":
            return match.rivals
        names = [match.roles[role].name for role in ("gate", "up", "down")]
        return () if say_which_is_gate(*names) else ("gate", "up")

    def activation(self, kind: str) -> Leaf:
        named = self.named("activation", "the activation")
        if named is not None and isinstance(self.keys.values[str(named.value)], str):
            return named
        key = self.keys.containing("act", kind=str)
        if key is not None:
            return leaf(key, self.uncertainty(Key(key, sure=False), "the activation"))
        near = next(
            (part.activation for part in (self.nearest.parts() if self.nearest else ()) if hasattr(part, "activation")),
            None,
        )
        usual = near or ("silu" if kind == "gated" else "gelu")
        return leaf(f"'{usual}'", "no key names the activation: 'silu', 'gelu', 'gelu_new', 'relu' …?")

    def moe(self) -> Node:
        mixture = self.structure.mixture
        assert mixture is not None
        expert = self.feed_forward(mixture.forward, "expert size", "intermediate_size")
        count = self.number("experts", mixture.experts.count, MEANINGS["experts"].what)
        node: Node = {
            "router": self.router(),
            "experts": {"at": leaf(mixture.experts.at), "count": count, **expert},
        }
        if mixture.shared is not None:
            node["shared"] = self.feed_forward(mixture.shared, "shared size", "expert size", "intermediate_size")
            size, whole = mixture.forward.size("down")[1], mixture.shared.size("down")[1]
            shared = self.keys.of_value("shared experts", whole // size) if whole % size == 0 else None
            if node["shared"]["size"].question and shared is not None:
                unsure = self.uncertainty(shared, MEANINGS["shared experts"].what)
                node["shared"]["size"] = leaf(f"{expert['size'].value} * {shared.name}", unsure)
            if mixture.shared_gate is not None:
                node["shared_gate"] = leaf(mixture.shared_gate.name)
        return node

    def router(self) -> Node:
        mixture = self.structure.mixture
        assert mixture is not None
        near = next((p.router for p in (self.nearest.parts() if self.nearest else ()) if isinstance(p, MoeSpec)), None)
        key = self.keys.find("scoring")
        scoring, ask = near.scoring if near else "softmax", "softmax, softmax_top_k or sigmoid?"
        if key is not None and self.keys.values[key.name] in ("softmax", "sigmoid"):
            scoring, ask = self.keys.values[key.name], self.uncertainty(key, MEANINGS["scoring"].what) or ""
        elif mixture.correction is not None and _is_correction(mixture.correction):
            scoring = "sigmoid"
        unstated = leaf(True, "are the chosen weights divided by their sum?")
        node: Node = {
            "weight": leaf(mixture.router.name),
            "top_k": self.found("top k") or leaf(2, "no key states how many experts a token goes to"),
            "scoring": leaf(scoring, ask),
            "normalize": self.found("normalize") or unstated,
        }
        if scale := self.found("router scale"):
            node["scale"] = scale
        if mixture.correction is not None:
            module, last = mixture.correction
            unsure = None if _is_correction(mixture.correction) else _ON_SCORES
            node["correction"] = leaf(f"{module.name}.{last}".lstrip("."), unsure)
        groups, chosen, method = (self.keys.find(name) for name in ("expert groups", "chosen groups", "choice"))
        plain = method is not None and "group" not in str(self.keys.values[method.name]) and mixture.correction is None
        if groups is not None and chosen is not None and not plain:
            node |= {"num_groups": leaf(groups.name), "top_groups": leaf(chosen.name)}
        return node
