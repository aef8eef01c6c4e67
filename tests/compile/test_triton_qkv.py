"""The Triton kernels between projections and attention: interpreted, against norm, rotary and KV write one by one.

What a kernel must not read or write is NaN, and must still be NaN afterwards.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.kv_write.reference import write, write_kv
from fastgen.compile.ops.latent.triton import LatentKernel, latent_spec
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.ops.rotary.reference import apply_rotary
from fastgen.compile.spec import KernelSpec, torch_dtype

BLOCK_SIZE = 4
RMS = HeadNorm("rms", 1e-6)
# 16 bits: rounded up to four times; the interpreter cuts bits off where hardware rounds to bf16.
TOLERANCE = {"fp32": 1e-5, "fp16": 2**-8, "bf16": 2**-4}
FEATURES: dict[str, dict[str, Any]] = {
    "rms": {"q_norm": RMS, "k_norm": RMS},
    "layer with bias": {"q_norm": HeadNorm("layer", 1e-5, bias=True), "k_norm": HeadNorm("layer", 1e-5, bias=True)},
    "rms over all": {name: HeadNorm("rms", 1e-6, over_all=True) for name in ("q_norm", "k_norm")},
    "layer over all": {name: HeadNorm("layer", 0.1, over_all=True, bias=True) for name in ("q_norm", "k_norm")},
    "a weight for each head": {
        name: HeadNorm("layer", 1e-5, per_head=True, bias=True) for name in ("q_norm", "k_norm")
    },
    "offset": {name: HeadNorm("rms", 1e-6, offset=1.0) for name in ("q_norm", "k_norm")},
    "layer with offset": {name: HeadNorm("layer", 1e-6, offset=1.0) for name in ("q_norm", "k_norm")},
    "no weight": {name: HeadNorm("rms", 1e-6, weight=False) for name in ("q_norm", "k_norm")},
    "queries alone": {"q_norm": RMS, "k_norm": None},
    "keys alone": {"q_norm": None, "k_norm": HeadNorm("layer", 1e-5)},
    "rotary": {"rotary_dim": 16},
    "partial rotary": {"rotary_dim": 6},
    "interleaved": {"rotary_dim": 16, "interleaved": True},
    "partial interleaved": {"rotary_dim": 6, "interleaved": True},
    "queries elsewhere": {"in_place": False},
    "padded head": {"head_dim": 20},
    "odd head": {"head_dim": 17},
    "odd numbers of heads": {"num_heads": 9, "num_kv_heads": 3},
    "one KV head": {"num_heads": 5, "num_kv_heads": 1},
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
}


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


def fields_of(*names: str, **changes: Any) -> dict[str, Any]:
    fields = {"dtype": "fp32", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return fields | {key: value for name in names for key, value in FEATURES[name].items()} | changes


def compatible_pairs() -> Iterator[tuple[str, str]]:
    for one, other in itertools.combinations(FEATURES, 2):
        if not FEATURES[one].keys() & FEATURES[other].keys():
            yield one, other


class Draw:
    """Numbers of one seed."""

    def __init__(self, seed: int, dtype: str):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), torch_dtype(dtype)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def slots(self, num_tokens: int, num_padding: int) -> tuple[Tensor, int]:
        """Slots of ``num_tokens``, of which the last are padding, and the number of blocks there are.

        Rows of padding write to the first blocks. Here each has a slot of its own: where some share one, any may be the
        last.
        """
        first, num_used = max(1, -(-num_padding // BLOCK_SIZE)), 1 + num_tokens // BLOCK_SIZE
        order = torch.randperm(num_used * BLOCK_SIZE, generator=self.generator)
        slots = first * BLOCK_SIZE + order[:num_tokens]
        slots[num_tokens - num_padding :] = torch.arange(num_padding)
        return slots, first + num_used

    def rotary(self, num_tokens: int, size: int) -> tuple[Tensor, Tensor]:
        """Positions, and a table of cosines and sines that no rotation has, so that each number counts."""
        positions = torch.randint(0, 50, (num_tokens,), generator=self.generator).int()
        return positions, torch.randn(50, size, generator=self.generator)


def weights_of(norm: HeadNorm | None, prefix: str, heads: int, size: int, draw: Draw) -> dict[str, Tensor]:
    if norm is None:
        return {}
    shape = (heads * size,) if norm.over_all else (heads, size) if norm.per_head else (size,)
    given = {"weight": draw.normal(*shape) if norm.weight else None, "bias": draw.normal(*shape) if norm.bias else None}
    return {f"{prefix}_norm_{name}": value for name, value in given.items() if value is not None}


def normed(x: Tensor, norm: HeadNorm | None, prefix: str, given: dict[str, Tensor]) -> Tensor:
    if norm is None:
        return x
    weight, bias = given.get(f"{prefix}_norm_weight"), given.get(f"{prefix}_norm_bias")
    rows = x.flatten(1) if norm.over_all else x
    if norm.kind == "rms":
        return rms_norm(rows, weight, norm.eps, norm.offset).view_as(x)
    return layer_norm(rows, weight, bias, norm.eps, norm.offset).view_as(x)


def check(found: Tensor, want: Tensor, dtype: str, where: object) -> None:
    """Equal up to the tolerance relative to the largest values that there are, NaN where NaN is."""
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(
        found, want, rtol=allowed, atol=allowed, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def check_qkv(
    loader: KernelLoader, fields: dict[str, Any], num_tokens: int, num_padding: int = 0, seed: int = 0
) -> None:
    spec = qkv_spec(**fields)
    heads, kv_heads, size = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    draw = Draw(seed, fields["dtype"])
    slots, num_blocks = draw.slots(num_tokens, num_padding)
    qkv = torch.full((num_tokens + 1, (heads + 2 * kv_heads) * size), torch.nan, dtype=draw.dtype)
    qkv[:-1] = draw.normal(num_tokens, (heads + 2 * kv_heads) * size)
    given, norms = {}, {"q": fields.get("q_norm"), "k": fields.get("k_norm")}
    positions = torch.zeros(num_tokens, dtype=torch.int32)
    if rotary_dim := fields.get("rotary_dim"):
        positions, given["cos_sin"] = draw.rotary(num_tokens, rotary_dim)
    given |= weights_of(norms["q"], "q", heads, size, draw) | weights_of(norms["k"], "k", kv_heads, size, draw)

    q, k, v = qkv[:-1].clone().unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], dim=1)
    q, k = normed(q, norms["q"], "q", given), normed(k, norms["k"], "k", given)
    if rotary_dim:
        interleaved = fields.get("interleaved", False)
        q, k = (apply_rotary(x, positions, given["cos_sin"], interleaved=interleaved) for x in (q, k))
    caches = [torch.full((num_blocks, BLOCK_SIZE, kv_heads, size), torch.nan, dtype=draw.dtype) for _ in range(4)]
    write_kv(k, v, caches[2], caches[3], slots)
    before, in_place = qkv.clone(), fields.get("in_place", True)
    out = torch.full((num_tokens + 1, heads, size), torch.nan, dtype=draw.dtype)
    given |= {} if in_place else {"q_out": out[:-1]}

    QkvKernel(loader.load(spec))(qkv[:-1], positions, *caches[:2], slots, **given)
    where = f"{num_tokens} tokens, seed {seed}, {fields}"
    if in_place:
        before[:-1, : heads * size] = q.flatten(1)
    else:
        check(out[:-1], q, fields["dtype"], where)
        assert out[-1].isnan().all(), where
    check(qkv, before, fields["dtype"], where)
    for found, want in zip(caches[:2], caches[2:], strict=True):
        check(found, want, fields["dtype"], where)


def test_every_feature(loader: KernelLoader) -> None:
    check_qkv(loader, fields_of(), 3)
    for name in FEATURES:
        check_qkv(loader, fields_of(name), 5, num_padding=2)


def test_feature_pairs(loader: KernelLoader) -> None:
    """A part of them, in which each feature is. The slow test has them all."""
    pairs = random.Random(1).sample(list(compatible_pairs()), 50)
    assert {name for pair in pairs for name in pair} == FEATURES.keys()
    for pair in pairs:
        check_qkv(loader, fields_of(*pair), 2)


@pytest.mark.slow
def test_every_feature_pair_and_drawn_shapes(loader: KernelLoader) -> None:
    for pair in compatible_pairs():
        check_qkv(loader, fields_of(*pair), 2)
    draw = random.Random(2)
    for seed in range(300):
        names = draw.sample(sorted(FEATURES), 4)
        kv_heads, size = draw.randint(1, 9), draw.randint(1, 70)
        changes: dict[str, Any] = {
            "num_kv_heads": kv_heads,
            "num_heads": kv_heads * draw.randint(1, 9),
            "head_dim": size,
        }
        changes["rotary_dim"] = 2 * draw.randint(0, size // 2)
        num_tokens = draw.randint(0, 4)
        check_qkv(loader, fields_of(*names, **changes), num_tokens, draw.randint(0, num_tokens), seed)


@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_numbers_of_tokens(loader: KernelLoader, num_tokens: int) -> None:
    check_qkv(loader, fields_of("rms", "rotary"), num_tokens, num_padding=num_tokens // 3)


def test_heads_in_several_tiles(loader: KernelLoader) -> None:
    fields = fields_of("rms", num_heads=39, num_kv_heads=13, head_dim=256, rotary_dim=64)
    assert qkv_spec(**fields).parameters["tiles"] == 5 + 2 + 2
    check_qkv(loader, fields, 2)
    check_qkv(loader, fields_of("rms over all", num_heads=39, num_kv_heads=13, head_dim=128), 1)
    check_qkv(loader, fields_of(num_heads=71, num_kv_heads=1, head_dim=64, rotary_dim=64), 1)  # Falcon-7B


@pytest.mark.parametrize("rotary_dim", [3, -2, 18])
def test_impossible_rotary_is_refused(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim}"):
        qkv_spec(**fields_of(rotary_dim=rotary_dim))


def test_without_anything_to_do_queries_have_no_programs(loader: KernelLoader) -> None:
    assert qkv_spec(**fields_of()).parameters["q_tiles"] == 0
    assert qkv_spec(**fields_of("queries elsewhere")).parameters["q_tiles"] == 1


# Latent attention


def check_latent(
    loader: KernelLoader, norm: HeadNorm, num_tokens: int, dtype: str, seed: int = 0, **fields: Any
) -> None:
    spec = latent_spec(dtype, norm, **fields)
    heads, latent, rotary, nope = (fields[name] for name in ("num_heads", "latent_dim", "rotary_dim", "nope_dim"))
    draw = Draw(seed, dtype)
    slots, num_blocks = draw.slots(num_tokens, num_tokens // 3)
    kv, q = draw.normal(num_tokens, latent + rotary), draw.normal(num_tokens, heads, nope + rotary)
    positions, table = draw.rotary(num_tokens, rotary)
    given = weights_of(norm, "kv", 1, latent, draw)
    cache = torch.full((num_blocks, BLOCK_SIZE, 1, latent + rotary), torch.nan, dtype=draw.dtype)
    q_latent = torch.full((num_tokens, heads, latent + rotary), torch.nan, dtype=draw.dtype)
    want_cache, want_q = cache.clone(), q_latent.clone()
    c, key = kv.unsqueeze(1).split([latent, rotary], dim=2)
    interleaved = fields.get("interleaved", False)
    key = apply_rotary(key, positions, table, interleaved=interleaved)
    write(torch.cat([normed(c, norm, "kv", given), key], dim=2), want_cache, slots)
    want_q[:, :, latent:] = apply_rotary(q[:, :, nope:], positions, table, interleaved=interleaved)

    LatentKernel(loader.load(spec))(kv, q, q_latent, positions, cache, slots, cos_sin=table, **given)
    where = f"{num_tokens} tokens, seed {seed}, {spec}"
    check(cache, want_cache, dtype, where)
    check(q_latent, want_q, dtype, where)


def test_latent_kv(loader: KernelLoader) -> None:
    draw = random.Random(3)
    norms = [
        RMS,
        HeadNorm("layer", 1e-5, bias=True),
        HeadNorm("rms", 1e-6, offset=1.0),
        HeadNorm("rms", 1e-6, weight=False),
    ]
    for seed, (norm, interleaved) in enumerate(itertools.product(norms, (False, True))):
        sizes = {"num_heads": draw.choice([1, 5, 16]), "latent_dim": draw.choice([16, 33, 512])}
        sizes |= {"rotary_dim": draw.choice([2, 6, 64]), "nope_dim": draw.choice([1, 16, 128])}
        dtype = draw.choice(["fp32", "fp16", "bf16"])
        check_latent(loader, norm, draw.choice([0, 1, 5]), dtype, seed, interleaved=interleaved, **sizes)
    check_latent(loader, RMS, 1, "fp32", num_heads=128, latent_dim=512, rotary_dim=64, nope_dim=128)  # DeepSeek


# Built for GPUs that are not here

SHIPPED: dict[str, KernelSpec] = {
    "Llama 3": qkv_spec("bf16", num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128),
    "fp32": qkv_spec("fp32", num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128, q_norm=RMS, k_norm=RMS),
    "OLMo 2": qkv_spec("bf16", num_heads=40, num_kv_heads=40, head_dim=128, rotary_dim=128, **FEATURES["rms over all"]),
    "Qwen 3": qkv_spec("fp16", num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128, q_norm=RMS, k_norm=RMS),
    "Gemma 3": qkv_spec("bf16", num_heads=16, num_kv_heads=8, head_dim=256, rotary_dim=256, **FEATURES["offset"]),
    "GLM": qkv_spec("bf16", num_heads=32, num_kv_heads=2, head_dim=128, rotary_dim=64, interleaved=True),
    "Phi": qkv_spec(
        "bf16", num_heads=32, num_kv_heads=32, head_dim=80, rotary_dim=32, **FEATURES["a weight for each head"]
    ),
    "Falcon": qkv_spec("bf16", num_heads=71, num_kv_heads=1, head_dim=64, rotary_dim=64, in_place=False),
    "OPT": qkv_spec("fp16", num_heads=32, num_kv_heads=32, head_dim=128),
    "DeepSeek": latent_spec("bf16", RMS, num_heads=128, latent_dim=512, nope_dim=128, rotary_dim=64, interleaved=True),
}


def check_build(arch: str, names: list[str], directory: Path) -> None:
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(directory), num_jobs=1)
    for name, entry in zip(names, loader.build([SHIPPED[name] for name in names]), strict=True):
        found = entry.report
        assert found["spill_bytes"] == 0, f"{name}: {found}"
        assert found["shared_bytes"] <= 16 << 10, f"{name}: {found}"


def test_built_without_spills(tmp_path: Path) -> None:
    check_build("sm_90", ["OLMo 2", "GLM"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHES)
def test_all_are_built_without_spills(arch: str, tmp_path: Path) -> None:
    check_build(arch, list(SHIPPED), tmp_path)
