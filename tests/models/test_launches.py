"""The launches of a layer on a Hopper GPU, recorded on the ``meta`` device at published sizes.

Launches of attention itself are those of its op, and not counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch

from fastgen.compile.backends.choose import backend_for
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.capture.recording import recording
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import Stream
from fastgen.models.builder import build, kv_groups, kv_shapes
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.shard.shard import shards
from fastgen.models.spec import ModelSpec
from tests.models import test_recipe_published, test_recipe_published_families

META = torch.device("meta")
HOPPER = TargetFacts("triton", "sm_90", num_sms=132)
PUBLISHED = {**test_recipe_published.PUBLISHED, **test_recipe_published_families.PUBLISHED}
OF_ATTENTION = ("attention", "attention_combine", "bmm")
# Few-row kernels: the projections, and for split features the sum of the parts.
PROJECT, REDUCE, NORM = "few_row_linear", "few_row_reduce", "few_row_norm"


@dataclass
class Launches:
    """Notes names in place of launching."""

    names: list[str] = field(default_factory=list)

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        if 0 not in grid and kernel.spec.op not in OF_ATTENTION:
            finish = kernel.spec.parameters.get("finish")
            self.names.append(f"{kernel.spec.op}, {finish}" if finish else kernel.spec.op)

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if function.__name__ not in OF_ATTENTION:
            self.names.append(function.__name__)


def published(name: str) -> ModelSpec:
    config, _ = PUBLISHED[name]
    spec = resolve(find_recipe(config), config)
    return replace(spec, layers=spec.layers[:3])


def batch(num_tokens: int, num_groups: int) -> RaggedBatch:
    """Decodes of sequences of one block."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return RaggedBatch(
        **{name: numbers(num_tokens) for name in ("input_ids", "token_source", "positions", "logits_indices")},
        cu_seqlens_q=numbers(num_tokens + 1),
        seq_lens=numbers(num_tokens),
        block_tables=numbers(num_groups, num_tokens, 1),
        slot_mapping=numbers(num_groups, num_tokens, dtype=torch.int64),
        sampled_ids=numbers(num_tokens),
    )


def launches_of_a_layer(
    spec: ModelSpec, num_tokens: int, *, weight_format: WeightOnlyFormat | None = None
) -> list[str]:
    """Returns what the second layer launches in a step, attention aside: from its first norm to the next layer's."""
    backend, sizes = backend_for(HOPPER, max_rows=num_tokens, max_num_seqs=num_tokens), {"block_size": 64}
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": META, "backend": backend, **sizes}
    model, _ = build(spec, max_model_len=64, weight_format=weight_format, **options)
    kv_cache = PagedKVCache(kv_groups(spec), kv_shapes(spec), num_blocks=1, **options)
    step, seen = batch(num_tokens, len(kv_shapes(spec))), Launches()
    with torch.inference_mode(), recording(seen):
        stream = Stream(model.embedding(step))
        for layer in list(model.layers)[:2]:
            seen.names.clear()
            layer(stream, step, kv_cache)
    return seen.names


# The kernels of a layer whose features are split, or whose are not, with the op that each computes too.
SPLIT_LINEAR_AND_NORM = [PROJECT, NORM]
WHOLE_QKV, SPLIT_QKV = [f"{PROJECT}, rotate"], [PROJECT, f"{REDUCE}, rotate"]
WHOLE_INWARD, SPLIT_INWARD = [f"{PROJECT}, activate"], [PROJECT, f"{REDUCE}, activate"]
SPLIT_LINEAR = [PROJECT, REDUCE]
OLMO_2 = ["add", PROJECT, "qkv", *SPLIT_LINEAR, "rms_norm", "add", *WHOLE_INWARD, *SPLIT_LINEAR, "rms_norm"]


