"""Parts of models that the recipe language cannot describe, for the message about a key that it does not have."""

from __future__ import annotations

import re
from typing import Final

# By the words in a key: what a person who writes such a key wants to describe.
_LACKING: Final = (
    ("sinks?", "attention sinks"),
    ("clip|clamp|limit", "bounds on queries, keys, values or activations"),
    ("after|post_(rope|rotary|rotation)", "norm of queries and keys after the rotation: it is before"),
    ("chunks?|chunked", "attention in chunks"),
    ("conv|convolution|kernel_size|ssm|mamba|recurrent|state|linear_attention", "convolution or recurrent state"),
    ("encoder|cross|cross_attention", "encoder, and no attention to one"),
    ("temperature|temperature_tuning", "factor on queries that depends on the position"),
    ("output_gate|attention_gate|attn_gate", "gate on the output of an attention"),
    ("lora|adapters?", "adapters: merge them into the weights"),
    ("bidirectional|mask|prefix", "attention other than causal"),
    ("relative|t5_bias", "learned bias on scores"),
)


def lacks(key: str) -> str:
    """Returns ``": the language has no …"`` if ``key`` names something that no key of the language describes."""
    name = key.lower()
    for words, what in _LACKING:
        if re.search(rf"(?:^|_)(?:{words})(?:_|$)", name):
            return f": the language has no {what}"
    return ""
