"""The architectures of the built-in models: each small, and each with the features of its family switched on."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from training.tokenizer import CONTEXT

EMBEDDING_STD = 0.15
MODEL_NAMES = ("tiny-llama", "tiny-mistral", "tiny-opt")


def build_model(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A freshly initialised fp32 model of fewer than two million parameters."""
    model = _build_architecture(name, tokenizer)
    # Words that occur in the same places, such as the names, get much the same updates.  They must start far enough
    # apart to remain distinct, or a model does not learn which of them was said before.
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        torch.nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    if name == "tiny-opt":
        positions = model.get_decoder().embed_positions.weight
        positions.data = sinusoids(*positions.shape)
    return model


def sinusoids(count: int, width: int) -> torch.Tensor:
    """Vectors of ``count`` positions, shape (count, width), as large as those of the tokens.

    Learned positions start from these because equal distances look alike anywhere in the context; from random ones,
    every position would have to learn on its own which others are near.
    """
    frequency = 10_000 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(count)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1) * (2**0.5 * EMBEDDING_STD)


def _build_architecture(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    common = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if name == "tiny-llama":  # grouped-query attention, tied head
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=128,
                intermediate_size=320,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                **common,
            )
        )
    if name == "tiny-mistral":  # attention wider than the hidden state, a window shorter than the context, own head
        return MistralForCausalLM(
            MistralConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=32,
                sliding_window=256,
                tie_word_embeddings=False,
                **common,
            )
        )
    if name == "tiny-opt":  # learned positions, LayerNorm and biases, ReLU
        return OPTForCausalLM(
            OPTConfig(
                hidden_size=128,
                word_embed_proj_dim=128,
                ffn_dim=384,
                num_hidden_layers=4,
                num_attention_heads=4,
                dropout=0.0,
                attention_dropout=0.0,
                layerdrop=0.0,
                **common,
            )
        )
    raise ValueError(f"unknown model {name!r}; known are {', '.join(MODEL_NAMES)}")
