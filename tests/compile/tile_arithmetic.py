"""The arithmetic of a matrix unit's tiles in numpy, after Intel's definition. Nothing of it is shared with kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint16]
_SMALLEST = 2.0**-126


def widened(bf16: Codes) -> Floats:
    """Returns the numbers of bf16's bits; denormal ones are zero."""
    return _flushed((bf16.astype(np.uint32) << 16).view(np.float32))


def rounded(x: Floats) -> Codes:
    """Returns the bits of the nearest numbers in bf16, ties to even; denormal ones are zero."""
    bits = _flushed(x).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)


def dot_bf16(sums: Floats, a: Codes, b: Codes) -> Floats:
    """Returns ``sums [M, N] + a [M, K] b [K, N]`` for one tile: products of even and of odd ``k`` are two chains of
    fused additions from zero, and their sum is added."""
    chains = [np.zeros_like(sums), np.zeros_like(sums)]
    x, w = widened(a), widened(b)
    for k in range(a.shape[1]):
        chains[k % 2] = _fused(x[:, k, None], w[None, k], chains[k % 2])
    with np.errstate(all="ignore"):
        return _flushed(_flushed(sums) + _flushed(chains[0] + chains[1]))


def cut(x: Floats) -> list[Codes]:
    """Returns the bits of three numbers in bf16 whose sum is ``x``: of its leading 8 bits, the next 8, the last 8."""
    parts, rest = [], x
    for _ in range(3):
        codes = (rest.view(np.uint32) >> 16).astype(np.uint16)
        parts.append(codes)
        rest = rest - (codes.astype(np.uint32) << 16).view(np.float32)
    assert not rest.any()
    return parts


def linear(parts: list[Codes], weight: Floats, bias: Floats) -> Floats:
    """Returns ``x [T, in] weight [out, in]ᵀ + bias`` as a matrix unit computes it: ``x`` is the sum of ``parts``, and
    ``weight`` is rounded to bf16."""
    sums, missing = np.zeros((len(parts[0]), len(weight)), np.float32), -weight.shape[1] % 32
    padded, codes = ([np.pad(each, ((0, 0), (0, missing))) for each in codes] for codes in (parts, [rounded(weight)]))
    for k in range(0, codes[0].shape[1], 32):
        for part in padded:
            sums = dot_bf16(sums, part[:, k : k + 32], codes[0][:, k : k + 32].T)
    return _flushed(sums + _flushed(bias))


def dot_bytes(sums: NDArray[np.int32], a: NDArray[np.int8], b: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Returns ``sums [M, N] + a [M, K] b [K, N]``, modulo 2 to the 32."""
    return (sums.astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)


def _flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.float32(0), x), x).astype(np.float32)


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Returns ``a * b + c`` rounded once to 24 bits of any exponent, then zero where it is denormal."""
    with np.errstate(all="ignore"):
        product, addend = a.astype(np.float64) * b.astype(np.float64), np.broadcast_to(c, np.broadcast(a, b).shape)
        total = product + addend.astype(np.float64)
        # The sum's error (Knuth). An inexact sum is made odd, so that rounding it once more is rounding once (Boldo and
        # Melquiond, 2008).
        back = total - product
        error = (product - (total - back)) + (addend - back)
        is_even = total.view(np.int64) & 1 == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        total = np.where(np.isfinite(total) & (error != 0) & is_even, np.nextafter(total, towards), total)
        mantissa, exponent = np.frexp(total)
        nearest = np.ldexp(np.rint(mantissa * 2.0**24), exponent - 24)
        return _flushed(np.where(np.abs(nearest) < _SMALLEST, np.copysign(0.0, nearest), nearest).astype(np.float32))
