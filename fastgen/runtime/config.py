"""Resolves the sizes of an engine: from the user's arguments, the model spec and the device to numbers that are all
known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fastgen.arguments import parse_bytes, shown_bytes
from fastgen.errors import InvalidArgumentError, OutOfMemoryError
from fastgen.models.spec import ModelSpec
from fastgen.options import LoadOptions
from fastgen.runtime.memory.fit import blocks_of_sequence, default_num_blocks, nearest_that_fits
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.memory.sizes import AskedSizes, EngineConfig

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
_DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
# Kernels of a GPU read a KV tile of 64 keys from one block, without gathering.
DEFAULT_BLOCK_SIZE: dict[Literal["cpu", "cuda"], int] = {"cpu": 16, "cuda": 64}
_DEFAULT_NUM_DRAFT_TOKENS = 4


def resolve_engine_config(memory: MemoryModel, options: LoadOptions) -> EngineConfig:
    """Returns the sizes with everything filled in that was left open, and refuses sizes that cannot work.

    By default the KV cache takes half of a machine's memory that the rest of the engine leaves; on a GPU the whole
    engine takes nine tenths. It never takes more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can use.

    :raises OutOfMemoryError: with the arithmetic and the nearest sizes that fit.
    """
    _check_model_len(memory.build.spec, options.max_model_len)
    kv_cache_memory, token_budget = options.kv_cache_memory, options.token_budget
    asked = AskedSizes(
        None if kv_cache_memory is None else parse_bytes(kv_cache_memory, "kv_cache_memory"),
        token_budget,
        options.max_num_seqs,
        options.max_model_len,
        options.block_size,
        options.prefix_caching,
        _num_draft_tokens(
            options.speculative, options.num_draft_tokens, token_budget or _DEFAULT_TOKEN_BUDGET[memory.device.kind]
        ),
        options.kv_reservation,
    )
    try:
        return _resolve(memory, asked)
    except OutOfMemoryError as error:
        advice = nearest_that_fits(memory, asked, _in_full(memory, asked), _resolve)
        raise OutOfMemoryError(f"{error}; {advice}") from None


def _in_full(memory: MemoryModel, asked: AskedSizes) -> AskedSizes:
    """Returns the sizes with defaults filled in, except the KV cache's memory, which follows from all others."""
    kind = memory.device.kind
    budget = asked.token_budget or _DEFAULT_TOKEN_BUDGET[kind]
    return replace(
        asked,
        token_budget=budget,
        max_num_seqs=asked.max_num_seqs or min(_DEFAULT_MAX_NUM_SEQS[kind], budget),
        max_model_len=asked.max_model_len or memory.build.spec.max_positions,
        block_size=asked.block_size or DEFAULT_BLOCK_SIZE[kind],
    )


def _resolve(memory: MemoryModel, asked: AskedSizes) -> EngineConfig:
    """Returns the config like :func:`resolve_engine_config`; its error has the arithmetic and no advice."""
    full = _in_full(memory, asked)
    budget, num_seqs, size, model_len = full.token_budget, full.max_num_seqs, full.block_size, full.max_model_len
    assert budget is not None
    assert num_seqs is not None
    assert size is not None
    if num_seqs > budget:
        raise InvalidArgumentError(
            f"max_num_seqs={num_seqs} is above token_budget={budget}: every running sequence takes a token of each "
            "step; raise token_budget or lower max_num_seqs"
        )

    def sized(num_blocks: int) -> EngineConfig:
        return EngineConfig(
            token_budget=budget,
            max_num_seqs=num_seqs,
            block_size=size,
            num_blocks=num_blocks,
            max_model_len=model_len or max(0, num_blocks - 1) // memory.num_kv_groups * size + 1,
            num_kv_groups=memory.num_kv_groups,
            prefix_caching=asked.prefix_caching,
            num_draft_tokens=asked.num_draft_tokens,
            kv_reservation=asked.kv_reservation,
        )

    block_bytes, least = memory.block_bytes(size), 1 + memory.num_kv_groups
    if asked.kv_cache_memory is not None:
        num_blocks = asked.kv_cache_memory // block_bytes
        if num_blocks < least:
            raise OutOfMemoryError(
                f"the KV cache gets {asked.kv_cache_memory:,} bytes, but one block of {size} tokens takes "
                f"{block_bytes:,} and {least} blocks are the least"
            )
    else:
        useful = None if model_len is None else 1 + num_seqs * blocks_of_sequence(memory, model_len, budget, size)
        num_blocks = max(least, default_num_blocks(memory, sized, useful))
    config = sized(num_blocks)
    if config.kv_reservation == "context":
        reserved = blocks_of_sequence(memory, config.max_model_len, budget, size)
        if reserved > num_blocks - 1:
            raise OutOfMemoryError(
                f"kv_reservation='context' reserves {reserved} blocks for each sequence of up to "
                f"{config.max_model_len} tokens, but the KV cache has {num_blocks - 1}"
            )
    ledger = memory.ledger(config)
    if ledger.total_bytes > ledger.device_bytes:
        raise OutOfMemoryError(f"{ledger.arithmetic()}, but {memory.device} has {shown_bytes(ledger.device_bytes)}")
    return config


def parse_dtype(name: str) -> torch.dtype:
    """Returns the dtype of weights and arithmetic, by its name."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise InvalidArgumentError(f"dtype={name!r}: expected 'auto' or one of {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[name]


def _num_draft_tokens(speculative: str | None, num_draft_tokens: int | None, token_budget: int) -> int:
    """Returns the most tokens drafted for a sequence; 0 without ``speculative``."""
    if speculative is None:
        if num_draft_tokens is not None:
            raise InvalidArgumentError(f"num_draft_tokens={num_draft_tokens} needs speculative='ngram'")
        return 0
    if speculative != "ngram":
        raise InvalidArgumentError(f"speculative={speculative!r}: expected 'ngram', or None")
    most = _DEFAULT_NUM_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    if most >= token_budget:
        raise InvalidArgumentError(
            f"num_draft_tokens={most} drafts and the token before them take {most + 1} places of a step, and "
            f"token_budget={token_budget} has fewer; raise token_budget or lower num_draft_tokens"
        )
    return most


def _check_model_len(spec: ModelSpec, max_model_len: int | None) -> None:
    if max_model_len is None or spec.max_positions is None or max_model_len <= spec.max_positions:
        return
    message = (
        f"max_model_len={max_model_len} is above the {spec.max_positions} positions the model was trained for; ask for "
        "at most these"
    )
    rotaries = [attention.rotary for attention in spec.attentions()]
    if any(rotary and rotary.scaling and rotary.scaling.kind == "dynamic" for rotary in rotaries):
        message += (
            "; its dynamic rotary scaling would stretch the positions of tokens already cached as a sequence grows "
            "beyond them, so that an answer would depend on what else was asked"
        )
    raise InvalidArgumentError(message)
