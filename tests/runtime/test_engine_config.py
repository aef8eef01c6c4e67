"""The engine's sizes, worked out by hand for a few devices and models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MistralConfig

from fastgen.arguments import parse_bytes
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.host.device import Device
from fastgen.errors import InvalidArgumentError, OutOfMemoryError
from fastgen.models.measure import ModelBuild
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, ModelSpec
from fastgen.options import LoadOptions
from fastgen.runtime.config import parse_dtype, resolve_engine_config
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.memory.sizes import EngineConfig

GiB = 2**30
MAX_POSITIONS = 1000
TOKEN_BYTES = 3 * 2 * 2 * 16  # layers, keys and values, KV heads, head size; times the bytes of a number


def make_spec(max_positions: int | None = MAX_POSITIONS, windows: list[int | None] | None = None) -> ModelSpec:
    config = MistralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        sliding_window=None,
    ).to_dict() | {"architectures": ["MistralForCausalLM"]}
    spec = replace(resolve(find_recipe(config), config), max_positions=max_positions)
    return spec if windows is None else with_windows(spec, windows)


def with_windows(spec: ModelSpec, windows: list[int | None]) -> ModelSpec:
    layers = []
    for layer, window in zip(spec.layers, windows, strict=True):
        branches = tuple(
            replace(
                branch,
                parts=tuple(
                    replace(each, part=replace(each.part, sliding_window=window))
                    if isinstance(each.part, AttentionSpec)
                    else each
                    for each in branch.parts
                ),
            )
            for branch in layer.branches
        )
        layers.append(replace(layer, branches=branches))
    return replace(spec, layers=tuple(layers))


def memory_of(
    spec: ModelSpec | None = None, *, kind: Any = "cpu", memory: int = 64 * GiB, dtype: torch.dtype = torch.float32
) -> MemoryModel:
    device = Device(kind=kind, name="test", memory_bytes=memory)
    target = TargetFacts("cpp", "avx2", 2) if kind == "cpu" else TargetFacts("triton", "sm_90", num_sms=132)
    return MemoryModel(ModelBuild(spec or make_spec(), dtype, target), device)


def config_of(
    spec: ModelSpec | None = None, *, kind: Any = "cpu", memory: int = 64 * GiB, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> EngineConfig:  # fmt: skip
    return resolve_engine_config(
        memory_of(spec, kind=kind, memory=memory, dtype=dtype), LoadOptions("a model", **options)
    )


# Sizes an engine for a GPU in a process of its own, and names what it imported that takes seconds.
SIZE_FOR_A_GPU = """
import sys, torch
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.host.device import Device
from fastgen.models.measure import ModelBuild
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.options import LoadOptions
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.memory.ledger import MemoryModel

config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60, "max_position_embeddings": 128,
          "rms_norm_eps": 1e-5}
