"""Latent vectors, their key and queries in C++ against norm, rotation and KV write of the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.attention.cpp import empty_cache
from fastgen.compile.ops.latent.cpp import LatentKernel, latent_spec
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.rotary.reference import apply_rotary
from fastgen.compile.spec import torch_dtype
from tests.compile.arches import WIDTHS

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
MAX_POSITIONS = 50
UNITS = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}
NORMS = (
    HeadNorm("rms", 1e-6),
    HeadNorm("rms", 0.05, offset=1.0),
    HeadNorm("layer", 1e-5, bias=True),
    HeadNorm("layer", 0.1, weight=False),
)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    nope_dim: int
    rope_dim: int
    kv_rank: int
    block_size: int
    cache_dtype: str
    rotary_dim: int
    interleaved: bool
    norm: HeadNorm


def drawn_shape(seed: int) -> Shape:
    rng = random.Random(seed)
    rope = rng.choice((2, 6, 8, 34))
    return Shape(
        rng.randint(1, 5),
        rng.choice((1, 5, 16, 33)),
        rope,
        rng.choice((1, 15, 16, 32, 70)),
        rng.choice((1, 4, 7, 16)),
        ("fp32", "bf16", "fp16")[seed % 3],
        rng.choice((rope, 2)),
        seed % 2 == 0,
        NORMS[seed % len(NORMS)],
    )


CASES = [
    pytest.param(arch, seed, marks=[] if seed < (4 if arch == ARCHES[0] else arch in WIDTHS) else pytest.mark.slow)
    for arch in ARCHES
    for seed in range(12)
]


def load(arch: str, shape: Shape) -> LatentKernel:
    loader = KernelLoader(CppBuilder(arch))
    load_thread_pool(loader)
    return LatentKernel(loader.load(latent_spec(arch, **vars(shape))))


class Case:
    """``num_tokens`` tokens and where they go; the ``first`` to ``end`` of them alone are run."""

    def __init__(self, shape: Shape, num_tokens: int, first: int = 0, end: int | None = None):
        generator, rows = torch.Generator().manual_seed(num_tokens), slice(first, end)
        self.shape, rope, width = shape, shape.rope_dim, shape.kv_rank + shape.rope_dim
        self.kv = torch.randn(num_tokens, width, generator=generator)[rows] * 3
        self.q = torch.randn(num_tokens, shape.num_heads, shape.nope_dim + rope, generator=generator)[rows]
        self.positions = torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator).int()[rows]
        num_blocks = -(-num_tokens // shape.block_size) + 2
        self.slots = torch.randperm(num_blocks * shape.block_size, generator=generator)[:num_tokens][rows]
        dtype = torch_dtype(shape.cache_dtype)
        self.cache, _ = empty_cache(num_blocks, shape.block_size, 1, width, shape.kv_rank, dtype=dtype)
        self.cache.fill_(7)
        self.cos_sin = torch.randn(MAX_POSITIONS, shape.rotary_dim, generator=generator)
        names = [argument.name for argument in shape.norm.arguments("kv", "fp32")]
        self.norm = {name: torch.randn(shape.kv_rank, generator=generator) for name in names}
        self.mapped = torch.full((len(self.q), shape.num_heads, width), 7.0)

    def run(self, kernel: LatentKernel) -> Case:
        kernel(
            *(self.kv.clone(), self.q, self.mapped, self.positions, self.cache, self.slots),
            cos_sin=self.cos_sin,
            **self.norm,
        )
        return self

    def cached(self) -> torch.Tensor:
        return self.cache[self.slots // self.shape.block_size, self.slots % self.shape.block_size, 0].float()


@pytest.mark.parametrize(("arch", "seed"), CASES)
def test_drawn_shapes(arch: str, seed: int) -> None:
    shape = drawn_shape(seed)
    kernel, norm, rank = load(arch, shape), shape.norm, shape.kv_rank
    for num_tokens in (0, 1, 2, 5, 83):
        case = Case(shape, num_tokens).run(kernel)
        weight, bias = case.norm.get("kv_norm_weight"), case.norm.get("kv_norm_bias")
        latent = case.kv[:, :rank]
        if norm.kind == "rms":
            latent = rms_norm(latent, weight, norm.eps, norm.offset)
        else:
            latent = layer_norm(latent, weight, bias, norm.eps, norm.offset)

        def rotate(x: torch.Tensor, case: Case = case) -> torch.Tensor:
            return apply_rotary(x, case.positions, case.cos_sin, interleaved=shape.interleaved)

        expected = torch.cat([latent, rotate(case.kv[:, None, rank:])[:, 0]], dim=1)
        unit = UNITS[shape.cache_dtype]  # one rounding may tip over
        torch.testing.assert_close(case.cached(), expected, rtol=unit + 1e-5, atol=1e-5)
        torch.testing.assert_close(case.mapped[..., rank:], rotate(case.q[..., shape.nope_dim :]), rtol=1e-5, atol=1e-5)
        assert (case.mapped[..., :rank] == 7).all()
        case.cache[case.slots // shape.block_size, case.slots % shape.block_size] = 7
        assert (case.cache == 7).all()


def test_a_token_gets_the_same_bits_in_any_batch() -> None:
    shape = drawn_shape(1)
    kernel, pool = load(ARCHES[0], shape), load_thread_pool(KernelLoader(CppBuilder(ARCHES[0])))
    before = pool.num_threads
    for num_threads in (1, 2, 3):
        pool.resize(num_threads)
        together = Case(shape, 23).run(kernel)
        for token in range(23):
            one = Case(shape, 23, token, token + 1).run(kernel)
            assert torch.equal(one.mapped[0], together.mapped[token])
            assert torch.equal(one.cached()[0], together.cached()[token])
    pool.resize(before)
