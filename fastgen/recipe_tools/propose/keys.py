"""Finds the key of ``config.json`` for a meaning: by the names that the field uses, by its value, or by likeness.

Only a name that the field uses makes a key sure. Any other key that may be meant is a question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastgen.models.registry.nearest import SPELLINGS
from fastgen.models.resolve.config_keys import INERT
from fastgen.recipe_tools.propose.evidence import Evidence

_NUMBER: Final = (int, float)


@dataclass(frozen=True)
class Meaning:
    """A meaning that a key may have: ``what`` it is, the ``names`` that the field uses, and the ``kind`` of its value.

    A key whose name contains all parts of an entry of ``like`` may be meant too.
    """

    what: str
    names: tuple[str, ...]
    kind: type | tuple[type, ...] = _NUMBER
    like: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Key:
    """A key of the configuration, dotted inside mappings. It is ``sure`` if its name is one that the field uses."""

    name: str
    sure: bool = True


MEANINGS: Final[dict[str, Meaning]] = {
    "embedding scale": Meaning(
        "a factor on the embedding", ("embedding_multiplier",), like=(("embedding", "mult"), ("embed", "scale"))
    ),
    "score scale": Meaning("the factor on q·k", ("attention_multiplier",), like=(("attention", "mult"),)),
    "score divisor": Meaning(
        "the square of the divisor of q·k", ("query_pre_attn_scalar",), like=(("pre_attn_scalar",),)
    ),
    "score cap": Meaning(
        "the soft cap of scores", ("attn_logit_softcapping",), like=(("attn", "softcap"), ("attn", "soft_cap"))
    ),
    "window": Meaning("the tokens that a token sees", ("sliding_window", "sliding_window_size"), int, (("window",),)),
    "uses window": Meaning("whether there is a window", ("use_sliding_window",), bool, (("use", "window"),)),
    "layer kinds": Meaning("the kinds of the layers", ("layer_types",), list),
    "residual scale": Meaning(
        "a factor on what branches add", ("residual_multiplier",), like=(("residual", "mult"), ("residual", "scale"))
    ),
    "logit divisor": Meaning("a divisor of the logits", ("logits_scaling",), like=(("logit", "scaling"),)),
    "logit scale": Meaning("a factor on the logits", ("logit_scale",), like=(("logit", "scale"), ("logit", "mult"))),
    "logit cap": Meaning(
        "the soft cap of logits", ("final_logit_softcapping",), like=(("final", "softcap"), ("logits", "softcap"))
    ),
    "rotated fraction": Meaning(
        "the rotated fraction of a head",
        ("partial_rotary_factor", "rotary_pct"),
        like=(("partial", "rotary"), ("rotary", "pct"), ("rotary", "fraction")),
    ),
    "rotated features": Meaning("the rotated features of a head", ("rotary_dim",), int, (("rotary", "dim"),)),
    "interleaved": Meaning(
        "whether 2i and 2i + 1 are rotated together", ("rope_interleave", "rope_interleaved"), bool, (("interleave",),)
    ),
    "no rotation": Meaning("1 for each layer that rotates", ("no_rope_layers",), list, (("no_rope",),)),
    "alibi": Meaning("whether scores have an ALiBi bias", ("alibi",), bool, (("alibi",),)),
    "parallel": Meaning(
        "whether the parts of a layer run in parallel",
        ("use_parallel_residual", "parallel_attn", "parallel_residual"),
        bool,
        (("parallel",),),
    ),
    "embedding size": Meaning("the width of the embedding", ("word_embed_proj_dim", "embedding_size"), int),
    "dense layers": Meaning("the number of dense layers", ("first_k_dense_replace",), int, (("dense",),)),
    "experts": Meaning(
        "the number of experts",
        ("num_local_experts", "num_experts", "n_routed_experts", "n_experts", "moe_num_experts"),
        int,
        (("num_experts",), ("experts",)),
    ),
    "expert size": Meaning("the features of an expert", ("moe_intermediate_size", "expert_size"), int),
    "shared size": Meaning("the features of the shared expert", ("shared_expert_intermediate_size",), int),
    "shared experts": Meaning(
        "the number of shared experts", ("n_shared_experts", "num_shared_experts"), int, (("shared",),)
    ),
    "top k": Meaning(
        "how many experts a token goes to",
        ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk"),
        int,
        (("per_tok",), ("expert", "top"), ("selected", "expert"), ("moe", "k")),
    ),
    "scoring": Meaning("how the router scores", ("scoring_func",), str, (("scor",),)),
    "normalize": Meaning(
        "whether the chosen weights are divided by their sum",
        ("norm_topk_prob",),
        bool,
        (("norm", "topk"), ("norm", "top_k")),
    ),
    "router scale": Meaning("a factor on the weights of experts", ("routed_scaling_factor",), like=(("rout", "scal"),)),
    "expert groups": Meaning("the groups of experts", ("n_group",), int, (("n_group",),)),
    "chosen groups": Meaning("the groups that experts are chosen from", ("topk_group",), int, (("topk_group",),)),
    "choice": Meaning("how experts are chosen", ("topk_method",), str, (("topk_method",),)),
    "nope": Meaning("the features of a head that are not rotated", ("qk_nope_head_dim",), int, (("nope",),)),
    "rope": Meaning("the features of a head that are rotated", ("qk_rope_head_dim",), int, (("rope",),)),
    "value": Meaning("the features of a value head", ("v_head_dim",), int, (("v_head",), ("value",))),
    "query rank": Meaning("the rank of the queries", ("q_lora_rank",), int, (("q_lora",), ("q_rank",))),
    "latent rank": Meaning("the rank of keys and values", ("kv_lora_rank",), int, (("kv_lora",), ("kv_rank",))),
}


class Keys:
    """The keys of a configuration, looked up by their meaning and by the value that the shape of a tensor implies."""

    def __init__(self, evidence: Evidence):
        self.values: Mapping[str, Any] = evidence.values

    def named(self, meaning: str) -> str | None:
        """Returns the key that is a spelling of ``meaning`` and is not null."""
        return next(iter(self._spelled(meaning)), None)

    def conflicts(self, meaning: str) -> list[str]:
        """Returns all keys that are spellings of ``meaning`` if they state different values, else nothing."""
        found = self._spelled(meaning)
        return found if len({repr(self.values[key]) for key in found}) > 1 else []

    def _spelled(self, meaning: str) -> list[str]:
        spelled = SPELLINGS[meaning]
        found = [key for key in self.values if _last(key) in spelled and self.values[key] is not None]
        return sorted(found, key=lambda key: (key.count("."), spelled.index(_last(key))))

    def number(self, meaning: str) -> int | None:
        key = self.named(meaning)
        value = self.values[key] if key is not None else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def find(self, meaning: str) -> Key | None:
        """Returns the key of this meaning: one with a name that the field uses, else one with a name like it.

        Names that begin with an underscore are private to a program, so they are never taken.
        """
        wanted = MEANINGS[meaning]
        for name in wanted.names:
            for key, value in self.values.items():
                if _last(key) == name and _is_kind(value, wanted.kind):
                    return Key(key)
        for parts in wanted.like:
            for key, value in self.values.items():
                alike = all(part in _last(key) for part in parts) and not _last(key).startswith("_")
                if alike and _is_kind(value, wanted.kind) and not self._means_otherwise(key, meaning):
                    return Key(key, sure=False)
        return None

    def states(self, *meanings: str) -> bool:
        """Returns whether some key has one of these meanings, even if it is null."""
        return any(
            self.find(meaning) is not None or any(_last(key) in MEANINGS[meaning].names for key in self.values)
            for meaning in meanings
        )

    def of_value(self, meaning: str, value: int) -> Key | None:
        """Returns the key that states ``value``: one of the ``meaning``, else one named like it, else the only one."""
        spelled = SPELLINGS.get(meaning) or MEANINGS[meaning].names
        equal = [key for key in self.values if self._is(key, value)]
        for name in spelled:
            if found := next((key for key in equal if _last(key) == name), None):
                return Key(found)
        others = [
            key
            for key in equal
            if key not in INERT and not _last(key).startswith("_") and not self._means_otherwise(key, meaning)
        ]
        for parts in MEANINGS[meaning].like if meaning in MEANINGS else ():
            if found := next((key for key in others if all(part in _last(key) for part in parts)), None):
                return Key(found, sure=False)
        return Key(others[0], sure=False) if len(others) == 1 else None

    def containing(self, *parts: str, kind: type | tuple[type, ...] = _NUMBER) -> str | None:
        """Returns the first key whose name contains all of ``parts`` and whose value has that type (not a flag)."""
        for key, value in self.values.items():
            if _is_kind(value, kind) and all(part in _last(key) for part in parts):
                return key
        return None

    def _means_otherwise(self, key: str, meaning: str) -> bool:
        """Returns whether the field uses the name of ``key`` for something else."""
        last = _last(key)
        spelled = any(last in names for other, names in SPELLINGS.items() if other != meaning)
        return spelled or any(last in each.names for other, each in MEANINGS.items() if other != meaning)

    def _is(self, key: str, value: int) -> bool:
        found = self.values[key]
        return isinstance(found, int) and not isinstance(found, bool) and found == value


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _is_kind(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
