"""The C++ sampling kernel against the torch reference, and against the same decisions in fp64."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CPP_ARCHES, cpp_arch
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.ops.sampling.cpp import Mask, RowSampling, SampledRow, SamplingKernel, sampling_spec
from fastgen.compile.ops.sampling.reference import (
    Adjustments,
    Draws,
    RowStatus,
    adjust,
    gumbel_noise,
    log_probabilities,
    log_weights,
    sample,
    uniforms,
)
from tests.chi_square import chi_square
from tests.compile.arches import in_each_width, loader
from tests.fast import cases

HERE = cpp_arch(device.current("cpu"))
# Those whose instructions this machine has.
ARCHES = CPP_ARCHES[CPP_ARCHES.index(HERE) :]
# Tokens of a slice: few, so that small vocabularies have several.
SLICE = 1024
# What is decided by less than this, the reference and the kernel may decide differently.
MARGIN = 1e-4
INF = float("inf")


@pytest.fixture(params=in_each_width(ARCHES))
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kernel_for(vocab_size: int, arch: str = HERE, *, slice_size: int = SLICE, max_rows: int = 100) -> SamplingKernel:
    built = loader(arch).load(sampling_spec(arch, slice_size=slice_size))
    return SamplingKernel(built, vocab_size, max_rows=max_rows, max_threads=3)


# What is expected


def adjusted(logits: Tensor, row: SampledRow) -> Tensor:
    """A row of logits as the reference adjusts it."""
    sampling = row.sampling
    uses, bias = torch.zeros(1, len(logits), dtype=torch.int32), torch.zeros(1, len(logits))
    uses[0, torch.from_numpy(row.uses[0]).long()] = torch.from_numpy(row.uses[1])
    bias[0, torch.from_numpy(row.biases[0]).long()] = torch.from_numpy(row.biases[1])
    if row.mask is not None:
        is_allowed = torch.from_numpy(row.mask)[:, None] >> torch.arange(32) & 1
        bias[0, is_allowed.flatten()[: len(logits)] == 0] = -INF
    columns = {name: torch.tensor([getattr(sampling, name)]).float() for name in ("presence", "frequency")}
    repetition = torch.tensor([max(sampling.repetition, torch.finfo().tiny)])
    return adjust(logits[None], Adjustments(uses > 0, (uses >> 1).float(), repetition, **columns, bias=bias))[0]


def draws(row: SampledRow, **changed: Any) -> Draws:
    sampling = row.sampling
    reals = {name: getattr(sampling, name) for name in ("temperature", "top_p", "min_p")}
    integers = {"top_k": sampling.top_k, "seeds": sampling.seed_bits}
    integers |= {"positions": row.position, "sequence_indices": sampling.sequence_index}
    columns = {name: torch.tensor([value], dtype=torch.float64) for name, value in reals.items()}
    columns |= {name: torch.tensor([value]) for name, value in integers.items()}
    return Draws(**columns | {name: torch.tensor([value]) for name, value in changed.items()})


def possible(logits: Tensor, row: SampledRow) -> set[int]:
    """The tokens that exact arithmetic may choose, each of its decisions moved by up to ``MARGIN``; most often one."""
    sampling, scores = row.sampling, adjusted(logits, row)
    if sampling.temperature == 0:
        return {int(scores.argmax())}
    # The temperature and top-k leave nothing to rounding.
    x = log_weights(scores[None], draws(row, top_p=1.0, min_p=0.0))[0].double()
    y = log_weights(scores[None], draws(row, top_p=1.0, min_p=0.0, top_k=0))[0]
    assert (x[x.isfinite()] == y[x.isfinite()].double()).all()
    weights = x.exp()
    order = torch.from_numpy(np.lexsort((-np.arange(len(x)), x.numpy())))  # rising, among equals the highest id first
    share = torch.empty_like(x)
    share[order] = weights[order].cumsum(0) / weights.sum()
    share[order[-1]] = INF
    tail = 1 - sampling.top_p if sampling.top_p < 1 else -1.0
    surely = (share > tail + MARGIN * abs(tail)) & ((weights >= sampling.min_p * (1 + MARGIN)) | (x == 0))
    maybe = (share > tail - MARGIN * abs(tail)) & (weights >= sampling.min_p * (1 - MARGIN)) & x.isfinite()
    surely[order[-1]] = True
    where = (torch.tensor([each]) for each in (sampling.seed_bits, row.position, sampling.sequence_index))
    drawn = x + gumbel_noise(*where, len(x))[0].double()
    best = drawn[surely].max()
    return set(((drawn >= best - MARGIN) & maybe).nonzero().squeeze(1).tolist())


def choosable(logits: Tensor, rows: list[SampledRow]) -> tuple[Tensor, list[SampledRow]]:
    """Without the rows that have no token left."""
    places = [i for i, row in enumerate(rows) if adjusted(logits[i], row).isfinite().any()]
    return logits[places], [rows[i] for i in places]


def check(kernel: SamplingKernel, logits: Tensor, rows: list[SampledRow]) -> list[int]:
    """Every row's token is one that it may be, and where only one may be it is the reference's."""
    found, _ = kernel(logits, rows)
    num_open = 0
    for scores, row, token in zip(logits, rows, found, strict=True):
        allowed = possible(scores, row)
        assert token in allowed, row
        num_open += len(allowed) > 1
        if len(allowed) == 1:
            assert [token] == sample(adjusted(scores, row)[None], draws(row))[0].tolist(), row
    assert num_open <= 0.02 * len(rows) + 1
    return found


# What is drawn


def random_logits(rng: Random, num_rows: int, vocab_size: int) -> Tensor:
    """Rows of many kinds: smooth, full of ties, peaked, huge, of every magnitude, with tokens that cannot be."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    for row in range(num_rows):
        match rng.randrange(8):
            case 0:
                logits[row] = (logits[row] * 2).round() / 2
            case 1:
                logits[row] = logits[row].sign()
            case 2:
                logits[row, rng.randrange(vocab_size)] += 20
            case 3:
                logits[row] *= 1e37
            case 4:
                logits[row, torch.rand(vocab_size, generator=generator) < 0.9] = -INF
                logits[row, rng.randrange(vocab_size)] = 0.25
            case 5:
                bits = torch.randint(-(2**31), 2**31, (vocab_size,), generator=generator, dtype=torch.int64)
                numbers = bits.to(torch.int32).view(torch.float32)
                logits[row] = torch.where(numbers.isfinite(), numbers, 0.0)
            case 6:
                logits[row] = logits[row].bfloat16().float() * 3
    return logits


