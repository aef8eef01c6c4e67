"""Proposes the attention: projections, norms of queries and keys, positions, scores."""

from __future__ import annotations

from collections.abc import Mapping

from fastgen.models.spec import AttentionSpec
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.keys import MEANINGS, Key
from fastgen.recipe_tools.propose.matching import Match
from fastgen.recipe_tools.propose.nodes import Leaf, Node, Scalar, implied, leaf
from fastgen.recipe_tools.propose.sources import Sources

_NO_BASE = "no key states the base: 10000? Or `alibi` and no rotary? The language has no fixed sinusoids"


class AttentionNodes(Sources):
    """Writes the node of the attention."""

    def attention(self) -> Node:
        match = self.structure.attention
        if match.kind == "latent":
            return {"latent_attention": self.latent_attention(match)}
        norms = self.structure.norms
        node: Node = {"qkv": self.qkv(match)}
        for role, module, heads in (
            ("q_norm", norms.q, self.structure.num_heads),
            ("k_norm", norms.k, self.structure.num_kv_heads),
        ):
            if module is not None:
                node[role] = self.qk_norm(module, heads)
        if norms.q is not None:
            ask = "is this norm before the rotation? The language has none after it"
            node["q_norm"]["weight"] = leaf(norms.q.name, ask)
        node |= self.places(self.structure.head_dim)
        node |= self.scores()
        node["output"] = self.output(match)
        return {"attention": node}

    def output(self, match: Match) -> Node:
        module = match.roles["output"]
        layout: Node = {"layout": leaf("in out")} if match.transposed else {}
        inside = ", ".join(norm.name for norm in self.structure.norms.inside)
        ask = f"what does {inside} norm? The language has no norm between the heads and the output" if inside else None
        return {"weight": leaf(module.name, ask), **layout, "bias": leaf(module.has_bias)}

    def qkv(self, match: Match) -> Node:
        ask = f"which is which? The shapes fit any order of {', '.join(match.rivals)}" if match.rivals else None
        if match.kind == "three":
            modules = [match.roles[role] for role in "qkv"]
            node: Node = {role: leaf(match.roles[role].name) for role in "qkv"}
            if match.transposed:
                node["layout"] = leaf("in out")
            return node | {"bias": leaf(all(module.has_bias for module in modules), ask)}
        module = match.roles["qkv"]
        layout, split, ask = self.fused_layout(module)
        return {
            "fused": leaf(module.name),
            "layout": leaf(f"in {layout.removesuffix(' in')}" if match.transposed else layout, ask),
            "split": {name: leaf(value) for name, value in zip("qkv", split, strict=True)},
            "bias": leaf(module.has_bias),
        }

    def fused_layout(self, module: Module) -> tuple[str, tuple[Scalar, Scalar, Scalar], str | None]:
        structure = self.structure
        name = module.name.rpartition(".")[2].lower()
        near = self.near_layout_is_by_head()
        by_head = "query_key_value" in name or (name == "wqkv" and near is not False)
        other = "(part head_dim) in" if by_head else "(num_kv_heads part head_dim) in"
        others = "" if structure.num_kv_heads == 1 else f"`{other}` with its split, or "
        ask = f"or {others}another order of q, k and v? Shapes are the same"
        if not by_head:
            return "(part head_dim) in", ("num_heads", "num_kv_heads", "num_kv_heads"), ask
        group: Scalar = 1 if structure.num_heads == structure.num_kv_heads else "num_heads // num_kv_heads"
        return "(num_kv_heads part head_dim) in", (group, 1, 1), ask

    def near_layout_is_by_head(self) -> bool | None:
        for part in self.nearest.attentions() if self.nearest is not None else ():
            if isinstance(part, AttentionSpec) and part.q.weight.layout is not None and part.q.weight.layout.part:
                axes = part.q.weight.layout.pattern.replace("(", "").replace(")", "").replace("in ", "").split()
                return axes[0] != "part"
        return None

    def qk_norm(self, module: Module, heads: int) -> Node:
        node = self.norm(module, "norm of each head") or {}
        over_all = module.weight == (heads * self.structure.head_dim,) and heads > 1
        node["over"] = leaf("all" if over_all else "head")
        node["per_head_weight"] = leaf(True) if len(module.weight) == 2 else implied(False)
        return node

    def scores(self) -> Node:
        """Returns scale, soft cap and window of the scores, if the configuration has keys for them."""
        node: Node = {}
        if scale := self.found("score scale") or self.found("score divisor", "1 / sqrt({})"):
            node["scale"] = scale
        if cap := self.found("score cap"):
            node["softcap"] = cap
        if window := self.keys.find("window"):
            node["sliding_window"] = self.window(window)
        return node

    def window(self, key: Key) -> Leaf:
        unsure = self.uncertainty(key, MEANINGS["window"].what)
        flag = self.keys.find("uses window")
        if flag is not None and self.keys.values[flag.name] is False:
            return leaf(
                f"{key.name} if {flag.name} else none", unsure, self.uncertainty(flag, MEANINGS["uses window"].what)
            )
        kinds = self.layer_kinds()
        if kinds is not None:
            others = sorted(set(map(str, self.keys.values[kinds])) - {"sliding_attention", "full_attention"})
            other = f"layers of the kind {', '.join(others)} are taken to see all tokens; do they?" if others else None
            return leaf(f"{key.name} if {kinds}[layer] == 'sliding_attention' else none", unsure, other)
        return leaf(key.name, unsure, "in every layer? Else by `layer`")

    def layer_kinds(self) -> str | None:
        """Returns the key that lists the kinds of the layers."""
        key = self.keys.find("layer kinds")
        return key.name if key is not None else None

    def places(self, width: int) -> Node:
        """Returns the rotary or ALiBi node, or nothing if positions are in the embedding."""
        theta = self.named("theta", "the base")
        flag = self.keys.find("alibi")
        alibi = next((p.alibi for p in self.near_attentions() if isinstance(p, AttentionSpec) and p.alibi), None)
        placed = self.structure.positions is not None or theta is not None
        stated = flag is not None and self.keys.values[flag.name]
        if stated or (flag is None and alibi is not None and not placed):
            guess = (
                None
                if stated
                else "no key states positions, and the nearest recipe has ALiBi; has this model, or rotary?"
            )
            rounding = "in which dtype are slope and bias rounded, float32 or bfloat16?"
            return {
                "alibi": {
                    "rounding": leaf(alibi.rounding if alibi else "float32", guess, rounding),
                    "scaled": leaf(alibi.scaled if alibi else False, "is the bias scaled together with q·k?"),
                }
            }
        if self.structure.positions is not None and theta is None:
            return {}
        return {"rotary": self.rotary(width, theta)}

    def rotary(self, width: int, theta: Leaf | None) -> Node:
        latent = self.structure.attention.kind == "latent"
        base = theta or leaf(10000, _NO_BASE)
        pairs, layers = self.rotated_pairs(latent=latent), self.found("no rotation", "{}[layer] == 1")
        alike = self.by_layer() if layers is None or self.layer_kinds() else None
        node: Node = {
            "kind": leaf(pairs.value, pairs.question, alike),
            "theta": base,
        }
        if not latent:
            node |= self.rotated_part(width)
        mappings = self.rope_mappings()
        if mappings:
            several = f"{', '.join(mappings)}: which holds in which layers?" if len(mappings) > 1 else None
            node["scaling"] = leaf(mappings[0], several)
        if layers is not None:
            node["when"] = layers
        return node

    def rotated_pairs(self, *, latent: bool) -> Leaf:
        """Returns which features are rotated together."""
        flag = self.keys.find("interleaved")
        if flag is not None:
            stated = self.keys.values[flag.name]
            self.requires.append(flag.name if stated else f"not {flag.name}")
            unsure = self.uncertainty(flag, MEANINGS["interleaved"].what)
            return leaf("interleaved" if stated else "half", unsure)
        near = next((part.rotary for part in self.near_attentions() if part.rotary), None)
        kind = near.kind if near and not latent else "interleaved" if latent else "half"
        return leaf(kind, "features i and i + dim/2 rotated together (half), or 2i and 2i + 1 (interleaved)?")

    def rotated_part(self, width: int) -> Node:
        """Returns how much of a head is rotated; all of it, with a question, if no key says so."""
        if fraction := self.found("rotated fraction"):
            return {"fraction": fraction}
        dim = self.keys.find("rotated features")
        if dim is not None and self.keys.values[dim.name] <= width:
            return {"dim": leaf(dim.name, self.uncertainty(dim, MEANINGS["rotated features"].what))}
        return {"fraction": leaf(1, f"no key states it: are all {width} features of a head rotated, or some?")}

    def by_layer(self) -> str:
        """Returns the question whether some layers rotate differently or not at all."""
        kinds = self.layer_kinds()
        listed = ", ".join(dict.fromkeys(map(str, self.keys.values[kinds]))) if kinds is not None else ""
        every = f"do all kinds of layers ({listed})" if listed else "do all layers"
        return f"{every} rotate, and alike? Else `when`, or `theta` and `scaling` by layer"

    def rope_mappings(self) -> list[str]:
        """Returns the keys of mappings that stretch the frequencies."""
        kinds = {"rope_type", "type", "factor"}
        return [key for key, value in self.keys.values.items() if isinstance(value, Mapping) and kinds & value.keys()]

    def latent_sizes(self) -> tuple[int, int, int]:
        """Returns the features of a head without rotation, with rotation, and of a value head."""
        match, heads = self.structure.attention, self.structure.num_heads
        narrow, rank = match.size("kv_down")[0], match.size("kv_up")[1]
        value = match.size("output")[1] // heads
        return match.size("kv_up")[0] // heads - value, narrow - rank, value

    def latent_size(self, meaning: str) -> Leaf:
        """Returns one of the sizes of a head, ``nope``, ``rope`` or ``value``."""
        sizes = dict(zip(("nope", "rope", "value"), self.latent_sizes(), strict=True))
        return self.number(meaning, sizes[meaning], MEANINGS[meaning].what)

    def latent_attention(self, match: Match) -> Node:
        norms = self.structure.latent_norms
        nope, rope, value = (self.latent_size(name) for name in ("nope", "rope", "value"))
        node: Node = {"nope_dim": nope, "rope_dim": rope, "v_head_dim": value}
        biased = "q_down" in match.roles and match.roles["q_down"].has_bias
        if "q" in match.roles:
            node["q"] = {"weight": leaf(match.roles["q"].name)}
        else:
            rank = match.size("q_up")[1]
            node["q_latent"] = {
                "rank": self.number("query rank", rank, MEANINGS["query rank"].what),
                "down": leaf(match.roles["q_down"].name),
                "norm": self.latent_norm(norms.get("q")),
                "up": leaf(match.roles["q_up"].name),
            }
        node["kv_latent"] = {
            "rank": self.number("latent rank", match.size("kv_up")[1], MEANINGS["latent rank"].what),
            "down": leaf(match.roles["kv_down"].name),
            "norm": self.latent_norm(norms.get("kv")),
            "fused": leaf(match.roles["kv_up"].name),
            "layout": leaf("(num_heads part) in", "are the keys and values of each head adjacent?"),
            "split": {"k": leaf(nope.value), "v": leaf(value.value)},
        }
        node["bias"] = leaf(biased or match.roles["kv_down"].has_bias)
        node["rotary"] = self.rotary(self.latent_sizes()[1], self.named("theta", "the base"))
        node["output"] = self.output(match)
        return node

    def latent_norm(self, module: Module | None) -> Node:
        node = self.norm(module, "norm of the latent") or {
            "kind": leaf("rms"),
            "weight": leaf("missing"),
            "eps": leaf(1e-6),
        }
        node["eps"] = leaf(1e-6, "1e-6 in all known models; or the model's eps?")
        return node
