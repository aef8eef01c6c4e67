"""Files that transformers reads but does not write get its answers: keys left out, null, in two places, or not read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import MlpSpec
from tests.matrix import Record
from tests.models.test_parity_more import drawn_options
from tests.reference import check_family, save

# What takes the place of a key that a file leaves out.
ABSENT = object()

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
LLAMA = SIZES | {"num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
LATENT = SIZES | {
    **{"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 11, "first_k_dense_replace": 1},
    "num_key_value_heads": 4,
}
# By recipe: the architecture, and what a file of a tiny model states.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("CohereForCausalLM", SIZES | {"num_key_value_heads": 2}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT | {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}),
    "falcon": ("FalconForCausalLM", {key: value for key, value in SIZES.items() if key != "intermediate_size"}),
    "gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 12}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES | {"num_attention_heads": 2}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "granite": ("GraniteForCausalLM", LLAMA),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 7}),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "opt": ("OPTForCausalLM", {"ffn_dim": 44, **{key: SIZES[key] for key in SIZES if key != "intermediate_size"}}),
    "phi": ("PhiForCausalLM", SIZES),
    "phi3": ("Phi3ForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 12}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3ForCausalLM", LLAMA | {"num_hidden_layers": 3}),
}

INSIDE = {"rope_type": "default", "rope_theta": 700.0}
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "the old mapping hides that of today": ("llama", {"rope_scaling": YARN, "rope_parameters": INSIDE}),
    "it hides a fraction": ("phi", {"rope_scaling": LINEAR, "rope_parameters": {"partial_rotary_factor": 0.25}}),
    "it hides theta of GPT-NeoX": ("gpt_neox", {"rope_scaling": LINEAR, "rope_parameters": INSIDE}),
    "it hides theta of Command-R": ("cohere", {"rope_scaling": LINEAR, "rope_parameters": INSIDE}),
    "it hides theta of Falcon": ("falcon", {"rope_scaling": LINEAR, "rope_parameters": INSIDE}),
    "it hides theta of Mixtral": ("mixtral", {"rope_scaling": LINEAR, "rope_parameters": INSIDE}),
    "it hides theta of SmolLM3": ("smollm3", {"rope_scaling": LINEAR, "rope_parameters": INSIDE}),
    "it hides a factor of the scores": (
        "deepseek_v2",
        {"rope_scaling": YARN, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "an empty one hides nothing": (
        "llama",
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}},
    ),
    "nulls in the mapping": ("deepseek_v2", {"rope_scaling": YARN | {"factor": None, "mscale_all_dim": None}}),
    "theta and fraction that GPT-NeoX writes only": ("gpt_neox", {"rope_theta": 500.0, "partial_rotary_factor": 1.0}),
    "types of layers without the flag": ("smollm3", {"sliding_window": 5, "layer_types": TYPES}),
    "types of layers that all have the window": (
        "qwen3_moe",
        {"sliding_window": 5, "layer_types": TYPES[:2], "use_sliding_window": True},
    ),
    "an activation that is not read": ("gemma", {"hidden_activation": "relu"}),
    "a tied head with a bias": ("gptj", {"tie_word_embeddings": True}),
    **{
        f"{key} is null": ("falcon", {key: None})
        for key in ("multi_query", "parallel_attn", "alibi", "bias", "new_decoder_architecture")
    },
    "use_qk_norm is null": ("cohere", {"use_qk_norm": None}),
    "norm_topk_prob of V2 is null": ("deepseek_v2", {"norm_topk_prob": None}),
    "norm_topk_prob of V3 is null": ("deepseek_v3", {"norm_topk_prob": None}),
    **{f"the activation {name}": ("llama", {"hidden_act": name}) for name in ("gelu_python", "gelu_python_tanh")},
    "the activation gelu_accurate": ("llama", {"hidden_act": "gelu_accurate"}),
    "keys of every class": (
        "llama",
        {"is_causal": True, "tie_last_hidden_states": None, "experts_implementation": "eager"},
    ),
}


def file_of(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """The content of the ``config.json`` of a tiny model of the recipe ``name``."""
    architecture, stated = FILES[name]
    found = {key: value for key, value in (stated | change).items() if value is not ABSENT}
    return {"architectures": [architecture], **found}


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_answers_of_transformers(case: str, record: Record) -> None:
    name, change = CASES[case]
    written = file_of(name, change)
    model_class = getattr(transformers, written["architectures"][0])

    def write(model: PreTrainedModel, directory: Path) -> None:
        (save(model, directory) / "config.json").write_text(json.dumps(written))

    config = model_class.config_class.from_dict(copy.deepcopy(written))
    record(name, "parity", check_family(config, model_class, drawn_options(Random(case)), 1, write=write, num_steps=8))


LEFT_OUT = ("rms_norm_eps", "hidden_act", "activation_function", "max_position_embeddings", "n_positions")


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_leaves_out_is_what_the_class_says(name: str) -> None:
    """Eps, activation and positions. An eps changes answers by too little to be compared there."""
    written = file_of(name, dict.fromkeys(LEFT_OUT, ABSENT))
    model_class = getattr(transformers, written["architectures"][0])
    theirs = model_class.config_class.from_dict(copy.deepcopy(written)).to_dict()
    spec = resolve(find_recipe(written), written)
    eps = {
        each.eps
        for layer in spec.layers
        for branch in layer.branches
        for each in (branch.norm, branch.output_norm)
        if each
    }
    stated = next((theirs[key] for key in theirs if "eps" in key), 1e-5)  # that of OPT is in its code
    assert eps <= {stated}
    activations = {ACTIVATIONS[each.activation] for each in spec.parts() if isinstance(each, MlpSpec)}
    keys = ("hidden_act", "activation_function", "activation")
    assert activations <= {ACTIVATIONS[next(theirs[key] for key in keys if key in theirs)]}
    assert spec.max_positions == next(
        theirs[key] for key in ("max_position_embeddings", "n_positions") if key in theirs
    )
