"""Parts of models that the recipe language cannot describe, for messages about keys that nothing reads."""

from __future__ import annotations

import re
from typing import Final

# By the words in a key of a recipe or of config.json: what the key describes. The first row that fits counts.
_LACKING: Final = (
    ("sinks?", "attention sinks"),
    ("clip|clamp|limit", "bounds on queries, keys, values or activations"),
    ("after|post_(rope|rotary|rotation)", "norm of queries and keys after the rotation: it is before"),
    (
        "conv|convolution|kernel_size|ssm|mamba|recurrent|d_state|state_(size|dim)|linear_attention|time_(?:decay|mix|first|faaaa)",
        "convolution or recurrent state",
    ),
    ("chunks?|chunked", "attention in chunks"),
    ("encoder|cross|cross_attention", "encoder, and no attention to one"),
    ("temperature|temperature_tuning|4_scaling", "factor on queries that depends on the position"),
    ("output_gate|attention_gate|attn_gate", "gate on the output of an attention"),
    ("(?<![qvo]_)lora|adapters?", "adapters: merge them into the weights"),  # `q_lora_rank` is of latent attention
    ("bidirectional|mask(?!_)|prefix_lm", "attention other than causal"),  # `mask_token_id` is of the tokenizer
    ("sub_(norm|ln|layernorm|layer_norm)|subln", "norm between the heads and the output of an attention"),
    ("relative|t5_bias", "learned bias on scores"),
)


def lacks(key: str) -> str:
    """Returns ``": the language has no …"`` if ``key`` names something that no key of the language describes."""
    name = key.lower()
    for words, what in _LACKING:
        if re.search(rf"(?:^|_)(?:{words})(?:_|$)", name):
            return f": the language has no {what}"
    return ""
