"""More families load published configurations with the published parameter counts.

A count is that of the distinct weights: a tied head, or a copy of it in a file, counts once.
"""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.errors import RecipeError
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, MoeSpec
from tests.fast import cases
from tests.matrix import Record

COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True}
ROTARY = {"rope_scaling": None, "rope_theta": 10000.0}

FALCON: dict[str, Any] = COMMON | {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = FALCON | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
FALCON_RW: dict[str, Any] = FALCON | {
    "alibi": True,
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 2048,
    "multi_query": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "vocab_size": 50304,
}
QWEN: dict[str, Any] = COMMON | {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2 = QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
}
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
PHI: dict[str, Any] = (
    COMMON
    | ROTARY
    | {
        "architectures": ["PhiForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "embd_pdrop": 0.0,
        "eos_token_id": None,
        "hidden_act": "gelu_new",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "phi",
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": None,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": 51200,
    }
)
PHI_3: dict[str, Any] = (
    COMMON
    | ROTARY
    | {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    }
)
GEMMA: dict[str, Any] = (
    COMMON
    | ROTARY
    | {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "vocab_size": 256000,
    }
)
GEMMA_2: dict[str, Any] = {key: value for key, value in GEMMA.items() if key != "rope_scaling"} | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
PYTHIA: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
GPT_J: dict[str, Any] = {key: value for key, value in GPT2.items() if key != "n_ctx"} | {
    "architectures": ["GPTJForCausalLM"],
    "gradient_checkpointing": False,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "vocab_size": 50400,
}
BLOOM: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 1,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}
OLMO_2: dict[str, Any] = COMMON | {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
COMMAND_R: dict[str, Any] = COMMON | {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "pad_token_id": 0,
    "rope_theta": 8000000.0,
    "vocab_size": 256000,
}
GRANITE: dict[str, Any] = COMMON | {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
MIXTRAL: dict[str, Any] = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2: dict[str, Any] = {key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"} | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
SMOLLM_3: dict[str, Any] = COMMON | {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
INTERNLM_2: dict[str, Any] = COMMON | {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 92544,
}
FALCON_3: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 11,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 23040,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000042,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}


def sizes(hidden: int, layers: int, heads: int, feed_forward: int | None = None, **others: Any) -> dict[str, Any]:
    numbers = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return numbers | ({} if feed_forward is None else {"intermediate_size": feed_forward}) | others


def qwen(hidden: int, layers: int, heads: int, feed_forward: int, kv: int, **others: Any) -> dict[str, Any]:
    return sizes(hidden, layers, heads, feed_forward, num_key_value_heads=kv, **others)


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "falcon-7b": (FALCON, 6_921_720_704),
    "falcon-40b": (FALCON_40B, 41_303_293_952),
    "falcon-180B": (FALCON_40B | sizes(14848, 80, 232), 178_557_088_768),
    "falcon-rw-1b": (FALCON_RW, 1_311_625_216),
    "falcon-rw-7b": (FALCON_RW | sizes(4096, 36, 64, vocab_size=65024), 7_516_020_736),
    "falcon-11B": (
        FALCON_40B
        | sizes(4096, 60, 32, activation="gelu", ff_factor=4, ffn_hidden_size=16384, max_position_embeddings=8192)
        | {"num_ln_in_parallel_attn": 1, "rope_scaling": None, "rope_theta": 500042.0, "tie_word_embeddings": False},
        11_102_822_400,
    ),
    "Falcon3-1B-Base": (FALCON_3 | qwen(2048, 18, 8, 8192, 4, max_position_embeddings=4096), 1_669_408_768),
    "Falcon3-3B-Base": (FALCON_3 | qwen(3072, 22, 12, 9216, 4), 3_227_655_168),
    "Falcon3-7B-Base": (FALCON_3, 7_455_550_464),
    "Falcon3-10B-Base": (FALCON_3 | qwen(3072, 40, 12, 23040, 4), 10_305_653_760),
    "Qwen1.5-7B": (QWEN2 | qwen(4096, 32, 32, 11008, 32, vocab_size=151936), 7_721_324_544),
    "Qwen2-0.5B": (QWEN2 | qwen(896, 24, 14, 4864, 2, tie_word_embeddings=True, vocab_size=151936), 494_032_768),
    "Qwen2-1.5B": (QWEN2 | qwen(1536, 28, 12, 8960, 2, tie_word_embeddings=True, vocab_size=151936), 1_543_714_304),
    "Qwen2-7B": (QWEN2, 7_615_616_512),
    "Qwen2.5-3B": (QWEN2 | qwen(2048, 36, 16, 11008, 2, tie_word_embeddings=True, vocab_size=151936), 3_085_938_688),
    "Qwen2.5-7B": (QWEN2 | {"use_mrope": False}, 7_615_616_512),
    "Qwen2.5-14B": (QWEN2 | qwen(5120, 48, 40, 13824, 8), 14_770_033_664),
    "Qwen2.5-32B": (QWEN2 | qwen(5120, 64, 40, 27648, 8), 32_763_876_352),
    "Qwen2-72B": (QWEN2 | qwen(8192, 80, 64, 29568, 8), 72_706_203_648),
    "Qwen3-0.6B": (QWEN3 | qwen(1024, 28, 16, 3072, 8, tie_word_embeddings=True), 596_049_920),
    "Qwen3-1.7B": (QWEN3 | qwen(2048, 28, 16, 6144, 8, tie_word_embeddings=True), 1_720_574_976),
    "Qwen3-4B": (QWEN3 | qwen(2560, 36, 32, 9728, 8, tie_word_embeddings=True), 4_022_468_096),
    "Qwen3-8B": (QWEN3, 8_190_735_360),
    "Qwen3-14B": (QWEN3 | qwen(5120, 40, 40, 17408, 8), 14_768_307_200),
    "Qwen3-32B": (QWEN3 | qwen(5120, 64, 64, 25600, 8), 32_762_123_264),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624),
    "Qwen3-235B-A22B": (
        QWEN3_MOE | sizes(4096, 94, 64, 12288, moe_intermediate_size=1536, max_window_layers=94),
        235_093_634_560,
    ),
    "phi-1": (PHI, 1_418_270_720),
    "phi-1_5": (PHI, 1_418_270_720),
    "phi-2": (PHI | sizes(2560, 32, 32, 10240, partial_rotary_factor=0.4, resid_pdrop=0.1), 2_779_683_840),
    "Phi-3-mini-4k": (PHI_3, 3_821_079_552),
    "Phi-3-medium-4k": (PHI_3 | qwen(5120, 40, 40, 17920, 10), 13_960_238_080),
    "phi-4": (
        PHI_3
        | qwen(5120, 40, 40, 17920, 10, vocab_size=100352, sliding_window=None, rope_theta=250000)
        | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384},
        14_659_507_200,
    ),
    "gemma-2b": (GEMMA, 2_506_172_416),
    "gemma-7b": (GEMMA | qwen(3072, 28, 16, 24576, 16, hidden_act="gelu_pytorch_tanh"), 8_537_680_896),
    "gemma-2-2b": (GEMMA_2, 2_614_341_888),
    "gemma-2-9b": (GEMMA_2 | qwen(3584, 42, 16, 14336, 8), 9_241_705_984),
    "gemma-2-27b": (
        GEMMA_2 | qwen(4608, 46, 32, 36864, 16, head_dim=128, query_pre_attn_scalar=144),
        27_227_128_320,
    ),
    "gpt2": (GPT2, 124_439_808),
    "gpt2-medium": (GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24}, 354_823_168),
    "gpt2-large": (GPT2 | {"n_embd": 1280, "n_head": 20, "n_layer": 36}, 774_030_080),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}, 1_557_611_200),
    "pythia-14m": (PYTHIA | sizes(128, 6, 4, 512), 14_067_712),
    "pythia-31m": (PYTHIA | sizes(256, 6, 8, 1024), 30_494_720),
    "pythia-70m": (PYTHIA, 70_426_624),
    "pythia-160m": (PYTHIA | sizes(768, 12, 12, 3072), 162_322_944),
    "pythia-410m": (PYTHIA | sizes(1024, 24, 16, 4096), 405_334_016),
    "pythia-1b": (PYTHIA | sizes(2048, 16, 8, 8192), 1_011_781_632),
    "pythia-1.4b": (PYTHIA | sizes(2048, 24, 16, 8192), 1_414_647_808),
    "pythia-2.8b": (PYTHIA | sizes(2560, 32, 32, 10240), 2_775_208_960),
    "pythia-6.9b": (PYTHIA | sizes(4096, 32, 32, 16384, vocab_size=50432), 6_857_302_016),
    "pythia-12b": (PYTHIA | sizes(5120, 36, 40, 20480, vocab_size=50688), 11_846_072_320),
    "gpt-neox-20b": (
        PYTHIA | sizes(6144, 44, 64, 24576, vocab_size=50432, attention_probs_dropout_prob=0, hidden_dropout_prob=0),
        20_554_567_680,
    ),
    "gpt-j-6b": (GPT_J, 6_050_882_784),
    "bloom-560m": (BLOOM, 559_214_592),
    "bloom-7b1": (
        {key: value for key, value in BLOOM.items() if key not in ("n_embed", "num_attention_heads")}
        | {"hidden_size": 4096, "n_head": 32, "n_layer": 30, "seq_length": 2048},
        7_069_016_064,
    ),
    "bloom": (
        BLOOM | {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "pretraining_tp": 4},
        176_247_271_424,
    ),
    "OLMo-2-0425-1B": (OLMO_2 | qwen(2048, 16, 16, 8192, 16), 1_484_916_736),
    "OLMo-2-1124-7B": (OLMO_2, 7_298_617_344),
    "OLMo-2-1124-13B": (OLMO_2 | qwen(5120, 40, 40, 13824, 40), 13_716_198_400),
    "OLMo-2-0325-32B": (OLMO_2 | qwen(5120, 64, 40, 27648, 8), 32_234_279_936),
    "c4ai-command-r-v01": (COMMAND_R, 34_980_831_232),
    "c4ai-command-r-plus": (
        COMMAND_R
        | qwen(12288, 64, 96, 33792, 8, logit_scale=0.8333333333333334, use_qk_norm=True, rope_theta=75000000.0),
        103_810_674_688,
    ),
    "granite-3.0-2b-base": (GRANITE, 2_533_531_648),
    "Mixtral-8x7B-v0.1": (MIXTRAL, 46_702_792_704),
    "Mixtral-8x22B-v0.1": (
        MIXTRAL | qwen(6144, 56, 48, 16384, 8, max_position_embeddings=65536),
        140_620_634_112,
    ),
    "DeepSeek-V3": (DEEPSEEK, 671_026_419_200),
    "DeepSeek-V2": (DEEPSEEK_V2, 235_741_434_880),
    "DeepSeek-V2-Lite": (
        DEEPSEEK_V2
        | sizes(2048, 27, 16, 10944, moe_intermediate_size=1408, n_group=1, n_routed_experts=64, q_lora_rank=None)
        | {"num_key_value_heads": 16, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy"},
        15_706_484_224,
    ),
    "SmolLM3-3B": (SMOLLM_3, 3_075_098_624),
    "internlm2-7b": (INTERNLM_2, 7_737_708_544),
}


