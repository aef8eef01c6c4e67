"""The keys that a file has to state, and the keys that a class reads."""

from __future__ import annotations

import pytest
import transformers

from fastgen.models.registry.registry import named_recipe
from fastgen.verify.keys import needed_keys, read_spellings


def test_a_key_without_a_default_is_needed() -> None:
    needed = needed_keys(named_recipe("llama"))
    assert {"vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"} <= needed
    assert not needed & {"num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "rms_norm_eps"}


def test_names_of_define_and_config_are_not_keys() -> None:
    assert "alibi" not in needed_keys(named_recipe("falcon"))
    assert "num_experts" not in needed_keys(named_recipe("qwen3_moe"))
    assert "layer" not in needed_keys(named_recipe("gpt2"))


def test_of_several_spellings_each_is_needed() -> None:
    assert {"n_embd", "hidden_size"} <= needed_keys(named_recipe("gpt2"))  # first() of both without a fallback


@pytest.mark.parametrize(
    ("config", "key", "meant"),
    [
        ("GPTNeoXConfig", "rotary_emb_base", "rope_theta"),
        ("GPTNeoXConfig", "rotary_pct", "partial_rotary_factor"),
        ("GPTNeoXConfig", "rope_theta", None),  # the class reads only the other name
        ("BloomConfig", "n_embed", "hidden_size"),
        ("GPT2Config", "num_hidden_layers", "n_layer"),
        ("LlamaConfig", "rope_theta", "rope_theta"),
        ("LlamaConfig", "max_sequence_length", None),
    ],
)
def test_the_spellings_that_a_class_reads(config: str, key: str, meant: str | None) -> None:
    assert read_spellings(getattr(transformers, config), [key]).get(key) == meant