# Layers of more than 16 rows have no tiles of which three fit a multiprocessor, so more of them are split.
@pytest.mark.parametrize(
    ("name", "num_tokens", "qkv", "inward"),
    [
        ("Llama-2-7b", 1, WHOLE_QKV, WHOLE_INWARD),
        ("Llama-2-7b", 32, WHOLE_QKV, SPLIT_INWARD),
        *(("Llama-2-13b", num_tokens, WHOLE_QKV, WHOLE_INWARD) for num_tokens in (1, 32)),
        *(("Llama-3.1-8B", num_tokens, SPLIT_QKV, WHOLE_INWARD) for num_tokens in (1, 32)),
        ("Llama-3.1-70B", 1, SPLIT_QKV, WHOLE_INWARD),
        ("Llama-3.1-70B", 32, SPLIT_QKV, SPLIT_INWARD),
        ("Qwen2-7B", 1, SPLIT_QKV, WHOLE_INWARD),  # with biases
        ("Qwen2-7B", 32, SPLIT_QKV, SPLIT_INWARD),
        *(("gemma-7b", num_tokens, WHOLE_QKV, WHOLE_INWARD) for num_tokens in (1, 32)),
        *(("opt-6.7b", num_tokens, WHOLE_QKV, WHOLE_INWARD) for num_tokens in (1, 32)),  # without a gate or rotation
        *(("falcon-rw-7b", num_tokens, WHOLE_QKV, WHOLE_INWARD) for num_tokens in (1, 32)),
        *(("gemma-2-9b", num_tokens, SPLIT_QKV, WHOLE_INWARD) for num_tokens in (1, 32)),  # what branches add is normed
    ],
)
def test_norms_activations_and_rotations_have_no_launches_of_their_own(
    name: str, num_tokens: int, qkv: list[str], inward: list[str]
) -> None:
    expected = [*SPLIT_LINEAR_AND_NORM, *qkv, *SPLIT_LINEAR_AND_NORM, *inward]
    assert launches_of_a_layer(published(name), num_tokens) == expected
    assert 6 <= len(expected) <= 8


def test_a_layer_that_norms_the_sum_reads_its_own_outputs() -> None:
    found = launches_of_a_layer(published("opt-350m"), 1)
    assert found == [*SPLIT_QKV, *SPLIT_LINEAR_AND_NORM, *SPLIT_INWARD, *SPLIT_LINEAR_AND_NORM]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-8B", [PROJECT, NORM, *SPLIT_LINEAR, "qkv", PROJECT, NORM, *WHOLE_INWARD]),  # norms of heads
        # a norm of what a branch adds, and none of what the next one reads
        ("OLMo-2-1124-7B", OLMO_2),
        # two branches that are added to each other
        ("falcon-7b", ["layer_norm", *SPLIT_QKV, *SPLIT_LINEAR, *WHOLE_INWARD, *SPLIT_LINEAR, "add"]),
        ("gpt-j-6b", ["layer_norm", *WHOLE_QKV, *SPLIT_LINEAR, *WHOLE_INWARD, *SPLIT_LINEAR, "add"]),
    ],
)
def test_what_stands_between_is_computed_by_itself(name: str, expected: list[str]) -> None:
    assert launches_of_a_layer(published(name), 1) == expected


def test_experts_read_a_norm_that_the_attention_before_computed() -> None:
    found = launches_of_a_layer(published("Mixtral-8x7B-v0.1"), 1)
    routed = ["moe_route", "moe_sort", "grouped_linear", "activation", "grouped_linear", "moe_combine"]
    assert found == ["rms_norm", *SPLIT_QKV, *SPLIT_LINEAR_AND_NORM, *SPLIT_LINEAR, *routed]


def test_sums_over_ranks_stand_between_a_linear_layer_and_the_norm() -> None:
    found = launches_of_a_layer(shards(published("Llama-2-7b"), 2)[0], 1)
    assert found == [
        "rms_norm",
        *SPLIT_QKV,
        *SPLIT_LINEAR,
        "all_gather",
        "sum_parts",
        "rms_norm",
        *SPLIT_INWARD,
        *SPLIT_LINEAR,
        "all_gather",
        "sum_parts",
    ]


@pytest.mark.parametrize("weight_format", get_args(WeightOnlyFormat))
def test_quantized_layers_launch_no_more(weight_format: WeightOnlyFormat) -> None:
    assert len(launches_of_a_layer(published("Llama-2-7b"), 1, weight_format=weight_format)) <= 8


def test_many_rows_are_left_to_the_library() -> None:
    """Above 64 rows each op is computed by itself."""
    found = launches_of_a_layer(published("Llama-2-7b"), 65)
    assert found == ["mm", "rms_norm", "mm", "qkv", "mm", "rms_norm", "mm", "activation"]
