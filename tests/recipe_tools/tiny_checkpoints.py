"""A tiny random checkpoint for each shipped recipe, made by transformers, and the model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers

from tests.reference import randomise

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_NO_HEAD_DIM: Final = {key: value for key, value in SIZES.items() if key != "head_dim"}
_EQUAL_HEADS: Final = {"num_key_value_heads": 6}
_GPT: Final[dict[str, Any]] = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
_EXPERTS: Final[dict[str, Any]] = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LATENT: Final[dict[str, Any]] = {
    **_NO_HEAD_DIM,
    **_EQUAL_HEADS,
    **_EXPERTS,
    **{"q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 7},
    **{"n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}

# By recipe: the architecture in transformers, and its configuration.
CHECKPOINTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": 7}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 12}),
    "qwen3_moe": ("Qwen3Moe", SIZES | _EXPERTS | {"head_dim": 12, "num_experts": 4}),
    "smollm3": ("SmolLM3", SIZES | {"no_rope_layers": [1, 1, 0], "pad_token_id": 0}),
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", SIZES | {"sliding_window": 7}),
    "granite": (
        "Granite",
        SIZES
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
        | {"logits_scaling": 2.0},
    ),
    "olmo2": ("Olmo2", SIZES),
    "cohere": ("Cohere", SIZES),
    "phi": ("Phi", SIZES),
    "phi3": ("Phi3", SIZES | {"pad_token_id": 0}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2", _LATENT),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "gpt2": ("GPT2", _GPT),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", SIZES),
    "bloom": ("Bloom", {"vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "falcon": ("Falcon", _NO_HEAD_DIM | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "opt": ("OPT", SIZES | {"ffn_dim": 72, "word_embed_proj_dim": 48}),
}


def make(name: str, directory: Path) -> transformers.PreTrainedModel:
    """Writes the checkpoint for the recipe ``name`` to ``directory`` and returns its model."""
    stem, overrides = CHECKPOINTS[name]
    cls: Any = getattr(transformers, f"{stem}LMHeadModel", None) or getattr(transformers, f"{stem}ForCausalLM")
    config = cls.config_class(**overrides)
    config._experts_implementation = "eager"  # its grouped product requires sizes that are multiples of 16 bytes
    torch.manual_seed(0)
    model = randomise(cls._from_config(config, attn_implementation="eager"), 0)
    model.save_pretrained(directory)
    return model
