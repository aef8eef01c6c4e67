"""Tensor parallelism: which sizes a model can be split into, and what one device holds."""

from __future__ import annotations

import pytest
import torch

from fastgen.compile.backends.target import TargetFacts
from fastgen.errors import InvalidArgumentError
from fastgen.lab.devices.shards import num_all_reduces, shard
from fastgen.models.measure import MeasuredModel, ModelBuild
from fastgen.models.shard.obstacles import parallel_sizes
from fastgen.models.spec import ModelSpec
from fastgen.models.spec.tensors import linears_of
from tests.fast import cases
from tests.lab.devices.specs import PUBLISHED, published_spec

# One of each family, with every kind of part: latent attention, experts, ALiBi, norms of queries, parallel branches.
FAMILIES = (
    *("Llama-2-70b", "Mistral-7B-v0.1", "Mixtral-8x7B-v0.1", "falcon-40b", "falcon-7b", "bloom-560m", "opt-13b"),
    *("Qwen3-8B", "Qwen3-30B-A3B", "OLMo-2-1124-7B", "DeepSeek-V2-Lite", "gpt2-xl", "gpt-j-6b", "c4ai-command-r-plus"),
)


def matrix_elements(spec: ModelSpec) -> int:
    return sum(linear.in_features * linear.out_features for linear in linears_of(spec.layers))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama-2-70b", (1, 2, 4, 8)),
        ("Llama-2-13b", (1, 2, 4, 8)),  # 40 heads, and 13,824 features, which 5 does not divide
        ("opt-13b", (1, 2, 4, 5, 8, 10)),
        ("falcon-7b", (1,)),
        ("Qwen2-0.5B", (1, 2)),
        ("gpt2-xl", (1, 5)),
    ],
)
def test_sizes_divide_the_heads(name: str, sizes: tuple[int, ...]) -> None:
    assert parallel_sizes(published_spec(name), 10) == sizes


def test_a_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match="tensor_parallel=3: 64 heads cannot be split evenly; LlamaForCausalLM can be split over 1, 2, 4, 8, 16,",
    ):
        shard(published_spec("Llama-2-70b"), 3)
    with pytest.raises(InvalidArgumentError, match="tensor_parallel=0: it must be at least 1"):
        shard(published_spec("Llama-2-70b"), 0)


# The other mixture is smaller.
QUICK = {*FAMILIES} - {"Qwen3-30B-A3B"}


@pytest.mark.parametrize("name", cases(FAMILIES, fast=QUICK))
def test_shards_together_are_the_model(name: str) -> None:
    """Nothing is lost: what the devices hold together is the model, and more only where something is held twice."""
    spec = published_spec(name)
    for size in parallel_sizes(spec, 8):
        share = shard(spec, size)
        together = size * matrix_elements(share)
        assert together >= matrix_elements(spec)
        if all(part.num_kv_heads % size == 0 for part in spec.attentions() if hasattr(part, "num_kv_heads")):
            held_twice = sum(
                (size - 1) * linear.in_features * linear.out_features
                for part in spec.parts()
                for each in ("router", "shared_gate", "q_down", "kv_down")
                for linear in linears_of(getattr(part, each, None))
            )
            assert together == matrix_elements(spec) + held_twice


@pytest.mark.parametrize("name", FAMILIES)
def test_a_share_can_be_measured(name: str) -> None:
    spec = published_spec(name)
    size = parallel_sizes(spec, 8)[-1]
    target = TargetFacts("triton", "sm_80", num_sms=108)
    whole, share = (
        MeasuredModel(ModelBuild(each, torch.bfloat16, target)).weights for each in (spec, shard(spec, size))
    )
    assert whole.matrices / size <= share.matrices <= whole.matrices
    assert share.tables == whole.tables


def test_few_kv_heads_are_held_by_several_devices() -> None:
    share = shard(published_spec("Llama-2-70b"), 32)
    (attention, *_) = share.attentions()
    assert (attention.num_heads, attention.num_kv_heads) == (2, 1)
    assert attention.k.out_features == attention.head_dim


def test_each_branch_ends_in_one_sum() -> None:
    assert num_all_reduces(published_spec("Llama-2-70b")) == 1 + 2 * 80
    assert num_all_reduces(published_spec("falcon-40b")) == 1 + 60


def test_one_device_holds_the_model_itself() -> None:
    spec = published_spec("falcon-7b")
    assert shard(spec, 1) is spec
    assert len(PUBLISHED) > 50
