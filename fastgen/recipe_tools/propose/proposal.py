"""Turns a checkpoint's structure into a recipe: each module in its node, each number an expression over the config.

What headers leave open is taken from the nearest known recipe if it has such a node, else it is the most common choice.
In both cases the line has a question.
"""

from __future__ import annotations

from fastgen.models.registry.nearest import Nearness
from fastgen.recipe_tools.propose.attention import AttentionNodes
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.feed_forward import FeedForwardNodes
from fastgen.recipe_tools.propose.keys import Keys
from fastgen.recipe_tools.propose.nodes import Leaf, Node, Scalar, assumed, implied, leaf
from fastgen.recipe_tools.propose.structure import Structure
from fastgen.recipe_tools.propose.words import is_after


class Proposer(AttentionNodes, FeedForwardNodes):
    """Writes the nodes of a recipe for one structure."""

    def __init__(self, structure: Structure, keys: Keys, nearest: Nearness | None, num_layers: int, layers_at: str):
        super().__init__(structure, keys, nearest)
        self.num_layers, self.layers_at = num_layers, layers_at

    def tree(self) -> Node:
        model: Node = {
            "embedding": self.embedding(),
            "layers": {"at": leaf(self.layers_at), "residual": self.residual()},
            **self.optional("final_norm", self.final_norm()),
            "head": self.head(),
        }
        requires: Node = {"requires": leaf(tuple(self.requires))} if self.requires else {}
        return {"config": self.config(), **requires, "model": model}

    def final_norm(self) -> Node | None:
        module = self.structure.final_norm
        node = self.norm(module, "final norm")
        if node is not None and module is not None and not module.has_bias and node["offset"].implied:
            node["weight"] = Leaf(module.name, question="is 1 added to the weights of the norms (offset: 1, in all)?")
        return node

    @staticmethod
    def optional(key: str, node: Node | Leaf | None) -> Node:
        return {} if node is None else {key: node}

    # ------------------------------------------------------------------------------------------------------ numbers

    def config(self) -> Node:
        structure = self.structure
        heads = self.number("num_heads", structure.num_heads)
        if not structure.heads_known:
            heads = leaf(structure.num_heads, f"no key states the number of heads; {structure.head_dim} features each?")
        limit = self.keys.named("max_positions")
        unlimited = leaf("none", "no key states how many positions the model was trained on")
        if structure.positions is not None and limit is None:
            unlimited = leaf(structure.positions.weight[0])
        return {
            "vocab_size": self.number("vocab_size", structure.vocab),
            "hidden_size": self.number("hidden_size", structure.hidden),
            "num_layers": self.number("num_layers", self.num_layers),
            "num_heads": heads,
            "num_kv_heads": self.kv_heads(heads),
            "head_dim": self.head_dim(heads),
            "max_positions": leaf(limit) if limit else unlimited,
        }

    def kv_heads(self, heads: Leaf) -> Leaf:
        structure = self.structure
        if structure.num_kv_heads == structure.num_heads:
            key = self.keys.named("num_kv_heads")
            same = key is not None and self.keys.values[key] == structure.num_heads
            return Leaf(key if same else heads.value, sure=heads.sure)
        if structure.num_kv_heads == 1 and self.keys.of_value("num_kv_heads", 1) is None:
            return leaf(1)
        return self.number("num_kv_heads", structure.num_kv_heads)

    def head_dim(self, heads: Leaf) -> Leaf:
        structure = self.structure
        if structure.attention.kind == "latent":
            nope, rope, _ = self.latent_sizes()
            return leaf(f"{self.size_text(nope, 'nope')} + {self.size_text(rope, 'rope')}")
        key = self.keys.named("head_dim")
        if key is not None and self.keys.values[key] == structure.head_dim:
            return leaf(key)
        if structure.hidden == structure.num_heads * structure.head_dim:
            hidden = self.number("hidden_size", structure.hidden)
            return Leaf(f"{hidden.value} // {heads.value}", sure=heads.sure)
        return self.number("head_dim", structure.head_dim)

    # --------------------------------------------------------------------------------------------------------- ends

    def embedding(self) -> Node:
        structure = self.structure
        node: Node = {"tokens": leaf(structure.tokens.name), "scale": implied(1)}
        multiplier = self.keys.containing("embedding", "mult") or self.keys.containing("embed", "scale")
        if multiplier:
            node["scale"] = leaf(multiplier)
        elif self.very_near is not None and self.very_near.embedding.scale != 1:
            root = abs(self.very_near.embedding.scale**2 - self.very_near.hidden_size) < 0.5
            scale: Scalar = "sqrt(hidden_size)" if root else self.very_near.embedding.scale
            node["scale"] = leaf(scale, "the nearest recipe scales the embedding; does this model? Else 1")
        if structure.project_in is not None:
            node["project"] = self.project(structure.project_in)
        if structure.positions is not None:
            node["positions"] = self.positions(structure.positions)
        if node["scale"].implied:
            ask = "no key states a scale of the embedding (scale: sqrt(hidden_size), …); is it scaled?"
            node["tokens"] = Leaf(structure.tokens.name, question=ask)
        return node | self.optional("norm", self.norm(structure.embedding_norm, "norm of the embedding"))

    def project(self, module: Module) -> Node:
        width = self.number("embedding_size", self.structure.width)
        return {"weight": leaf(module.name), "size": width, **self.bias(module)}

    def positions(self, module: Module) -> Node:
        rows = module.weight[0]
        limit = self.keys.named("max_positions")
        most = self.keys.values[limit] if limit else rows
        offset = rows - most if isinstance(most, int) and 0 < rows - most <= 8 else 0
        text = f"max_positions + {offset}" if offset else "max_positions"
        return {
            "weight": leaf(module.name),
            "offset": leaf(offset),
            "rows": leaf(text if most == rows - offset else rows),
        }

    def head(self) -> Node:
        structure = self.structure
        node: Node = {}
        tied_key = self.keys.named("tied")
        if structure.head is None:
            stated = tied_key is not None and self.keys.values[tied_key] is True
            node["weight"] = assumed("lm_head")
            question = (
                None if stated else "no tensor is the head, so it is assumed to be the embedding; or is it missing?"
            )
            node["tied"] = leaf(tied_key if stated else True, question)
        else:
            node["weight"] = leaf(structure.head.name)
            node["tied"] = leaf(tied_key if tied_key and self.keys.values[tied_key] is False else False)
            if tied_key and self.keys.values[tied_key] is True:  # both tensors exist and must be equal
                node["tied"] = leaf(tied_key)
            node |= self.bias(structure.head)
        if structure.project_out is not None:
            node["project"] = self.project(structure.project_out)
        if scale := self.keys.containing("logit", "scaling", kind=(int, float)):
            node["scale"] = leaf(f"1 / {scale}", "are the logits divided by this key, or multiplied?")
        elif scale := self.keys.containing("logit", "scale") or self.keys.containing("logit", "mult"):
            node["scale"] = leaf(scale)
        if cap := self.keys.containing("final", "softcap") or self.keys.containing("logits", "softcap"):
            node["softcap"] = leaf(cap)
        return node

    # ------------------------------------------------------------------------------------------------------- layers

    def residual(self) -> Node:
        norms = self.structure.norms
        parallel, question = self.is_parallel()
        attention = self.attention()
        forwards = self.forwards()
        scale = self.keys.containing("residual", "mult")
        scaled: Node = {"scale": leaf(scale)} if scale else {}
        attend_norm = self.norm(norms.attend, "norm of the attention", ask=question)
        transform_norm = self.norm(norms.transform, "norm of the feed-forward")
        if parallel:
            if transform_norm is None:
                return {"both": self.optional("norm", attend_norm) | attention | forwards | scaled}
            inner = {kind: self.optional("norm", transform_norm) | part for kind, part in forwards.items()}
            ((kind, part),) = attention.items()
            return {"both": {kind: self.optional("norm", attend_norm) | part} | inner | scaled}
        after = {
            "attend": self.norm(norms.after_attend, "norm after the attention", ask=self.ask_after(norms.after_attend)),
            "transform": self.norm(norms.after_transform, "norm after the feed-forward"),
        }
        return {
            "attend": {
                **self.optional("norm", attend_norm),
                **attention,
                **self.optional("output_norm", after["attend"]),
                **scaled,
            },
            "transform": {
                **self.optional("norm", transform_norm),
                **forwards,
                **self.optional("output_norm", after["transform"]),
                **scaled,
            },
        }

    @staticmethod
    def ask_after(norm: Module | None) -> str | None:
        if norm is None or is_after(norm.name):
            return None
        return "is this norm before its part (norm), after it (output_norm), or on the sum (sum_norm)?"

    def is_parallel(self) -> tuple[bool, str | None]:
        """Returns whether attention and feed-forward read the same stream, and a question if nothing shows it."""
        norms = self.structure.norms
        if not norms.stream:
            return False, None
        flag = self.keys.containing("parallel", kind=bool)
        if len(norms.stream) == 1:
            return True, None
        if norms.after_attend or norms.after_transform:
            return False, None
        if flag is not None:
            parallel = bool(self.keys.values[flag])
            self.requires.append(flag if parallel else f"not {flag}")
            return parallel, None
        near = self.very_near.layers[0].branches if self.very_near is not None else ()
        parallel = len(near) == 1 and len(near[0].parts) == 2
        ask = "one after the other (attend, transform), or in parallel (one branch, both)?"
        sequential = any("post" in module.name or "input" in module.name for module in norms.stream)
        return parallel, ask if parallel or not sequential else None
