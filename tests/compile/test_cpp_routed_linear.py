"""Experts' linear layers in C++ against their torch reference: for any routing, the same bits in any batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.ops.experts.cpp import GroupedLinearKernel, SortedChoices
from fastgen.compile.ops.experts.reference import sort_by_expert
from fastgen.compile.ops.linear.cpp import linear_spec
from fastgen.compile.weights.packed import PackedWeight, WeightFormat
from tests.compile.arches import loader
from tests.compile.linear_cases import (
    ALL,
    HERE,
    MAX_IN,
    MAX_ROWS,
    ROUTED_ONCE,
    Layer,
    draw,
    kernels,
    sanitize,
)


@pytest.fixture
def make(request: pytest.FixtureRequest, pool: ThreadPool) -> Experts:
    pool.resize(2)
    return Experts(*request.param)


@dataclass(frozen=True)
class Weights:
    """``drawn`` are each expert's weight and bias."""

    packed: PackedWeight
    drawn: list[tuple[Tensor, Tensor]]


class Experts:
    """Kernels of one format for one instruction set, and a plain layer's."""

    def __init__(self, arch: str, weight_format: WeightFormat):
        self.one = Layer(arch, weight_format)
        spec = linear_spec(weight_format, arch, routed=True)
        self.kernel = GroupedLinearKernel(loader(arch).load(spec), 4 * MAX_ROWS, MAX_IN)

    def weights(self, seed: int, num_experts: int, out_features: int, in_features: int) -> Weights:
        drawn = [draw(1000 * seed + expert, 1, out_features, in_features)[1:] for expert in range(num_experts)]
        packed = self.kernel.pack(out_features, in_features, num_groups=num_experts)
        for expert, (weight, bias) in enumerate(drawn):
            packed.group(expert).write(0, weight)
            packed.group(expert).bias[:out_features] = bias
        return Weights(packed, drawn)


def sort(experts: Tensor, num_experts: int) -> SortedChoices:
    order, counts = sort_by_expert(experts, num_experts)
    return SortedChoices(order, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))


def draw_choices(rng: random.Random, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Draws choices from all experts, from one or from a few, so that others go empty."""
    open_experts = rng.choice([range(num_experts), [rng.randrange(num_experts)], range(num_experts // 2, num_experts)])
    chosen = [[rng.choice(list(open_experts)) for _ in range(top_k)] for _ in range(num_tokens)]
    return torch.tensor(chosen, dtype=torch.int64).view(num_tokens, top_k)


by_kernel = pytest.mark.parametrize("make", kernels(ROUTED_ONCE), indirect=True)


@by_kernel
def test_drawn_shapes_and_choices(make: Experts) -> None:
    seed = 21
    rng = random.Random(seed)
    for case in range(30):
        num_tokens, top_k = rng.choice([0, 1, 1, 2, 5, 13, 33, 120]), rng.choice([1, 2, 4])
        num_experts = rng.choice([1, 2, 5, 8, 40])
        out_features, in_features = rng.choice([1, 31, 32, 65, 257]), rng.choice([1, 32, 70, 129, 2081])
        experts = draw_choices(rng, num_tokens, num_experts, top_k)
        weights = make.weights(case, num_experts, out_features, in_features)
        is_by_choice = rng.random() < 0.5  # the input has a row for each choice
        x = draw(case, num_tokens * (top_k if is_by_choice else 1), 1, in_features)[0]
        found = make.kernel.route(x, sort(experts, num_experts), weights.packed)
        where = f"seed {seed}, case {case}: {experts.shape}, {num_experts} of {out_features} x {in_features}"
        assert found.shape == (num_tokens * top_k, out_features)
        for expert, (weight, bias) in enumerate(weights.drawn):
            (choices,) = torch.where(experts.flatten() == expert)
            if len(choices):
                rows = x[choices if is_by_choice else choices // top_k]
                make.one.assert_right(found[choices], rows, weight, bias, f"{where}, expert {expert}")


@by_kernel
def test_a_choice_has_the_bits_of_a_plain_layer_in_any_batch(make: Experts, pool: ThreadPool) -> None:
    """Whatever else chooses the expert, or other experts, and on any number of threads."""
    num_experts, top_k = 7, 3
    weights = make.weights(5, num_experts, 75, 2100)
    x, rng = draw(31, 130, 1, 2100)[0], random.Random(31)
    alone = [
        torch.cat([make.one.run(row[None], weights.packed.group(expert)) for row in x]) for expert in range(num_experts)
    ]
    for num_tokens in (1, 2, 5, 12, 13, 40, 130):
        for num_threads in (1, 2, 3):
            pool.resize(num_threads)
            experts = draw_choices(rng, num_tokens, num_experts, top_k)
            found = make.kernel.route(x[:num_tokens], sort(experts, num_experts), weights.packed)
            expected = torch.stack([alone[expert][c // top_k] for c, expert in enumerate(experts.flatten().tolist())])
            assert torch.equal(found, expected), (num_tokens, num_threads)


@by_kernel
def test_what_is_not_finite_stays_with_its_choices(make: Experts) -> None:
    weights = make.weights(6, 4, 40, 100)
    x, experts = draw(8, 6, 1, 100)[0], draw_choices(random.Random(1), 6, 4, 2)
    expected = make.kernel.route(x, sort(experts, 4), weights.packed)
    x[1, 17], x[4, 60] = torch.nan, torch.inf
    found = make.kernel.route(x, sort(experts, 4), weights.packed).view(6, 2, 40)
    assert torch.equal(found[[0, 2, 3, 5]], expected.view(6, 2, 40)[[0, 2, 3, 5]])
    assert not found[[1, 4]].isfinite().any()


def test_what_does_not_fit_is_refused(pool: ThreadPool) -> None:
    make = Experts(HERE, "int8")
    weights = make.weights(1, 3, 8, 16)
    choices = sort(torch.tensor([[0, 2], [1, 2]]), 3)
    with pytest.raises(ValueError, match="expected"):
        make.kernel.route(torch.ones(2, 15), choices, weights.packed)
    many = torch.zeros(4 * MAX_ROWS + 1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most"):
        make.kernel.route(torch.ones(len(many), 16), sort(many, 3), weights.packed)
    with pytest.raises(ValueError, match="3 rows for 4 choices"):
        make.kernel.route(torch.ones(3, 16), choices, weights.packed)
    with pytest.raises(ValueError, match="2 experts"):
        make.kernel.route(torch.ones(2, 16), sort(torch.tensor([[0, 1], [1, 0]]), 2), weights.packed)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "weight_format"), ALL)
def test_sanitizers_find_nothing(arch: str, weight_format: WeightFormat, tmp_path: Path) -> None:
    sanitize(linear_spec(weight_format, arch, routed=True), tmp_path)
