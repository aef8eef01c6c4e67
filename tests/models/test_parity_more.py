"""The other recipes against transformers over drawn configurations: whole distributions, prompt and answer, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from fastgen.compile.ops.attention.reference import alibi_bias
from fastgen.models.resolve.parts import alibi_slopes
from tests.draws import number
from tests.matrix import Record
from tests.reference import check_family, rounding_errors

NUM_EXAMPLES = 8
IN_SHORT = number(8, in_short=4)
MAX_POSITIONS = 96

Drawn = dict[str, Any]
# A family's name: the prefix of its classes in transformers, and what draws its configuration.
DRAWS: dict[str, tuple[str, Callable[[Random], Drawn]]] = {}


def family(prefix: str) -> Callable[[Callable[[Random], Drawn]], Callable[[Random], Drawn]]:
    def register(draw: Callable[[Random], Drawn]) -> Callable[[Random], Drawn]:
        DRAWS[draw.__name__] = (prefix, draw)
        return draw

    return register


def flip(rng: Random) -> bool:
    return rng.random() < 0.5


def sizes(rng: Random, *, head_dims: tuple[int, ...] = (4, 8, 10, 16), grouped: bool = True) -> Drawn:
    """Sizes under the names most configurations use; the head size follows from them."""
    num_kv_heads = rng.randint(1, 3)
    num_heads = num_kv_heads * (rng.randint(1, 4) if grouped else 1)
    sizes = {
        "vocab_size": rng.randint(40, 80),
        "hidden_size": num_heads * rng.choice(head_dims),
        "intermediate_size": rng.randint(8, 70),
        "num_hidden_layers": rng.randint(1, 2),
        "num_attention_heads": num_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": flip(rng),
    }
    return sizes | ({"num_key_value_heads": num_kv_heads} if grouped else {})


def gated(rng: Random) -> Drawn:
    """A Llama's kin: sizes, an explicit head size, eps, activation, rotation."""
    return sizes(rng) | {
        "head_dim": rng.choice((4, 10, 16)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 0.05)),
        "hidden_act": rng.choice(("silu", "gelu", "relu")),
        "rope_parameters": rotary(rng),
    }


def rotary(rng: Random, **more: Any) -> Drawn:
    rope = {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0, 500000.0))} | more
    return rope | ({"rope_type": "linear", "factor": 2.5} if rng.random() < 0.3 else {})


def window_types(rng: Random, num_layers: int) -> list[str]:
    return [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]


# Falcon's generations


@family("Falcon")
def falcon_7b(rng: Random) -> Drawn:
    """One KV head whatever ``num_kv_heads`` says, parallel parts below one norm."""
    shape = sizes(rng, grouped=False) | {"num_attention_heads": rng.randint(1, 7), "num_kv_heads": 71}
    del shape["intermediate_size"]
    shape["hidden_size"] = shape["num_attention_heads"] * rng.choice((4, 10))
    return shape | {
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": flip(rng),
        "alibi": False,
        "layer_norm_epsilon": rng.choice((1e-5, 0.05)),
    }


@family("Falcon")
def falcon_40b(rng: Random) -> Drawn:
    """Grouped KV heads, parallel parts below a norm each."""
    shape = sizes(rng)
    shape["num_kv_heads"] = shape.pop("num_key_value_heads")
    shape["ffn_hidden_size"] = shape.pop("intermediate_size")
    return shape | {"new_decoder_architecture": True, "bias": flip(rng), "alibi": False, "rope_parameters": rotary(rng)}


@family("Falcon")
def falcon_11b(rng: Random) -> Drawn:
    """Grouped KV heads, parallel parts below one norm."""
    return falcon_40b(rng) | {"num_ln_in_parallel_attn": 1}


@family("Falcon")
def falcon_rw(rng: Random) -> Drawn:
    """ALiBi in bf16, one part after the other; head counts that are no powers of two among them."""
    num_heads = rng.choice((1, 2, 3, 5, 6, 8, 12))
    shape = sizes(rng, grouped=False) | {
        "num_attention_heads": num_heads,
        "hidden_size": num_heads * rng.choice((4, 8)),
    }
    del shape["intermediate_size"]
    return shape | {
        "multi_query": flip(rng),
        "parallel_attn": flip(rng),
        "new_decoder_architecture": False,
        "bias": flip(rng),
        "alibi": True,
    }


