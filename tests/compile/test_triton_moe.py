"""The Triton kernels of mixtures of experts: interpreted, against the torch reference, and built for absent GPUs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.experts.reference import combine, route, sort_by_expert
from fastgen.compile.ops.experts.tiling import GroupedTiling, grouped_tiling
from fastgen.compile.ops.experts.triton import (
    CombineKernel,
    ExpertTiles,
    GroupedLinearKernel,
    RouteKernel,
    SortKernel,
    combine_spec,
    grouped_linear_spec,
    route_spec,
    sort_spec,
)
from fastgen.compile.ops.linear.reference import grouped_linear
from fastgen.compile.spec import KernelSpec, torch_dtype
from tests.fast import cases

CPU = torch.device("cpu")
UNWRITTEN = -77


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


# Routing

FEATURES: dict[str, dict[str, Any]] = {
    "softmax_top_k": {"scoring": "softmax_top_k"},
    "sigmoid": {"scoring": "sigmoid"},
    "corrected": {"corrected": True},
    "normalize": {"normalize": True},
    "scale": {"scale": 2.5},
    "one group": {"num_groups": 4, "top_groups": 1},
    "two groups": {"num_groups": 3, "top_groups": 2},
    "all groups": {"num_groups": 2, "top_groups": 2},
    "groups of one": {"num_groups": 12, "top_groups": 7},
    "many": {"top_k": 3},
}


def routed(
    loader: KernelLoader, logits: Tensor, correction: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    kernel = RouteKernel(loader.load(route_spec(num_experts, corrected=correction is not None, **options)))
    experts = torch.full((num_tokens + 1, options["top_k"]), UNWRITTEN, dtype=torch.int32)
    weights = torch.full((num_tokens + 1, options["top_k"]), float(UNWRITTEN))
    kernel(logits, correction, experts[:-1], weights[:-1])
    assert (experts[-1] == UNWRITTEN).all()
    assert (weights[-1] == UNWRITTEN).all()
    return experts[:-1], weights[:-1]


def check_route(loader: KernelLoader, num_tokens: int, num_experts: int, changes: dict[str, Any], seed: int) -> None:
    options = {"top_k": 2, "scoring": "softmax", "normalize": False, **changes}
    corrected = options.pop("corrected", False)
    generator = torch.Generator().manual_seed(seed)
    # Halves, so that ties are frequent and exact; some rows have logits that underflow.
    logits = torch.randint(-4, 5, (num_tokens, num_experts), generator=generator) / 2
    logits[::5] *= 100
    correction = torch.randint(-2, 3, (num_experts,), generator=generator) / 2 if corrected else None
    experts, weights = routed(loader, logits, correction, options)
    expected_experts, expected_weights = route(logits, correction, **options)
    assert torch.equal(experts.long(), expected_experts), f"{options}, corrected={corrected}, seed {seed}"
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-30)


def test_every_routing_feature_and_pair(loader: KernelLoader) -> None:
    for seed, count in enumerate((0, 1, 2)):
        for names in itertools.combinations(FEATURES, count):
            keys = [key for name in names for key in FEATURES[name]]
            if len(keys) == len(set(keys)):
                check_route(loader, 7, 12, {key: v for name in names for key, v in FEATURES[name].items()}, seed)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 8, 2), (1, 1, 1), (70, 8, 8), (5, 60, 4), (3, 256, 8)]
)
def test_routing_at_odd_sizes(loader: KernelLoader, num_tokens: int, num_experts: int, top_k: int) -> None:
    check_route(loader, num_tokens, num_experts, {"top_k": top_k, "normalize": True}, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_drawn_routing(loader: KernelLoader, seed: int) -> None:
    rng = Random(seed)
    num_groups, size = rng.randint(1, 6), rng.randint(1, 6)
    top_groups = rng.randint(1, num_groups)
    changes = {
        **{"top_k": rng.randint(1, top_groups * size), "scoring": rng.choice(("softmax", "softmax_top_k", "sigmoid"))},
        **{"normalize": rng.random() < 0.5, "scale": rng.choice((None, 2.5)), "corrected": rng.random() < 0.5},
        **{"num_groups": num_groups, "top_groups": top_groups},
    }
    check_route(loader, rng.choice([1, 9, 40]), num_groups * size, changes, seed)


@pytest.mark.parametrize("scoring", ["softmax", "softmax_top_k", "sigmoid"])
def test_whatever_a_row_holds_it_goes_to_different_experts_that_exist(loader: KernelLoader, scoring: str) -> None:
    """Padding may hold anything, and must disturb no other row."""
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    good = logits[5:].clone()
    logits[0] = math.nan
    logits[1, 3] = math.nan
    logits[2] = math.inf
    logits[3] = -math.inf
    logits[4] = torch.full((6,), -math.nan)
    for groups in ({}, {"num_groups": 3, "top_groups": 2}):
        options = {"top_k": 4, "scoring": scoring, "normalize": True, **groups}
        experts, weights = routed(loader, logits, torch.zeros(6), options)
        assert all(len({e for e in row if 0 <= e < 6}) == 4 for row in experts.tolist())
        expected_experts, expected_weights = route(good, torch.zeros(6), **options)
        assert torch.equal(experts[5:].long(), expected_experts)
        torch.testing.assert_close(weights[5:], expected_weights)


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    for changes in ({"top_k": 9}, {"top_k": 0}, {"top_k": 3, "num_groups": 4}, {"top_k": 1, "num_groups": 3}):
        with pytest.raises(ValueError, match="cannot be chosen"):
            route_spec(8, scoring="softmax", normalize=True, **changes)


# Sorting


def draw_experts(rng: Random, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Choices of different experts a token: any, few, or for all tokens the same."""
    candidates = rng.choice([num_experts, top_k, min(num_experts, top_k + 1)])
    start = rng.randrange(num_experts)
    rows = [[(start + each) % num_experts for each in rng.sample(range(candidates), top_k)] for _ in range(num_tokens)]
    return torch.tensor(rows, dtype=torch.int32).view(num_tokens, top_k)


