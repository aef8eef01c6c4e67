"""Shrinks a checkpoint's configuration so that a model of it is made in no time, and every kind of layer remains.

Only keys that the file states are changed, and everything that hangs together is divided by the same number. So the
recipe reads the same keys, and proportions stay: heads to KV heads, the rotated part of a head, the feed-forward to the
stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, TypeGuard

from fastgen.verify.configs import SIZES, SPELLINGS, TOKEN_IDS, flattened
from fastgen.verify.keys import FRACTIONS

# A number above one of these is divided until it is not, as far as what depends on it allows.
_MOST_HEADS: Final = 16
_HEAD_DIM: Final = 16
_VOCAB: Final = 160
_WINDOW: Final = 11  # tokens; fewer than the shortest prompt of a verification has
_LAYERS: Final = 4
_EXPERTS: Final = 8
_LEAST_POSITIONS: Final = 48  # tokens; the prompts of a verification and what follows them need fewer
_SMALLEST: Final = 8  # features of a feed-forward or a latent vector

_HEAD_SIZES: Final = ("head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_WIDTHS: Final = (*SIZES, "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank")
_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
# Keys that count or number layers: a period, or the first layer of another kind.
_OF_LAYERS: Final = re.compile("layer|pattern|interval|step|dense|every|freq|period")
# Keys that say how many tokens a token sees.
_WINDOWS: Final = re.compile("(window|local_attention|attention_span|attention_chunk)(_size)?$")


def shrunk(config: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with smaller numbers where it is large, and with room for the prompts of a verification.

    ``whole`` is the same configuration with all that its class fills in.
    """
    smaller = dict(config)
    smaller |= _fewer_layers(config)
    smaller |= _narrower(config, whole)
    smaller |= _fewer_experts(config)
    name = _stated("vocab_size", config)
    if name is not None and config[name] > _VOCAB:
        smaller[name] = _VOCAB
        smaller |= {key: None if key == "pad_token_id" else 0 for key in TOKEN_IDS if key in config}
    name = _stated("max_positions", config)
    if name is not None and config[name] < _LEAST_POSITIONS:
        smaller[name] = _LEAST_POSITIONS
    return smaller | {
        key: _WINDOW for key, value in config.items() if _WINDOWS.search(key) and _is_count(value, _WINDOW)
    }


