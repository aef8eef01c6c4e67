"""Draws tiny configurations of an architecture that transformers knows, so that all nodes of a recipe are exercised.

A configuration is drawn as the content of a ``config.json``, which both sides read. Over the draws every choice of a
key occurs, and rotary settings occur in the spellings of transformers 4 and 5. There are four kinds of files in turn:
with all keys that transformers fills in, with as few as possible, and two with some of the keys. The second of these
two looks old and has the extra keys of published files of the architecture.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from fastgen.models.resolve.config_keys import HARMLESS, INERT
from fastgen.verify.keys import FRACTIONS, Reading

MAX_POSITIONS: Final = 96
_MOST_LAYERS: Final = 32
_SPARSE: Final = 1
_OLD: Final = 3


def is_filled_in(index: int) -> bool:
    """Returns whether the ``index``-th file has all keys that transformers fills in."""
    return index % 4 == 0


def is_old(index: int) -> bool:
    """Returns whether the ``index``-th file looks like those of older versions and other programs."""
    return index % 4 == _OLD


def is_sparse(index: int) -> bool:
    """Returns whether the ``index``-th file leaves as much as possible to the defaults of the class."""
    return index % 4 == _SPARSE


def flattened(config: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value that is not a mapping, with the keys that lead to it."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flattened(value, (*at, key))
        else:
            yield (*at, key), value


# The names that files use for the same size.
SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "max_positions": ("max_position_embeddings", "n_positions"),
}

# Keys whose value follows from other sizes if they are absent, but not if the default is written out.
DERIVED: Final = frozenset({*SPELLINGS["num_kv_heads"], *SPELLINGS["head_dim"]})

SIZES: Final = (
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "moe_intermediate_size"),
    *("shared_expert_intermediate_size",),
)
_ACTIVATIONS: Final = ("hidden_act", "activation_function", "hidden_activation", "activation")
_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "sliding_window": (5, None, 16),
    "window_size": (5, 16),
    "max_window_layers": (1, 0, 2),
    "no_rope_layer_interval": (2, 3),
    "num_local_experts": (4, 6),
    "num_experts": (4, 6),
    "n_routed_experts": (16, 24),
    "num_experts_per_tok": (2, 3, 1),
    "q_lora_rank": (7, None),
    "kv_lora_rank": (16, 6),
    "qk_nope_head_dim": (8, 4),
    "qk_rope_head_dim": (6, 4),
    "v_head_dim": (5, 8),
    "attn_logit_softcapping": (3.0, None),
    "final_logit_softcapping": (4.0, None),
    "query_pre_attn_scalar": (24, 7),
    "logit_scale": (0.3, 1.7),
    "rotary_dim": (4, 8),
    "n_group": (2, 1),
    "topk_group": (1,),
    "topk_method": ("group_limited_greedy", "greedy"),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (1, 0),
    "num_nextn_predict_layers": (0,),
    "decoder_sparse_step": (1, 2, 3),
    "num_ln_in_parallel_attn": (None, 2, 1),
    "mlp_only_layers": ([], [1]),
    "original_max_position_embeddings": (MAX_POSITIONS,),
    "embedding_multiplier": (3.0, 0.5),
    "attention_multiplier": (0.2, 0.05),
    "residual_multiplier": (0.4, 1.5),
    "logits_scaling": (3.0, 0.5),
    "routed_scaling_factor": (1.7, 0.6),
}
_NO_EXPERTS: Final = ("num_experts", "num_local_experts")  # if the class has dense layers too, 0 makes all layers dense
_LAYERS: Final[dict[str, tuple[Any, ...]]] = {  # lists with one entry per layer
    "layer_types": ("sliding_attention", "full_attention"),
    "no_rope_layers": (1, 0),
}
_COUNTS: Final[dict[str, str | None]] = {  # a number of layers: the list of layers that replaces it
    "max_window_layers": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "first_k_dense_replace": None,
    "decoder_sparse_step": None,
}
# Keys that must fit together if experts are chosen by groups: all stated, or all left out.
_GROUPS: Final = ("n_group", "topk_group", "num_experts_per_tok")

TOKEN_IDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")
_ROPE_KEYS: Final = ("rope_parameters", "rope_scaling", "rope_theta")


class Draws:
    """Configurations of one architecture; the first ones differ from one another as much as possible.

    ``defaults`` is a complete ``config.json`` as the class of the architecture fills it in. ``mentioned`` are the
    top-level keys in the recipe's expressions. ``reading`` describes how the class reads keys. ``base`` holds flags and
    names to keep; ``published`` holds keys of published files that the class ignores.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any],
        mentioned: Collection[str],
        *,
        seed: int,
        base: Mapping[str, Any] | None = None,
        reading: Reading | None = None,
        published: Mapping[str, Any] | None = None,
    ):
        self.defaults, self.mentioned, self.reading = defaults, frozenset(mentioned), reading or Reading()
        self.seed, self.base, self.published = seed, dict(base or {}), dict(published or {})
        self.attempt = 0

    def cycle(self, key: str, choices: tuple[Any, ...], index: int) -> Any:
        """Returns the ``index``-th value of ``key``: each choice occurs once before any occurs twice.

        A draw depends only on the seed, its key and its index, so that two recipes of one architecture get the same
        configurations. The second and later attempts at one index draw freely.
        """
        if self.attempt:
            return random.Random(f"{self.seed} {key} {index} {self.attempt}").choice(choices)
        turn, place = divmod(index, len(choices))
        return random.Random(f"{self.seed} {key} {turn}").sample(choices, len(choices))[place]

    def known(self, key: str) -> bool:
        return key in self.defaults or key in self.mentioned

    def config(self, index: int, attempt: int = 0) -> dict[str, Any]:
        """Returns the ``index``-th configuration; ``attempt`` counts the earlier ones of this index that were
        refused.
        """
        self.attempt = attempt
        sparse = is_sparse(index)
        drawn = self.sizes(index, sparse)
        drawn |= {key: None if key == "pad_token_id" else 0 for key in TOKEN_IDS}
        if sparse and attempt:  # the reference has no default for some keys
            bare = (key for key in _CHOICES if key in self.defaults and self.defaults[key] is None)
            drawn |= {key: self.cycle(key, _CHOICES[key], index) for key in bare}
        if sparse:
            return drawn
        needed = {key for key, value in drawn.items() if value is not None or key not in self.reading.follow}
        needed -= {self.spelling("max_positions")}
        drawn |= self.features(index)
        drawn |= self.rotary(index)
        drawn |= self.base_features()
        if not is_filled_in(index):
            listed = _LAYERS.keys() & self.defaults.keys()
            grouped = dict.fromkeys(_GROUPS, "groups") if "n_group" in self.defaults else {}
            left_out = [
                key
                for key in drawn.keys() - needed | listed
                if self.cycle(f"{grouped.get(key, key)} left out", (True, False), index)
            ]
        else:
            left_out = []
        drawn = {key: value for key, value in drawn.items() if key not in left_out}
        drawn |= self.by_layer(index, drawn, left_out)
        if is_old(index):
            drawn = {**self.published, **drawn}
        if not is_filled_in(index):
            drawn = {self.respelled(key, index): value for key, value in drawn.items()}
        return drawn

    def by_layer(self, index: int, drawn: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
        """Draws the number of layers, and the lists with one entry per layer.

        If the class's default counts layers, there are more layers than that count.
        """
        lists = {key: kinds for key, kinds in _LAYERS.items() if key in self.defaults and key not in left_out}
        for key in sorted(lists.keys() & self.reading.nulls):
            if self.cycle(f"{key} is null", (True, False), index):
                lists[key] = ()
        name = self.spelling("num_layers")
        if name is None:
            return {}
        num_layers = drawn[name]
        for key, instead in _COUNTS.items():
            default = self.defaults.get(key)
            if not isinstance(default, int) or key in drawn or lists.get(instead or ""):
                continue
            counts = key != "max_window_layers" or drawn.get("use_sliding_window")
            if counts and default + 2 <= _MOST_LAYERS:
                num_layers = max(num_layers, default + 2)
        made: dict[str, Any] = {name: num_layers}
        flag = "use_sliding_window"
        windowed = drawn.get(flag, self.defaults.get(flag, True)) and drawn.get("sliding_window", 0) is not None
        for key, kinds in lists.items():
            kinds = kinds if key != "layer_types" or windowed else kinds[1:]
            layers = [self.cycle(f"{key} {layer}", kinds, index) for layer in range(num_layers)] if kinds else None
            made[key] = layers
        return made

    def respelled(self, key: str, index: int) -> str:
        """Returns ``key`` in one of the spellings that the class reads."""
        others = sorted(other for other, meant in self.reading.spellings.items() if meant == key)
        read = [key] if key in self.defaults or self.reading.spellings.get(key) == key else []
        choices = (*others, *read) if others else (key,)
        choice: str = self.cycle(f"{key} spelled", tuple(dict.fromkeys(choices)), index // 4)
        return choice

    def usual(self, key: str, index: int) -> Any:
        """Returns a value of ``key`` for a file that must state it: a small one, or the default of the class."""
        return self.cycle(key, _CHOICES[key], index) if key in _CHOICES else self.defaults[key]

    def sizes(self, index: int, sparse: bool) -> dict[str, Any]:
        names = {meaning: self.spelling(meaning) for meaning in SPELLINGS}
        default_kv = self.defaults.get(names["num_kv_heads"] or "")
        default_heads = self.defaults.get(names["num_heads"] or "")
        kv_heads = self.cycle("num_kv_heads", (2, 1, 3), index)
        head_dim = self.cycle("head_dim", (8, 16, 24), index)
        rotary_dim = self.defaults.get("rotary_dim")
        if sparse and isinstance(rotary_dim, int):
            head_dim = rotary_dim  # the file leaves rotary_dim out
        hidden_per_head = head_dim
        # The meaning of an absent key differs: it follows from other sizes, or it is a number that the class fixes.
        fixed = self.attempt > 0 or default_kv != default_heads
        if sparse and isinstance(default_kv, int) and fixed and self.attempt < 2:
            kv_heads, hidden_per_head = default_kv, self.smallest_head() if self.attempt else head_dim
        latent = "kv_lora_rank" in self.defaults  # heads come from a latent vector, and none are shared
        follows = names["num_kv_heads"] in self.reading.nulls and self.cycle("kv follow", (False, True, False), index)
        group = 1 if latent or (follows and not sparse) else self.cycle("group", (2, 1, 3, 5), index)
        if "alibi" in self.defaults and not sparse and self.flag("alibi", index):
            hidden_per_head = 8
            kv_heads, group = (9, 1) if follows else (kv_heads, 9)  # with up to 8 heads all slopes are powers of two
        num_heads = kv_heads * group
        stated = names["head_dim"] is not None and not latent
        explicit = stated and (self.attempt > 1 or (not sparse and self.cycle("explicit", (True, False), index)))
        if explicit:
            hidden_per_head = self.cycle("hidden", (10, 6, 20), index)
        hidden = num_heads * hidden_per_head
        values: dict[str, Any] = {
            "vocab_size": self.cycle("vocab_size", tuple(range(61, 141, 2)), index),
            "hidden_size": hidden,
            "num_layers": self.cycle("num_layers", (2, 3), index) + (2 if sparse and self.dense_first() else 0),
            "num_heads": num_heads,
        }
        if not sparse or latent or self.attempt > 1:
            values["num_kv_heads"] = None if follows and not sparse else kv_heads
        if not sparse or self.attempt > 1:
            values["max_positions"] = MAX_POSITIONS
        if explicit:
            values["head_dim"] = head_dim
        drawn = {name: values[meaning] for meaning, name in names.items() if name is not None and meaning in values}
        for key in SIZES:
            if key in self.defaults and not (self.attempt > 1 and sparse and self.defaults.get(key) is None):
                drawn[key] = self.cycle(key, tuple(range(9, 69, 2)), index)
                if self.follows(key) and self.cycle(f"{key} follows", (False, True), index):
                    drawn[key] = None
        if self.known("rotary_dim") and not (sparse and isinstance(rotary_dim, int)):
            drawn["rotary_dim"] = self.cycle("rotary_dim", _CHOICES["rotary_dim"], index)
        if self.known("word_embed_proj_dim"):
            drawn["word_embed_proj_dim"] = hidden if sparse or self.cycle("projected", (False, True), index) else 12
        return drawn

    def smallest_head(self) -> int:
        """Returns the fewest features of a head of which the class, by its default, rotates a pair."""
        usual = {**self.defaults, **(self.defaults.get("rope_parameters") or {})}
        fraction = next((usual[key] for key in FRACTIONS if isinstance(usual.get(key), float | int)), 1)
        return next(size for size in range(2, 1024, 2) if int(size * fraction) >= 2 and int(size * fraction) % 2 == 0)

    def follows(self, key: str) -> bool:
        """Returns whether the class derives the value from other sizes if it is null."""
        return self.defaults[key] is None or key in self.reading.nulls

    def dense_first(self) -> bool:
        """Returns whether by default more layers are dense than a tiny model has."""
        return (self.defaults.get("first_k_dense_replace") or 0) > 1

    def spelling(self, meaning: str) -> str | None:
        return next((name for name in SPELLINGS[meaning] if name in self.defaults), None) or next(
            (name for name in SPELLINGS[meaning] if name in self.mentioned), None
        )

    def features(self, index: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {}
        for key in sorted(self.mentioned | self.defaults.keys()):
            default = self.defaults.get(key)
            if key in _CHOICES and key in self.defaults:
                none = (0,) if key in _NO_EXPERTS and "mlp_only_layers" in self.defaults else ()
                drawn[key] = self.cycle(key, (*_CHOICES[key], *none), index)
            elif key in _ACTIVATIONS and key in self.defaults:
                drawn[key] = self.cycle(key, (default or "silu", "gelu", "relu"), index)
            elif "eps" in key and isinstance(default, float):
                drawn[key] = self.cycle(key, (1e-5, 0.05, 1e-6), index)
            elif isinstance(default, bool) and key not in INERT and key not in HARMLESS:
                drawn[key] = self.flag(key, index)
        return drawn

    def flag(self, key: str, index: int) -> bool:
        default: bool = self.defaults[key]
        return default if index == 0 else self.cycle(key, (not default, default), index)

    def rotary(self, index: int) -> dict[str, Any]:
        if not any(key in self.mentioned for key in _ROPE_KEYS):
            return {}
        theta = self.cycle("theta", (100.0, 10000.0, 500000.0), index)
        kind = (
            "default" if index == 0 else self.cycle("rope", ("llama3", "linear", "yarn", "default", "dynamic"), index)
        )
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
        if "partial_rotary_factor" in (self.defaults.get("rope_parameters") or {}):
            rope["partial_rotary_factor"] = self.cycle("partial_rotary_factor", (0.5, 0.25, 1.0), index)
        if kind != "default":
            rope["factor"] = self.cycle("factor", (2.0, 1.5, 8.0), index)
        if kind == "llama3" or (kind == "yarn" and self.cycle("original", (True, False), index)):
            rope["original_max_position_embeddings"] = 32
        if kind == "yarn" and "kv_lora_rank" in self.defaults:  # the scale of the scores then depends on it
            rope |= {"mscale": 0.7, "mscale_all_dim": self.cycle("mscale_all_dim", (0.9, 0.4), index)}
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if is_filled_in(index) or (not is_old(index) and self.cycle("rope of today", (True, False), index // 4)):
            return {"rope_parameters": rope}
        if self.cycle("rope inside", (False, True), index // 4):
            return {"rope_scaling": rope}
        flat: dict[str, Any] = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        return {**flat, "rope_scaling": None if kind == "default" else rope}

    def base_features(self) -> dict[str, Any]:
        sizes = {name for names in SPELLINGS.values() for name in names} | {*SIZES, *TOKEN_IDS, *_ROPE_KEYS}
        return {
            key: value
            for key, value in self.base.items()
            if key not in sizes | INERT and isinstance(value, bool | str) and key in self.defaults
        }
