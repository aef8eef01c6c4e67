"""Tensor parallelism: what ranks hold of a model, and that together they compute what the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from fastgen.compile.weights.packed import MAX_IN_FEATURES
from fastgen.errors import InvalidArgumentError
from fastgen.models.registry.registry import list_recipes
from fastgen.models.shard.obstacles import obstacle, parallel_sizes
from fastgen.models.shard.plan import plan_shards
from fastgen.models.shard.shard import shard, shards
from fastgen.models.spec import AttentionSpec, MlpSpec, ModelSpec, Rank, TensorSpec
from tests.models.shards import cpp_backends, small_spec, summed_log_probs, whole_log_probs, write_checkpoint

TOLERANCE = 1e-4
RECIPES = sorted(listed.recipe.name for listed in list_recipes())
# ALiBi and a stacked projection; parallel branches; norms over all heads; latent attention with experts; a projected
# embedding with positions and a bias everywhere.
FEW = ("bloom", "falcon", "olmo2", "deepseek_v3", "opt")
COUNTS = (2, 3, 4, 8)


def spec_for(recipe: str, count: int) -> ModelSpec:
    """Returns a model that ``count`` ranks can share: with 8 of them two hold the same KV head."""
    return small_spec(recipe, num_kv_heads=6 if count == 3 else 4)


def check_sum(recipe: str, count: int, directory: Path) -> None:
    spec = spec_for(recipe, count)
    checkpoint = write_checkpoint(spec, directory)
    expected = whole_log_probs(spec, checkpoint)
    found, num_sums = summed_log_probs(spec, checkpoint, count)
    assert (found - expected).abs().max() <= TOLERANCE
    assert expected.std(-1).mean() > 500 * TOLERANCE, "a flat distribution shows no differences"
    over_all = sum(isinstance(each, AttentionSpec) and each.q_norm is not None for each in spec.attentions())
    num_branches = sum(len(layer.branches) for layer in spec.layers)
    assert num_sums == 1 + num_branches + (over_all if recipe == "olmo2" else 0)


@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("count", [3, 8])
def test_ranks_sum_to_the_whole_model(recipe: str, count: int, tmp_path: Path) -> None:
    check_sum(recipe, count, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_of_every_recipe_sum_to_the_whole_model(recipe: str, count: int, tmp_path: Path) -> None:
    check_sum(recipe, count, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_hold_everything_once(recipe: str) -> None:
    """Each number of a split tensor is held by one rank, or by as many as share its KV head; all else by all ranks."""
    for count in COUNTS:
        spec = spec_for(recipe, count)
        held: dict[str, list[TensorSpec]] = {}
        for own in shards(spec, count):
            for tensor in own.tensors():
                held.setdefault(f"{tensor.names[0]} {tensor.layout and tensor.layout.part}", []).append(tensor)
        for tensor in spec.tensors():
            pieces = held[f"{tensor.names[0]} {tensor.layout and tensor.layout.part}"]
            if pieces[0].piece is None:
                assert len(pieces) in (1, count)
                continue
            holders = torch.zeros(tensor.shape, dtype=torch.int32)
            for each in pieces:
                assert each.piece is not None
                holders[tuple(slice(*ends) for ends in each.piece)] += 1
                assert each.shape == tuple(end - first for first, end in each.piece)
            assert holders.min() == holders.max()
            assert holders.max() in (1, *(count // kv for kv in (1, 4) if count % kv == 0))


def test_biases_behind_a_sum_are_added_once() -> None:
    first, second = shards(small_spec("opt", num_kv_heads=4), 2)
    for own, has in ((first, True), (second, False)):
        (attention, *_) = own.attentions()
        assert isinstance(attention, AttentionSpec)
        assert (attention.output.bias is not None) == has
        assert attention.q.bias is not None
        assert attention.q.bias.shape == (attention.q.out_features,)


def test_slopes_follow_the_heads() -> None:
    spec = small_spec("bloom", num_kv_heads=4)

    def slopes(each: ModelSpec) -> tuple[float, ...]:
        (attention, *_) = each.attentions()
        assert isinstance(attention, AttentionSpec)
        assert attention.alibi is not None
        return attention.alibi.slopes

    assert sum((slopes(own) for own in shards(spec, 4)), ()) == slopes(spec)


def test_one_rank_is_the_model_itself() -> None:
    spec = small_spec("llama", num_kv_heads=4)
    assert shard(spec, Rank()) is spec


def test_numbers_of_ranks_follow_from_the_spec() -> None:
    spec = small_spec("mistral", num_kv_heads=4)
    assert parallel_sizes(spec, 24) == (1, 2, 4, 8, 12, 24)
    with pytest.raises(
        InvalidArgumentError,
        match="=5: 24 heads cannot be split evenly; MistralForCausalLM can be split over 1, 2, 4, 8, 12, 24 devices",
    ):
        shard(spec, Rank(0, 5))
    with pytest.raises(InvalidArgumentError, match="tensor_parallel=3: 4 KV heads cannot be split evenly"):
        shard(spec, Rank(0, 3))


def test_groups_of_a_format_never_straddle_ranks() -> None:
    spec = small_spec("llama", num_kv_heads=4, intermediate_size=256)
    assert parallel_sizes(spec, 8, "int4") == (1, 2)  # 192 features of 24 heads are 6 groups
    with pytest.raises(InvalidArgumentError, match="a share of 192 inputs is no multiple of the 32 that share a scale"):
        shard(spec, Rank(0, 4), "int4")
    assert parallel_sizes(spec, 8, "int8") == (1, 2, 4, 8)


def test_groups_of_4_bits_are_those_of_the_whole_model(tmp_path: Path) -> None:
    spec = small_spec("llama", num_kv_heads=4, intermediate_size=256)
    checkpoint = write_checkpoint(spec, tmp_path)
    expected = whole_log_probs(spec, checkpoint, weight_format="int4_weight_only")
    found, _ = summed_log_probs(spec, checkpoint, 2, weight_format="int4_weight_only")
    assert (found - expected).abs().max() <= TOLERANCE


def check_weight_only(
    recipe: str, count: int, weight_format: Literal["int8_weight_only", "fp8_weight_only"], directory: Path
) -> None:
    spec = spec_for(recipe, count)
    checkpoint = write_checkpoint(spec, directory)
    expected = whole_log_probs(spec, checkpoint, weight_format=weight_format)
    found, _ = summed_log_probs(spec, checkpoint, count, weight_format=weight_format)
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("weight_format", ["int8_weight_only", "fp8_weight_only"])
def test_scales_of_8_bits_are_those_of_whole_rows(
    recipe: str, weight_format: Literal["int8_weight_only", "fp8_weight_only"], tmp_path: Path
) -> None:
    check_weight_only(recipe, 4, weight_format, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("weight_format", ["int8_weight_only", "fp8_weight_only"])
def test_scales_of_8_bits_are_those_of_whole_rows_in_every_recipe(
    recipe: str, count: int, weight_format: Literal["int8_weight_only", "fp8_weight_only"], tmp_path: Path
) -> None:
    check_weight_only(recipe, count, weight_format, tmp_path)


def check_integer_products(recipe: str, count: int, directory: Path) -> None:
    """Rows and weights get the codes of the whole model, and integer products are summed exactly. So bits differ only
    where a norm is over the heads of all ranks, and then by one order of summation."""
    spec, backends = spec_for(recipe, count), cpp_backends(count)
    checkpoint = write_checkpoint(spec, directory)
    expected = whole_log_probs(spec, checkpoint, backends, weight_format="int8")
    found, _ = summed_log_probs(spec, checkpoint, count, backends, weight_format="int8")
    if recipe == "olmo2":
        assert (found - expected).abs().max() <= TOLERANCE
    else:
        assert torch.equal(found, expected)


@pytest.mark.slow  # tests/compile/test_ranks.py has the products of one layer, and of experts
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("count", COUNTS)
def test_int8_ranks_of_every_recipe_have_the_bits_of_one(recipe: str, count: int, tmp_path: Path) -> None:
    check_integer_products(recipe, count, tmp_path)


def test_ranks_sum_integer_products_of_8_bits_once_a_map() -> None:
    """Parallel parts are summed separately, and all experts of a layer together."""
    for recipe, a_layer in (("llama", 2), ("falcon", 2), ("mixtral", 2), ("deepseek_v3", 3)):
        spec = small_spec(recipe, num_kv_heads=4)
        plan = plan_shards(spec, 2, 4, "int8")
        num_dense = sum(isinstance(part, MlpSpec) for part in spec.parts()) if recipe == "deepseek_v3" else 0
        assert plan.num_sums == 1 + a_layer * len(spec.layers) - num_dense


def test_products_of_8_bits_have_room_in_32() -> None:
    spec = small_spec("llama", num_kv_heads=4, intermediate_size=2 * MAX_IN_FEATURES)
    assert obstacle(spec, 2) is None
    assert "products of 8 bits has no room in the 32" in (obstacle(spec, 2, "int8") or "")