def differences(config: Mapping[str, Any], smaller: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the numbers that were changed: by key the old and the new one."""
    return {key: (config[key], value) for key, value in smaller.items() if value != config[key] and _is_count(value)}


def _is_count(value: object, above: int = 0) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > above


def _stated(meaning: str, config: Mapping[str, Any]) -> str | None:
    """Returns the key of this meaning whose value is a number above 0."""
    return next((name for name in SPELLINGS[meaning] if _is_count(config.get(name))), None)


# ------------------------------------------------------------------------------------------------------------ layers


def _fewer_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    name = _stated("num_layers", config)
    if name is None:
        return {}
    layers = config[name]
    fewer = min(layers, max(_LAYERS, *_needed_layers(config, name, layers)))
    smaller: dict[str, Any] = {name: fewer}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            smaller[key] = value[:fewer]
        elif _are_indices(key, value, layers):
            smaller[key] = [index for index in value if index < fewer]
    return smaller


def _needed_layers(config: Mapping[str, Any], name: str, layers: int) -> Iterator[int]:
    """Yields numbers of layers, of which the largest has every kind of layer that the configuration describes."""
    yield 1
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            texts = list(map(repr, value))
            yield 1 + max(texts.index(text) for text in texts)
        elif _are_indices(key, value, layers):
            yield 2 + max(value)
        elif key != name and _is_count(value) and value < layers and _OF_LAYERS.search(key):
            yield 2 + value


def _are_indices(key: str, value: object, layers: int) -> bool:
    if not isinstance(value, list) or not value or not _OF_LAYERS.search(key):
        return False
    return all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < layers for each in value)


# ------------------------------------------------------------------------------------------------------------ widths


@dataclass(frozen=True)
class _Heads:
    """The numbers of query heads and of KV heads."""

    queries: int
    shared: int

    def fewer(self) -> _Heads:
        """Returns at most 16 query heads, if halving leads there.

        Both numbers are halved while there are more than two KV heads, then the query heads of each KV head.
        """
        queries, shared = self.queries, self.shared
        while queries > _MOST_HEADS and shared % 2 == 0 and shared > 2:
            queries, shared = queries // 2, shared // 2
        while queries > _MOST_HEADS and (queries // shared) % 2 == 0:
            queries //= 2
        return _Heads(queries, shared)


def _narrower(config: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fewer and smaller heads, and all widths divided as the stream's."""
    names = {meaning: _stated(meaning, config) for meaning in SPELLINGS}
    hidden, heads = names["hidden_size"], names["num_heads"]
    if hidden is None or heads is None:
        return {}
    now = _Heads(config[heads], _count(whole, "num_kv_heads") or config[heads])
    if now.queries % now.shared:
        return {}
    follows = names["num_kv_heads"] is None
    new = now.fewer() if not follows or now.shared == now.queries else now
    share = Fraction(new.queries, now.queries)
    if (config[hidden] * share).denominator != 1:
        return {}
    divisor = _divisor(config, whole, config[hidden] * share)
    ratio = share / divisor
    smaller = {heads: new.queries, hidden: int(config[hidden] * ratio)}
    if names["num_kv_heads"] is not None:
        smaller[names["num_kv_heads"]] = new.shared
    smaller |= {key: config[key] // divisor for key in _HEAD_SIZES if _is_count(config.get(key))}
    for key in _WIDTHS:
        value = config.get(key)
        if _is_count(value) and ratio < 1:
            smaller[key] = max(min(value, _SMALLEST), int(value * ratio))
    return smaller


def _divisor(config: Mapping[str, Any], whole: Mapping[str, Any], hidden: Fraction) -> int:
    """Returns the power of two by which the size of a head is divided, and the stream with it."""
    sizes = {key: config[key] for key in _HEAD_SIZES if _is_count(config.get(key))}
    head_dim = _count(whole, "head_dim") or config[_stated("hidden_size", config) or ""] // _count(whole, "num_heads")
    if _has_lists_of_features(whole):
        return 1
    follows = _count(whole, "head_dim") in (0, _per_head(whole))
    if not follows and not {"head_dim", "qk_rope_head_dim"} & sizes.keys():
        return 1  # the class fixes the size of a head
    fractions = [value for path, value in flattened(whole) if path[-1] in FRACTIONS and isinstance(value, float | int)]

    def fits(divisor: int) -> bool:
        even = all(size % (2 * divisor) == 0 for size in (head_dim, *sizes.values()))
        rotated = all(_divides(int(head_dim * each), 2 * divisor) for each in fractions)
        return even and rotated and (hidden / divisor).denominator == 1 and head_dim // divisor >= _HEAD_DIM

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    divisor = 1
    while fits(2 * divisor):
        divisor *= 2
    return divisor


def _divides(value: int, divisor: int) -> bool:
    return value > 0 and value % divisor == 0


def _count(whole: Mapping[str, Any], meaning: str) -> int:
    """Returns the number of this meaning, 0 if there is none."""
    name = _stated(meaning, whole)
    return whole[name] if name is not None else 0


def _per_head(whole: Mapping[str, Any]) -> int:
    return _count(whole, "hidden_size") // (_count(whole, "num_heads") or 1)


def _has_lists_of_features(whole: Mapping[str, Any]) -> bool:
    """Returns whether the rotary settings have a list, which has a number for each pair of features."""
    mappings = (value for key, value in whole.items() if isinstance(value, Mapping) and "rope" in key)
    return any(isinstance(each, list) for mapping in mappings for each in mapping.values())


# ----------------------------------------------------------------------------------------------------------- experts


def _fewer_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    groups, chosen_groups = config.get("n_group"), config.get("topk_group")
    top_k = config.get("num_experts_per_tok")
    least = top_k if _is_count(top_k) else 1
    if _is_count(groups) and _is_count(chosen_groups):
        fewest = groups * max(2, -(-least // chosen_groups))
    else:
        fewest = max(_EXPERTS, least)
    return {key: min(config[key], fewest) for key in _EXPERT_COUNTS if _is_count(config.get(key))}
