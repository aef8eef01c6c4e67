"""Paged attention's C++ kernel against the torch reference: ragged batches, every feature, any other requests."""

from __future__ import annotations

import math
import random
import subprocess
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import load_thread_pool, thread_pool_spec
from fastgen.compile.host.workspace import Workspace
from fastgen.compile.ops.attention.cpp import AttentionKernel, AttentionLimits, attention_spec, empty_cache
from fastgen.compile.ops.attention.reference import Alibi, paged_attention
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.render import render
from fastgen.compile.spec import torch_dtype
from fastgen.compile.weights.packed import ARCHES_WITH_BF16_DOT
from tests.compile.arches import ARCHES, EMULATED, HERE, WIDTHS, in_each_width
from tests.compile.cache_pairs import keys_in_pairs, values_in_pairs
from tests.fast import cases

# Kernels hold their scale as a constant; with this one queries that are multiples of 4 make weights powers of 2.
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=32, block_size=16, dtype="fp32", scale=math.log(2) / 4)
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 37},
    "alibi": {"alibi": "plain"},
    "scaled bf16 alibi": {"alibi": "scaled", "alibi_dtype": "bf16"},
    "softcap": {"softcap": 1.5},
    "small blocks": {"block_size": 4},
    "values in keys": {"values_in_keys": True, "v_dim": 20, "num_kv_heads": 1},
    "odd sizes": {"head_dim": 23, "v_dim": 23},
    "bf16": {"dtype": "bf16"},
    "bf16 with tails": {"dtype": "bf16", "head_dim": 22, "v_dim": 22},
    "bf16 in small blocks": {"dtype": "bf16", "block_size": 4},
    "bf16 in large blocks": {"dtype": "bf16", "block_size": 64},
    "fp16": {"dtype": "fp16"},
    "bf16 in large heads": {"dtype": "bf16", "head_dim": 96, "v_dim": 96, "q_stride": 6 * 96},
}
# What decides how keys near the edge of a window are read.
NEAR_BLOCKS: dict[str, dict[str, Any]] = {
    "a window of small blocks": {"sliding_window": 37, "block_size": 4},
    "a window of odd blocks": {"sliding_window": 37, "block_size": 3},
    "a window of blocks as large as tiles": {"sliding_window": 37, "block_size": 64},
    "a window in bf16": {"sliding_window": 37, "dtype": "bf16"},
    "a window of odd blocks in bf16": {"sliding_window": 37, "block_size": 3, "dtype": "bf16"},
    "a window of small blocks in bf16": {"sliding_window": 37, "block_size": 6, "dtype": "bf16"},
    "a window of large blocks in bf16": {"sliding_window": 37, "block_size": 64, "dtype": "bf16"},
    "a window of one": {"sliding_window": 1},
}
# Each feature once, beside others that are computed elsewhere: enough for the fast tests.
TOGETHER = [
    *((), ("window", "softcap", "odd sizes"), ("alibi", "small blocks"), ("scaled bf16 alibi", "fp16")),
    *(("values in keys",), ("bf16",), ("bf16 with tails",), ("bf16 in small blocks",)),
]
# Those of NEAR_BLOCKS for the fast tests: blocks larger and smaller than tiles, in both dtypes.
NEAR_ONCE = (
    *("a window of blocks as large as tiles", "a window of one", "a window in bf16"),
    *("a window of odd blocks in bf16", "a window of small blocks in bf16"),
)
IN_SMALL_BLOCKS = ("bf16 in small blocks", "a window of small blocks in bf16")
# Of the largest value: a few roundings of the scores.
TOLERANCE = 1e-5
# What rounding to bf16 changes a number by at most, relative to it.
HALF_UNIT = 2.0**-8


