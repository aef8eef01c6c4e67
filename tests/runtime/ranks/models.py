"""Small checkpoints of the families that ranks share, and their answers on one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.reference import randomise, save

VOCAB_SIZE: Final = 151
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
# By family: a configuration, and transformers' class. Inputs of a rank's matrices are whole groups of 32.
FAMILIES: Final[dict[str, tuple[Any, Any]]] = {
    "llama": (
        lambda: LlamaConfig(hidden_size=64, intermediate_size=128, num_key_value_heads=2, **_COMMON),
        LlamaForCausalLM,
    ),
    "falcon": (
        lambda: FalconConfig(
            hidden_size=32, ffn_hidden_size=48, num_kv_heads=2, new_decoder_architecture=True, **_COMMON
        ),
        FalconForCausalLM,
    ),
    "opt": (lambda: OPTConfig(hidden_size=32, ffn_dim=48, word_embed_proj_dim=16, **_COMMON), OPTForCausalLM),
    "mixtral": (
        lambda: MixtralConfig(
            hidden_size=32, intermediate_size=40, num_key_value_heads=1, num_local_experts=4, **_COMMON
        ),
        MixtralForCausalLM,
    ),
    "olmo2": (
        lambda: Olmo2Config(hidden_size=32, intermediate_size=40, num_key_value_heads=2, **_COMMON),
        Olmo2ForCausalLM,
    ),
    "deepseek": (
        lambda: DeepseekV2Config(
            hidden_size=32,
            intermediate_size=40,
            moe_intermediate_size=16,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            topk_method="greedy",
            **_COMMON,
        ),
        DeepseekV2ForCausalLM,
    ),
}


def save_family(family: str, directory: Path) -> Path:
    """Writes a random checkpoint of ``family`` in fp32."""
    config, model = FAMILIES[family]
    made = config()
    made._experts_implementation = "eager"
    return save(randomise(model(made), seed=13), directory)


def prompts(count: int) -> list[list[int]]:
    """Prompts of which some begin alike, and which repeat themselves, so that drafts are proposed."""
    rng = random.Random(7)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
    found = []
    for index in range(count):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        found.append((common if index % 2 else []) + own * 2)
    return found
