"""Routing and grouped products against brute force in NumPy, ties and experts without tokens included."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastgen.compile.ops.experts.reference import combine, route, sort_by_expert
from fastgen.compile.ops.linear.reference import grouped_linear, per_head_linear

Array = npt.NDArray[Any]


def best(scores: list[float], candidates: list[int], count: int) -> list[int]:
    return sorted(candidates, key=lambda expert: (-scores[expert], expert))[:count]


def route_one(logits: Array, correction: Array | None, options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """One token, in fp64."""
    num_experts = len(logits)
    exponentials = np.exp(logits - logits.max())
    scores = {
        "softmax": exponentials / exponentials.sum(),
        "softmax_top_k": logits,
        "sigmoid": 1 / (1 + np.exp(-logits)),
    }[options["scoring"]]
    choice = list(scores if correction is None else scores + correction)
    size = num_experts // options["num_groups"]
    groups = [list(range(start, start + size)) for start in range(0, num_experts, size)]
    counted = 1 if correction is None else 2
    group_scores = [sum(sorted((choice[e] for e in group), reverse=True)[:counted]) for group in groups]
    open_groups = best(group_scores, list(range(len(groups))), options["top_groups"])
    chosen = best(choice, [e for group in open_groups for e in groups[group]], options["top_k"])
    weights = np.array([scores[e] for e in chosen])
    if options["scoring"] == "softmax_top_k":
        weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    if options["normalize"]:
        weights = weights / weights.sum()
    return chosen, list(weights * (options["scale"] or 1.0))


def draw_options(rng: Random) -> tuple[int, dict[str, Any]]:
    num_groups, size = rng.randint(1, 4), rng.randint(1, 4)
    top_groups = rng.randint(1, num_groups)
    return num_groups * size, {
        "top_k": rng.randint(1, top_groups * size),
        "scoring": rng.choice(("softmax", "softmax_top_k", "sigmoid")),
        "normalize": rng.random() < 0.5,
        "scale": rng.choice((None, 2.5)),
        "num_groups": num_groups,
        "top_groups": top_groups,
    }


@pytest.mark.parametrize("seed", range(60))
def test_route_equals_brute_force(seed: int) -> None:
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_experts, options = draw_options(rng)
    # Halves, so that ties are frequent and exact
    logits = torch.randint(-4, 5, (rng.choice((0, 1, 9)), num_experts), generator=generator) / 2
    correction = torch.randint(-2, 3, (num_experts,), generator=generator) / 2 if rng.random() < 0.5 else None
    experts, weights = route(logits, correction, **options)
    assert experts.shape == weights.shape == (len(logits), options["top_k"])
    assert weights.dtype == torch.float32
    for token, row in enumerate(logits.double().numpy()):
        chosen, expected = route_one(row, None if correction is None else correction.double().numpy(), options)
        assert experts[token].tolist() == chosen, f"{row}, {correction}, {options}"
        np.testing.assert_allclose(weights[token], expected, rtol=1e-5)


def test_ties_go_to_the_lowest_expert() -> None:
    experts, weights = route(torch.zeros(2, 64), None, top_k=3, scoring="softmax", normalize=True)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert weights.flatten().tolist() == pytest.approx([1 / 3] * 6)


def test_scores_that_underflow_leave_finite_weights() -> None:
    _, weights = route(torch.full((1, 4), -200.0), None, top_k=2, scoring="sigmoid", normalize=True)
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("seed", range(40))
def test_experts_equal_brute_force(seed: int) -> None:
    """Sorted, grouped and combined, each token gets what its experts make of it one by one; nothing is dropped."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_experts, top_k = rng.randint(1, 7), rng.randint(1, 3)
    top_k = min(top_k, num_experts)
    num_tokens, size_in, size_out = rng.choice((0, 1, 3, 17)), rng.randint(1, 6), rng.randint(1, 6)
    x = torch.randn(num_tokens, size_in, generator=generator)
    weight = torch.randn(num_experts, size_out, size_in, generator=generator)
    bias = torch.randn(num_experts, size_out, generator=generator) if rng.random() < 0.5 else None
    crowded = rng.randrange(num_experts)  # sometimes all go to few experts, so that others have none
    experts = torch.tensor(
        [
            rng.sample(range(num_experts), top_k)
            if rng.random() < 0.5
            else [(crowded + i) % num_experts for i in range(top_k)]
            for _ in range(num_tokens)
        ],
        dtype=torch.int64,
    ).view(num_tokens, top_k)
    weights = torch.rand(num_tokens, top_k, generator=generator)

    order, counts = sort_by_expert(experts, num_experts)
    assert counts.tolist() == [int((experts == expert).sum()) for expert in range(num_experts)]
    assert sorted(order.tolist()) == list(range(num_tokens * top_k))
    assert experts.flatten()[order].tolist() == sorted(experts.flatten().tolist())
    out = combine(grouped_linear(x[order // top_k], weight, bias, counts), order, weights)

    expected = np.zeros((num_tokens, size_out))
    for token, place in np.ndindex(num_tokens, top_k):
        expert = int(experts[token, place])
        made = weight[expert].double().numpy() @ x[token].double().numpy()
        made = made if bias is None else made + bias[expert].double().numpy()
        expected[token] += float(weights[token, place]) * made
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_row_of_nan_spoils_no_other() -> None:
    """Padding may hold anything."""
    x = torch.randn(5, 4)
    x[3] = float("nan")
    gate, weight = torch.randn(6, 4), torch.randn(6, 2, 4)

    def run(rows: torch.Tensor) -> torch.Tensor:
        experts, weights = route(rows @ gate.T, None, top_k=2, scoring="softmax", normalize=True)
        order, counts = sort_by_expert(experts, 6)
        return combine(grouped_linear(rows[order // 2], weight, None, counts), order, weights)

    kept = [0, 1, 2, 4]
    torch.testing.assert_close(run(x)[kept], run(x[kept]))


def test_per_head_linear() -> None:
    x, weight = torch.randn(3, 2, 4), torch.randn(2, 5, 4)
    expected = [[weight[head].double().numpy() @ x[t, head].double().numpy() for head in range(2)] for t in range(3)]
    np.testing.assert_allclose(per_head_linear(x, weight), expected, atol=1e-5)
