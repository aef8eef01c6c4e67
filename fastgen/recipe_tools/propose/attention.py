"""Proposes the attention: projections, norms of queries and keys, positions, scores."""

from __future__ import annotations

from collections.abc import Mapping

from fastgen.models.spec import AttentionSpec
from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.matching import Match
from fastgen.recipe_tools.propose.nodes import Leaf, Node, Scalar, implied, leaf
from fastgen.recipe_tools.propose.sources import Sources


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
        node |= self.places(self.structure.head_dim)
        node |= self.scores()
        node["output"] = self.linear(match, "output")
        return {"attention": node}

    def linear(self, match: Match, role: str) -> Node:
        module = match.roles[role]
        layout: Node = {"layout": leaf("in out")} if match.transposed else {}
        return {"weight": leaf(module.name), **layout, "bias": leaf(module.has_bias)}

    def qkv(self, match: Match) -> Node:
        ask = f"which is which? The shapes fit any order of {', '.join(match.rivals)}" if match.rivals else None
        if match.kind == "three":
            modules = [match.roles[role] for role in "qkv"]
            node: Node = {role: leaf(match.roles[role].name) for role in "qkv"}
            if match.transposed:
                node["layout"] = leaf("in out")
            return node | {"bias": Leaf(all(module.has_bias for module in modules), question=ask)}
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
        ask = None if structure.num_kv_heads == 1 else f"or `{other}`, with its split? Shapes are the same"
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
        if scale := self.keys.containing("attention", "mult"):
            node["scale"] = leaf(scale)
        elif scale := self.keys.containing("pre_attn_scalar"):
            node["scale"] = leaf(f"1 / sqrt({scale})")
        if cap := self.keys.containing("attn", "softcap"):
            node["softcap"] = leaf(cap)
        if (window := self.keys.containing("window", kind=int)) and "layers" not in window:
            node["sliding_window"] = self.window(window)
        return node

    def window(self, key: str) -> Leaf:
        flag = self.keys.containing("use", "window", kind=bool)
        if flag is not None and self.keys.values[flag] is False:
            return leaf(f"{key} if {flag} else none")
        kinds = self.keys.containing("layer_types", kind=list)
        if kinds is not None:
            return leaf(f"{key} if {kinds}[layer] == 'sliding_attention' else none")
        return leaf(key, "in every layer?") if flag is not None or self.near_windows() else leaf(key)

    def near_windows(self) -> bool:
        """Returns whether the nearest recipe has windows in only some layers."""
        parts = list(self.nearest.attentions()) if self.nearest is not None else []
        return len({part.sliding_window for part in parts if isinstance(part, AttentionSpec)}) > 1

    def places(self, width: int) -> Node:
        """Returns the rotary or ALiBi node, or nothing if positions are in the embedding."""
        theta = self.keys.named("theta")
        flag = self.keys.containing("alibi", kind=bool)
        alibi = next((p.alibi for p in self.near_attentions() if isinstance(p, AttentionSpec) and p.alibi), None)
        placed = self.structure.positions is not None or theta is not None
        if (flag and self.keys.values[flag]) or (flag is None and alibi is not None and not placed):
            ask = None if alibi else "in which dtype are slope and bias rounded, float32 or bfloat16?"
            scaled = alibi.scaled if alibi else False
            return {
                "alibi": {
                    "rounding": leaf(alibi.rounding if alibi else "float32", ask),
                    "scaled": leaf(scaled, "is the bias scaled together with q·k?"),
                }
            }
        if self.structure.positions is not None and theta is None:
            return {}
        return {"rotary": self.rotary(width, theta)}

    def rotary(self, width: int, theta: str | None) -> Node:
        near = next((part.rotary for part in self.near_attentions() if part.rotary), None)
        flag = self.keys.containing("interleave", kind=bool)
        latent = self.structure.attention.kind == "latent"
        kind = near.kind if near and not latent else "interleaved" if latent else "half"
        if flag is not None:
            kind = "interleaved" if self.keys.values[flag] else "half"
            self.requires.append(flag if self.keys.values[flag] else f"not {flag}")
        ask = None if flag else "features i and i + dim/2 rotated together (half), or 2i and 2i + 1 (interleaved)?"
        node: Node = {
            "kind": leaf(kind, ask),
            "theta": leaf(theta) if theta else leaf(10000, "no key states the base: 10000? Or `alibi` and no rotary?"),
        }
        if fraction := self.keys.containing("partial", "rotary") or self.keys.containing("rotary", "pct"):
            node["fraction"] = leaf(fraction)
        elif (dim := self.keys.containing("rotary", "dim", kind=int)) and self.keys.values[dim] <= width:
            node["dim"] = leaf(dim)
        elif near is not None and near.dim != width and self.structure.attention.kind != "latent":
            node["dim"] = leaf(near.dim if near.dim <= width else width, f"all {width} features of a head, or some?")
        mapping = self.rope_mapping()
        if mapping is not None:
            node["scaling"] = leaf(mapping)
        if layers := self.keys.containing("no_rope", kind=list):
            node["when"] = leaf(f"{layers}[layer] == 1")
        return node

    def rope_mapping(self) -> str | None:
        for key, value in self.keys.values.items():
            if isinstance(value, Mapping) and {"rope_type", "type", "factor"} & value.keys():
                return key
        return None

    def latent_sizes(self) -> tuple[int, int, int]:
        """Returns the features of a head without rotation, with rotation, and of a value head."""
        match, heads = self.structure.attention, self.structure.num_heads
        narrow, rank = match.size("kv_down")[0], match.size("kv_up")[1]
        value = match.size("output")[1] // heads
        return match.size("kv_up")[0] // heads - value, narrow - rank, value

    def latent_attention(self, match: Match) -> Node:
        nope, rope, value = self.latent_sizes()
        norms = self.structure.latent_norms
        rank = match.size("kv_up")[1]
        node: Node = {
            "nope_dim": leaf(self.size_text(nope, "nope")),
            "rope_dim": leaf(self.size_text(rope, "rope")),
            "v_head_dim": leaf(self.size_text(value, "v_head", "value")),
        }
        biased = "q_down" in match.roles and match.roles["q_down"].has_bias
        if "q" in match.roles:
            node["q"] = {"weight": leaf(match.roles["q"].name)}
        else:
            node["q_latent"] = {
                "rank": leaf(self.size_text(match.size("q_up")[1], "q_lora", "q_rank")),
                "down": leaf(match.roles["q_down"].name),
                "norm": self.latent_norm(norms.get("q")),
                "up": leaf(match.roles["q_up"].name),
            }
        node["kv_latent"] = {
            "rank": leaf(self.size_text(rank, "kv_lora", "kv_rank")),
            "down": leaf(match.roles["kv_down"].name),
            "norm": self.latent_norm(norms.get("kv")),
            "fused": leaf(match.roles["kv_up"].name),
            "layout": leaf("(num_heads part) in", "are the keys and values of each head adjacent?"),
            "split": {"k": leaf(self.size_text(nope, "nope")), "v": leaf(self.size_text(value, "v_head", "value"))},
        }
        node["bias"] = leaf(biased or match.roles["kv_down"].has_bias)
        node["rotary"] = self.rotary(rope, self.keys.named("theta"))
        node["output"] = self.linear(match, "output")
        return node

    def latent_norm(self, module: Module | None) -> Node:
        node = self.norm(module, "norm of the latent") or {
            "kind": leaf("rms"),
            "weight": leaf("missing"),
            "eps": leaf(1e-6),
        }
        node["eps"] = leaf(1e-6, "1e-6 in all known models; or the model's eps?")
        return node
