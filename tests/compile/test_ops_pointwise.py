"""Norms, rotation and logits against formulas in NumPy."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from fastgen.compile.ops.linear.reference import logits
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.rotary.reference import apply_rotary


@pytest.mark.parametrize("seed", range(30))
def test_norms(seed: int) -> None:
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    heads, size, eps = rng.choice((None, 1, 3)), rng.choice((1, 2, 9)), rng.choice((1e-6, 0.1))
    offset = rng.choice((0.0, 1.0))
    shape = (rng.choice((0, 1, 5)), *([heads] if heads else []), size)
    weight_shape = (heads, size) if heads and rng.random() < 0.5 else (size,)
    x = torch.randn(shape, generator=generator) * 3
    weight = torch.randn(weight_shape, generator=generator) if rng.random() < 0.8 else None
    bias = torch.randn(weight_shape, generator=generator) if weight is not None and rng.random() < 0.5 else None
    wide = x.double().numpy()
    factor = 1.0 if weight is None else weight.double().numpy() + offset
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * factor
    np.testing.assert_allclose(rms_norm(x, weight, eps, offset), rms, atol=2e-5)
    centred = wide - wide.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * factor
    layer = layer if bias is None else layer + bias.double().numpy()
    np.testing.assert_allclose(layer_norm(x, weight, bias, eps, offset), layer, atol=2e-5)


def test_an_offset_is_not_rounded_away_in_16_bits() -> None:
    """1 + 1/1024 has no bf16; the weight alone has."""
    x = torch.full((1, 4), 1024.0, dtype=torch.bfloat16)
    weight = torch.full((4,), 1 / 64 - 1 / 8192, dtype=torch.bfloat16)
    exact = 1 + weight.double()
    found = rms_norm(x, weight, 0.0, offset=1.0)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[0], exact.bfloat16())
    assert torch.equal(layer_norm(x, weight, exact.bfloat16(), 1e-5, offset=1.0)[0], exact.bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "rotated"), [(8, 8), (8, 4), (6, 2), (7, 4)])
def test_rotary_turns_pairs_by_their_angle(size: int, rotated: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    angles = torch.rand(11, rotated // 2, generator=generator) * 6
    x = torch.randn(5, 3, size, generator=generator)
    positions = torch.tensor([0, 3, 10, 10, 1], dtype=torch.int32)
    found = apply_rotary(x, positions, torch.cat([angles.cos(), angles.sin()], -1), interleaved=interleaved)
    expected = x.double().numpy().copy()
    for token, pair in np.ndindex(5, rotated // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotated // 2)
        turned = (expected[token, :, first] + 1j * expected[token, :, second]) * np.exp(
            1j * angles[positions[token], pair].item()
        )
        expected[token, :, first], expected[token, :, second] = turned.real, turned.imag
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert torch.equal(found[..., rotated:], x[..., rotated:])
    assert (
        apply_rotary(x.bfloat16(), positions, torch.zeros(11, rotated), interleaved=interleaved).dtype == torch.bfloat16
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_fp32(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 5).to(dtype), torch.randn(9000, 5).to(dtype), torch.randn(9000).to(dtype)
    exact = x.double().numpy() @ weight.double().numpy().T
    for added in (None, bias):
        found = logits(x, weight, added)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, exact if added is None else exact + added.double().numpy(), atol=1e-5)
