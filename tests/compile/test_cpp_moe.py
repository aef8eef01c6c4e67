"""Routing, sorting, summing and the soft cap in C++ against the torch references, with ties and what is no number."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.experts.cpp import CombineKernel, RouteKernel, SortKernel, combine_spec, route_spec, sort_spec
from fastgen.compile.ops.experts.reference import combine, route, sort_by_expert
from fastgen.compile.ops.softcap.cpp import SoftcapKernel, softcap_spec
from fastgen.compile.ops.softcap.reference import soft_cap
from tests.compile.arches import WIDTHS, in_each_width

HERE = cpp_arch(device.current("cpu"))
ARCHES = CPP_ARCHES[CPP_ARCHES.index(HERE) :]


def drawn_options(seed: int) -> tuple[int, dict[str, Any]]:
    rng = random.Random(seed)
    num_groups, size = rng.randint(1, 4), rng.randint(1, 9)
    top_groups = rng.randint(1, num_groups)
    return num_groups * size, {
        "top_k": rng.randint(1, top_groups * size),
        "scoring": ("softmax", "softmax_top_k", "sigmoid")[seed % 3],
        "normalize": rng.random() < 0.5,
        "scale": rng.choice((None, 2.5)),
        "num_groups": num_groups,
        "top_groups": top_groups,
    }


ROUTES = [
    pytest.param(arch, seed, marks=[] if seed < (6 if arch == HERE else arch in WIDTHS) else pytest.mark.slow)
    for arch in ARCHES
    for seed in range(30)
]


@pytest.fixture(scope="module")
def loaders() -> dict[str, KernelLoader]:
    found = {arch: KernelLoader(CppBuilder(arch)) for arch in ARCHES}
    load_thread_pool(found[HERE])
    return found


@pytest.mark.parametrize(("arch", "seed"), ROUTES)
def test_route(loaders: dict[str, KernelLoader], arch: str, seed: int) -> None:
    num_experts, options = drawn_options(seed)
    corrected = random.Random(-seed).random() < 0.5
    kernel = RouteKernel(loaders[arch].load(route_spec(arch, num_experts, corrected=corrected, **options)))
    generator = torch.Generator().manual_seed(seed)
    for num_tokens in (0, 1, 3, 100):
        logits = torch.randn(num_tokens, num_experts, generator=generator) * 3
        logits[: num_tokens // 2] = logits[: num_tokens // 2].round()  # ties
        correction = torch.randn(num_experts, generator=generator).round() if corrected else None
        experts, weights = kernel(logits, correction)
        expected_experts, expected_weights = route(logits, correction, **options)
        # Where a tie of rounded scores is decided otherwise, both choices weigh the same.
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
        assert (experts == expected_experts).float().mean() > 0.99 if num_tokens == 100 else True
        for token in range(num_tokens):
            (one, its), row = kernel(logits[token : token + 1], correction), slice(token, token + 1)
            assert torch.equal(one, experts[row])
            assert torch.equal(its, weights[row])


def test_a_logit_that_is_no_number_shows(loaders: dict[str, KernelLoader]) -> None:
    for seed in range(3):
        num_experts, options = drawn_options(seed)
        kernel = RouteKernel(loaders[HERE].load(route_spec(HERE, num_experts, **options)))
        logits = torch.zeros(2, num_experts)
        logits[1, num_experts // 2] = torch.nan
        experts, weights = kernel(logits, None)
        assert weights[1].isnan().any()
        assert not weights[0].isnan().any()
        assert all(len(set(row)) == options["top_k"] and max(row) < num_experts for row in experts.tolist())


@pytest.mark.parametrize("num_experts", [1, 2, 7, 300])
def test_sort(loaders: dict[str, KernelLoader], num_experts: int) -> None:
    kernel = SortKernel(loaders[HERE].load(sort_spec(num_experts)))
    for seed, (num_tokens, top_k) in enumerate([(0, 2), (1, 1), (1, 6), (3, 2), (40, 5), (500, 8)]):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(num_experts, (num_tokens, top_k), generator=generator)
        for experts in (drawn, torch.full_like(drawn, num_experts - 1), drawn // 3 * 3 % num_experts):
            order, counts = sort_by_expert(experts, num_experts)
            choices = kernel(experts)
            assert torch.equal(choices.order, order)
            assert torch.equal(choices.first_rows[1:], counts.cumsum(0))
            assert choices.first_rows[0] == 0


@pytest.mark.parametrize(
    ("shared", "gated", "top_k"), [(False, False, 1), (False, False, 3), (True, False, 2), (True, True, 4)]
)
def test_combine(loaders: dict[str, KernelLoader], shared: bool, gated: bool, top_k: int) -> None:
    kernel = CombineKernel(loaders[HERE].load(combine_spec(HERE, top_k=top_k, shared=shared, gated=gated)))
    for seed in range(10):
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        num_tokens, size = rng.choice((0, 1, 4, rng.randint(5, 60))), rng.randint(1, 70)
        order, _ = sort_by_expert(torch.randint(5, (num_tokens, top_k), generator=generator), 5)
        outputs = torch.randn(num_tokens * top_k, size, generator=generator)  # by choice
        weights = torch.rand(num_tokens, top_k, generator=generator)
        added = torch.randn(num_tokens, size, generator=generator)
        gates = torch.randn(num_tokens, 1, generator=generator)
        expected = combine(outputs[order], order, weights)
        if shared:
            expected = expected + (gates.sigmoid() if gated else 1) * added
        found = kernel(outputs, weights, added if shared else None, gates if gated else None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", in_each_width(ARCHES))
def test_soft_cap(loaders: dict[str, KernelLoader], arch: str) -> None:
    kernel = SoftcapKernel(loaders[arch].load(softcap_spec(30.0, arch)))
    for size in (0, 1, 17, 2**14 - 1, 2**14 + 1, 50_000):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100
        expected = soft_cap(x.double(), 30.0).float()
        alone = torch.cat([kernel(x[i : i + 1].clone()) for i in range(min(size, 40))]) if size else x
        found = kernel(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-30)
        assert torch.equal(found[:40], alone[:40])