# Fused tensors, biases, parallel parts


@family("Bloom")
def bloom(rng: Random) -> Drawn:
    num_heads = rng.choice((1, 2, 3, 6, 8, 12))
    return {
        "vocab_size": rng.randint(40, 80),
        "hidden_size": num_heads * rng.choice((4, 8)),
        "n_layer": rng.randint(1, 2),
        "n_head": num_heads,
        "layer_norm_epsilon": rng.choice((1e-5, 0.05)),
        "tie_word_embeddings": flip(rng),
    }


@family("GPT2")
def gpt2(rng: Random) -> Drawn:
    num_heads = rng.randint(1, 5)
    return {
        "vocab_size": rng.randint(40, 80),
        "n_embd": num_heads * rng.choice((4, 10)),
        "n_layer": rng.randint(1, 2),
        "n_head": num_heads,
        "n_positions": MAX_POSITIONS,
        "n_inner": rng.choice((None, 37)),
        "activation_function": rng.choice(("gelu_new", "relu")),
        "scale_attn_weights": flip(rng),
        "scale_attn_by_inverse_layer_idx": flip(rng),
        "tie_word_embeddings": flip(rng),
    }


@family("GPTNeoX")
def gpt_neox(rng: Random) -> Drawn:
    return sizes(rng, grouped=False, head_dims=(8, 16)) | {
        "use_parallel_residual": flip(rng),
        "attention_bias": flip(rng),
        "hidden_act": rng.choice(("gelu", "relu")),
        "rope_parameters": rotary(rng, partial_rotary_factor=rng.choice((0.25, 0.5, 1.0))),
        "layer_norm_eps": rng.choice((1e-5, 0.05)),
    }


@family("GPTJ")
def gptj(rng: Random) -> Drawn:
    num_heads, head_dim = rng.randint(1, 4), rng.choice((8, 16))
    return {
        "vocab_size": rng.randint(40, 80),
        "n_embd": num_heads * head_dim,
        "n_layer": rng.randint(1, 2),
        "n_head": num_heads,
        "n_positions": MAX_POSITIONS,
        "n_inner": rng.choice((None, 37)),
        "rotary_dim": rng.choice((4, 8)),
        "tie_word_embeddings": False,
    }


@family("Phi")
def phi(rng: Random) -> Drawn:
    return sizes(rng, head_dims=(8, 16)) | {
        "tie_word_embeddings": False,
        "qk_layernorm": flip(rng),
        "rope_parameters": rotary(rng, partial_rotary_factor=rng.choice((0.25, 0.5))),
        "layer_norm_eps": rng.choice((1e-5, 0.05)),
    }


@family("Phi3")
def phi3(rng: Random) -> Drawn:
    return sizes(rng, head_dims=(8, 16)) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice((100.0, 10000.0)),
            "partial_rotary_factor": rng.choice((0.5, 0.75, 1.0)),
        },
        "sliding_window": rng.choice((None, 5, 40)),
        "rms_norm_eps": rng.choice((1e-5, 0.05)),
        "pad_token_id": 0,
    }


# Llama's kin


@family("Qwen2")
def qwen2(rng: Random) -> Drawn:
    drawn = gated(rng)
    del drawn["head_dim"]
    return drawn | {
        "use_sliding_window": flip(rng),
        "sliding_window": rng.choice((5, 17)),
        "max_window_layers": rng.randint(0, 2),
    }


@family("Qwen3")
def qwen3(rng: Random) -> Drawn:
    return gated(rng) | {
        "attention_bias": flip(rng),
        "use_sliding_window": flip(rng),
        "sliding_window": rng.choice((5, 17)),
        "max_window_layers": rng.randint(0, 2),
    }


@family("Gemma")
def gemma(rng: Random) -> Drawn:
    drawn = gated(rng)
    return drawn | {"hidden_act": rng.choice(("gelu", "gelu_pytorch_tanh")), "tie_word_embeddings": True}