def resolved(config: dict[str, Any]) -> ModelSpec:
    return resolve(find_recipe(config), config)


# The same recipes have smaller ones.
LARGE = {"DeepSeek-V2", "Qwen3-235B-A22B"}


@pytest.mark.parametrize("name", cases(PUBLISHED, fast=PUBLISHED.keys() - LARGE))
def test_every_published_configuration_loads(name: str, record: Record) -> None:
    config, num_parameters = PUBLISHED[name]
    spec = resolved(config)
    assert spec.num_parameters == num_parameters
    record(spec.recipe, "published", name)


def attentions(name: str, **changes: Any) -> list[AttentionSpec]:
    return [part for part in resolved(PUBLISHED[name][0] | changes).attentions() if isinstance(part, AttentionSpec)]


def windows(name: str, **changes: Any) -> list[int | None]:
    return [part.sliding_window for part in attentions(name, **changes)]


def test_windows_by_layer() -> None:
    assert windows("Qwen2.5-7B") == [None] * 28
    assert windows("Qwen2.5-7B", use_sliding_window=True, max_window_layers=20) == [None] * 20 + [131072] * 8
    types = ["full_attention", "sliding_attention"] * 14
    assert windows("Qwen2.5-7B", use_sliding_window=True, layer_types=types) == [None, 131072] * 14
    assert windows("Qwen2.5-7B", use_sliding_window=False, layer_types=types) == [None] * 28
    assert windows("Qwen3-30B-A3B", use_sliding_window=True, sliding_window=9) == [9] * 48
    assert windows("gemma-2-2b") == [4096, None] * 13
    assert windows("gemma-2-2b", layer_types=types[:26]) == [None, 4096] * 13
    assert set(windows("Phi-3-mini-4k")) == {2047}
    assert set(windows("Mixtral-8x7B-v0.1")) == {None}
    assert windows("SmolLM3-3B") == [None] * 36


