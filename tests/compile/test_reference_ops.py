"""Every reference op against its definition, written anew in NumPy and float64: loops over tokens, heads and slots.

Shapes are drawn from printed seeds. Where an op promises fp32 inside and the input's dtype outside, its answer may
differ from the exact one by that one rounding and no more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from fastgen.compile.ops.activation.reference import ACTIVATIONS, activate, activate_and_multiply
from fastgen.compile.ops.attention.reference import paged_attention
from fastgen.compile.ops.embedding.reference import embed, resolve_token_ids
from fastgen.compile.ops.kv_write.reference import write_kv
from fastgen.compile.ops.linear.reference import linear, logits
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.rotary.reference import apply_rotary

Array = npt.NDArray[Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Largest relative error of rounding to the dtype; fp32's own is part of the slack.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNUSED = 2**30  # a block id that no cache has


def exact(x: Tensor) -> Array:
    return x.double().numpy()


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape) * spread).to(dtype)


def assert_rounded_once(found: Tensor, expected: Array, *, slack: float = 2e-6) -> None:
    """``found`` is ``expected`` up to one rounding to its dtype; ``slack`` is for the arithmetic in fp32 before it."""
    assert found.shape == expected.shape
    excess = np.abs(exact(found) - expected) - ROUNDING[found.dtype] * np.abs(expected)
    smallest = 2.0**-25 if found.dtype == torch.float16 else 0.0  # half of its smallest subnormal number
    allowed = slack * max(1.0, float(np.abs(expected).max(initial=0.0))) + smallest
    assert not np.isnan(excess).any()
    assert excess.max(initial=0.0) <= allowed, f"off by {excess.max():.2e} beyond the rounding, allowed {allowed:.2e}"


# Attention


class AttentionCase:
    """A mixed batch: chunks, decodes and empty rows, in blocks scattered over a cache whose other slots hold NaN."""

    def __init__(self, seed: int, dtype: torch.dtype):
        rng = self.rng = np.random.default_rng(seed)
        self.num_seqs, self.block_size = int(rng.integers(1, 6)), int(rng.choice([1, 2, 3, 4, 16]))
        self.num_kv_heads, self.head_dim = int(rng.integers(1, 4)), int(rng.choice([1, 3, 8, 20]))
        self.num_heads = self.num_kv_heads * int(rng.integers(1, 5))
        self.scale = float(rng.choice([0.1, 1.0, 3.0]))
        self.window = [None, 1, 2, 5, 16, 100][int(rng.integers(6))]
        num_new = rng.choice([0, 1, 1, 2, 3, 7, 20], size=self.num_seqs)
        num_cached = rng.choice([0, 0, 1, 4, 15, 16, 33], size=self.num_seqs)
        self.seq_lens = np.where(num_new > 0, num_cached + num_new, 0)
        self.starts = np.concatenate([[0], np.cumsum(num_new)])
        self.num_padding = int(rng.choice([0, 0, 1, 5]))

        num_blocks = -(-self.seq_lens // self.block_size)
        max_blocks = max(int(num_blocks.max()), 1) + int(rng.integers(2))
        free = list(rng.permutation(np.arange(1, 1 + num_blocks.sum())))
        self.tables = np.full((self.num_seqs, max_blocks), UNUSED)
        shape = (1 + int(num_blocks.sum()), self.block_size, self.num_kv_heads, self.head_dim)
        self.k_cache = torch.full(shape, math.nan, dtype=dtype)
        self.v_cache = torch.full(shape, math.nan, dtype=dtype)
        for row, length in enumerate(self.seq_lens):
            for index in range(num_blocks[row]):
                self.tables[row, index] = free.pop()
            for position in range(length):
                slot = self.slot(row, position)
                self.k_cache[slot] = normal(rng, self.num_kv_heads, self.head_dim, dtype=dtype)
                self.v_cache[slot] = normal(rng, self.num_kv_heads, self.head_dim, dtype=dtype)
        num_tokens = int(self.starts[-1]) + self.num_padding
        self.q = normal(rng, num_tokens, self.num_heads, self.head_dim, dtype=dtype, spread=float(rng.choice([1, 40])))

    def slot(self, row: int, position: int) -> tuple[int, int]:
        return int(self.tables[row, position // self.block_size]), position % self.block_size

    def run(self) -> Tensor:
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            torch.from_numpy(self.tables).int(),
            torch.from_numpy(self.starts).int(),
            torch.from_numpy(self.seq_lens).int(),
            scale=self.scale,
            sliding_window=self.window,
        )

    def expected(self) -> Array:
        out = np.zeros(self.q.shape)
        for row, length in enumerate(self.seq_lens):
            start, end = self.starts[row : row + 2]
            for token in range(start, end):
                position = length - (end - token)
                first = 0 if self.window is None else max(0, position + 1 - self.window)
                slots = [self.slot(row, seen) for seen in range(first, position + 1)]
                for head in range(self.num_heads):
                    kv_head = head // (self.num_heads // self.num_kv_heads)
                    keys = np.stack([exact(self.k_cache[slot][kv_head]) for slot in slots])
                    values = np.stack([exact(self.v_cache[slot][kv_head]) for slot in slots])
                    scores = keys @ exact(self.q[token, head]) * self.scale
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ values / weights.sum()
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_drawn_batches(dtype: torch.dtype) -> None:
    for seed in range(40):
        case = AttentionCase(seed, dtype)
        print(f"seed {seed}: {vars(case)}")
        found = case.run()
        assert found.dtype == dtype
        # scores of several hundred are rounded to 2e-5 or so in fp32, and weights are off by as much
        assert_rounded_once(found, case.expected(), slack=3e-4)
        assert (found[case.starts[-1] :] == 0).all()


def test_attention_reads_nothing_before_the_window_and_changes_no_input() -> None:
    """Blocks that slid out of the window may have been given away: their table entries mean nothing any more."""
    block_size, window, length = 4, 5, 30
    rng = np.random.default_rng(0)
    cache = normal(rng, 9, block_size, 2, 8)
    q = normal(rng, 3, 4, 8)
    table = torch.tensor([[8, 7, 6, 5, 4, 3, 2, 1]], dtype=torch.int32)
    where = (torch.tensor([0, 3], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))
    whole = paged_attention(q, cache, cache, table, *where, scale=0.3, sliding_window=window)
    first_seen = length - 3 + 1 - window
    table[:, : first_seen // block_size] = UNUSED
    before = [x.clone() for x in (q, cache, table, *where)]
    again = paged_attention(q, cache, cache, table, *where, scale=0.3, sliding_window=window)
    assert torch.equal(again, whole)
    assert all(torch.equal(one, two) for one, two in zip(before, (q, cache, table, *where), strict=True))


def test_attention_of_nothing() -> None:
    cache = torch.zeros(1, 4, 1, 2)
    rows = torch.zeros(3, dtype=torch.int32)
    out = paged_attention(
        torch.ones(2, 1, 2), cache, cache, rows.view(3, 1), torch.zeros(4).int(), rows, scale=1.0, sliding_window=None
    )
    assert torch.equal(out, torch.zeros(2, 1, 2))


# Keys and values


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_write_kv_fills_its_slots_and_no_others(cache_dtype: torch.dtype) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        num_blocks, block_size, num_tokens = int(rng.integers(2, 9)), int(rng.integers(1, 6)), int(rng.integers(0, 6))
        caches = [normal(rng, num_blocks, block_size, 2, 3, dtype=cache_dtype) for _ in range(2)]
        places = np.arange(block_size, num_blocks * block_size)
        slots = rng.permutation(places)[: min(num_tokens, len(places))]
        new = [normal(rng, len(slots), 2, 3) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        for cache, rows in zip(expected, new, strict=True):
            for slot, row in zip(slots, rows, strict=True):
                cache[slot // block_size, slot % block_size] = row.to(cache_dtype)
        write_kv(*new, *caches, torch.from_numpy(slots))
        assert all(torch.equal(one, two) for one, two in zip(caches, expected, strict=True)), f"seed {seed}"


# Embedding


def test_token_ids_come_from_the_host_or_from_what_was_sampled() -> None:
    input_ids = torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32)
    token_source = torch.tensor([-1, 0, 2, -1, 1], dtype=torch.int32)
    sampled_ids = torch.tensor([90, 91, 92], dtype=torch.int32)
    found = resolve_token_ids(input_ids, token_source, sampled_ids)
    assert found.tolist() == [10, 90, 92, 13, 91]
    assert found.dtype == torch.int32
    weight = torch.arange(200.0).view(100, 2)
    assert embed(found, weight).tolist() == [[2.0 * i, 2.0 * i + 1] for i in found.tolist()]
    assert embed(found[:0], weight).shape == (0, 2)


# Norms


def rounded_both_ways(x: Array, dtype: torch.dtype) -> list[Tensor]:
    """``x`` rounded to ``dtype``: next to a tie fp32, whose own roundings come before, may tip to either side."""
    return [torch.from_numpy(x * (1 + nudge)).to(dtype) for nudge in (-(2.0**-20), 2.0**-20)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_rounds_before_it_weights(dtype: torch.dtype, weighted: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        size, eps = int(rng.choice([1, 2, 7, 64])), float(rng.choice([1e-6, 1e-3, 0.5]))
        x = normal(rng, int(rng.choice([0, 1, 9])), size, dtype=dtype, spread=float(rng.choice([1e-3, 1.0, 300.0])))
        weight = normal(rng, size, dtype=dtype) if weighted else None
        wide = exact(x)
        normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
        factor = 1.0 if weight is None else exact(weight)
        found = rms_norm(x, weight, eps)
        assert found.dtype == dtype
        if dtype == torch.float32:
            np.testing.assert_allclose(exact(found), normed * factor, rtol=1e-5, atol=1e-6)
        else:
            allowed = [
                each
                for once in rounded_both_ways(normed, dtype)
                for each in rounded_both_ways(exact(once) * factor, dtype)
            ]
            assert torch.stack([found == each for each in allowed]).any(0).all(), f"seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weighted", "biased"), [(True, True), (True, False), (False, False)])
def test_layer_norm(dtype: torch.dtype, weighted: bool, biased: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        size, eps = int(rng.choice([1, 2, 7, 64])), float(rng.choice([1e-5, 1e-3, 0.5]))
        x = normal(rng, int(rng.choice([0, 1, 9])), size, dtype=dtype) + float(rng.choice([0, 20]))
        weight = normal(rng, size, dtype=dtype) if weighted else None
        bias = normal(rng, size, dtype=dtype) if biased else None
        wide = exact(x)
        spread = np.sqrt(wide.var(-1, keepdims=True) + eps)
        expected = (wide - wide.mean(-1, keepdims=True)) / spread
        expected = expected * (1.0 if weight is None else exact(weight)) + (0.0 if bias is None else exact(bias))
        found = layer_norm(x, weight, bias, eps)
        assert found.dtype == dtype
        # fp32 may round x / spread before the mean is taken off it
        assert_rounded_once(found, expected, slack=2e-6 + 2.0**-21 * float(np.abs(wide / spread).max(initial=0.0)))


@pytest.mark.parametrize("norm", [lambda x: rms_norm(x, None, 1e-6), lambda x: layer_norm(x, None, None, 1e-6)])
def test_a_row_without_spread_has_norm_zero(norm: Any) -> None:
    assert norm(torch.zeros(2, 5)).tolist() == [[0.0] * 5] * 2


# Rotary


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_turns_pairs_of_the_first_features(dtype: torch.dtype) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        half, rest, num_heads = int(rng.choice([1, 3, 8])), int(rng.choice([0, 1, 4])), int(rng.integers(1, 4))
        x = normal(rng, int(rng.choice([0, 1, 7])), num_heads, 2 * half + rest, dtype=dtype)
        table = normal(rng, 50, 2 * half)
        positions = torch.from_numpy(rng.integers(0, 50, size=len(x))).int()
        turn = exact(table)[positions.numpy()][:, None]
        pairs = exact(x)[..., :half] + 1j * exact(x)[..., half : 2 * half]
        turned = pairs * (turn[..., :half] + 1j * turn[..., half:])
        found = apply_rotary(x, positions, table)
        assert found.dtype == dtype
        assert_rounded_once(found[..., : 2 * half], np.concatenate([turned.real, turned.imag], axis=-1))
        assert torch.equal(found[..., 2 * half :], x[..., 2 * half :]), f"seed {seed}"


# Linear layers and logits


@pytest.mark.parametrize("biased", [True, False])
def test_linear(biased: bool) -> None:
    for num_tokens in (0, 1, 5):
        rng = np.random.default_rng(num_tokens)
        x, weight, bias = normal(rng, num_tokens, 7), normal(rng, 3, 7), normal(rng, 3) if biased else None
        expected = exact(x) @ exact(weight).T + (0.0 if bias is None else exact(bias))
        assert_rounded_once(linear(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, 8191, 8192, 8193, 2 * 8192 + 5])
def test_logits_are_never_rounded_to_16_bits(dtype: torch.dtype, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    hidden, weight = normal(rng, 3, 24, dtype=dtype), normal(rng, vocab_size, 24, dtype=dtype)
    found = logits(hidden, weight)
    assert found.dtype == torch.float32
    assert_rounded_once(found, exact(hidden) @ exact(weight).T)
    assert logits(hidden[:0], weight).shape == (0, vocab_size)


# Activations


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_an_activation_is_what_transformers_means_by_its_name(kind: str) -> None:
    x = torch.linspace(-9, 9, 1001).view(7, 143)
    expected = exact(ACT2FN[kind](x.double()))
    assert_rounded_once(activate(x, kind), expected)
    up = torch.linspace(-2, 3, 1001).view(7, 143)
    assert_rounded_once(activate_and_multiply(torch.cat([x, up], dim=-1), kind), expected * exact(up))