@family("Gemma2")
def gemma2(rng: Random) -> Drawn:
    drawn = gated(rng)
    del drawn["hidden_act"]
    return drawn | {
        "query_pre_attn_scalar": rng.choice((7, 16)),
        "sliding_window": rng.choice((3, 17)),
        "layer_types": window_types(rng, drawn["num_hidden_layers"]),
        "attn_logit_softcapping": rng.choice((None, 2.0, 50.0)),
        "final_logit_softcapping": rng.choice((None, 2.0, 30.0)),
        "tie_word_embeddings": True,
    }


@family("Olmo2")
def olmo2(rng: Random) -> Drawn:
    drawn = gated(rng)
    del drawn["head_dim"]
    drawn["hidden_size"] = drawn["num_attention_heads"] * rng.choice((4, 16))
    return drawn | {"attention_bias": flip(rng)}


@family("Cohere")
def cohere(rng: Random) -> Drawn:
    drawn = sizes(rng, head_dims=(8, 16))
    return drawn | {
        "use_qk_norm": flip(rng),
        "attention_bias": flip(rng),
        "logit_scale": rng.choice((0.0625, 1.0)),
        "layer_norm_eps": rng.choice((1e-5, 0.05)),
        "rope_parameters": rotary(rng),
        "pad_token_id": 0,
    }


@family("Granite")
def granite(rng: Random) -> Drawn:
    drawn = gated(rng)
    del drawn["head_dim"]
    drawn["hidden_size"] = drawn["num_attention_heads"] * rng.choice((4, 16))
    return drawn | {
        "embedding_multiplier": rng.choice((1.0, 5.0)),
        "attention_multiplier": rng.choice((0.1, 0.4)),
        "residual_multiplier": rng.choice((0.3, 1.0)),
        "logits_scaling": rng.choice((1.0, 3.0)),
        "attention_bias": flip(rng),
        "mlp_bias": flip(rng),
    }


@family("SmolLM3")
def smollm3(rng: Random) -> Drawn:
    drawn = gated(rng)
    del drawn["head_dim"]
    drawn["hidden_size"] = drawn["num_attention_heads"] * rng.choice((4, 16))
    return drawn | {
        "no_rope_layers": [rng.randint(0, 1) for _ in range(drawn["num_hidden_layers"])],
        "pad_token_id": 0,
    }


# Mixtures of experts, latent attention


@family("Mixtral")
def mixtral(rng: Random) -> Drawn:
    num_experts = rng.randint(1, 6)
    return gated(rng) | {
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "sliding_window": rng.choice((None, 7)),
    }


@family("Qwen3Moe")
def qwen3_moe(rng: Random) -> Drawn:
    num_experts = rng.randint(2, 6)
    return gated(rng) | {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "norm_topk_prob": flip(rng),
        "moe_intermediate_size": rng.randint(5, 30),
        "mlp_only_layers": [1] if flip(rng) else [],
        "decoder_sparse_step": rng.choice((1, 2)),
    }


def latent(rng: Random, num_groups: int, num_experts: int) -> Drawn:
    drawn = sizes(rng, grouped=False)
    drawn["num_hidden_layers"] = 2
    return drawn | {
        "num_key_value_heads": drawn["num_attention_heads"],
        "kv_lora_rank": rng.choice((6, 16)),
        "q_lora_rank": rng.choice((None, 7)),
        "qk_nope_head_dim": rng.choice((4, 8)),  # transformers views it as complex numbers
        "qk_rope_head_dim": rng.choice((4, 6)),
        "v_head_dim": rng.choice((5, 8)),
        "n_routed_experts": num_experts,
        "n_shared_experts": rng.randint(1, 2),
        "num_experts_per_tok": rng.randint(1, 3),
        "n_group": num_groups,
        "topk_group": rng.randint(1, num_groups),
        "first_k_dense_replace": rng.randint(0, 1),
        "moe_intermediate_size": rng.randint(5, 30),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "attention_bias": flip(rng),
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "rope_parameters": rng.choice(
            (
                {"rope_type": "default", "rope_theta": 10000.0},
                {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 24,
                    "mscale": 1.0,
                    "mscale_all_dim": rng.choice((0.7, 1.0)),
                },
            )
        ),
    }


