"""Small random checkpoints of each family, shared by the runtime's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

import fastgen
from tests.reference import randomise, save

FAMILIES = ("llama", "mistral", "opt")
VOCAB_SIZE = 151
MAX_POSITIONS = 160
WINDOW = 11


def families(*fast: str, of: tuple[str, ...] = FAMILIES) -> list[Any]:
    """Returns parameters for the families ``of``, those that are not ``fast`` for the slow tests alone.

    What a test of schedules sees of a family is its KV groups: ``mistral`` has a window, which frees blocks under way,
    ``llama`` and ``opt`` have none. What each computes is compared with the reference in ``tests/models``.
    """
    return [pytest.param(each, marks=[] if each in fast else pytest.mark.slow) for each in of]


def save_checkpoint(family: str, directory: Path, *, vocab_size: int = VOCAB_SIZE) -> Path:
    """A checkpoint of ``family`` (``"llama"``, ``"mistral"``, ``"opt"``) in fp32, without a tokenizer."""
    common = {
        "vocab_size": vocab_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": 2,
    }
    if family == "opt":
        config = OPTConfig(hidden_size=32, ffn_dim=48, word_embed_proj_dim=16, **common)
        model = OPTForCausalLM(config)
    elif family == "mistral":
        config = MistralConfig(
            hidden_size=32, intermediate_size=40, num_key_value_heads=2, head_dim=12, sliding_window=WINDOW, **common
        )
        model = MistralForCausalLM(config)
    else:
        config = LlamaConfig(hidden_size=32, intermediate_size=40, num_key_value_heads=1, **common)
        model = LlamaForCausalLM(config)
    return save(randomise(model, seed=11), directory)


def small_cache(directory: Path, num_tokens: int, **options: Any) -> int:
    """Bytes of a KV cache that one sequence of so many tokens takes whole, so that others preempt each other."""
    with fastgen.load(directory, kv_cache_memory="1MiB", **options) as llm:
        assert llm._engine is not None
        kv = llm._engine.scheduler.kv
        return (
            llm._engine.runner.kv_cache.size_bytes
            // llm.config.num_blocks
            * (kv.capacity.blocks_needed(num_tokens) + 1)
        )


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """A byte-level BPE tokenizer of fewer ids than the models have: a few letters, all bytes are not among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 10, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=letters
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, and the dog ate the hat: <user> <assistant>\né"] * 3, trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=chat_template
    )
    fast.save_pretrained(directory)
