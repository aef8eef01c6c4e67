"""Scores how well a module's name matches a role. Names never decide alone: shapes first limit what is possible."""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final[dict[str, tuple[str, ...]]] = {  # the last part of a module's name
    "q": ("q", "wq", "query", "queries", "qry"),
    "k": ("k", "wk", "key", "keys"),
    "v": ("v", "wv", "value", "values", "val"),
    "qkv": ("qkv", "wqkv", "kqv", "query_key_value", "c_attn", "in_proj", "q_k_v"),
    "output": ("o", "wo", "out", "output", "dense", "proj", "c_proj", "merge", "final"),
    "q_down": ("q_a", "wq_a", "q_down", "q_compress", "q_reduce", "q_lora_a"),
    "q_up": ("q_b", "wq_b", "q_up", "q_expand", "q_lora_b"),
    "kv_down": ("kv_a_proj_with_mqa", "kv_a", "wkv_a", "kv_down", "kv_compress", "kv_reduce"),
    "kv_up": ("kv_b", "wkv_b", "kv_up", "kv_expand"),
    "gate": ("gate", "wg", "w1", "g", "gating", "linear_1"),
    "up": ("up", "w3", "fc1", "fc_in", "c_fc", "wi", "h_to_4h", "in", "expand", "widen", "value", "w1", "linear_v"),
    "down": ("down", "w2", "fc2", "fc_out", "c_proj", "wo", "4h_to_h", "out", "contract", "narrow", "proj", "fc3"),
    "gate_up": ("gate_up", "up_gate", "fused", "w13", "w12", "wi", "gate_and_up"),
    "router": ("router", "gate", "gating", "switch", "wg"),
    "tokens": ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "token", "embed", "embeddings",
               "embedding", "tok", "emb", "words"),
    "positions": ("wpe", "embed_positions", "position", "positions", "pos", "position_embeddings", "pos_emb"),
    "head": ("lm_head", "embed_out", "output", "head", "unembed", "logits", "out"),
    "q_norm": ("q_norm", "q_layernorm", "query_norm", "q_ln", "norm_q", "query_layernorm", "q"),
    "k_norm": ("k_norm", "k_layernorm", "key_norm", "k_ln", "norm_k", "key_layernorm", "k"),
}  # fmt: skip
_ATTENTION: Final = frozenset(("attn", "attention", "self", "mha", "mixer", "attend", "heads", "sa"))
_FEED_FORWARD: Final = frozenset(
    ("mlp", "ffn", "ff", "feed", "forward", "feedforward", "ffw", "moe", "experts", "expert", "shared", "transform")
)
_NORM: Final = frozenset(("norm", "ln", "layernorm", "rms", "rmsnorm", "scale"))
_GATE: Final = frozenset(("gate", "gates", "gated", "gating"))

# Words of a norm's name that say nothing of its place, and words that say it is the last one.
_NORM_ALONE: Final = _NORM | {"layer", "group", "weight"}
_LAST: Final = frozenset(("final", "f", "out", "output", "last", "post", "after", "end", "decoder", "head"))

_FIRST: Final = frozenset(("input", "pre", "attn", "attention", "self", "before", "1", "in", "ante", "mixer", "mha"))
_SECOND: Final = frozenset(("post", "2", "ffn", "mlp", "feed", "forward", "feedforward", "ff", "final", "after", "ffw"))


def words(name: str) -> list[str]:
    """Returns the words of a name in lower case: ``self_attn.qProj`` gives self, attn, q, proj."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name)
    return [part for part in re.split(r"[^a-z0-9]+", apart.lower()) if part]


def name_score(role: str, module: str) -> float:
    """Returns a score: 0 if the name of ``module`` does not match ``role``, 3 if its last part is a word for it."""
    path, _, last = module.rpartition(".")
    text = "_".join(words(last))
    best = 0.0
    for rank, word in enumerate(_WORDS[role]):
        weight = 3 - 0.05 * rank
        if text == word:
            best = max(best, weight)
        elif re.search(rf"(?:^|_){word}(?:_|$)", text):
            best = max(best, weight - 1)
        elif len(word) > 2 and word in text:
            best = max(best, weight - 2)
    if best == 0 and role in ("tokens", "positions", "q_norm", "k_norm"):  # the enclosing module may have the word
        best = 0.5 if set(words(path)) & set(_WORDS[role]) else 0
    return best


def about_attention(module: str) -> bool:
    return bool(set(words(module)) & _ATTENTION)


def about_feed_forward(module: str) -> bool:
    return bool(set(words(module)) & _FEED_FORWARD)


def about_norm(module: str) -> bool:
    return any(word in _NORM or "norm" in word for word in words(module))


def is_shared(module: str) -> bool:
    return "shared" in words(module)


def comes_second(module: str) -> float:
    """Returns a score of a norm's name: above 0 it belongs to the feed-forward, below 0 to the attention."""
    found = words(module)
    first = sum(word in _FIRST for word in found)
    second = sum(word in _SECOND for word in found)
    return second - first


def say_which_is_gate(gate: str, up: str, down: str) -> bool:
    """Returns whether names say which of two equal matrices is the gate: a word that only one of them has, or exactly
    w1, w3 and w2. Numbers alone say nothing: the gate is w1 in Llama's own files, and w2 in Qwen's first model.
    """
    if _GATE & set(words(gate)) and not _GATE & set(words(up)):
        return True
    if "up" in words(up) and "up" not in words(gate):
        return True
    return [name.rpartition(".")[2] for name in (gate, up, down)] == ["w1", "w3", "w2"]


def is_before(module: str) -> bool:
    """Returns whether a norm's name says that it is before the part that follows."""
    return bool({"pre", "input", "before", "ante"} & set(words(module)))


def is_after(module: str) -> bool:
    """Returns whether a norm's name says that it is after the part that it is named for."""
    return bool({"post", "after", "output", "out"} & set(words(module)))


def says_final(norm: str) -> bool:
    """Returns whether the name of a norm outside the layers says that it is the last one, or nothing else."""
    found = set(words(norm.rpartition(".")[2]))
    return found <= _NORM_ALONE or (bool(found & _LAST) and not found & {"emb", "embed", "embedding", "embeddings"})