@family("DeepseekV2")
def deepseek_v2(rng: Random) -> Drawn:
    grouped = flip(rng)
    return latent(rng, 2, 6) | {"topk_method": "group_limited_greedy" if grouped else "greedy", "mlp_bias": flip(rng)}


@family("DeepseekV3")
def deepseek_v3(rng: Random) -> Drawn:
    return latent(rng, rng.choice((1, 2)), 6) | {"norm_topk_prob": flip(rng), "num_nextn_predict_layers": 0}


def drawn_config(name: str, rng: Random) -> tuple[transformers.PreTrainedConfig, Any, str]:
    """A configuration of the family, the class of its model, and the attention to compare with."""
    prefix, draw = DRAWS[name]
    drawn = draw(rng)
    if drawn.get("hidden_size") == 4:  # numbers that may all but agree: a norm blows rounding up, in transformers too
        drawn["hidden_size"] = 8
    print(f"{name}: {drawn}")
    model_class = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
    # transformers' eager Falcon adds ALiBi twice, once with the mask
    return getattr(transformers, f"{prefix}Config")(**drawn), model_class, "sdpa" if name == "falcon_rw" else "eager"


def drawn_options(rng: Random) -> Drawn:
    return {
        "token_budget": rng.choice((8, 9, 64)),
        "block_size": rng.choice((1, 4, 16)),
        "max_num_seqs": 3,
        "max_model_len": MAX_POSITIONS,
    }


def recipe_of(name: str) -> str:
    """The recipe for a family; Falcon's generations share one."""
    return "falcon" if name.startswith("falcon") else name


def seeds_of(config_of: Callable[[int], transformers.PretrainedConfig]) -> Iterator[int]:
    """Yields the seeds of a family's examples: in short the first few, and each that draws a flag or a name that none
    before has drawn."""
    drawn: set[tuple[str, object]] = set()
    for seed in range(NUM_EXAMPLES):
        stated = config_of(seed).to_dict().items()
        choices = {(key, value) for key, value in stated if value is None or isinstance(value, bool | str)}
        if seed < IN_SHORT or choices - drawn:
            yield seed
        drawn |= choices


@pytest.mark.parametrize("name", DRAWS)
def test_family(name: str, record: Record) -> None:
    for seed in seeds_of(lambda seed: drawn_config(name, Random(f"{name} {seed}"))[0]):
        rng = Random(f"{name} {seed}")
        config, model_class, attention = drawn_config(name, rng)
        options = drawn_options(rng)
        print(f"seed {seed}: {options}")
        record(recipe_of(name), "parity", check_family(config, model_class, options, seed, attention=attention))


@pytest.mark.parametrize("name", DRAWS)
def test_bfloat16_agrees_within_its_rounding(name: str, record: Record) -> None:
    """Both sides in bf16 differ from the exact fp32 answer; ours by no more than twice what transformers' own does."""
    config, model_class, attention = drawn_config(name, Random(f"{name} in 16 bits"))
    error, their_error = rounding_errors(config, model_class, attention=attention)
    record(recipe_of(name), "bfloat16", [error, their_error])
    assert 0 < error <= 2 * their_error, (error, their_error)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 12, 32, 71, 128])
def test_falcon_rounds_its_alibi_as_transformers_does(num_heads: int) -> None:
    """To the bit, and at positions that bf16 cannot hold."""
    positions = torch.arange(2048)
    theirs = build_alibi_tensor(torch.ones(1, 2048, dtype=torch.int64), num_heads, torch.float32)
    ours = alibi_bias(torch.tensor(alibi_slopes(num_heads)).bfloat16(), positions)
    assert torch.equal(ours, theirs[:, 0])


# A family transformers does not have: a Llama's weights as InternLM2 stores them


