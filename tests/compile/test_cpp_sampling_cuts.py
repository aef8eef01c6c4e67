"""The C++ sampling kernel cuts exactly at top-k and top-p: through equal scores, and between different ones."""

from __future__ import annotations

import math

import pytest
import torch

from fastgen.compile.ops.sampling.cpp import RowSampling, SampledRow
from fastgen.compile.ops.sampling.reference import sample
from tests.compile.arches import in_each_width
from tests.compile.test_cpp_sampling import ARCHES, draws, kernel_for


@pytest.fixture(params=in_each_width(ARCHES))
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_among_equals_the_lowest_ids_are_kept_and_drawn(arch: str) -> None:
    """A tie that top-p cuts through keeps the lowest ids; top-k keeps all that are tied."""
    logits = torch.full((6, 2100), -40.0)
    tied = list(range(10, 2100, 262))
    logits[:, tied] = 1.0  # eight equal ones, in three slices
    samplings = [RowSampling(1.0, top_k=8, top_p=(2 * n - 1) / 16, seed=n) for n in (1, 2, 5)]
    samplings += [RowSampling(1.0, top_p=0.3), RowSampling(1.0, top_k=3), RowSampling()]
    kernel = kernel_for(2100, arch)
    kept: list[set[int]] = [set() for _ in samplings]
    for position in range(60):
        for row, token in enumerate(kernel(logits, [SampledRow(each, position) for each in samplings])[0]):
            kept[row].add(token)
    assert kept == [set(tied[:1]), set(tied[:2]), set(tied[:5]), set(tied[:3]), set(tied), set(tied[:1])]


@pytest.mark.parametrize("top_p", [0.25, 0.5])
def test_a_cut_exactly_between_equals(arch: str, top_p: float) -> None:
    """Powers of two leave nothing to rounding: those that together have just this probability are kept."""
    kernel = kernel_for(4096, arch)
    rows = [SampledRow(RowSampling(1.0, top_p=top_p), position) for position in range(100)]
    logits = torch.full((100, 4096), -2.0)
    found = kernel(logits, rows)[0]
    assert found == [sample(scores[None], draws(row))[0].item() for scores, row in zip(logits, rows, strict=True)]
    assert max(found) < 4096 * top_p


def test_a_cut_exactly_between_different_scores(arch: str) -> None:
    """The two scores of half the best one's weight together have just the probability that top-p cuts off. Weights are
    powers of two, so nothing is rounded: both are cut."""
    logits = torch.full((100, 4096), -200.0)
    logits[:, 5] = logits[:, 3000] = -math.log(2)
    logits[:, 1700] = 0.0
    rows = [SampledRow(RowSampling(1.0, top_p=0.5), position) for position in range(100)]
    assert set(kernel_for(4096, arch)(logits, rows)[0]) == {1700}
    wider = [SampledRow(RowSampling(1.0, top_p=0.51), position) for position in range(100)]
    assert set(kernel_for(4096, arch)(logits, wider)[0]) == {5, 1700}
