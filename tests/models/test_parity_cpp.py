"""The ``cpp`` target against transformers, for every family: whole distributions, prompt and answer, in fp32.

What the recipes say is checked on the reference target, over many configurations; here it is the kernels. A kernel is
built for its sizes, so families share them: a configuration is drawn, and then given the sizes below.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from tests.fast import cases
from tests.models.test_parity_more import DRAWS, Drawn, drawn_options, flip, gated, save_as_internlm2
from tests.reference import check_family, rounding_errors

SHARED: Drawn = {
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **{"num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
}
OPTIONS: Drawn = {"target": "cpp", "token_budget": 9, "block_size": 16, "max_num_seqs": 3, "max_model_len": 96}
LATENT = ("deepseek_v2", "deepseek_v3")
# Drawn configurations of a family in the long tests.
MORE = 4


def config_of(name: str, rng: Random, shared: Drawn) -> tuple[transformers.PreTrainedConfig, Any, str]:
    prefix, draw = DRAWS[name]
    drawn = draw(rng)
    drawn |= {key: value for key, value in shared.items() if drawn.get(key) is not None}
    if name in LATENT:
        drawn["num_key_value_heads"] = drawn["num_attention_heads"]
    if "layer_types" in drawn:
        drawn["layer_types"] = ["sliding_attention", "full_attention"][: drawn["num_hidden_layers"]]
    if "no_rope_layers" in drawn and shared:
        drawn["no_rope_layers"] = [1, 0]
    print(f"{name}: {drawn}")
    model_class = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
    # transformers' eager Falcon adds ALiBi twice, once with the mask
    return getattr(transformers, f"{prefix}Config")(**drawn), model_class, "sdpa" if name == "falcon_rw" else "eager"


# Each kernel and each way to call it: ALiBi, caps, windows, scales, latent and rotated heads, norms of heads, experts.
QUICK = {"bloom", "cohere", "deepseek_v3", "gemma2", "gpt_neox", "gptj", "granite", "mixtral", "qwen3", "qwen3_moe"}


@pytest.mark.parametrize("name", cases(DRAWS, fast=QUICK))
def test_family(name: str) -> None:
    config, model_class, attention = config_of(name, Random(f"{name} cpp"), SHARED)
    check_family(config, model_class, OPTIONS, 0, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_drawn_sizes(name: str) -> None:
    for seed in range(MORE):
        rng = Random(f"{name} cpp {seed}")
        config, model_class, attention = config_of(name, rng, {})
        options = drawn_options(rng) | {"target": "cpp"}
        print(f"seed {seed}: {options}")
        check_family(config, model_class, options, seed, attention=attention)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama(tied: bool, biased: bool) -> None:
    drawn = (
        gated(Random("llama")) | SHARED | {"tie_word_embeddings": tied, "attention_bias": biased, "mlp_bias": biased}
    )
    config = LlamaConfig(**{key: value for key, value in drawn.items() if key in LlamaConfig().to_dict()})
    check_family(config, LlamaForCausalLM, OPTIONS, 0)


def test_internlm2() -> None:
    drawn = gated(Random("internlm2")) | {key: SHARED[key] for key in ("hidden_size", "head_dim", "rms_norm_eps")}
    drawn |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": flip(Random(1))}
    config = LlamaConfig(**drawn | {"tie_word_embeddings": False})
    check_family(config, LlamaForCausalLM, OPTIONS, 0, write=save_as_internlm2)


@pytest.mark.parametrize("like_350m", [False, True], ids=["norms-before", "like-350m"])
def test_opt(like_350m: bool) -> None:
    config = OPTConfig(
        vocab_size=70,
        hidden_size=32,
        word_embed_proj_dim=12 if like_350m else 32,
        do_layer_norm_before=not like_350m,
        ffn_dim=41,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        pad_token_id=1,
    )
    check_family(config, OPTForCausalLM, OPTIONS, 0)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", cases(["gemma2", "phi", "qwen3_moe", "deepseek_v3"], fast=["deepseek_v3"]))
def test_weights_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Both sides differ from the exact answer of the same weights in fp32; here only what is cached is rounded."""
    config, model_class, attention = config_of(name, Random(f"{name} in 16 bits"), SHARED)
    error, their_error = rounding_errors(config, model_class, attention=attention, dtype=dtype, target="cpp")
    assert 0 < error <= their_error, (error, their_error)