def sorted_tiles(loader: KernelLoader, experts: Tensor, num_experts: int, block_m: int, room: int = 0) -> ExpertTiles:
    spec = sort_spec(num_experts, block_m, block=32)
    sort = SortKernel(loader.load(spec), max_choices=experts.numel() + room, device=CPU)
    tiles = sort.tiles
    for buffer in (tiles.order, tiles.tiles, tiles.num_tiles):
        buffer.fill_(UNWRITTEN)
    return sort(experts)


@pytest.mark.parametrize("seed", range(12))
def test_choices_are_sorted_and_cut_into_tiles(loader: KernelLoader, seed: int) -> None:
    rng = Random(seed)
    num_experts, block_m, num_tokens = rng.choice([1, 2, 7, 8, 31]), rng.choice([1, 4, 16]), rng.choice([1, 3, 37])
    experts = draw_experts(rng, num_tokens, rng.randint(1, min(3, num_experts)), num_experts)
    tiles = sorted_tiles(loader, experts, num_experts, block_m, room=5)
    order, counts = sort_by_expert(experts.long(), num_experts)
    assert tiles.order[: len(order)].tolist() == order.tolist()
    assert (tiles.order[len(order) :] == UNWRITTEN).all()
    expected, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        expected += [[expert, start + row, start + count] for row in range(0, count, block_m)]
        start += count
    num_tiles = int(tiles.num_tiles)
    assert tiles.tiles[:num_tiles].tolist() == expected
    assert (tiles.tiles[num_tiles:] == UNWRITTEN).all()
    assert num_tiles <= tiles.most_tiles(experts.numel())


def test_no_choice_finds_more_tiles_than_there_is_room_for(loader: KernelLoader) -> None:
    """The bound is reached: every expert has one row more than fills its tiles."""
    experts = torch.tensor([e for e in range(4) for _ in range(5)], dtype=torch.int32).view(20, 1)
    sort = SortKernel(loader.load(sort_spec(4, 4, block=32)), max_choices=20, device=CPU)
    tiles = sort(experts)
    assert int(tiles.num_tiles) == 8 <= tiles.most_tiles(20) == 9
    with pytest.raises(ValueError, match="at most 20 choices"):
        sort(torch.zeros(7, 3, dtype=torch.int32))


# Products


