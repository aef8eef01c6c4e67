"""Paged attention against brute force in NumPy: every feature, ragged batches with empty rows and padding."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fastgen.compile.ops.attention.reference import Alibi, alibi_bias, paged_attention
from fastgen.compile.ops.kv_write.reference import write_kv
from fastgen.compile.ops.softcap.reference import soft_cap

Array = npt.NDArray[Any]


def brute_force(q: Array, keys: Array, values: Array, num_cached: int, features: dict[str, Any]) -> Array:
    """One sequence, one query, one head at a time, in fp64: ``q [n, N, D]``, ``keys, values [s, K, D or Dv]``."""
    group_size = q.shape[1] // keys.shape[1]
    out = np.zeros((len(q), q.shape[1], values.shape[2]))
    for i, head in np.ndindex(q.shape[:2]):
        position = num_cached + i
        first = max(0, position - features["window"] + 1) if features["window"] else 0
        scores = []
        for key_position in range(first, position + 1):
            score = float(q[i, head] @ keys[key_position, head // group_size])
            bias = features["slopes"][head] * key_position if features["slopes"] is not None else 0.0
            score = (score + bias) * features["scale"] if features["scaled"] else score * features["scale"] + bias
            scores.append(features["cap"] * math.tanh(score / features["cap"]) if features["cap"] else score)
        weights = np.exp(np.array(scores) - max(scores))
        out[i, head] = weights / weights.sum() @ values[first : position + 1, head // group_size]
    return out


def draw_case(rng: Random) -> tuple[list[tuple[int, int]], dict[str, int], dict[str, Any]]:
    """Cached and new tokens of each row, sizes, features."""
    rows = [(rng.choice((0, 0, 1, 5, 11)), rng.choice((0, 1, 1, 4, 9))) for _ in range(rng.randint(1, 5))]
    num_kv_heads = rng.randint(1, 3)
    sizes = {
        "heads": num_kv_heads * rng.randint(1, 4),
        "kv_heads": num_kv_heads,
        "dim": rng.choice((1, 4, 7)),
        "v_dim": rng.choice((1, 4, 9)),
        "block": rng.choice((1, 3, 4, 16)),
        "padding": rng.choice((0, 3)),
    }
    features = {
        "scale": rng.choice((0.3, 1.0)),
        "window": rng.choice((None, 1, 2, 6, 100)),
        "slopes": [rng.uniform(0.01, 0.5) for _ in range(sizes["heads"])] if rng.random() < 0.5 else None,
        "scaled": rng.random() < 0.5,
        "cap": rng.choice((None, 0.7, 20.0)),
    }
    return rows, sizes, features


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed: int) -> None:
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    rows, sizes, features = draw_case(rng)
    lengths = [cached + new if new else 0 for cached, new in rows]
    num_blocks = [-(-length // sizes["block"]) for length in lengths]
    free = list(range(1, sum(num_blocks) + 1))
    rng.shuffle(free)
    tables = torch.full((len(rows), max([1, *num_blocks])), 10**6)  # an entry that must not be read
    k_cache = torch.full((sum(num_blocks) + 1, sizes["block"], sizes["kv_heads"], sizes["dim"]), float("nan"))
    v_cache = torch.full((*k_cache.shape[:3], sizes["v_dim"]), float("nan"))
    keys, values = [], []
    for row, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(num_blocks[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        keys.append(torch.randn(length, sizes["kv_heads"], sizes["dim"], generator=generator))
        values.append(torch.randn(length, sizes["kv_heads"], sizes["v_dim"], generator=generator))
        slots = torch.tensor(
            [blocks[i // sizes["block"]] * sizes["block"] + i % sizes["block"] for i in range(length)],
            dtype=torch.int64,
        )
        write_kv(keys[-1], values[-1], k_cache, v_cache, slots)
        if features["window"]:  # of what no row sees, the blocks may be another's by now
            tables[row, : max(0, rows[row][0] - features["window"] + 1) // sizes["block"]] = 10**6
    new = [row[1] for row in rows]
    starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    q = torch.randn(sum(new) + sizes["padding"], sizes["heads"], sizes["dim"], generator=generator) * 2
    q[sum(new) :] = float("nan")

    slopes = features["slopes"]
    out = paged_attention(
        q,
        k_cache,
        v_cache,
        tables,
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        scale=features["scale"],
        sliding_window=features["window"],
        alibi=None if slopes is None else Alibi(torch.tensor(slopes), features["scaled"]),
        softcap=features["cap"],
    )
    assert out.shape == (len(q), sizes["heads"], sizes["v_dim"])
    assert (out[sum(new) :] == 0).all()
    for row, (cached, num_new) in enumerate(rows):
        if num_new:
            mine = out[starts[row] : starts[row + 1]].numpy()
            expected = brute_force(
                q[starts[row] : starts[row + 1]].double().numpy(),
                keys[row].double().numpy(),
                values[row].double().numpy(),
                cached,
                features,
            )
            np.testing.assert_allclose(mine, expected, atol=2e-5, err_msg=f"row {row} of {rows}, {sizes}, {features}")


def test_values_may_be_a_view_of_the_keys() -> None:
    """As in latent attention: the value is the first features of the key."""
    cache = torch.randn(3, 4, 1, 6)
    arguments = (torch.tensor([[2, 1]]), torch.tensor([0, 2]), torch.tensor([7]))
    q = torch.randn(2, 3, 6)
    from_view = paged_attention(q, cache, cache[..., :4], *arguments, scale=0.5, sliding_window=None)
    from_copy = paged_attention(q, cache, cache[..., :4].clone(), *arguments, scale=0.5, sliding_window=None)
    assert torch.equal(from_view, from_copy)


def test_bias_is_rounded_where_the_slopes_are() -> None:
    slopes, positions = torch.tensor([0.7, 0.0625, 0.003]), torch.arange(1000, dtype=torch.int32)
    exact = slopes[:, None].double() * positions.double()
    assert (alibi_bias(slopes, positions) - exact).abs().max() < 1e-4

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    bias = alibi_bias(slopes.bfloat16(), positions)
    assert bias.dtype == torch.float32
    assert torch.equal(bias.double(), rounded(rounded(slopes)[:, None] * rounded(positions)))


def test_softcap_bounds_and_keeps_small_values() -> None:
    x = torch.tensor([-1000.0, -1.0, 0.0, 1e-3, 1.0, 1000.0])
    capped = soft_cap(x, 30.0)
    np.testing.assert_allclose(capped, 30 * np.tanh(x.double().numpy() / 30), rtol=1e-6)
    assert capped.abs().max() <= 30