def rotations(name: str, **changes: Any) -> set[tuple[str, int, float] | None]:
    rotaries = [part.rotary for part in attentions(name, **changes)]
    return {rotary and (rotary.kind, rotary.dim, rotary.theta) for rotary in rotaries}


def test_rotations() -> None:
    assert rotations("phi-2") == {("half", 32, 1e4)}
    assert rotations("phi-1_5") == {("half", 32, 1e4)}
    assert rotations("pythia-70m") == {("half", 16, 1e4)}
    assert rotations("gpt-j-6b") == {("interleaved", 64, 1e4)}
    assert rotations("c4ai-command-r-v01") == {("interleaved", 128, 8e6)}
    assert rotations("falcon-7b") == {("half", 64, 1e4)}
    assert rotations("gpt2") == rotations("bloom-560m") == rotations("falcon-rw-1b") == {None}
    rotated = [part.rotary is not None for part in attentions("SmolLM3-3B")]
    assert rotated == [True, True, True, False] * 9
    renamed = {"rope_scaling": None, "rope_theta": 1.0, "partial_rotary_factor": 1.0}
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.4}}
    assert rotations("phi-2", **(renamed | new)) == {("half", 32, 5e4)}


def test_falcon_in_all_its_shapes() -> None:
    def outline(name: str, **changes: Any) -> tuple[Any, ...]:
        spec = resolved(PUBLISHED[name][0] | changes)
        branches = spec.layers[-1].branches
        return tuple((branch.norm is not None, [part.norm is not None for part in branch.parts]) for branch in branches)

    assert outline("falcon-7b") == outline("falcon-11B") == ((True, [False, False]),)
    assert outline("falcon-40b") == ((False, [True, True]),)
    assert outline("falcon-rw-1b") == ((True, [False]), (True, [False]))
    heads = {name: resolved(PUBLISHED[name][0]).num_kv_heads for name in ("falcon-7b", "falcon-40b", "falcon-rw-1b")}
    assert heads == {"falcon-7b": 1, "falcon-40b": 8, "falcon-rw-1b": 32}
    assert resolved(FALCON | {"num_kv_heads": 71}).num_kv_heads == 1  # as in files saved since 4.33
    alibi = attentions("falcon-rw-1b")[0].alibi
    assert alibi is not None
    assert (alibi.rounding, alibi.scaled, len(alibi.slopes)) == ("bfloat16", True, 32)
    q, v = attentions("falcon-40b")[0].q.weight, attentions("falcon-40b")[0].v.weight
    assert q.names == v.names
    assert q.layout is not None
    assert v.layout is not None
    assert (q.layout.part, v.layout.part, q.stored_shape) == ((0, 16), (17, 18), (9216, 8192))
    assert dict(q.layout.sizes) == {"num_kv_heads": 8, "part": 18, "head_dim": 64, "in": 8192}


