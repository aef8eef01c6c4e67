"""Drawn configurations of every family against transformers: whole distributions, prompt and answer, in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from tests.draws import drawn
from tests.matrix import Record
from tests.reference import check_family, rounding_errors, save

DRAWN = drawn(60, in_short=12)


@st.composite
def rotary_configs(draw: st.DrawFn, max_positions: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"]))
    rotary: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 10000.0, 500000.0]))}
    if kind != "default":
        rotary["factor"] = draw(st.sampled_from([1.5, 2.0, 8.0]))
    if kind in ("llama3", "yarn"):
        rotary["original_max_position_embeddings"] = draw(st.sampled_from([16, 32, max_positions]))
    if kind == "llama3":
        rotary |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([2.0, 4.0]))}
    if kind == "yarn":
        extra = {
            "attention_factor": st.sampled_from([0.7, 1.3]),
            "beta_fast": st.sampled_from([8.0, 32.0]),
            "beta_slow": st.sampled_from([1.0, 2.0]),
            "truncate": st.just(False),
        }
        for key in draw(st.sets(st.sampled_from(sorted(extra)))):
            rotary[key] = draw(extra[key])
        if draw(st.booleans()):
            rotary |= {"mscale": 0.8, "mscale_all_dim": 0.5}
    return rotary


def widths_per_head(num_heads: int) -> list[int]:
    """Never a stream of three: those may all but agree, and a norm then blows rounding up past 1e-4, in transformers
    too."""
    return [3, 8, 20] if num_heads > 2 else [8, 20]


@st.composite
def llama_like(draw: st.DrawFn) -> dict[str, Any]:
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([4, 10, 16, 24]))
    explicit = draw(st.booleans())
    hidden_size = num_heads * (draw(st.sampled_from(widths_per_head(num_heads))) if explicit else head_dim)
    max_positions = 96
    config = {
        "vocab_size": draw(st.integers(50, 199)),
        "hidden_size": hidden_size,
        "intermediate_size": draw(st.integers(8, 70)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"])),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 0.05])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(rotary_configs(max_positions)),
    }
    return config | ({"head_dim": head_dim} if explicit else {})


@st.composite
def llama_configs(draw: st.DrawFn) -> dict[str, Any]:
    return draw(llama_like()) | {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}


@st.composite
def mistral_configs(draw: st.DrawFn) -> dict[str, Any]:
    return draw(llama_like()) | {"sliding_window": draw(st.sampled_from([None, 1, 5, 16, 4096]))}


@st.composite
def opt_configs(draw: st.DrawFn) -> dict[str, Any]:
    num_heads = draw(st.integers(1, 4))
    hidden_size = num_heads * draw(st.sampled_from(widths_per_head(num_heads)))
    return {
        "vocab_size": draw(st.integers(50, 199)),
        "hidden_size": hidden_size,
        "word_embed_proj_dim": draw(st.sampled_from([hidden_size, 12])),
        "ffn_dim": draw(st.integers(8, 70)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": num_heads,
        "activation_function": draw(st.sampled_from(["relu", "gelu"])),
        "max_position_embeddings": 96,
        "do_layer_norm_before": draw(st.booleans()),
        "_remove_final_layer_norm": draw(st.booleans()),
        "enable_bias": draw(st.booleans()),
        "layer_norm_elementwise_affine": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 1,
    }


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    budget = draw(st.sampled_from([8, 9, 64]))
    return {"token_budget": budget, "block_size": draw(st.sampled_from([1, 4, 16])), "max_num_seqs": 3}


def save_with_old_rope_spelling(model: PreTrainedModel, directory: Path) -> None:
    """As transformers 4 wrote it: ``rope_theta`` beside, ``rope_scaling`` with the rest or ``null``."""
    config_file = save(model, directory) / "config.json"
    config = json.loads(config_file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config_file.write_text(json.dumps(config))


@DRAWN
@given(config=llama_configs(), options=engine_options(), old_rope_spelling=st.booleans(), seed=st.integers(0, 2**31))
def test_llama(
    config: dict[str, Any], options: dict[str, Any], old_rope_spelling: bool, seed: int, record: Record
) -> None:
    write = save_with_old_rope_spelling if old_rope_spelling else save
    record("llama", "parity", check_family(LlamaConfig(**config), LlamaForCausalLM, options, seed, write=write))


@DRAWN
@given(config=mistral_configs(), options=engine_options(), seed=st.integers(0, 2**31))
def test_mistral(config: dict[str, Any], options: dict[str, Any], seed: int, record: Record) -> None:
    record("mistral", "parity", check_family(MistralConfig(**config), MistralForCausalLM, options, seed))


@DRAWN
@given(config=opt_configs(), options=engine_options(), seed=st.integers(0, 2**31))
def test_opt(config: dict[str, Any], options: dict[str, Any], seed: int, record: Record) -> None:
    removes_final_norm = config.pop("_remove_final_layer_norm")
    hf_config = OPTConfig(**config)
    hf_config._remove_final_layer_norm = removes_final_norm
    record("opt", "parity", check_family(hf_config, OPTForCausalLM, options, seed))


SMALL = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("name", "model_class", "config"),
    [
        ("llama", LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=96, num_key_value_heads=2)),
        ("mistral", MistralForCausalLM, MistralConfig(**SMALL, intermediate_size=96, num_key_value_heads=2)),
        ("opt", OPTForCausalLM, OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, pad_token_id=1)),
    ],
)
def test_bfloat16_agrees_within_its_rounding(name: str, model_class: Any, config: Any, record: Record) -> None:
    """Both sides in bf16 differ from the exact fp32 answer; ours by no more than twice what transformers' own does."""
    error, their_error = rounding_errors(config, model_class)
    record(name, "bfloat16", [error, their_error])
    assert 0 < error <= 2 * their_error, (error, their_error)
