"""Headers and configurations of tiny models that no shipped recipe describes, as transformers makes them."""

from __future__ import annotations

import json
from typing import Any, Final

import torch
import transformers

from tests.recipe_tools.tiny_checkpoints import SIZES

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
