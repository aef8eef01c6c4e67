"""Capacity: the ledger of one device of several, blocks, and requests of one shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastgen.errors import InvalidArgumentError, OutOfMemoryError
from fastgen.lab.devices.datasheets import datasheet
from fastgen.lab.devices.roofline import model_build
from fastgen.lab.plan.capacity import Shape, ShardMemory, Sizes, capacity
from fastgen.options import LoadOptions
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.memory.ledger import MemoryModel
from tests.lab.plan.questions import fits, model

CHAT = Shape(4650, 350)


def test_the_exact_plan_of_the_post_has_the_same_concurrency() -> None:
    """Mistral-7B on an RTX 4090 with the post's blocks: 7.25 GiB are left where it has 7, and as many chats fit."""
    found = fits("mistral-7b-v0.2", "RTX-4090", CHAT, max_model_len=8192, block_size=16)
    assert found.bytes_per_token == 2**20 / 8
    assert found.block_bytes == 2 * 2**20
    assert 3584 < found.num_blocks < 3800
    assert (found.blocks_of_request, found.blocks_of_longest) == (313, 512)
    assert (found.concurrent, found.concurrent_reserved) == (11, 7)
    assert found.kv_tokens == found.num_blocks * 16


def test_falcon_over_four_gpus_of_24_gb() -> None:
    """AWS: about 20 of 24 GB, roughly 84 %, before a request. The ledger: 80 % weights, 86 % with all else."""
    found = fits("falcon-40b", "A10G", Shape(32, 128), size=4, kv_cache_memory="1GiB")
    sold = datasheet("A10G").memory_bytes
    assert found.weight_bytes / sold == pytest.approx(0.80, abs=0.01)
    assert found.idle_bytes / sold == pytest.approx(0.86, abs=0.02)
    assert 4 * found.weight_bytes == pytest.approx(2 * 41.3e9, rel=0.01)


def test_one_device_has_the_ledger_of_an_engine() -> None:
    """The plan sums what an engine on that device would."""
    sheet, described = datasheet("A100-80"), model("llama-2-13b")
    build = model_build(described.spec, sheet, described.dtype)
    memory = MemoryModel(build, sheet.device)
    config = resolve_engine_config(memory, LoadOptions("x", token_budget=512))
    found = fits("llama-2-13b", "A100-80", Shape(100, 100))
    assert (found.config, found.ledger) == (config, memory.ledger(config))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_devices_share_weights_and_cache(size: int) -> None:
    alone = fits("llama-2-13b", "A100-80", Shape(100, 100))
    shared = fits("llama-2-13b", "A100-80", Shape(100, 100), size=size)
    for row in ("matrices", "embedding and head"):
        assert shared.ledger.size_bytes(row) == pytest.approx(alone.ledger.size_bytes(row) / size, rel=0.01)
    assert shared.block_bytes == alone.block_bytes / size
    assert shared.ledger.device_bytes == alone.ledger.device_bytes
    assert shared.num_blocks > size * alone.num_blocks


def test_kv_heads_that_are_too_few_are_held_twice() -> None:
    """Llama-2-70B has 8 KV heads: 16 devices hold as much of the cache each as 8 do."""
    eight, sixteen = (
        ShardMemory(model("llama-2-70b"), datasheet("A100-80"), size=size, weight_format=None, kv_dtype=None)
        for size in (8, 16)
    )
    assert eight.block_bytes(16) == sixteen.block_bytes(16)


def test_the_type_of_the_cache_and_the_format_of_weights_are_variables() -> None:
    plain = fits("llama-2-13b", "A100-80", Shape(100, 100))
    narrow = fits("llama-2-13b", "A100-80", Shape(100, 100), kv_dtype="fp8")
    assert narrow.block_bytes == plain.block_bytes / 2
    assert narrow.num_blocks == pytest.approx(2 * plain.num_blocks, rel=0.01)
    packed = fits("llama-2-13b", "A100-80", Shape(100, 100), weight_format="int4_weight_only")
    assert packed.ledger.size_bytes("matrices") < 0.3 * plain.ledger.size_bytes("matrices")
    assert packed.num_blocks > plain.num_blocks


def test_a_window_bounds_the_blocks_of_a_request() -> None:
    """Mistral-7B v0.1 sees 4096 tokens, so a chat holds those and the chunk behind them, and not all 5000."""
    unbounded = fits("mistral-7b-v0.2", "RTX-4090", CHAT, max_model_len=8192)
    windowed = fits("mistral-7b-v0.1", "RTX-4090", CHAT, max_model_len=8192)
    assert windowed.blocks_of_request < unbounded.blocks_of_request
    assert windowed.concurrent > unbounded.concurrent


def test_max_num_seqs_bounds_the_requests() -> None:
    assert fits("llama-2-13b", "A100-80", Shape(10, 10), max_num_seqs=7).concurrent == 7
    # A step has a token of each sequence, so a small budget bounds them too.
    assert fits("llama-2-13b", "A100-80", Shape(10, 10), max_num_seqs=100, token_budget=64).concurrent == 64


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"4000 \+ 200 = 4200 tokens is longer than max_model_len=4096"):
        fits("llama-2-13b", "A100-80", Shape(4000, 200))


def test_a_cache_that_holds_no_request_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match=r"has 1 blocks, and a request of 160 tokens takes 3: all else takes"):
        fits("falcon-40b", "A10G", Shape(32, 128), size=4)


def test_weights_that_do_not_fit_are_refused_with_the_sum() -> None:
    with pytest.raises(OutOfMemoryError, match=r"matrices of fp16 127\.50 GiB .* but cuda has 79\.15 GiB; .*quantize="):
        fits("llama-2-70b", "A100-80", Shape(10, 10))


def test_the_smallest_block_is_one_token() -> None:
    memory = ShardMemory(model("llama-2-13b"), datasheet("H200"), size=1, weight_format=None, kv_dtype=None)
    found = capacity(memory, Shape(100, 28), replace(Sizes(), block_size=1), 512)
    assert found.blocks_of_request == 128
