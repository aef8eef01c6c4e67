"""Finds how large the KV cache can be, and which sizes fit where the requested ones do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastgen.arguments import shown_bytes
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.errors import FastgenError
from fastgen.models.builder import kv_windows
from fastgen.options import MIN_MODEL_LEN
from fastgen.runtime.kv_cache.block_tables import max_blocks_held
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.memory.sizes import AskedSizes, EngineConfig

# Returns the engine's sizes, or raises a :class:`FastgenError`.
Resolve = Callable[[MemoryModel, AskedSizes], EngineConfig]

# Fields of :class:`AskedSizes`, integers.
Sizes = dict[str, Any]

# Share for the KV cache of the memory that the rest of the engine leaves: other processes and file caches need some.
_SHARE_OF_REST = 0.5
# Share of a GPU's memory for the whole engine: the driver needs some, and fragmentation takes some.
_SHARE_OF_GPU = 0.9
# The number of steps in which all sizes are lowered together.
_STEPS = 1024
_SIZES = ("kv_cache_memory", "token_budget", "max_num_seqs", "max_model_len", "block_size")
_SMALLEST: Sizes = {"kv_cache_memory": None, "token_budget": 1, "max_num_seqs": 1, "max_model_len": MIN_MODEL_LEN}
_PLENTY = 1 << 62


def blocks_of_sequence(memory: MemoryModel, length: int, token_budget: int, block_size: int) -> int:
    """Returns the most blocks that a sequence of ``length`` tokens holds at once, over all KV groups. A group with a
    window holds the blocks of the window and of the chunk behind it.
    """
    windows = kv_windows(memory.build.spec)
    return sum(max_blocks_held(length, window, block_size, max_chunk=token_budget) for window in windows)


def default_num_blocks(memory: MemoryModel, sized: Callable[[int], EngineConfig], useful: int | None) -> int:
    """Returns as many blocks as the device has memory for, at most the ``useful`` ones, and perhaps none. ``sized``
    makes an engine's sizes with so many.
    """
    device = memory.device

    def fits(num_blocks: int) -> bool:
        ledger = memory.ledger(sized(num_blocks))
        if device.kind == "cuda":
            return ledger.total_bytes <= _SHARE_OF_GPU * device.memory_bytes
        kv_bytes = ledger.size_bytes("KV cache")
        return kv_bytes <= _SHARE_OF_REST * (device.memory_bytes - ledger.total_bytes + kv_bytes)

    most = device.memory_bytes // memory.block_bytes(sized(1).block_size)
    if useful is not None and useful <= most:
        most = useful
        if fits(most):  # as all the useful blocks of a small model do
            return most
    return _largest(fits, most)


def nearest_that_fits(memory: MemoryModel, asked: AskedSizes, full: AskedSizes, resolve: Resolve) -> str:
    """Returns sizes that fit instead of ``asked``, as the end of a sentence: each size that is enough to change, with
    the nearest value that fits; else all of them lowered alike; else what would take less for the weights. ``full`` are
    the sizes that ``asked`` amounts to.
    """

    def fits(changes: Sizes) -> bool:
        return _resolves(resolve, memory, replace(asked, **changes))

    found = []
    block_bytes = memory.block_bytes(full.block_size or 1)
    least_kv = (1 + memory.num_kv_groups) * block_bytes
    if full.kv_cache_memory is not None and full.kv_cache_memory < least_kv and fits({"kv_cache_memory": least_kv}):
        found.append(_as_text({"kv_cache_memory": least_kv}))
    for name, value in _sizes(full).items():
        unit = block_bytes if name == "kv_cache_memory" else 1

        def lowered(count: int, name: str = name, unit: int = unit) -> Sizes:
            return _with_room({name: count * unit}, asked)

        best = _largest(lambda count: fits(lowered(count)), (value - 1) // unit)
        if best >= _least(name):
            found.append(_as_text(lowered(best)))
    if found:
        return f"it fits with {', or with '.join(found)}"

    def all_lowered(step: int) -> Sizes:
        kv = {} if full.kv_cache_memory is None else {"kv_cache_memory": least_kv}
        return {name: max(_least(name), value * step // _STEPS) for name, value in _sizes(full).items()} | kv

    step = _largest(lambda step: fits(all_lowered(step)), _STEPS)
    return f"it fits with {_as_text(all_lowered(step))}" if step else _for_weights(memory, asked, resolve)


def _for_weights(memory: MemoryModel, asked: AskedSizes, resolve: Resolve) -> str:
    """Returns advice where the weights leave too little for the smallest engine."""
    build = memory.build

    def fits_in(weight_format: QuantizedFormat) -> bool:
        quantized = MemoryModel(replace(build, weight_format=weight_format), memory.device)
        return _resolves(resolve, quantized, asked)

    smaller = [f"quantize={each!r}" for each in build.target.quantized_formats if fits_in(each)]
    if smaller:
        return f"no sizes of the engine help, but it fits with {', or with '.join(smaller)}"
    smallest = resolve(memory.on(replace(memory.device, memory_bytes=_PLENTY)), replace(asked, **_SMALLEST))
    return f"no sizes of the engine help: it takes {shown_bytes(least_bytes(memory, smallest))} at least"


def least_bytes(memory: MemoryModel, config: EngineConfig) -> int:
    """Returns the least memory in which an engine of ``config`` fits. What it takes grows a little with the memory, of
    which compiled formats have a share.
    """
    least = 0
    while (taken := memory.on(replace(memory.device, memory_bytes=least)).ledger(config).total_bytes) > least:
        least = taken
    return least


def _sizes(full: AskedSizes) -> Sizes:
    """Returns the sizes that take less memory when they are lowered."""
    return {name: value for name in _SIZES if (value := getattr(full, name)) is not None}


def _least(name: str) -> int:
    return _SMALLEST.get(name) or 1


def _with_room(changes: Sizes, asked: AskedSizes) -> Sizes:
    """Returns the changes with ``max_num_seqs`` lowered to the token budget where it exceeds that."""
    budget, num_seqs = changes.get("token_budget"), asked.max_num_seqs
    return changes if budget is None or num_seqs is None or num_seqs <= budget else changes | {"max_num_seqs": budget}


def _resolves(resolve: Resolve, memory: MemoryModel, asked: AskedSizes) -> bool:
    try:
        resolve(memory, asked)
    except FastgenError:
        return False
    return True


def _as_text(changes: Sizes) -> str:
    *others, last = [f"{name}={value}" for name, value in changes.items()]
    return f"{', '.join(others)} and {last}" if others else last


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to ``most`` that fits, or 0. A number above one that does not fit must not fit
    either.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
