"""The engine's sizes: from what the user asked for, the model spec and the device, to numbers that are all known."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from fastgen.compile.device import Device
from fastgen.errors import InvalidArgumentError, OutOfMemoryError
from fastgen.layers.kv_cache import storage_places
from fastgen.models.builder import kv_groups, kv_shapes
from fastgen.models.spec import ModelSpec

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
_DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_BLOCK_SIZE = 16
_DEFAULT_NUM_DRAFT_TOKENS = 4
_KV_SHARE_OF_MEMORY = {"cpu": 0.25, "cuda": 0.90}
_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. ``num_blocks`` counts the padding block; ``max_model_len`` is prompt and answer together;
    ``num_draft_tokens`` is 0 where nothing is drafted.
    """

    token_budget: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    num_kv_groups: int
    prefix_caching: bool = True
    num_draft_tokens: int = 0

    @property
    def max_rows(self) -> int:
        """Rows of a step that may need logits: a token of each sequence, and its drafts."""
        return min(self.token_budget, self.max_num_seqs * (1 + self.num_draft_tokens))

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence, in one KV group."""
        return -(-self.max_model_len // self.block_size)


def resolve_engine_config(
    spec: ModelSpec,
    device: Device,
    *,
    dtype: torch.dtype,
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_memory: int | str | None = None,
    block_size: int | None = None,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    speculative: str | None = None,
    num_draft_tokens: int | None = None,
) -> EngineConfig:
    """Fill in what was left open and refuse what cannot work.

    By default the KV cache takes a quarter of the machine's memory on a CPU, on a GPU nine tenths less the weights, and
    never more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can use.
    """
    for name, value in (
        ("token_budget", token_budget),
        ("max_num_seqs", max_num_seqs),
        ("block_size", block_size),
        ("max_model_len", max_model_len),
        ("num_draft_tokens", num_draft_tokens),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InvalidArgumentError(f"{name}={value!r}: expected an integer of at least 1")
    if not isinstance(prefix_caching, bool):
        raise InvalidArgumentError(f"prefix_caching={prefix_caching!r}: expected True or False")
    budget = token_budget or _DEFAULT_TOKEN_BUDGET[device.kind]
    num_seqs = max_num_seqs or min(_DEFAULT_MAX_NUM_SEQS[device.kind], budget)
    if num_seqs > budget:
        raise InvalidArgumentError(
            f"max_num_seqs={num_seqs} is above token_budget={budget}: every running sequence takes a token of each "
            "step; raise token_budget or lower max_num_seqs"
        )
    size = block_size or DEFAULT_BLOCK_SIZE
    groups = kv_groups(spec)
    num_groups = len(set(groups))
    storages = set(storage_places(groups, kv_shapes(spec)))
    bytes_per_block = size * dtype.itemsize * sum(shape.num_features for shape, _ in storages)
    _check_model_len(spec, max_model_len)
    model_len = max_model_len or spec.max_positions

    if kv_cache_memory is None:
        memory = _default_kv_memory(spec, device, dtype)
        num_blocks = int(memory // bytes_per_block)
        if model_len is not None:
            num_blocks = min(num_blocks, 1 + num_groups * num_seqs * -(-model_len // size))
    else:
        memory = parse_bytes(kv_cache_memory, "kv_cache_memory")
        num_blocks = memory // bytes_per_block
    if num_blocks < 1 + num_groups:
        raise OutOfMemoryError(
            f"the KV cache gets {int(memory):,} bytes, but one block of {size} tokens takes "
            f"{bytes_per_block:,} and {1 + num_groups} blocks are the least; "
            "raise kv_cache_memory or lower block_size"
        )
    config = EngineConfig(
        token_budget=budget,
        max_num_seqs=num_seqs,
        block_size=size,
        num_blocks=num_blocks,
        max_model_len=model_len or (num_blocks - 1) // num_groups * size + 1,
        num_kv_groups=num_groups,
        prefix_caching=prefix_caching,
        num_draft_tokens=_num_draft_tokens(speculative, num_draft_tokens, budget),
    )
    _check_memory(spec, device, config, dtype, num_blocks * bytes_per_block)
    return config


def parse_dtype(name: str) -> torch.dtype:
    """The dtype that weights and arithmetic are to have, by its name."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise InvalidArgumentError(f"dtype={name!r}: expected 'auto' or one of {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[name]


def parse_bytes(size: int | str, name: str) -> int:
    """A number of bytes, or a string such as ``"4GiB"`` or ``"500 MB"``; ``name`` is the argument it came as."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B|)", size.strip()) if isinstance(size, str) else None
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise InvalidArgumentError(f"{name}={size!r}: expected a positive number of bytes or a size such as '4GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


def _num_draft_tokens(speculative: str | None, num_draft_tokens: int | None, token_budget: int) -> int:
    """How many tokens are drafted for a sequence at most; 0 without ``speculative``."""
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


def _check_memory(spec: ModelSpec, device: Device, config: EngineConfig, dtype: torch.dtype, kv_bytes: int) -> None:
    """Refuse what the device's memory cannot hold, before it is asked for."""
    sizes = {
        "weights": spec.num_parameters * dtype.itemsize,
        "KV cache": kv_bytes,
        f"activations of token_budget={config.token_budget}": config.token_budget * spec.hidden_size * dtype.itemsize,
        f"block tables of max_num_seqs={config.max_num_seqs}": (
            4 * config.num_kv_groups * config.max_num_seqs * config.max_blocks
        ),
    }
    if sum(sizes.values()) > device.memory_bytes:
        terms = " + ".join(f"{name} {size / 2**30:,.2f} GiB" for name, size in sizes.items())
        raise OutOfMemoryError(
            f"{terms} = {sum(sizes.values()) / 2**30:,.2f} GiB, but {device} has {device.memory_bytes / 2**30:,.2f} GiB"
        )


def _default_kv_memory(spec: ModelSpec, device: Device, dtype: torch.dtype) -> float:
    share = _KV_SHARE_OF_MEMORY[device.kind] * device.memory_bytes
    weights = spec.num_parameters * dtype.itemsize if device.kind == "cuda" else 0
    return max(0.0, share - weights)
