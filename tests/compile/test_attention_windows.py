"""Sliding windows larger than a tile, in every attention kernel, with an edge at every place of a tile.

Such a window has tiles that all rows see completely. Kernels compute those without a mask, so which tiles they are must
be exact: one tile too many shows a key behind the window's edge.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.attention.tiling import Tiling
from fastgen.compile.ops.attention.triton import MAX_DECODE_QUERIES
from tests.compile.arches import WIDTHS
from tests.compile.attention_cases import TOLERANCE, Case, Rows, differences_of_one_subject, shape_of
from tests.compile.test_cpp_attention import ARCHES, HERE, Batch, assert_close, with_features

# Triton. Keys of a KV tile; kernels for models have 16 to 64.
KEYS = 16
# The first ends within the second tile, the second at a tile's end, the third within the fourth tile.
WINDOWS = (KEYS + 4, 3 * KEYS, 3 * KEYS + 5)
# Whether a tile's keys lie in several blocks, or in one.
BLOCK_SIZES = {"gathered": 4, "by block": 2 * KEYS}

# C++. With AVX-512 a tile has 64 keys, the most of all instruction sets, and a segment has 8 tiles.
CPP_TILE, CPP_SEGMENT = 64, 512
CPP_FEATURES: dict[str, dict[str, Any]] = {
    "small blocks": {"block_size": 4},
    "odd blocks": {"block_size": 3},
    "blocks as large as tiles": {"block_size": 64},
    "bf16": {"dtype": "bf16"},
    "bf16 in small blocks": {"dtype": "bf16", "block_size": 4},
    "softcap": {"softcap": 1.5},
}


def at_every_place(window: int, num_new: int) -> Rows:
    """Returns sequences of ``num_new`` new tokens. The first three have not filled the window. From one of the others
    to the next the window's edge moves on by a key, through a tile."""
    filled = [(cached, num_new) for cached in range(window, window + KEYS + 1)]
    return [(0, num_new), (KEYS, num_new), (window - 1, num_new), *filled]


# New tokens of a sequence: a decode, decodes with drafts, and chunks of one query tile and of several.
NEW = (1, 3, MAX_DECODE_QUERIES, MAX_DECODE_QUERIES + 1, 2 * KEYS + 1)
QUICK = {
    *((1, 53, "by block"), (MAX_DECODE_QUERIES, 48, "gathered"), (MAX_DECODE_QUERIES + 1, 53, "gathered")),
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("num_new", "window", "blocks"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in itertools.product(NEW, WINDOWS, BLOCK_SIZES)
    ],
)
def test_triton(num_new: int, window: int, blocks: str) -> None:
    """Programs share the tiles of decodes: two tiles each, so that some begin within a window."""
    rows = at_every_place(window, num_new)
    shape = shape_of(sliding_window=window, block_size=BLOCK_SIZES[blocks], num_kv_heads=1, num_heads=2)
    tiling = Tiling(16, KEYS, 4, 1)
    case = Case(rows, shape, chunk=tiling, decode=tiling, num_sms=60)
    (difference,) = differences_of_one_subject(case, [rows])
    assert difference <= TOLERANCE["fp32"], f"differs by {difference:.1e}: {case}"


def lengths_at_every_place(window: int) -> list[tuple[int, int]]:
    """Returns ``(new, length)`` of decodes and chunks whose windows' edges lie at every place of a tile: in the first
    segment, and where earlier segments are behind the window."""
    first = [window - 1 + place for place in range(CPP_TILE + 2)]
    later = [length + CPP_SEGMENT for length in first]
    chunks = [(new, length) for length in later[::5] for new in (2, 9, 70)]
    return [(1, length) for length in (*first, *later)] + chunks


@pytest.mark.parametrize(
    ("arch", "feature", "window"),
    [
        *((HERE, feature, window) for feature, window in (("bf16", 100), ("odd blocks", 100), (None, 600))),
        (WIDTHS[-1], None, 100),
        *(pytest.param(arch, None, 100, marks=pytest.mark.slow) for arch in ARCHES if arch != WIDTHS[-1]),
        *(
            pytest.param(arch, feature, window, marks=pytest.mark.slow)
            for arch in ARCHES
            for feature in CPP_FEATURES
            for window in (CPP_TILE, 100, 600)
        ),
    ],
)
def test_cpp(arch: str, feature: str | None, window: int) -> None:
    shape = with_features(sliding_window=window, **(CPP_FEATURES[feature] if feature else {}))
    batch = Batch(shape, lengths_at_every_place(window), seed=window)
    assert_close(batch, batch.computed(KernelLoader(CppBuilder(arch))))