def check_linear(loader: KernelLoader, seed: int, dtype: str, **fixed: Any) -> None:
    """Both products, against the reference; each other row of memory is NaN and stays unread."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    num_experts, top_k = rng.choice([1, 3, 6]), 1
    top_k = rng.randint(1, min(3, num_experts))
    num_tokens = fixed.get("num_tokens", rng.choice([1, 5, 23]))
    sizes = rng.choice([1, 17, 32, 50]), rng.choice([1, 16, 33, 64])
    in_features, out_features = fixed.get("sizes", sizes)
    tiling = rng.choice(
        [GroupedTiling(16, 16, 16, 4, 1), GroupedTiling(16, 32, 32, 4, 1), GroupedTiling(32, 16, 16, 4, 1)]
    )
    gathers, scatters, biased = (fixed.get(name, rng.random() < 0.5) for name in ("gathers", "scatters", "bias"))
    experts = draw_experts(rng, num_tokens, top_k, num_experts)
    tiles = sorted_tiles(loader, experts, num_experts, tiling.block_m, room=9)
    order, counts = sort_by_expert(experts.long(), num_experts)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch_dtype(dtype))

    x = torch.full(((num_tokens if gathers else len(order)) + 2, in_features), math.nan, dtype=torch_dtype(dtype))
    x[:-2] = drawn(len(x) - 2, in_features)
    weight = torch.full((num_experts, out_features, in_features), math.nan, dtype=torch_dtype(dtype))
    used = counts > 0
    weight[used] = drawn(num_experts, out_features, in_features)[used]  # those without rows are never read
    bias = drawn(num_experts, out_features) if biased else None
    out = torch.full((len(order) + 2, out_features), UNWRITTEN, dtype=torch_dtype(dtype))
    spec = grouped_linear_spec(
        in_features, out_features, dtype, tiling, top_k=top_k if gathers else None, scatters=scatters, bias=biased
    )
    kernel = GroupedLinearKernel(loader.load(spec))
    kernel(x, weight, bias, tiles, len(order), out)
    rows = (x[order // top_k] if gathers else x[: len(order)]).float()
    expected = grouped_linear(rows, weight.float(), None if bias is None else bias.float(), counts)
    if scatters:
        expected = torch.empty_like(expected).index_copy_(0, order, expected)
    tolerance = 1e-5 if dtype == "fp32" else 2e-3
    found = out[:-2].float()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=5 * tolerance, msg=lambda text: f"{spec}: {text}")
    assert (out[-2:] == UNWRITTEN).all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_grouped_products(loader: KernelLoader, dtype: str) -> None:
    for seed, (gathers, scatters, bias) in enumerate(itertools.product([False, True], repeat=3)):
        check_linear(loader, seed, dtype, gathers=gathers, scatters=scatters, bias=bias)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_drawn_grouped_products(loader: KernelLoader, seed: int) -> None:
    check_linear(loader, seed, "fp16" if seed % 2 else "fp32")


def test_experts_beyond_32_bits(loader: KernelLoader) -> None:
    """Weights of more than 2³¹ numbers, of which only the last expert's are ever touched."""
    num_experts = 2**31 // (64 * 64) + 2
    weight = torch.empty(num_experts, 64, 64, dtype=torch.float16)
    weight[-1] = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    tiles = sorted_tiles(loader, torch.zeros(3, 1, dtype=torch.int32), 1, 16)
    tiles.tiles[0, 0] = num_experts - 1
    kernel = GroupedLinearKernel(loader.load(grouped_linear_spec(64, 64, "fp16", GroupedTiling(16, 64, 64, 4, 1))))
    x, out = torch.randn(3, 64).half(), torch.zeros(3, 64).half()
    kernel(x, weight, None, tiles, 3, out)
    torch.testing.assert_close(out.float(), x.float() @ weight[-1].float().T, rtol=2e-3, atol=1e-2)


def test_tiles_of_another_height_are_refused(loader: KernelLoader) -> None:
    tiles = sorted_tiles(loader, torch.zeros(1, 1, dtype=torch.int32), 2, 32)
    kernel = GroupedLinearKernel(loader.load(grouped_linear_spec(16, 16, "fp32", GroupedTiling(16, 16, 16, 4, 1))))
    with pytest.raises(ValueError, match="tiles of 32 rows"):
        kernel(torch.zeros(1, 16), torch.zeros(2, 16, 16), None, tiles, 1, torch.zeros(1, 16))


