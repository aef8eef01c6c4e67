"""Headers and configurations of tiny models that no shipped recipe describes, as transformers makes them."""

from __future__ import annotations

import json
from typing import Any, Final

import torch
import transformers

from tests.recipe_tools.tiny_checkpoints import SIZES

_CHUNKED: Final = ["chunked_attention"] * 2
_KINDS: Final = ["sliding_attention", "sliding_attention", "full_attention"]

# By name: the architecture in transformers, and its configuration.
OTHERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "cohere2": ("Cohere2", SIZES | {"sliding_window": 32, "layer_types": _KINDS, "pad_token_id": 0}),
    "gemma3": ("Gemma3", SIZES | {"sliding_window": 32, "layer_types": _KINDS}),
    "starcoder2": ("Starcoder2", SIZES | {"sliding_window": None}),
    "stablelm": ("StableLm", SIZES | {"qk_layernorm": True}),
    "nemotron": ("Nemotron", SIZES),
    "glm4": ("Glm4", SIZES | {"pad_token_id": 0}),
    "gpt_oss": ("GptOss", SIZES | {"num_local_experts": 4, "layer_types": _KINDS}),
    "granitemoe": ("GraniteMoe", SIZES | {"num_local_experts": 4}),
    "llama4": (
        "Llama4",
        SIZES
        | {"num_local_experts": 4, "intermediate_size_mlp": 72, "layer_types": [*_CHUNKED, "full_attention"]}
        | {"pad_token_id": 0},
    ),
    "lfm2": ("Lfm2", SIZES | {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": (
        "Qwen3Next",
        SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 20, "layer_types": ["linear_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "mamba2": (
        "Mamba2",
        {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 12, "head_dim": 8}
        | {"state_size": 16, "n_groups": 1, "pad_token_id": 0, "eos_token_id": 1},
    ),
}


def headers(name: str, table: dict[str, tuple[str, dict[str, Any]]] | None = None) -> Any:
    """Returns ``config.json`` as transformers writes it, and the shape of every tensor."""
    stem, overrides = (table or OTHERS)[name]
    cls: Any = getattr(transformers, f"{stem}LMHeadModel", None) or getattr(transformers, f"{stem}ForCausalLM")
    config = cls.config_class(**overrides)
    with torch.device("meta"):
        model = cls._from_config(config)
    content = json.loads(config.to_json_string()) | {"architectures": [cls.__name__]}
    tied = {name for name in getattr(model, "_tied_weights_keys", None) or () if config.tie_word_embeddings}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    return content, shapes