def test_scales_and_caps() -> None:
    gemma = resolved(GEMMA_2)
    part = attentions("gemma-2-27b")[0]
    assert (part.scale, part.softcap, gemma.head.softcap) == (1 / 12, 50.0, 30.0)
    assert gemma.embedding.scale == 2304**0.5
    assert gemma.final_norm is not None
    assert gemma.final_norm.offset == 1
    assert {part.part.activation for layer in resolved(GEMMA).layers for part in layer.branches[1].parts} == {  # type: ignore[union-attr]
        "gelu_pytorch_tanh"
    }
    assert attentions("gemma-2-2b", attn_logit_softcapping=None)[0].softcap is None
    granite = resolved(GRANITE)
    assert (granite.embedding.scale, granite.head.scale, granite.layers[0].branches[1].scale) == (12.0, 0.125, 0.22)
    assert attentions("granite-3.0-2b-base")[3].scale == 0.015625
    assert resolved(COMMAND_R).head.scale == 0.0625
    plain, inverse = attentions("gpt2")[2].scale, attentions("gpt2", scale_attn_by_inverse_layer_idx=True)[2].scale
    assert (plain, inverse) == (0.125, pytest.approx(0.125 / 3))
    assert attentions("gpt2", scale_attn_weights=False)[2].scale == 1
    latent = next(iter(resolved(DEEPSEEK).attentions()))
    assert isinstance(latent, LatentAttentionSpec)
    assert latent.scale == pytest.approx(192**-0.5 * 1.3688879**2)  # 0.1 ln 40 + 1
    assert next(iter(resolved(DEEPSEEK | {"rope_scaling": None}).attentions())).scale == pytest.approx(192**-0.5)