build = ModelBuild(resolve(find_recipe(config), config), torch.bfloat16, TargetFacts("triton", "sm_90", num_sms=132))
memory = MemoryModel(build, Device("cuda", "a GPU", 64 << 30))
found = resolve_engine_config(memory, LoadOptions("a model"))
assert memory.ledger(found).device_bytes > 0
print(*sorted({"sympy", "transformers"} & sys.modules.keys()))
"""


def test_sizes_for_a_gpu_are_found_without_what_takes_seconds_to_import() -> None:
    done = subprocess.run([sys.executable, "-c", SIZE_FOR_A_GPU], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_defaults() -> None:
    most = 1 + 64 * -(-MAX_POSITIONS // 16)
    assert config_of() == EngineConfig(
        token_budget=512, max_num_seqs=64, block_size=16, num_blocks=most, max_model_len=MAX_POSITIONS, num_kv_groups=1
    )
    on_gpu = config_of(kind="cuda")
    most = 1 + 256 * -(-MAX_POSITIONS // 64)
    assert (on_gpu.token_budget, on_gpu.max_num_seqs, on_gpu.block_size, on_gpu.num_blocks) == (2048, 256, 64, most)


def test_what_is_asked_for_is_what_is_got() -> None:
    config = config_of(token_budget=100, max_num_seqs=100, block_size=7, max_model_len=22, kv_cache_memory=10**6)
    num_blocks = 10**6 // (7 * TOKEN_BYTES * 4)
    assert config == EngineConfig(100, 100, 7, num_blocks, 22, 1)
    assert [config_of(max_model_len=length, block_size=7).max_blocks for length in (2, 7, 8, 21, 22)] == [1, 1, 2, 3, 4]
    assert config_of(max_model_len=22, block_size=7).num_blocks == 1 + 64 * 4
    # a budget below the usual number of sequences lowers it
    assert config_of(token_budget=8).max_num_seqs == 8
    assert config_of(max_model_len=MAX_POSITIONS).max_model_len == MAX_POSITIONS


def test_rows_for_drafts() -> None:
    config = config_of(max_num_seqs=10)
    assert (config.num_draft_tokens, config.max_rows) == (0, 10)
    config = config_of(max_num_seqs=10, speculative="ngram")
    assert (config.num_draft_tokens, config.max_rows) == (4, 50)
    config = config_of(max_num_seqs=10, speculative="ngram", num_draft_tokens=7)
    assert (config.num_draft_tokens, config.max_rows) == (7, 80)
    config = config_of(max_num_seqs=10, speculative="ngram", num_draft_tokens=7, token_budget=12)
    assert config.max_rows == 12, "no more than a step has tokens"


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_memory_holds_so_many_blocks(dtype: torch.dtype, num_bytes: int) -> None:
    block_bytes = 16 * TOKEN_BYTES * num_bytes
    for memory, num_blocks in ((2 * block_bytes, 2), (10 * block_bytes - 1, 9), (10 * block_bytes, 10)):
        assert config_of(dtype=dtype, kv_cache_memory=memory).num_blocks == num_blocks
    with pytest.raises(
        OutOfMemoryError, match=f"2 blocks are the least; it fits with kv_cache_memory={2 * block_bytes}"
    ):
        config_of(dtype=dtype, kv_cache_memory=2 * block_bytes - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_positions", [MAX_POSITIONS, None])
def test_by_default_the_cache_gets_its_share_of_what_all_else_leaves(
    dtype: torch.dtype, max_positions: int | None
) -> None:
    spec, few = make_spec(max_positions), {"max_num_seqs": 60}

    def with_one_more(config: EngineConfig) -> EngineConfig:
        length = config.max_model_len + (config.block_size if max_positions is None else 0)
        return replace(config, num_blocks=config.num_blocks + 1, max_model_len=length)

    for device_bytes in (48 << 20, 60 << 20):
        memory = memory_of(spec, memory=device_bytes, dtype=dtype)

        def takes_its_share(config: EngineConfig, memory: MemoryModel = memory) -> bool:
            kv_bytes = config.num_blocks * memory.block_bytes(16)
            rest = memory.ledger(config).total_bytes - kv_bytes
            return kv_bytes <= (memory.device.memory_bytes - rest) / 2

        config = resolve_engine_config(memory, LoadOptions("a model", **few))
        assert takes_its_share(config)
        assert not takes_its_share(with_one_more(config))
    for device_bytes in (60 << 20, 80 << 20):
        memory = memory_of(spec, memory=device_bytes, dtype=dtype, kind="cuda")
        config = resolve_engine_config(memory, LoadOptions("a model", max_num_seqs=400, token_budget=512))
        assert memory.ledger(config).total_bytes <= 0.9 * device_bytes
        assert memory.ledger(with_one_more(config)).total_bytes > 0.9 * device_bytes


def test_a_cache_that_reserves_whole_contexts_holds_at_least_one() -> None:
    block_bytes = 16 * TOKEN_BYTES * 4
    options: dict[str, Any] = {"kv_reservation": "context", "max_model_len": 32}
    assert config_of(kv_cache_memory=3 * block_bytes, **options).num_blocks == 3
    with pytest.raises(
        OutOfMemoryError, match=r"reserves 2 blocks for each sequence of up to 32 tokens, but .* has 1;"
    ):
        config_of(kv_cache_memory=2 * block_bytes, **options)


def test_a_window_bounds_what_a_sequence_can_use() -> None:
    spec = make_spec(windows=[None, 100, None])
    whole, of_window = -(-MAX_POSITIONS // 16), -(-99 // 16) + 1 + -(-31 // 16)
    assert config_of(spec, max_num_seqs=5, token_budget=32).num_blocks == 1 + 5 * (whole + of_window)
    # a chunk and a window longer than any sequence bound nothing
    assert config_of(spec, max_num_seqs=5, token_budget=950).num_blocks == 1 + 5 * (whole + whole)


def test_layers_of_different_windows_share_blocks_of_the_deepest_group() -> None:
    spec = make_spec(windows=[None, 8, None])
    block_bytes = 16 * TOKEN_BYTES * 4 * 2 // 3  # two layers in the deeper of the two groups
    config = config_of(spec, kv_cache_memory=3 * block_bytes)
    assert (config.num_kv_groups, config.num_blocks) == (2, 3)
    with pytest.raises(OutOfMemoryError, match="3 blocks are the least"):
        config_of(spec, kv_cache_memory=3 * block_bytes - 1)


def test_a_model_without_a_limit_takes_what_the_cache_holds() -> None:
    block_bytes = 16 * TOKEN_BYTES * 4
    config = config_of(make_spec(None), kv_cache_memory=11 * block_bytes)
    assert config.max_model_len == 10 * 16 + 1  # the last token of an answer needs no place
    assert config.max_blocks >= 10
    two_groups = make_spec(None, windows=[None, 8, None])
    config = config_of(two_groups, kv_cache_memory=12 * block_bytes * 2 // 3)
    assert (config.num_blocks, config.max_model_len) == (12, 5 * 16 + 1)
    assert config_of(make_spec(None), max_model_len=10**5).max_model_len == 10**5


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(1, 1), (10**12, 10**12), ("7", 7), ("7B", 7), ("1KB", 1000), ("1KiB", 1024), ("2 MB", 2 * 10**6),
     ("1.5MiB", 3 * 2**19), (" 4GiB ", 4 * GiB), ("4GB", 4 * 10**9), ("1TiB", 2**40), ("0.25TB", 25 * 10**10)],
)  # fmt: skip
def test_sizes_in_bytes(size: int | str, num_bytes: int) -> None:
    assert parse_bytes(size, "kv_cache_memory") == num_bytes


@pytest.mark.parametrize(
    "size", [0, -1, True, 1.5, "", "GiB", "0", "0.0GiB", "-1GiB", "4gib", "4 G", "4iB", "1e9", "4GiB4", "1 000", [4]]
)
def test_what_is_no_size(size: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_memory=.*expected a positive number of bytes or a size"):
        parse_bytes(size, "kv_cache_memory")  # type: ignore[arg-type]


def test_dtypes() -> None:
    assert [parse_dtype(name) for name in ("float32", "float16", "bfloat16")] == [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]
    with pytest.raises(InvalidArgumentError, match="expected 'auto' or one of 'float32', 'float16', 'bfloat16'"):
        parse_dtype("int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget=0: expected an integer of at least 1"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1"),
        ({"block_size": 1.5}, "block_size=1.5"),
        ({"max_model_len": True}, "max_model_len=True"),
        ({"max_num_seqs": 513}, "max_num_seqs=513 is above token_budget=512"),
        ({"max_model_len": MAX_POSITIONS + 1}, "max_model_len=1001 is above the 1000 positions"),
        ({"speculative": "eagle"}, "speculative='eagle': expected 'ngram', or None"),
        ({"speculative": True}, "speculative=True: expected 'ngram', or None"),
        ({"num_draft_tokens": 4}, "num_draft_tokens=4 needs speculative='ngram'"),
        ({"speculative": "ngram", "num_draft_tokens": 0}, "num_draft_tokens=0: expected an integer of at least 1"),
        (
            {"speculative": "ngram", "num_draft_tokens": 8, "token_budget": 8},
            "num_draft_tokens=8 drafts and the token before them take 9 places of a step, and token_budget=8 has fewer",
        ),
        ({"speculative": "ngram", "token_budget": 4}, "num_draft_tokens=4 drafts .* token_budget=4 has fewer"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        config_of(**options)