class Batch:
    """Sequences of ``(new, length)`` tokens over shuffled blocks, some rows of padding behind; all else is NaN, and so
    is what a window has left behind: the padding block stands in the tables there.
    """

    def __init__(self, shape: AttentionShape, lengths: list[tuple[int, int]], seed: int, num_padding: int = 3):
        generator = torch.Generator().manual_seed(seed)
        size, dtype = shape.block_size, torch_dtype(shape.dtype)
        needed = [-(-length // size) for _, length in lengths]
        blocks = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
        self.shape = shape
        latent_dim = shape.v_dim if shape.values_in_keys else None
        sizes = (size, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = empty_cache(sum(needed) + 4, *sizes, latent_dim, dtype=dtype)
        self.k.fill_(torch.nan)
        self.v.fill_(torch.nan)
        self.tables = torch.zeros(len(lengths), max([1, *needed]) + 1, dtype=torch.int32)
        for row, ((new, length), count) in enumerate(zip(lengths, needed, strict=True)):
            first = self.first_kept(length - new)
            mine = [0 if i < first else blocks.pop() for i in range(count)]
            self.tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
            at = torch.arange(first * size, length)
            places = (torch.tensor(mine, dtype=torch.long)[at // size], at % size)
            for cache in (self.k,) if shape.values_in_keys else (self.k, self.v):
                cache[places] = torch.randn(len(at), *cache.shape[2:], generator=generator).to(dtype)
        self.seq_lens = torch.tensor([length for _, length in lengths], dtype=torch.int32)
        self.starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(torch.int32)
        num_tokens = int(self.starts[-1]) + num_padding
        stored = torch.randn(num_tokens, shape.num_heads + 2, shape.head_dim, generator=generator)
        self.q = stored[:, : shape.num_heads]  # as in a fused projection, tokens lie apart
        slopes = torch.rand(shape.num_heads, generator=generator) * 0.1
        self.slopes = slopes.to(torch_dtype(shape.alibi_dtype)) if shape.alibi else None
        self.rounds = False

    def first_kept(self, num_cached: int) -> int:
        """The first block with a token that some later one sees, with so many cached."""
        window = self.shape.sliding_window
        return 0 if window is None else max(0, num_cached - window + 1) // self.shape.block_size

    def expected(self, v: Tensor | None = None) -> Tensor:
        """Returns the reference's result, with other values ``v`` if they are given. Queries are rounded where the
        kernel of :meth:`computed` rounds them.
        """
        alibi = None if self.slopes is None else Alibi(self.slopes, scaled=self.shape.alibi == "scaled")
        return paged_attention(
            self.q.bfloat16().float() if self.rounds else self.q,
            self.k,
            self.v if v is None else v,
            self.tables,
            self.starts,
            self.seq_lens,
            scale=self.shape.scale,
            sliding_window=self.shape.sliding_window,
            alibi=alibi,
            softcap=self.shape.softcap,
        )

    def computed(self, loader: KernelLoader, num_threads: int = 1) -> Tensor:
        load_thread_pool(loader).resize(num_threads)
        kernel = loader.load(attention_spec(self.shape, loader.builder.arch))
        self.rounds = bool(kernel.spec.parameters["bf16_dot"])
        out = torch.full((len(self.q), self.shape.num_heads, self.shape.v_dim), torch.nan, dtype=self.q.dtype)
        limits = AttentionLimits(len(self.q), len(self.seq_lens), max([1, *self.seq_lens.tolist()]), num_threads)
        attend = AttentionKernel(kernel, limits, Workspace(), self.slopes)
        k, v = (keys_in_pairs(self.k), values_in_pairs(self.v)) if self.rounds else (self.k, self.v)
        attend(self.q, k, v, self.tables, self.starts, self.seq_lens, out)
        return out


def drawn_lengths(random: random.Random) -> list[tuple[int, int]]:
    """Decodes, chunks after cached tokens and from the first token, empty rows."""
    lengths = []
    for _ in range(random.randint(1, 6)):
        new = random.choice((0, 1, 1, 1, 2, 7, random.randint(1, 90)))
        lengths.append((new, new + random.choice((0, 0, random.randint(0, 40), random.randint(0, 1400)))))
    return lengths


def assert_close(batch: Batch, found: Tensor) -> None:
    """A weight that is rounded may change a result by its share of how far its value lies from that."""
    expected = batch.expected().float()
    error = (found.float() - expected).abs()
    if batch.rounds:
        error -= HALF_UNIT * (batch.expected(batch.v.abs()).float() + expected.abs())
    worst = error.max() / expected.abs().max().clamp_min(1e-9)
    assert worst <= TOLERANCE, f"{worst:.1e}"


@pytest.fixture(scope="module")
def loaders() -> dict[str, KernelLoader]:
    return {arch: KernelLoader(CppBuilder(arch)) for arch in ARCHES}


@pytest.mark.parametrize(
    ("arch", "features"),
    [
        pytest.param(arch, features, id=f"{arch}-{' and '.join(features)}", marks=marks)
        for arch in ARCHES
        for features in dict.fromkeys([*TOGETHER, *((feature,) for feature in FEATURES)])
        for is_fast in [features in TOGETHER and arch in ((HERE,) if features else WIDTHS)]
        for marks in [() if is_fast else pytest.mark.slow]
    ],
)
def test_drawn_batches(loaders: dict[str, KernelLoader], arch: str, features: tuple[str, ...]) -> None:
    shape = with_features(*features)
    for seed in range(5):
        batch = Batch(shape, drawn_lengths(random.Random(seed)), seed)
        assert_close(batch, batch.computed(loaders[arch]))


@pytest.mark.parametrize(
    ("arch", "feature"),
    [
        pytest.param(arch, feature, marks=() if is_fast else pytest.mark.slow)
        for arch in ARCHES
        if arch in ARCHES_WITH_BF16_DOT
        for feature in (None, "window", "bf16 with tails", "bf16 in small blocks", "bf16 in large blocks", *NEAR_BLOCKS)
        if "odd blocks" not in (feature or "")  # these have no pairs of keys
        for is_fast in [
            feature in ("bf16 with tails", "bf16 in large blocks", "a window of large blocks in bf16")
            # else which keys are read does not depend on the unit that multiplies them
            or (arch == HERE and feature in (None, "window", *IN_SMALL_BLOCKS))
        ]
    ],
)
def test_bf16_dots_whose_numbers_need_no_rounding(
    loaders: dict[str, KernelLoader], arch: str, feature: str | None
) -> None:
    """Queries and keys are small whole numbers, and weights powers of 2, so what is left is the order of the sums."""
    shape = with_features("bf16", *([feature] if feature else []))
    for seed in range(3):
        batch = Batch(shape, drawn_lengths(random.Random(seed)), seed)
        for numbers in (batch.q, batch.k):
            numbers.copy_(numbers.clamp(-1.5, 1.5).round())
        batch.q.mul_(4)
        found = batch.computed(loaders[arch])
        assert batch.rounds
        batch.rounds = False
        assert_close(batch, found)


@pytest.mark.parametrize("features", cases(NEAR_BLOCKS, fast=NEAR_ONCE))
def test_nothing_is_read_of_what_a_window_left_behind(loaders: dict[str, KernelLoader], features: str) -> None:
    drawn = [drawn_lengths(random.Random(seed)) for seed in range(5)]
    for seed, lengths in enumerate([*drawn, [(1, length) for length in range(38, 54)]]):  # edges at every place
        batch = Batch(with_features(features), lengths, seed)
        assert_close(batch, batch.computed(loaders[HERE]))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("pair", list(combinations(FEATURES, 2)), ids=" and ".join)
def test_every_pair_of_features(loaders: dict[str, KernelLoader], arch: str, pair: tuple[str, str]) -> None:
    batch = Batch(with_features(*pair), drawn_lengths(random.Random(5)), 5)
    assert_close(batch, batch.computed(loaders[arch]))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        *[(71, 1, 64, 16), (4, 4, 80, 1), (1, 1, 1, 16)],
        (64, 8, 32, 16),  # more heads than are computed together
        *cases([(8, 1, 96, 32), (3, 3, 128, 256), (2, 1, 256, 16), (12, 12, 16, 16)], fast=()),
    ],
)
def test_sizes(
    loaders: dict[str, KernelLoader], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, "fp32", scale=head_dim**-0.5)
    batch = Batch(shape, [(1, 700), (0, 0), (9, 9), (1, 1), (30, 600), (0, 0)], 1)
    assert_close(batch, batch.computed(loaders[HERE]))


@pytest.mark.parametrize(
    ("arch", "feature"),
    [
        *((HERE, feature) for feature in (None, "bf16", *NEAR_ONCE)),
        *((arch, feature) for arch in EMULATED for feature in ("bf16", "a window of odd blocks in bf16")),
        *(
            pytest.param(HERE, feature, marks=pytest.mark.slow)
            for feature in ("window", "small blocks", *(each for each in NEAR_BLOCKS if each not in NEAR_ONCE))
        ),
    ],
)
def test_a_sequence_gets_the_same_bits_in_any_batch_chunking_and_number_of_threads(
    loaders: dict[str, KernelLoader], arch: str, feature: str | None
) -> None:
    shape = with_features(*([feature] if feature else []))
    length, loader = 1500, loaders[arch]
    alone = Batch(shape, [(length, length)], 7, num_padding=0)
    whole = alone.computed(loader)
    for chunk in (1, 5, 64, 1499):
        for num_threads in (1, 2, 3):
            alone.starts = torch.tensor([0, chunk], dtype=torch.int32)
            q, tables = alone.q, alone.tables
            alone.q, alone.tables = q[-chunk:], tables.clone()
            alone.tables[0, : alone.first_kept(length - chunk)] = 0
            assert torch.equal(alone.computed(loader, num_threads), whole[-chunk:]), (chunk, num_threads)
            alone.q, alone.tables = q, tables
    for seed in range(4):
        others = drawn_lengths(random.Random(seed))
        together = Batch(shape, [*others, (length, length)], 8)
        mine = slice(int(together.starts[-2]), int(together.starts[-1]))
        alone.starts = torch.tensor([0, length], dtype=torch.int32)
        together.q[mine] = alone.q
        for cache, own in zip((together.k, together.v), (alone.k, alone.v), strict=True):
            size = shape.block_size
            for index in range(-(-length // size)):
                cache[together.tables[-1, index]] = own[alone.tables[0, index]]
        assert torch.equal(together.computed(loader, 2)[mine], whole), seed


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        (HERE, "fp32"),
        pytest.param(HERE, "bf16", marks=pytest.mark.slow if EMULATED else ()),
        *((arch, "bf16") for arch in EMULATED),
    ],
)
def test_how_the_heads_and_keys_of_decodes_are_shared_out_shows_nowhere(
    loaders: dict[str, KernelLoader], arch: str, dtype: str
) -> None:
    shape = AttentionShape(64, 8, 32, 16, dtype, scale=32**-0.5)
    batch = Batch(shape, [(1, 5000), (1, 17), (1, 900), (2, 1030)], 3)
    found = batch.computed(loaders[arch])
    assert_close(batch, found)
    for num_threads in (2, 3, 7):
        assert torch.equal(batch.computed(loaders[arch], num_threads), found), num_threads
    q, starts, tables, seq_lens = batch.q, batch.starts, batch.tables, batch.seq_lens
    for row in range(len(seq_lens)):
        mine = slice(int(starts[row]), int(starts[row + 1]))
        batch.q, batch.starts = q[mine], torch.tensor([0, mine.stop - mine.start], dtype=torch.int32)
        batch.tables, batch.seq_lens = tables[row : row + 1], seq_lens[row : row + 1]
        assert torch.equal(batch.computed(loaders[arch]), found[mine]), row


@pytest.mark.parametrize("arch", in_each_width())
@pytest.mark.parametrize("rising", [False, True])
def test_what_is_far_below_the_best_score_weighs_nothing(
    loaders: dict[str, KernelLoader], arch: str, rising: bool
) -> None:
    batch = Batch(SHAPE, [(1, 1300)], 4)
    order = torch.arange(1300)
    place = (batch.tables[0, order // 16].long(), order % 16, 0)
    batch.q[0] = torch.eye(32)[0]
    best = 1299 if rising else 3
    batch.k[place] = torch.eye(32)[0] * -1000.0 * (order - best).abs().unsqueeze(1)
    values = torch.full((1300, 32), 1e30)
    values[best] = torch.arange(32.0)
    batch.v[place] = values
    assert torch.equal(batch.computed(loaders[arch], 2)[0, 0], torch.arange(32.0))


def test_a_score_that_is_no_number_shows_in_its_row_alone(loaders: dict[str, KernelLoader]) -> None:
    batch = Batch(SHAPE, [(3, 3), (1, 70)], 0)
    batch.q[3, 4] = torch.nan
    found = batch.computed(loaders[HERE])
    assert found[3, 4].isnan().all()
    assert not found[:3].isnan().any()
    assert not found[3, [0, 1, 2, 3, 5]].isnan().any()


SANITIZED = """
#include <cstdio>
#include <vector>
extern "C" int fastgen_set_num_threads(int);

static void run(int64_t num_new, int64_t num_cached, int64_t others) {  // others: decodes at that length, in front
    const int64_t num_seqs = 3, num_tokens = 2 + num_new + 2, q_stride = N * D;
    const std::vector<int32_t> cu_seqlens_q{0, 1, 2, int32_t(2 + num_new)};
    const std::vector<int32_t> seq_lens{int32_t(others), int32_t(others), int32_t(num_cached + num_new)};
    const int64_t max_blocks = (std::max(others, num_cached + num_new) + P - 1) / P;
    std::vector<int32_t> block_tables(num_seqs * max_blocks, 1 << 28);
    int64_t num_blocks = 0;
    for (int64_t s = 0; s < num_seqs; ++s) {
        for (int64_t i = 0; i * P < seq_lens[s]; ++i) block_tables[s * max_blocks + i] = int32_t(num_blocks++);
    }
    const std::vector<float> q(num_tokens * N * D, 0.5f), slopes(N, 0.5f);
    const std::vector<T> k_cache(num_blocks * K * D * P, T(0.5f)), v_cache(num_blocks * K * DV * P, T(0.5f));
    std::vector<float> out(num_tokens * N * DV);
    const int64_t num_threads = 3, scratch_bytes = sizeof(Scratch), max_tasks = 4096, max_pieces = 8192;
    struct alignas(64) Line { uint8_t bytes[64]; };
    struct {
        std::vector<Line> lines;
        uint8_t* data() { return lines.data()->bytes; }
    } workspace{std::vector<Line>(1 << 20)};
    const int64_t workspace_bytes = 64 << 20;
    CALL;
}

int main() {
    fastgen_set_num_threads(3);
    for (int64_t num_new : {0, 1, 7, 130}) {
        for (int64_t num_cached : {0, 15, 700, 2050}) {
            for (int64_t others : {1, 16, 1100}) run(num_new, num_cached, others);
        }
    }
    std::puts("done");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("feature", [None, *FEATURES])
@pytest.mark.parametrize("checks", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, arch: str, feature: str | None, checks: str) -> None:
    spec = attention_spec(with_features(*([feature] if feature else [])), arch)
    arguments = ", ".join(
        f"{argument.name}.data()" if argument.is_pointer else argument.name for argument in spec.arguments
    )
    (tmp_path / "main.cpp").write_text(render(spec) + SANITIZED.replace("CALL", f"{spec.name}({arguments})"))
    (tmp_path / "pool.cpp").write_text(render(thread_pool_spec()))
    flags = [flag for flag in CppBuilder(arch).flags if flag != "-shared"]
    watched = ["-O1", "-g", f"-fsanitize={checks}", "-fno-sanitize-recover=all"]
    command = ["g++", *flags, *watched, "main.cpp", "pool.cpp", "-o", "main", "-pthread"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")


def with_features(*features: str, **changes: Any) -> AttentionShape:
    """Returns the shape with these ``features``, and with ``changes`` of its fields."""
    fields: dict[str, Any] = {}
    for feature in features:
        fields |= (FEATURES | NEAR_BLOCKS)[feature]
    fields |= changes
    if fields.get("values_in_keys"):
        fields["v_dim"] = min(fields["v_dim"], fields.get("head_dim", SHAPE.head_dim))
    return replace(SHAPE, **{"v_dim": fields.get("head_dim", SHAPE.head_dim), **fields})