def test_cost_of_a_token_in_a_mixture() -> None:
    """Mixtral by hand: all experts count as parameters, two of eight as operations."""
    spec = resolved(MIXTRAL)
    attention, expert = 2 * 4096**2 + 2 * 4096 * 1024, 3 * 4096 * 14336
    matrices = 32 * (attention + 8 * 4096 + 2 * expert) + 32000 * 4096
    assert spec.flops_per_token(100) == 2 * matrices + 32 * 4 * 4096 * 100
    assert spec.kv_bytes_per_token(2) == 2 * 32 * 1024 * 2


def test_cost_of_a_token_over_a_latent_vector() -> None:
    """DeepSeek-V2-Lite by hand: 27 layers, the first dense, then 6 of 64 experts and two shared ones as one."""
    spec = resolved(PUBLISHED["DeepSeek-V2-Lite"][0])
    assert spec.kv_bytes_per_token(2) == 27 * (512 + 64) * 2
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    dense, sparse = 3 * 2048 * 10944, 64 * 2048 + (6 + 2) * 3 * 2048 * 1408
    matrices = 27 * attention + dense + 26 * sparse + 102400 * 2048
    assert spec.flops_per_token(10) == 2 * matrices + 27 * 2 * 16 * (576 + 512) * 10


def test_dense_and_sparse_layers() -> None:
    def sparse(config: dict[str, Any]) -> list[int]:
        layers = resolved(config).layers
        return [layer.index for layer in layers if isinstance(layer.branches[1].parts[0].part, MoeSpec)]

    small = QWEN3_MOE | {"num_hidden_layers": 6, "num_experts": 8}
    assert sparse(small) == [0, 1, 2, 3, 4, 5]
    assert sparse(small | {"decoder_sparse_step": 2}) == [1, 3, 5]
    assert sparse(small | {"mlp_only_layers": [0, 4]}) == [1, 2, 3, 5]
    assert sparse(DEEPSEEK | {"num_hidden_layers": 6, "n_routed_experts": 32}) == [3, 4, 5]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (FALCON, {"apply_residual_connection_post_layernorm": True}, "post_layernorm is True"),
        (FALCON_RW, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
        (FALCON_40B, {"parallel_attn": False}, "parallel_attn is False"),
        (QWEN2, {"use_mrope": True}, "use_mrope is True"),
        (QWEN2, {"use_qk_norm": True}, "use_qk_norm is not known"),
        (QWEN2, {"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
        (PHI, {"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        (PHI, {"partial_rotary_factor": 0.0}, "above 0 and at most 1"),
        (PHI, {"partial_rotary_factor": 1.5}, "above 0 and at most 1"),
        (PHI, {"partial_rotary_factor": 0.11}, "pairs of features"),
        (PHI_3, {"attention_bias": True}, "attention_bias is True"),
        (PHI_3, {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "'su' is not supported"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not known"),
        (GEMMA, {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is not known"),
        (GEMMA_2, {"attn_logit_softcapping": 0}, "a number above 0, or none"),
        (GEMMA_2, {"layer_types": ["full_attention"]}, "index 1 is out of range for a list of 1"),
        (GPT2, {"add_cross_attention": True}, "the layers attend to an encoder"),
        (GPT_J, {"rotary": False}, "rotary is False"),
        (GPT_J, {"rotary_dim": 300}, "an integer from 1 to 256"),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "post_layernorm is True"),
        (BLOOM, {"n_inner": 7}, "n_inner is 7"),
        (BLOOM, {"slow_but_exact": True, "pretraining_tp": 4}, "pretraining_tp is 4, slow_but_exact is True"),
        (COMMAND_R, {"logit_scale": 0.0}, "a number other than 0"),
        (GRANITE, {"logits_scaling": 0}, "division by zero"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "an integer from 1 to 8"),
        (MIXTRAL, {"num_local_experts": 10**6}, "an integer from 1 to 4096"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias is not known"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 7}, "shared_expert_intermediate_size is not known"),
        (DEEPSEEK, {"n_group": 7}, "256 experts cannot be divided into 7 equal groups"),
        (DEEPSEEK, {"n_group": 128, "topk_group": 3}, "3 groups of 2 experts are fewer than top_k, which is 8"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave is False"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is True"),
    ],
)  # fmt: skip
def test_what_changes_the_model_and_is_not_understood_is_refused(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        resolved(config | change)
