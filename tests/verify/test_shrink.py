"""A large configuration is made small, and what hangs together stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fastgen.verify.shrink import differences, shrunk


def smaller(name: str, config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the shrunk configuration, and the model that transformers makes of it, without memory."""
    cls = getattr(transformers, f"{name}ForCausalLM")
    found = shrunk(config, cls.config_class.from_dict(config).to_dict())
    with torch.device("meta"):
        return found, cls._from_config(cls.config_class.from_dict(found))


LLAMA = {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008], "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", LLAMA),
        ("Starcoder2", {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152,
                        "intermediate_size": 12288, "num_hidden_layers": 30, "sliding_window": 4096}),
        ("StableLm", {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 50304,
                      "intermediate_size": 6912, "num_hidden_layers": 32, "partial_rotary_factor": 0.25}),
        ("Gemma3", {"hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "vocab_size": 262144, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
                    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4}),
        ("DeepseekV3", {"hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
                        "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
                        "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8,
                        "topk_group": 4, "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512,
                        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}),
        ("Bloom", {"hidden_size": 14336, "n_head": 112, "n_layer": 70, "vocab_size": 250880}),
        ("Falcon", {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024}),
        ("GPTJ", {"n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64, "vocab_size": 50400}),
        ("Mixtral", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
                     "intermediate_size": 14336, "num_hidden_layers": 32, "num_local_experts": 8}),
    ],
)  # fmt: skip
def test_a_published_size_becomes_a_small_model_that_transformers_makes(name: str, config: dict[str, Any]) -> None:
    found, model = smaller(name, config)
    assert found.keys() == config.keys()
    assert sum(parameter.numel() for parameter in model.parameters()) < 100e6
    assert set(differences(config, found)) >= {"vocab_size"}


def test_proportions_stay() -> None:
    found, _ = smaller("Llama", LLAMA)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (16, 2)
    assert found["hidden_size"] == 16 * 16
    assert found["intermediate_size"] / found["hidden_size"] == 28672 / 8192
    assert found["num_hidden_layers"] == 4
    assert found["max_position_embeddings"] == 131072
    assert (found["bos_token_id"], found["eos_token_id"]) == (0, 0)


def test_every_kind_of_layer_remains() -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5
    config = LLAMA | {"num_hidden_layers": 30, "layer_types": kinds}
    found = shrunk(config, config)
    assert found["layer_types"] == kinds[: found["num_hidden_layers"]]
    assert "full_attention" in found["layer_types"]
    config = LLAMA | {"first_k_dense_replace": 7, "mlp_only_layers": [1, 9]}
    found = shrunk(config, config)
    assert found["num_hidden_layers"] == 11
    assert found["mlp_only_layers"] == [1, 9]


def test_a_part_of_a_head_stays_a_whole_number_of_pairs() -> None:
    config = LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    found = shrunk(config, config)
    head = found["hidden_size"] // found["num_attention_heads"]
    assert int(head * 0.25) >= 2
    assert int(head * 0.25) % 2 == 0


def test_factors_for_each_pair_of_features_keep_the_size_of_a_head() -> None:
    config = LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}}
    found = shrunk(config, config)
    assert found["hidden_size"] // found["num_attention_heads"] == 128


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_there_is_room_for_the_prompts(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    assert shrunk(config | {key: 20}, config | {key: 20})[key] == 48
    assert shrunk(config | {key: 4096}, config | {key: 4096})[key] == 4096


@pytest.mark.parametrize("key", ["sliding_window", "window_size", "attn_window", "local_attention", "attention_span"])
def test_prompts_are_longer_than_a_window_whatever_it_is_called(key: str) -> None:
    config = LLAMA | {key: 256, "max_window_layers": 3, "use_window": True}
    found = shrunk(config, config)
    assert (found[key], found["max_window_layers"], found["use_window"]) == (11, 3, True)
    assert shrunk(LLAMA | {key: 7}, LLAMA | {key: 7})[key] == 7


def test_a_small_configuration_stays_as_it_is() -> None:
    config = {
        **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "layer_types": ["full_attention"] * 3},
    }
    assert shrunk(config, config) == config
    assert differences(config, config) == {}