@pytest.mark.parametrize(("num_tokens", "num_features", "top_k"), [(0, 8, 2), (1, 1, 1), (5, 100, 3), (2, 1100, 8)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_combining(loader: KernelLoader, num_tokens: int, num_features: int, top_k: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(num_features)
    outputs = torch.randn(num_tokens * top_k, num_features, generator=generator).to(torch_dtype(dtype))
    weights = torch.rand(num_tokens, top_k, generator=generator)
    out = torch.full((num_tokens + 1, num_features), UNWRITTEN, dtype=outputs.dtype)
    CombineKernel(loader.load(combine_spec(num_features, top_k, dtype)))(outputs, weights, out[:-1])
    expected = combine(outputs, torch.arange(len(outputs)), weights)
    torch.testing.assert_close(out[:-1], expected, rtol=1e-3 if dtype == "fp16" else 1e-5, atol=1e-6)
    assert (out[-1] == UNWRITTEN).all()


@pytest.mark.parametrize("crowded", [False, True])
def test_a_whole_mixture_in_the_same_buffers(loader: KernelLoader, crowded: bool) -> None:
    """From logits to sums, at one size of buffers and changing tokens; NaN rows disturb no bit of others."""
    num_experts, top_k, hidden, inner = 5, 2, 24, 20
    tiling = GroupedTiling(16, 16, 32, 4, 1)
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 3

    inward, down = drawn(num_experts, inner, hidden), drawn(num_experts, hidden, inner)
    options: dict[str, Any] = {"top_k": top_k, "scoring": "softmax", "normalize": True}
    router = RouteKernel(loader.load(route_spec(num_experts, **options)))
    sort = SortKernel(loader.load(sort_spec(num_experts, 16)), max_choices=40, device=CPU)
    first = GroupedLinearKernel(loader.load(grouped_linear_spec(hidden, inner, "fp32", tiling, top_k=top_k)))
    second = GroupedLinearKernel(loader.load(grouped_linear_spec(inner, hidden, "fp32", tiling, scatters=True)))
    add = CombineKernel(loader.load(combine_spec(hidden, top_k, "fp32")))

    def run(x: Tensor, logits: Tensor) -> Tensor:
        num_tokens = len(x)
        experts, weights = torch.zeros(num_tokens, top_k, dtype=torch.int32), torch.zeros(num_tokens, top_k)
        made, outputs = (
            torch.full((num_tokens * top_k, inner), math.nan),
            torch.full((num_tokens * top_k, hidden), math.nan),
        )
        out = torch.full((num_tokens, hidden), math.nan)
        router(logits, None, experts, weights)
        tiles = sort(experts)
        first(x, inward, None, tiles, num_tokens * top_k, made)
        made.relu_()
        second(made, down, None, tiles, num_tokens * top_k, outputs)
        add(outputs, weights, out)
        return out

    for num_tokens in (20, 3, 0, 11):
        x, logits = drawn(num_tokens, hidden), drawn(num_tokens, num_experts)
        if crowded:
            logits[:, 1:3] += 50
        experts, weights = route(logits, None, **options)
        order, counts = sort_by_expert(experts, num_experts)
        made = grouped_linear(x[order // top_k], inward, None, counts).relu()
        expected = combine(grouped_linear(made, down, None, counts), order, weights)
        found = run(x, logits)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Beside a row that is NaN, and beside one that goes to the same experts: the others lie where they lay.
    broken = logits.clone()
    broken[3] = math.nan
    experts = torch.zeros(len(x), top_k, dtype=torch.int32)
    router(broken, None, experts, torch.zeros(len(x), top_k))
    logits[3] = 0
    logits[3, experts[3]] = torch.tensor([2.0, 1.0])
    found = run(x, logits)
    x[3] = math.nan
    again = run(x, broken)
    assert again[3].isnan().all()
    others = [0, 1, 2, *range(4, len(x))]
    assert torch.equal(again[others], found[others])


# Builds


def mixture_specs(arch: str, hidden: int, inner: int, num_experts: int, top_k: int, dtype: str) -> list[KernelSpec]:
    """A decode's, a small step's and a large one's products, and what is around them."""
    specs = [
        route_spec(num_experts, top_k=top_k, scoring="softmax", normalize=True),
        route_spec(
            256, top_k=8, scoring="sigmoid", normalize=True, corrected=True, scale=2.5, num_groups=8, top_groups=4
        ),
        combine_spec(hidden, top_k, dtype),
    ]
    for rows in (1, 40, 1000):
        tiling = grouped_tiling(dtype, arch, rows)
        specs += [
            sort_spec(num_experts, tiling.block_m),
            grouped_linear_spec(hidden, 2 * inner, dtype, tiling, top_k=top_k),
            grouped_linear_spec(inner, hidden, dtype, tiling, scatters=True, bias=True),
        ]
    return specs


def check_builds(arch: str, specs: list[KernelSpec], directory: Path) -> None:
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(directory), num_jobs=1)
    for spec, entry in zip(specs, loader.build(specs), strict=True):
        report = entry.report
        assert report["spill_bytes"] == 0, spec
        assert report["shared_bytes"] <= report["shared_limit_bytes"], spec
        if spec.op == "grouped_linear" and spec.parameters["dtype"] != "fp32":
            block_m = spec.parameters["block_m"]
            kind = "wgmma" if arch == "sm_90" and block_m >= 64 else "mma"
            kind = {"gfx942": "v_mfma", "sm_100": "tcgen05.mma" if block_m >= 64 else "mma"}.get(arch, kind)
            assert report["matrix_instructions"].get(kind, 0) > 0, spec


@pytest.mark.parametrize("arch", cases(["sm_80", "sm_90"], fast=["sm_90"]))
def test_grouped_products_are_built_ahead_of_time(tmp_path: Path, arch: str) -> None:
    tiling = grouped_tiling("bf16", arch, 1000)
    check_builds(arch, [grouped_linear_spec(4096, 4096, "bf16", tiling, top_k=2)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_mixtures_are_built_for_every_architecture(tmp_path: Path, arch: str, dtype: str) -> None:
    for sizes in ((4096, 14336, 8, 2), (2048, 768, 128, 8), (2880, 2880, 32, 4)):
        check_builds(arch, mixture_specs(arch, *sizes, dtype), tmp_path)
