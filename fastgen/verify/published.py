"""What published files of an architecture hold beyond what its class of transformers writes today.

The class passes over all of it, so a recipe has to as well; it is told by the class's name, since no other source of
it is at hand. Of an architecture that is not listed nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Published:
    """``config``: keys and what files say there. ``tensors``: names beside the weights, ``{layer}`` for each layer.
    ``bare``: some files lack the base model's prefix.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    bare: bool = False


_CODE: Final = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}  # for the time before the class was there
_SUMMARY: Final = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
}
_DEEPSEEK: Final = _CODE | {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "seq_aux": True}

_PUBLISHED: Final[dict[str, Published]] = {
    "BloomForCausalLM": Published(
        {
            **{"apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "n_inner": None},
            **{"bias_dropout_fusion": True, "masked_softmax_fusion": True, "offset_alibi": 100, "seq_length": 2048},
            **{"skip_bias_add": True, "skip_bias_add_qkv": False},
        },
        bare=True,
    ),
    "CohereForCausalLM": Published({"model_max_length": 131072}),
    "DeepseekV2ForCausalLM": Published(_DEEPSEEK | {"scoring_func": "softmax"}),
    "DeepseekV3ForCausalLM": Published(_DEEPSEEK | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    "FalconForCausalLM": Published(_CODE | {"apply_residual_connection_post_layernorm": False, "ff_factor": 4}),
    "GemmaForCausalLM": Published({"hidden_activation": None}),
    "Gemma2ForCausalLM": Published({"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
    "GPT2LMHeadModel": Published(
        {"n_ctx": 1024},
        ("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
        bare=True,
    ),
    "GPTJForCausalLM": Published(
        _SUMMARY | {"rotary": True, "scale_attn_weights": True},
        ("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
    ),
    "GPTNeoXForCausalLM": Published(
        {}, ("gpt_neox.layers.{layer}.attention.bias", "gpt_neox.layers.{layer}.attention.masked_bias")
    ),
    "LlamaForCausalLM": Published({"max_sequence_length": 64}),
    "OPTForCausalLM": Published({}, ("model.decoder.version",), bare=True),
    "PhiForCausalLM": Published(_CODE),
    "Phi3ForCausalLM": Published(_CODE | {"attention_bias": False}),
    "Qwen2ForCausalLM": Published({"use_mrope": False}),
    "Qwen3MoeForCausalLM": Published({"max_window_layers": 48}),
    "SmolLM3ForCausalLM": Published({"max_window_layers": 28}),
}


def published(class_name: str) -> Published:
    """What files of the class's architecture hold."""
    return _PUBLISHED.get(class_name, Published())
