"""Turns a checkpoint's structure into a recipe: each module in its node, each number an expression over the config.

What names, shapes and configuration leave open is taken from the nearest known recipe if it has such a node, else it is
the most common choice. In both cases the line has a question.
"""

from __future__ import annotations

from fastgen.models.registry.nearest import Nearness
from fastgen.recipe_tools.propose.attention import AttentionNodes
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.feed_forward import FeedForwardNodes
from fastgen.recipe_tools.propose.keys import Keys
from fastgen.recipe_tools.propose.nodes import Leaf, Node, Scalar, implied, joined, leaf
from fastgen.recipe_tools.propose.structure import Structure
from fastgen.recipe_tools.propose.words import is_after, is_before, says_final

_PLACE = "is this norm before its part (norm), after it (output_norm), or on the sum (sum_norm)?"
_AFTER = "are the norms after parts on what a part adds (output_norm), or on the sum (sum_norm)?"
_INSIDE = "is it between the heads and the output? The language has no norm there"
_ORDER = "one after the other (attend, transform), or in parallel (one branch, both)?"
_WHERE = "is it after the last layer? A norm of the embedding is `embedding: {norm: …}`"
_OFFSET = "is 1 added to the weights of the norms (offset: 1, in all)?"


class Proposer(AttentionNodes, FeedForwardNodes):
    """Writes the nodes of a recipe for one structure."""

    def __init__(self, structure: Structure, keys: Keys, nearest: Nearness | None, num_layers: int, layers_at: str):
        super().__init__(structure, keys, nearest)
        self.num_layers, self.layers_at = num_layers, layers_at

    def tree(self) -> Node:
        parallel, order = self.is_parallel()
        at_norm = self.structure.norms.transform is not None
        layers: Node = {
            "at": leaf(self.layers_at, None if at_norm else order),
            "residual": self.residual(parallel, order if at_norm else None),
        }
        final_norm, head = self.final_norm(), self.head()
        model: Node = {
            "embedding": self.embedding(),
            "layers": layers,
            **self.optional("final_norm", final_norm),
            "head": head,
        }
        requires: Node = {"requires": leaf(tuple(self.requires))} if self.requires else {}
        return {"config": self.config(), **requires, "model": model}

    def final_norm(self) -> Node | None:
        module = self.structure.final_norm
        node = self.norm(module, "final norm")
        if node is not None and module is not None:
            asked = None if says_final(module.name) else _WHERE
            node["weight"] = leaf(module.name, asked, _OFFSET if node["offset"].implied else None)
        return node

    @staticmethod
    def optional(key: str, node: Node | Leaf | None) -> Node:
        return {} if node is None else {key: node}

    # ------------------------------------------------------------------------------------------------------ numbers

    def config(self) -> Node:
        structure = self.structure
        heads = self.number("num_heads", structure.num_heads, "the number of heads")
        if not structure.heads_known:
            heads = leaf(structure.num_heads, f"no key states the number of heads; {structure.head_dim} features each?")
        limit = self.named("max_positions", "the trained length")
        unlimited = leaf("none", "no key states how many positions the model was trained on")
        if structure.positions is not None and limit is None:
            unlimited = leaf(structure.positions.weight[0])
        return {
            "vocab_size": self.number("vocab_size", structure.vocab, "the size of the vocabulary"),
            "hidden_size": self.number("hidden_size", structure.hidden, "the width of the stream"),
            "num_layers": self.number("num_layers", self.num_layers, "the number of layers"),
            "num_heads": heads,
            "num_kv_heads": self.kv_heads(heads),
            "head_dim": self.head_dim(heads),
            "max_positions": limit or unlimited,
        }

    def kv_heads(self, heads: Leaf) -> Leaf:
        structure = self.structure
        if structure.num_kv_heads == structure.num_heads:
            key = self.keys.named("num_kv_heads")
            same = key is not None and self.keys.values[key] == structure.num_heads
            return leaf(key if same else heads.value)
        if structure.num_kv_heads == 1 and self.keys.of_value("num_kv_heads", 1) is None:
            return leaf(1)
        return self.number("num_kv_heads", structure.num_kv_heads, "the number of KV heads")

    def head_dim(self, heads: Leaf) -> Leaf:
        structure = self.structure
        if structure.attention.kind == "latent":
            nope, rope = (self.latent_size(name) for name in ("nope", "rope"))
            return leaf(f"{nope.value} + {rope.value}")
        key = self.keys.named("head_dim")
        if key is not None and self.keys.values[key] == structure.head_dim:
            return leaf(key)
        if structure.hidden == structure.num_heads * structure.head_dim:
            hidden = self.number("hidden_size", structure.hidden, "")
            return leaf(f"{hidden.value} // {heads.value}")
        return self.number("head_dim", structure.head_dim, "the features of a head")

    # --------------------------------------------------------------------------------------------------------- ends

    def embedding(self) -> Node:
        structure = self.structure
        node: Node = {"tokens": leaf(structure.tokens.name), "scale": implied(1)}
        if scale := self.found("embedding scale"):
            node["scale"] = scale
        elif self.very_near is not None and self.very_near.embedding.scale != 1:
            root = abs(self.very_near.embedding.scale**2 - self.very_near.hidden_size) < 0.5
            usual: Scalar = "sqrt(hidden_size)" if root else self.very_near.embedding.scale
            node["scale"] = leaf(usual, "the nearest recipe scales the embedding; does this model? Else 1")
        if structure.project_in is not None:
            node["project"] = self.project(structure.project_in)
        if structure.positions is not None:
            node["positions"] = self.positions(structure.positions)
        node["tokens"] = leaf(structure.tokens.name, self.unstated(scaled=not node["scale"].implied))
        return node | self.optional("norm", self.norm(structure.embedding_norm, "norm of the embedding"))

    def unstated(self, *, scaled: bool) -> str:
        """Returns the question about what has no tensor: norms without weights, and what else no key states."""
        factors = {
            "the embedding (sqrt(hidden_size), …)": scaled or self.keys.states("embedding scale"),
            "q·k (other than 1 / sqrt(head_dim))": self.keys.states("score scale", "score divisor"),
            "branches": self.keys.states("residual scale"),
            "logits": self.keys.states("logit scale", "logit divisor"),
            "the weights of experts": self.structure.mixture is None or self.keys.states("router scale"),
        }
        limits = {
            "a soft cap on scores": self.keys.states("score cap"),
            "a soft cap on logits": self.keys.states("logit cap"),
            "a window": self.keys.states("window"),
        }
        factored = ", ".join(what for what, stated in factors.items() if not stated)
        open_ = [f"a factor on {factored}"] if factored else []
        open_ += [what for what, stated in limits.items() if not stated]
        norm = "a norm without weights (affine: false)"
        return (
            f"no key states {', or '.join(open_)}; has the model any, or {norm}?" if open_ else f"has the model {norm}?"
        )

    def project(self, module: Module) -> Node:
        width = self.number("embedding size", self.structure.width, "the width of the embedding")
        return {"weight": leaf(module.name), "size": width, **self.bias(module)}

    def positions(self, module: Module) -> Node:
        rows = module.weight[0]
        limit = self.keys.named("max_positions")
        most = self.keys.values[limit] if limit else rows
        offset = rows - most if isinstance(most, int) and 0 < rows - most <= 8 else 0
        text = f"max_positions + {offset}" if offset else "max_positions"
        return {
            "weight": leaf(module.name),
            "offset": leaf(offset, "is this the row of position 0?"),
            "rows": leaf(text if most == rows - offset else rows),
        }

    def head(self) -> Node:
        structure = self.structure
        node: Node = {}
        tied_key = self.keys.named("tied")
        if structure.head is None:
            stated = tied_key is not None and self.keys.values[tied_key] is True
            node["weight"] = leaf("lm_head")
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
        divided = self.found("logit divisor", "1 / {}", "are the logits divided by this key, or multiplied?")
        if scale := divided or self.found("logit scale"):
            node["scale"] = scale
        if cap := self.found("logit cap"):
            node["softcap"] = cap
        return node

    # ------------------------------------------------------------------------------------------------------- layers

    def residual(self, parallel: bool, order: str | None) -> Node:
        """Returns the branches; ``order`` is the question whether they are ``parallel``."""
        norms = self.structure.norms
        attention = self.attention()
        forwards = self.forwards()
        scale = self.found("residual scale")
        scaled = self.optional("scale", scale)
        offset = _OFFSET if self.structure.final_norm is None else None
        place = joined(self.ask_before(norms.attend), offset)
        attend_norm = self.norm(norms.attend, "norm of the attention", place=place)
        alone = norms.attend is None or len(norms.stream) > 2  # else the question at the first norm is enough
        place = joined(self.ask_before(norms.transform) if alone else None, order)
        transform_norm = self.norm(norms.transform, "norm of the feed-forward", place=place)
        if parallel:
            if transform_norm is None:
                return {"both": self.optional("norm", attend_norm) | attention | forwards | scaled}
            inner = {kind: self.optional("norm", transform_norm) | part for kind, part in forwards.items()}
            ((kind, part),) = attention.items()
            return {"both": {kind: self.optional("norm", attend_norm) | part} | inner | scaled}
        place = self.ask_after(norms.after_attend, _AFTER)
        attended = self.norm(norms.after_attend, "norm after the attention", place=place)
        place = self.ask_after(norms.after_transform, None if norms.after_attend else _AFTER)
        transformed = self.norm(norms.after_transform, "norm after the feed-forward", place=place)
        return {
            "attend": {
                **self.optional("norm", attend_norm),
                **attention,
                **self.optional("output_norm", attended),
                **scaled,
            },
            "transform": {
                **self.optional("norm", transform_norm),
                **forwards,
                **self.optional("output_norm", transformed),
                **scaled,
            },
        }

    def ask_after(self, norm: Module | None, said: str | None) -> str | None:
        """Returns the question about a norm that is taken to be after its part; ``said`` if the name says so."""
        return None if norm is None else joined(said if is_after(norm.name) else _PLACE, self.ask_inside(norm))

    def ask_before(self, norm: Module | None) -> str | None:
        """Returns the question about a norm that is taken to be before its part, unless its name says so."""
        return None if norm is None else joined(None if is_before(norm.name) else _PLACE, self.ask_inside(norm))

    def ask_inside(self, norm: Module) -> str | None:
        return _INSIDE if self.structure.is_in_attention(norm) else None

    def is_parallel(self) -> tuple[bool, str | None]:
        """Returns whether attention and feed-forward read the same stream, and a question if neither a key nor the
        number of norms says it.

        Names are only a default: `post_attention_layernorm` is also that of the parallel layers of GPT-NeoX.
        """
        norms = self.structure.norms
        if len(norms.stream) == 1:
            return True, None
        after = [norm for norm in (norms.after_attend, norms.after_transform) if norm is not None]
        flag = self.keys.find("parallel")
        if flag is not None and not after:
            parallel = bool(self.keys.values[flag.name])
            self.requires.append(flag.name if parallel else f"not {flag.name}")
            return parallel, self.uncertainty(flag, "whether the parts of a layer run in parallel")
        if flag is not None or len(after) == 2:  # parallel parts have no norms after each of them
            return False, None
        if after or any(is_after(module.name) for module in norms.stream):
            return False, _ORDER
        near = self.very_near.layers[0].branches if self.very_near is not None else ()
        return len(near) == 1 and len(near[0].parts) == 2, _ORDER
