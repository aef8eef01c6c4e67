"""Proposes the feed-forward, dense or a mixture of experts."""

from __future__ import annotations

from fastgen.models.spec import MoeSpec
from fastgen.recipe_tools.propose.matching import Match
from fastgen.recipe_tools.propose.nodes import Leaf, Node, leaf
from fastgen.recipe_tools.propose.sources import Sources


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
            first = self.keys.containing("dense", kind=int)
            count = first if first and self.keys.values[first] == len(dense) else len(dense)
            return leaf(f"layer < {count}"), leaf(f"layer >= {count}")
        return leaf(f"layer in {dense}"), leaf(f"not layer in {dense}")

    def feed_forward(self, match: Match) -> Node:
        size = match.size("down")[1]
        modules = list(match.roles.values())
        kind = "plain" if match.kind == "plain" else "gated"
        node: Node = {
            "kind": leaf(kind),
            "size": self.size(size, "features between up and down"),
            "activation": self.activation(kind),
        }
        ask = f"which is {' and which '.join(match.rivals)}? The shapes are the same" if match.rivals else None
        if match.kind == "fused":
            node["fused"] = leaf(match.roles["gate_up"].name)
            node["layout"] = leaf(
                "in (part out)" if match.transposed else "(part out) in", "gate first, or up first (split)?"
            )
            node["split"] = {"gate": leaf(1), "up": leaf(1)}
        else:
            for role in ("gate", "up"):
                if role in match.roles:
                    node[role] = Leaf(match.roles[role].name, question=ask if role in match.rivals else None)
            if match.transposed:
                node["layout"] = leaf("in out")
        node["down"] = leaf(match.roles["down"].name)
        node["bias"] = leaf(all(module.has_bias for module in modules))
        return node

    def activation(self, kind: str) -> Leaf:
        key = self.keys.named("activation")
        if key is not None and isinstance(self.keys.values[key], str):
            return leaf(key)
        key = self.keys.containing("act", kind=str)
        if key is not None:
            return leaf(key)
        near = next(
            (part.activation for part in (self.nearest.parts() if self.nearest else ()) if hasattr(part, "activation")),
            None,
        )
        usual = near or ("silu" if kind == "gated" else "gelu")
        return leaf(f"'{usual}'", "no key names the activation: 'silu', 'gelu', 'gelu_new', 'relu' …?")

    def moe(self) -> Node:
        mixture = self.structure.mixture
        assert mixture is not None
        expert = self.feed_forward(mixture.forward)
        key = self.keys.of_value("", mixture.experts.count, "num_experts", "experts")
        count = leaf(key) if key else leaf(mixture.experts.count, "no key states the number of experts")
        node: Node = {
            "router": self.router(),
            "experts": {"at": leaf(mixture.experts.at), "count": count, **expert},
        }
        if mixture.shared is not None:
            node["shared"] = self.feed_forward(mixture.shared)
            size, whole = mixture.forward.size("down")[1], mixture.shared.size("down")[1]
            if isinstance(node["shared"]["size"].value, int) and whole % size == 0:
                node["shared"]["size"] = leaf(f"{expert['size'].value} * {self.size_text(whole // size, 'shared')}")
            if mixture.shared_gate is not None:
                node["shared_gate"] = leaf(mixture.shared_gate.name)
        return node

    def router(self) -> Node:
        mixture = self.structure.mixture
        assert mixture is not None
        near = next((p.router for p in (self.nearest.parts() if self.nearest else ()) if isinstance(p, MoeSpec)), None)
        top_k = next(
            (key for parts in (("per_tok",), ("expert", "top"), ("selected", "expert"), ("moe", "k"))
             if (key := self.keys.containing(*parts, kind=int))),
            None,
        )  # fmt: skip
        scoring = near.scoring if near else "softmax"
        if (key := self.keys.containing("scor", kind=str)) and self.keys.values[key] in ("softmax", "sigmoid"):
            scoring = self.keys.values[key]
        elif mixture.correction is not None:
            scoring = "sigmoid"
        normalize = self.keys.containing("norm", "topk", kind=bool) or self.keys.containing("norm", "top_k", kind=bool)
        node: Node = {
            "weight": leaf(mixture.router.name),
            "top_k": leaf(top_k) if top_k else leaf(2, "no key states how many experts a token goes to"),
            "scoring": leaf(scoring, None if key else "softmax, softmax_top_k or sigmoid?"),
            "normalize": leaf(normalize) if normalize else leaf(True, "are the chosen weights divided by their sum?"),
        }
        if scale := self.keys.containing("rout", "scal"):
            node["scale"] = leaf(scale)
        if mixture.correction is not None:
            module, last = mixture.correction
            node["correction"] = leaf(f"{module.name}.{last}".lstrip("."))
        if groups := self.keys.containing("n_group", kind=int):
            chosen = self.keys.containing("topk_group", kind=int)
            method = self.keys.containing("topk_method", kind=str)
            plain = method is not None and "group" not in str(self.keys.values[method]) and mixture.correction is None
            if chosen and not plain:
                node |= {"num_groups": leaf(groups), "top_groups": leaf(chosen)}
        return node
