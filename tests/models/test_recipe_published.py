"""The built-in recipes load published configurations with the published parameter counts."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, ModelSpec
from tests.matrix import Record

LLAMA_2: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_1: dict[str, Any] = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLAMA_3_2: dict[str, Any] = LLAMA_3_1 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA_1: dict[str, Any] = {  # the first conversions, before num_key_value_heads and rope_theta
    "architectures": ["LLaMAForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "initializer_range": 0.02,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": -1,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
OPT: dict[str, Any] = {
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def opt(hidden_size: int, num_layers: int, num_heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden_size, "ffn_dim": 4 * hidden_size, "word_embed_proj_dim": hidden_size}
    return OPT | sizes | {"num_hidden_layers": num_layers, "num_attention_heads": num_heads} | others


def saved_by_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration as transformers 5 writes it: rotary settings in one mapping, dtype under its
    new name.
    """
    config = dict(config)
    if config["model_type"] != "opt":
        scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
        config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta", 10000.0)}
    config["dtype"] = config.pop("torch_dtype", None)
    return config | {"pad_token_id": None, "transformers_version": "5.23.0"}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-7b": (LLAMA_1, 6_738_415_616),
    "llama-7b, renamed": (
        LLAMA_1
        | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "tie_word_embeddings": False},
        6_738_415_616,
    ),
    "vicuna-7b-v1.1": (LLAMA_2 | {"max_position_embeddings": 2048, "pad_token_id": 0}, 6_738_415_616),
    "vicuna-7b-v1.5-16k": (
        LLAMA_2 | {"max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}},
        6_738_415_616,
    ),
    "Llama-2-7b": (LLAMA_2, 6_738_415_616),
    "Llama-2-13b": (
        LLAMA_2
        | {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40}
        | {"num_key_value_heads": 40},
        13_015_864_320,
    ),
    "Llama-2-70b": (
        LLAMA_2
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
        | {"num_key_value_heads": 8},
        68_976_648_192,
    ),
    "CodeLlama-7b": (
        LLAMA_2 | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
        6_738_546_688,
    ),
    "TinyLlama-1.1B": (
        LLAMA_2
        | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
        | {"attention_bias": False, "max_position_embeddings": 2048, "rope_theta": 10000.0},
        1_100_048_384,
    ),
    "Yi-6B": (
        LLAMA_2
        | {"attention_bias": False, "num_key_value_heads": 4, "pad_token_id": 0, "rope_theta": 5000000.0}
        | {"vocab_size": 64000},
        6_061_035_520,
    ),
    "SmolLM2-135M": (
        LLAMA_3
        | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30}
        | {"is_llama_config": True, "num_key_value_heads": 3, "rope_interleaved": False, "rope_theta": 100000}
        | {"tie_word_embeddings": True, "vocab_size": 49152},
        134_515_008,
    ),
    "Meta-Llama-3-8B": (LLAMA_3, 8_030_261_248),
    "Llama-3.1-8B": (LLAMA_3_1, 8_030_261_248),
    "Llama-3.1-70B": (
        LLAMA_3_1
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
        70_553_706_496,
    ),
    "Llama-3.1-405B": (
        LLAMA_3_1
        | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126},
        405_853_388_800,
    ),
    "Llama-3.2-1B": (LLAMA_3_2, 1_235_814_400),
    "Llama-3.2-3B": (
        LLAMA_3_2 | {"head_dim": 128, "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 28},
        3_212_749_824,
    ),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096),
    "zephyr-7b-beta": (
        MISTRAL | {"_name_or_path": "x", "pad_token_id": 2, "transformers_version": "4.35.0"},
        7_241_732_096,
    ),
    "Mistral-7B-v0.2": (MISTRAL | {"rope_theta": 1e6, "sliding_window": None, "attention_dropout": 0.0}, 7_241_732_096),
    "Mistral-7B-v0.3": (MISTRAL | {"rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768}, 7_248_023_552),
    "Mistral-Nemo": (
        MISTRAL
        | {"head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "max_position_embeddings": 1024000}
        | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072},
        12_247_782_400,
    ),
    "opt-125m": (OPT, 125_239_296),
    "opt-350m": (opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False), 331_196_416),
    "opt-1.3b": (opt(2048, 24, 32), 1_315_758_080),
    "opt-2.7b": (opt(2560, 32, 32), 2_651_596_800),
    "opt-6.7b": (opt(4096, 32, 32, _remove_final_layer_norm=False), 6_658_473_984),
    "opt-13b": (opt(5120, 40, 40, _remove_final_layer_norm=False, output_projection=True), 12_853_473_280),
    "opt-30b": (opt(7168, 48, 56, _remove_final_layer_norm=False, output_projection=True), 29_974_540_288),
    "opt-66b": (opt(9216, 64, 72, _remove_final_layer_norm=False, output_projection=True), 65_719_701_504),
    "galactica-125m": (
        OPT
        | {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False}
        | {"learned_embeddings": True, "scale_embeddings": False, "vocab_size": 50000},
        124_909_056,
    ),
}


def resolved(config: dict[str, Any]) -> ModelSpec:
    return resolve(find_recipe(config), config)


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    return list(spec.attentions())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_configuration_loads_in_both_spellings(name: str, record: Record) -> None:
    config, num_parameters = PUBLISHED[name]
    spec = resolved(config)
    assert spec.num_parameters == num_parameters
    assert resolved(saved_by_transformers_5(config)) == spec
    record(spec.recipe, "published", name)


def test_windows_and_limits() -> None:
    names = ["Mistral-7B-v0.1", "Mistral-7B-v0.3", "Mistral-Nemo", "Llama-3.1-8B", "Llama-3.2-1B", "llama-7b"]
    found = {name: resolved(PUBLISHED[name][0]) for name in [*names, "vicuna-7b-v1.5-16k"]}
    assert {part.sliding_window for part in attentions(found["Mistral-7B-v0.1"])} == {4096}
    assert {part.sliding_window for part in attentions(found["Mistral-7B-v0.3"])} == {None}
    assert {part.sliding_window for part in attentions(found["Llama-3.1-8B"])} == {None}
    assert found["llama-7b"].max_positions == 2048
    assert found["vicuna-7b-v1.5-16k"].max_positions == 16384  # the stretched length of linear scaling
    scaling = attentions(found["vicuna-7b-v1.5-16k"])[0].rotary.scaling  # type: ignore[union-attr]
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_positions) == ("linear", 4.0, 4096)
    assert found["Mistral-Nemo"].head_dim == 128
    assert found["Llama-3.2-1B"].tied
    assert not found["Llama-3.1-8B"].tied


def test_cost_of_a_token() -> None:
    """Llama-2-7B by hand: KV of 2 × 32 layers × 4096 features; 2 operations a weight of every matrix but one."""
    spec = resolved(PUBLISHED["Llama-2-7b"][0])
    assert spec.kv_bytes_per_token(2) == 2 * 32 * 4096 * 2
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    assert spec.flops_per_token(1000) == 2 * matrices + 32 * 4 * 4096 * 1000
    mistral = resolved(PUBLISHED["Mistral-7B-v0.1"][0])
    assert mistral.kv_bytes_per_token(2) == 131072
    assert mistral.flops_per_token(4096) == mistral.flops_per_token(10**6) > mistral.flops_per_token(4095)
    opt_350m = resolved(PUBLISHED["opt-350m"][0])  # the head is tied, and both projections count as operations
    assert opt_350m.flops_per_token(0) == 2 * (24 * (4 * 1024**2 + 2 * 1024 * 4096) + 50272 * 512 + 2 * 512 * 1024)