def save_as_internlm2(model: PreTrainedModel, directory: Path) -> None:
    config, state = model.config, model.state_dict()
    groups = config.num_key_value_heads
    tensors = {
        "model.tok_embeddings.weight": state["model.embed_tokens.weight"],
        "model.norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    names = {
        "self_attn.o_proj.weight": "attention.wo.weight",
        "self_attn.o_proj.bias": "attention.wo.bias",
        "mlp.gate_proj.weight": "feed_forward.w1.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight",
        "mlp.down_proj.weight": "feed_forward.w2.weight",
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
    }
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.{theirs}": state[f"{at}.{ours}"] for ours, theirs in names.items() if f"{at}.{ours}" in state
        }
        for kind in ("weight", "bias"):
            if f"{at}.self_attn.q_proj.{kind}" not in state:
                continue
            by_group = [state[f"{at}.self_attn.{each}_proj.{kind}"].chunk(groups) for each in "qkv"]
            fused = torch.cat([torch.cat(of_group) for of_group in zip(*by_group, strict=True)])
            tensors[f"{at}.attention.wqkv.{kind}"] = fused
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    keys = config.to_dict() | {"architectures": ["InternLM2ForCausalLM"], "bias": config.attention_bias}
    for key in ("attention_bias", "mlp_bias", "model_type"):
        del keys[key]
    (directory / "config.json").write_text(json.dumps(keys))


def drawn_internlm2(rng: Random) -> transformers.LlamaConfig:
    drawn = gated(rng) | {"attention_bias": flip(rng), "tie_word_embeddings": False}
    drawn["hidden_size"] = drawn["num_attention_heads"] * drawn["head_dim"]
    print(f"internlm2: {drawn}")
    return transformers.LlamaConfig(**drawn)


def test_internlm2(record: Record) -> None:
    for seed in seeds_of(lambda seed: drawn_internlm2(Random(f"internlm2 {seed}"))):
        rng = Random(f"internlm2 {seed}")
        config, options = drawn_internlm2(rng), drawn_options(rng)
        print(f"seed {seed}: {options}")
        difference = check_family(config, LlamaForCausalLM, options, seed, write=save_as_internlm2)
        record("internlm2", "parity", difference)


def test_internlm2_in_bfloat16_agrees_within_its_rounding(record: Record) -> None:
    config = drawn_internlm2(Random("internlm2 in 16 bits"))
    error, their_error = rounding_errors(config, LlamaForCausalLM, write=save_as_internlm2)
    record("internlm2", "bfloat16", [error, their_error])
    assert 0 < error <= 2 * their_error, (error, their_error)


SOFTMAX_TOP_K = """name: chosen-first
extends: mixtral
model: {layers: {residual: {transform: {moe: {router: {scoring: %s, normalize: false}}}}}}
"""


def check_router(scoring: str, directory: Path, seed: int) -> float:
    """A Mixtral whose recipe scores experts by ``scoring`` and does not normalise, against transformers' own."""
    rng = Random(f"router {seed}")
    drawn = mixtral(rng) | {"num_local_experts": 5, "num_experts_per_tok": rng.randint(2, 4)}
    print(f"seed {seed}: {drawn}")
    (directory / "chosen-first.yaml").write_text(SOFTMAX_TOP_K % scoring)
    options = drawn_options(rng) | {"recipe": directory / "chosen-first.yaml"}
    return check_family(transformers.MixtralConfig(**drawn), transformers.MixtralForCausalLM, options, seed)


def test_a_softmax_over_the_chosen_experts(tmp_path: Path) -> None:
    """No shipped recipe says ``softmax_top_k``; it is what a Mixtral computes in another order: the softmax over all
    experts, divided by the sum of the chosen ones, is the softmax over the chosen ones."""
    for seed in range(4):
        check_router("softmax_top_k", tmp_path, seed)
    with pytest.raises(AssertionError, match="differs by"):
        check_router("softmax", tmp_path, 0)


def test_every_recipe_is_compared() -> None:
    recipes = {file.stem for file in (Path(__file__).parents[2] / "recipes").glob("*.yaml")}
    here = {recipe_of(name) for name in DRAWS} | {"internlm2"}
    assert here | {"llama", "mistral", "opt"} == recipes