def random_lists(rng: Random, vocab_size: int) -> dict[str, Any]:
    used = rng.sample(range(vocab_size), rng.randint(0, min(vocab_size, 40)))
    biased = rng.sample(range(vocab_size), rng.randint(0, vocab_size // 2))
    biases = [rng.choice([-INF, -1.5, 0.5, 2.0]) for _ in biased]
    return {
        "uses": (np.array(used, np.int32), np.array([rng.randint(1, 7) for _ in used], np.int32)),
        "biases": (np.array(biased, np.int32), np.array(biases, np.float32)),
    }


def random_mask(rng: Random, vocab_size: int) -> Mask:
    """Some words whole, some empty, some of both; behind the last token nothing is set."""
    words = [rng.choice([0, -1, rng.getrandbits(32) - 2**31]) for _ in range(-(-vocab_size // 32))]
    if vocab_size % 32:
        words[-1] &= (1 << vocab_size % 32) - 1
    return np.array(words, np.int32)


def random_row(rng: Random, vocab_size: int) -> SampledRow:
    sampling = RowSampling(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.5, 1e-30]),
        top_k=rng.choice([0, 0, 1, 2, 7, 30, 700, 10**12]),
        top_p=rng.choice([1.0, 1.0, 1e-300, 0.13, 0.55, 0.93, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.03, 0.4, 1.0]),
        seed=rng.choice([0, -1, 2**63, 2**70 + 5, rng.getrandbits(64)]),
        sequence_index=rng.choice([0, 1, 2**32 - 1]),
        repetition=rng.choice([1.0, 1.0, 1.3, 0.6, 1e-300]),
        presence=rng.choice([0.0, 0.0, 1.5]),
        frequency=rng.choice([0.0, 0.0, -0.5]),
    )
    lists = random_lists(rng, vocab_size) if rng.random() < 0.5 else {}
    mask = random_mask(rng, vocab_size) if rng.random() < 0.25 else None
    return SampledRow(sampling, rng.choice([1, 77, 2**32 - 1]), **lists, mask=mask)


# Tokens


FEATURES: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "repetition": {"repetition": 1.7},
    "presence": {"presence": 0.9},
    "frequency": {"frequency": -0.6},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 3.0},
    "greedy": {"temperature": 0.0},
}


def test_every_feature_and_pair(arch: str) -> None:
    rng = Random(3)
    chosen = [(), *((name,) for name in FEATURES), *itertools.combinations(FEATURES, 2)]
    rows = []
    for names in chosen:
        settings = {key: value for name in names for key, value in FEATURES[name].items()}
        sampling = RowSampling(**{"temperature": 1.0, "seed": 77} | settings)
        rows += [SampledRow(sampling, 9), SampledRow(sampling, 10, **random_lists(rng, 100))]
        rows += [SampledRow(sampling, 11, mask=np.array([0b1011, -1, 0, 0b1000], np.int32))]
    check(kernel_for(100, arch, max_rows=len(rows)), random_logits(rng, len(rows), 100), rows)


@pytest.mark.parametrize("vocab_size", cases([1, 2, 7, 64, 83, 1024, 1025, 5003], fast=[1, 7, 83, 1024, 5003]))
def test_drawn_rows_at_odd_sizes(arch: str, vocab_size: int) -> None:
    rng = Random(f"sizes {vocab_size}")
    kernel = kernel_for(vocab_size, arch)
    for _ in range(3):
        logits = random_logits(rng, 30, vocab_size)
        rows = [random_row(rng, vocab_size) for _ in range(30)]
        check(kernel, *choosable(logits, rows))


@pytest.mark.parametrize("slice_size", [1 << 15, 3 << 10])
def test_a_large_vocabulary(slice_size: int) -> None:
    rng = Random(f"large {slice_size}")
    rows = [random_row(rng, 50_257) for _ in range(24)]
    check(kernel_for(50_257, slice_size=slice_size), *choosable(random_logits(rng, 24, 50_257), rows))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_drawn_rows(seed: int) -> None:
    rng = Random(f"many {seed}")
    vocab_size = rng.choice([3, 31, 300, 3000, 9001, 33_000])
    kernel = kernel_for(vocab_size, rng.choice(ARCHES))
    for _ in range(5):
        rows = [random_row(rng, vocab_size) for _ in range(40)]
        check(kernel, *choosable(random_logits(rng, 40, vocab_size), rows))


def test_greedy_rows_take_the_likeliest_and_the_lowest_id_of_equals(arch: str) -> None:
    for vocab_size in (1, 63, 64, 65, 1500, 4097):
        kernel, rng = kernel_for(vocab_size, arch), Random(vocab_size)
        logits = torch.randint(-5, 2, (60, vocab_size), generator=torch.Generator().manual_seed(1)).float()
        logits[::7] = -3e38
        for row in range(0, 60, 3):
            logits[row, rng.randrange(vocab_size)] = 7.0
            logits[row, rng.randrange(vocab_size)] = 7.0
        assert kernel.greedy(logits) == logits.argmax(dim=-1).tolist()
        assert kernel(logits, [SampledRow(RowSampling(), 0)] * 60)[0] == kernel.greedy(logits)


def test_random_bits_are_the_references(arch: str) -> None:
    """Among equals it is the random number alone that decides."""
    rng = Random(8)
    kernel = kernel_for(2500, arch, max_rows=200)
    rows = [
        SampledRow(RowSampling(1.0, seed=rng.getrandbits(64), sequence_index=rng.getrandbits(32)), rng.getrandbits(32))
        for _ in range(200)
    ]
    where = [(row.sampling.seed_bits, row.position, row.sampling.sequence_index) for row in rows]
    numbers = uniforms(*(torch.tensor(column) for column in zip(*where, strict=True)), 2500)
    assert kernel(torch.full((200, 2500), 3.5), rows)[0] == numbers.argmax(dim=-1).tolist()


def test_rows_that_cannot_be_sampled_say_so_and_disturb_no_other(arch: str) -> None:
    vocab_size = 2500
    nothing = {"biases": (np.arange(vocab_size, dtype=np.int32), np.full(vocab_size, -INF, np.float32))}
    one_left = {"biases": (np.arange(1, vocab_size, dtype=np.int32), np.full(vocab_size - 1, -INF, np.float32))}
    empty, single = np.zeros(79, np.int32), np.zeros(79, np.int32)
    single[2000 // 32] = 1 << 2000 % 32
    logits = torch.randn(10, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[0, 2300] = math.nan
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3, : vocab_size - 1] = -INF
    logits[4] = math.nan
    lists: list[dict[str, Any]] = [{}] * 6 + [nothing, one_left, {"mask": empty}, {"mask": single}]
    bad, none_left = -RowStatus.NOT_FINITE, -RowStatus.NOTHING_LEFT
    for sampling in (RowSampling(), RowSampling(0.9, top_k=5, top_p=0.9, min_p=0.01), RowSampling(1.1, num_top=3)):
        rows = [SampledRow(sampling, 4, **each) for each in lists]
        found, logprobs = kernel_for(vocab_size, arch)(logits, rows)
        alone = kernel_for(vocab_size, arch)(logits[5:6], rows[5:6])
        assert found == [bad, bad, none_left, vocab_size - 1, bad, alone[0][0], none_left, 0, none_left, 2000]
        assert [each is None for each in logprobs] == [token < 0 or sampling.num_top is None for token in found]
        assert logprobs[5] == alone[1][0]
    assert kernel_for(vocab_size, arch).greedy(logits)[:5] == [bad, bad, none_left, vocab_size - 1, bad]


def test_a_tiny_repetition_penalty_makes_the_largest_number_and_forbids_as_ever(arch: str) -> None:
    logits = torch.tensor([[9.0, 1.0]])
    uses = (np.array([0], np.int32), np.array([1], np.int32))
    sampling = RowSampling(repetition=1e-300)
    forbidden = (np.array([0], np.int32), np.array([-INF], np.float32))
    assert kernel_for(2, arch)(logits, [SampledRow(sampling, 0, uses)])[0] == [0]
    assert kernel_for(2, arch)(logits, [SampledRow(sampling, 0, uses, forbidden)])[0] == [1]


def test_a_result_depends_on_neither_threads_nor_other_rows_nor_slices(arch: str, pool: ThreadPool) -> None:
    rng, vocab_size = Random(f"company {arch}"), 7001
    logits = random_logits(rng, 24, vocab_size)
    rows = [random_row(rng, vocab_size) for _ in range(24)]
    for row, num_top in enumerate([0, 1, 9, 300]):
        sampling = RowSampling(0.9, top_p=0.8, seed=row, num_top=num_top)
        rows[row] = SampledRow(sampling, 5, **random_lists(rng, vocab_size))
    kernel = kernel_for(vocab_size, arch)
    pool.resize(1)
    tokens, logprobs = kernel(logits, rows)
    for num_threads in (1, 2, 5):
        pool.resize(num_threads)
        assert kernel(logits, rows) == (tokens, logprobs)
        assert kernel(logits.flip(0), rows[::-1]) == (tokens[::-1], logprobs[::-1])
        for row in range(24):
            assert kernel(logits[row : row + 1], rows[row : row + 1]) == ([tokens[row]], [logprobs[row]])
        assert kernel(logits[:3], rows[:3]) == (tokens[:3], logprobs[:3])


# Distributions


AXES = ("position", "seed", "sequence_index")
FILTERS = ({"temperature": 0.7}, {"temperature": 2.5}, {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.2})


@pytest.mark.parametrize(
    ("axis", "filters"), cases(itertools.product(AXES, FILTERS), fast=[*zip(AXES, FILTERS, strict=True)])
)
def test_tokens_are_drawn_from_the_softmax_of_those_kept(axis: str, filters: dict[str, Any]) -> None:
    num_draws = 20_000
    logits = torch.linspace(0, 3, 12)
    kernel = kernel_for(12, max_rows=num_draws)
    if axis == "position":
        rows = [SampledRow(RowSampling(**filters, seed=11), position) for position in range(num_draws)]
    else:
        rows = [SampledRow(RowSampling(**filters, **{axis: each}), 5) for each in range(num_draws)]
    observed = torch.tensor(kernel(logits.expand(num_draws, -1).contiguous(), rows)[0]).bincount(minlength=12)
    weights = log_weights(logits[None], draws(rows[0]))[0].double().softmax(0)
    kept = weights > 0
    assert observed[~kept].sum() == 0
    statistic, limit = chi_square(observed[kept].tolist(), (weights[kept] * num_draws).tolist())
    assert statistic < limit


def test_equal_logits_are_drawn_evenly_at_the_smallest_temperatures() -> None:
    """Noise is not lost beside scores that a small temperature has made enormous."""
    logits = torch.tensor([5.0, 30.0, 30.0, 29.0]).expand(4000, -1).contiguous()
    kernel = kernel_for(4, max_rows=4000)
    for temperature in (1e-3, 1e-30, 1e-300):
        rows = [SampledRow(RowSampling(temperature), position) for position in range(4000)]
        observed = torch.tensor(kernel(logits, rows)[0]).bincount(minlength=4)
        assert observed[[0, 3]].tolist() == [0, 0]
        assert 1840 < observed[1] < 2160


# Log-probabilities


@pytest.mark.parametrize("vocab_size", [1, 100, 3001])
def test_log_probabilities(arch: str, vocab_size: int) -> None:
    """Log-probabilities are those of the raw logits, whatever is done to them before a token is drawn."""
    rng = Random(f"logprobs {vocab_size}")
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(5)) * 4
    logits[0] = torch.where(torch.arange(vocab_size) % 9 == 0, 2.0, -INF)  # equals, and few of them
    logits[1] = logits[1].round()
    logits[2] *= 1e30
    logits[3] = 0.0
    tops = [rng.choice([0, 1, 2, 5, 21, 2000]) for _ in range(11)] + [vocab_size]
    rows = []
    for num_top in tops:
        sampling = RowSampling(rng.choice([0.0, 1.0]), top_k=3, num_top=min(num_top, vocab_size))
        rows.append(SampledRow(sampling, 3, **random_lists(rng, vocab_size)))
    logits, rows = choosable(logits, rows)
    token_ids, found = kernel_for(vocab_size, arch)(logits, rows)
    for scores, row, token_id, logprobs in zip(logits, rows, token_ids, found, strict=True):
        num_top = row.sampling.num_top or 0
        actual, top, top_ids = log_probabilities(scores[None], torch.tensor([token_id]), num_top)
        assert logprobs is not None
        assert logprobs.token_ids[0] == token_id
        expected = torch.cat([actual, top[0]])
        torch.testing.assert_close(torch.tensor(logprobs.values), expected, rtol=1e-5, atol=1e-5)
        if num_top:
            assert sorted(logprobs.values[1:], reverse=True) == logprobs.values[1:]
            order = sorted(range(vocab_size), key=lambda each: (-scores[each].item(), each))
            values = scores[top_ids[0]].tolist()
            assert scores[logprobs.token_ids[1:]].tolist() == pytest.approx(values, abs=1e-5, rel=1e-5)
            if scores.unique().numel() < 50:  # far apart, or equal: the order is certain
                assert logprobs.token_ids[1:] == order[:num_top]


# Refusals


def test_what_does_not_fit_is_refused() -> None:
    kernel = kernel_for(10, max_rows=2)
    assert kernel.greedy(torch.arange(20.0).view(2, 10)) == [9, 9]
    for logits in (torch.zeros(3, 10), torch.zeros(2, 9), torch.zeros(10, 2).T):
        with pytest.raises(ValueError, match="made for at most 2 x 10, contiguous"):
            kernel.greedy(logits)
    with pytest.raises(ValueError, match="takes up to 65536"):
        kernel_for(64 * SLICE + 1)
    with pytest.raises(ValueError, match="a multiple of 1024"):
        sampling_spec(HERE, slice_size=1000)
