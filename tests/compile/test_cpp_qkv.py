"""The C++ kernel between projection and attention against its references: norms, rotation, KV write."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.attention.cpp import empty_cache
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.qkv.cpp import QkvKernel, qkv_spec
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.rotary.reference import apply_rotary
from fastgen.compile.spec import KernelSpec, torch_dtype
from tests.compile.arches import WIDTHS
from tests.compile.cache_pairs import keys_in_pairs, keys_of_pairs, values_in_pairs, values_of_pairs

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
MAX_POSITIONS = 50
TOLERANCE = 1e-5
NORMS = {
    "none": None,
    "rms": HeadNorm("rms", 1e-6),
    "rms with offset, over all": HeadNorm("rms", 0.05, offset=1.0, over_all=True),
    "layer, of its own for each head": HeadNorm("layer", 1e-5, per_head=True, bias=True),
    "layer without weight": HeadNorm("layer", 0.1, weight=False),
    "layer, over all": HeadNorm("layer", 1e-5, over_all=True, bias=True, offset=1.0),
}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cache_dtype: str
    rotary_dim: int
    interleaved: bool
    q_norm: str
    k_norm: str

    def spec(self, arch: str) -> KernelSpec:
        fields = vars(self) | {"q_norm": NORMS[self.q_norm], "k_norm": NORMS[self.k_norm]}
        return qkv_spec(arch, **fields)


def drawn_shape(rng: random.Random, *, q_norm: str, k_norm: str, rotary: str) -> Shape:
    num_kv_heads, head_dim = rng.randint(1, 3), rng.choice((2, 6, 10, 16, 32, 33, 64, 66))
    return Shape(
        num_kv_heads * rng.randint(1, 4),
        num_kv_heads,
        head_dim,
        rng.choice((1, 4, 7, 16)),
        rng.choice(("fp32", "bf16", "fp16")),
        {"no": 0, "whole": head_dim // 2 * 2, "part": max(2, head_dim // 4 * 2)}[rotary],
        rng.random() < 0.5 and rotary != "no",
        q_norm,
        k_norm,
    )


RNG = random.Random(4)
SHAPES = [
    drawn_shape(RNG, q_norm=q_norm, k_norm=k_norm, rotary=RNG.choice(("no", "whole", "part")))
    for q_norm in NORMS
    for k_norm in NORMS
] + [
    drawn_shape(RNG, q_norm="none", k_norm="none", rotary=rotary)
    for rotary in ("no", "whole", "part")
    for _ in range(4)
]
FAST = {0, 7, 14, 21, 28, 35, 36, 40, 44}  # every norm, every rotation
CASES = [
    pytest.param(
        arch,
        shape,
        marks=[] if index in (FAST if ARCHES[0] == arch else (14, 44) if arch in WIDTHS else ()) else pytest.mark.slow,
    )
    for arch in ARCHES
    for index, shape in enumerate(SHAPES)
]


def normed(x: Tensor, kind: str, weights: dict[str, Tensor], prefix: str) -> Tensor:
    """``x [T, heads, D]`` by the reference."""
    norm = NORMS[kind]
    if norm is None:
        return x
    weight, bias = weights.get(f"{prefix}_norm_weight"), weights.get(f"{prefix}_norm_bias")
    rows = x.flatten(1) if norm.over_all else x
    if norm.kind == "rms":
        return rms_norm(rows, weight, norm.eps, norm.offset).view_as(x)
    return layer_norm(rows, weight, bias, norm.eps, norm.offset).view_as(x)


def drawn_weights(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    weights = {}
    for prefix, kind, heads in (("q", shape.q_norm, shape.num_heads), ("k", shape.k_norm, shape.num_kv_heads)):
        norm = NORMS[kind]
        for name in [] if norm is None else [each.name for each in norm.arguments(prefix, "fp32")]:
            assert norm is not None
            size = (heads * shape.head_dim,) if norm.over_all else (shape.head_dim,)
            weights[name] = torch.randn((heads, *size) if norm.per_head else size, generator=generator)
    return weights


class Loaded(NamedTuple):
    launch: QkvKernel
    in_pairs: bool  # of the caches


class Case:
    """``num_tokens`` tokens and where they go: slots in any order, of blocks that otherwise stay as they are."""

    def __init__(self, shape: Shape, num_tokens: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.num_tokens = shape, num_tokens
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = torch.randn(num_tokens, heads * shape.head_dim, generator=generator)
        self.positions = torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator).int()
        num_blocks = -(-num_tokens // shape.block_size) + 2
        self.slots = torch.randperm(num_blocks * shape.block_size, generator=generator)[:num_tokens]
        dtype = torch_dtype(shape.cache_dtype)
        sizes = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = empty_cache(*sizes, None, dtype=dtype)
        self.k.fill_(7)
        self.v.fill_(7)
        self.weights = drawn_weights(shape, generator)
        self.cos_sin = torch.randn(MAX_POSITIONS, shape.rotary_dim, generator=generator)

    def run(self, kernel: Loaded) -> Tensor:
        qkv = self.qkv.clone()
        given = self.weights | ({"cos_sin": self.cos_sin} if self.shape.rotary_dim else {})
        if not kernel.in_pairs:
            kernel.launch(qkv, self.positions, self.k, self.v, self.slots, **given)
        else:
            k, v = keys_in_pairs(self.k), values_in_pairs(self.v)
            kernel.launch(qkv, self.positions, k, v, self.slots, **given)
            self.k, self.v = keys_of_pairs(k), values_of_pairs(v)
        return qkv[:, : self.shape.num_heads * self.shape.head_dim]

    def check(self, kernel: Loaded) -> None:
        shape = self.shape
        heads = self.qkv.view(self.num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        q, k = normed(q, shape.q_norm, self.weights, "q"), normed(k, shape.k_norm, self.weights, "k")
        if shape.rotary_dim:
            q, k = (apply_rotary(each, self.positions, self.cos_sin, interleaved=shape.interleaved) for each in (q, k))
        assert_close(self.run(kernel), q.flatten(1))
        place = (self.slots // shape.block_size, self.slots % shape.block_size)
        unit = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}[shape.cache_dtype]  # one rounding may tip over
        assert_close(self.k[place].float(), k, unit)
        assert torch.equal(self.v[place], v.to(self.v.dtype))
        self.k[place], self.v[place] = 7, 7
        assert (self.k == 7).all()
        assert (self.v == 7).all()


def assert_close(found: Tensor, expected: Tensor, unit: float = 0.0) -> None:
    if expected.numel():
        difference = (found - expected).abs() - unit * expected.abs()
        assert difference.max() <= TOLERANCE * expected.abs().max(), float(difference.max())


@pytest.fixture(scope="module")
def loaders() -> dict[str, KernelLoader]:
    return {arch: KernelLoader(CppBuilder(arch)) for arch in ARCHES}


def load(loader: KernelLoader, shape: Shape) -> Loaded:
    load_thread_pool(loader)
    spec = shape.spec(loader.builder.arch)
    return Loaded(QkvKernel(loader.load(spec)), bool(spec.parameters["in_pairs"]))


@pytest.mark.parametrize(("arch", "shape"), CASES)
def test_drawn_shapes(loaders: dict[str, KernelLoader], arch: str, shape: Shape) -> None:
    kernel = load(loaders[arch], shape)
    for seed, num_tokens in enumerate((0, 1, 2, 5, 83)):
        Case(shape, num_tokens, seed).check(kernel)


def test_a_token_gets_the_same_bits_in_any_batch(loaders: dict[str, KernelLoader]) -> None:
    shape = SHAPES[14]
    loader = loaders[ARCHES[0]]
    kernel = load(loader, shape)
    case = Case(shape, 23, 0)
    for num_threads in (1, 2, 3):
        load_thread_pool(loader).resize(num_threads)
        together = case.run(kernel)
        keys, values = case.k.clone(), case.v.clone()
        for token in range(case.num_tokens):
            one = Case(shape, 23, 0)
            one.qkv, one.positions = one.qkv[token : token + 1], one.positions[token : token + 1]
            one.slots = one.slots[token : token + 1]
            assert torch.equal(one.run(kernel)[0], together[token])
            place = (int(one.slots) // shape.block_size, int(one.slots) % shape.block_size)
            assert torch.equal(one.k[place], keys[place])
            assert torch.equal(one.v[place], values[place])
    load_thread_pool(loader).resize(1)
