"""The sampling op against its sources: published random numbers, transformers' logits processors, softmax itself."""

import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastgen.compile.ops.sampling import reference as sampling
from fastgen.compile.ops.sampling.reference import (
    Adjustments,
    Draws,
    RowStatus,
    adjust,
    gumbel_noise,
    log_probabilities,
    log_weights,
    philox4x32,
    sample,
    uniforms,
)

WORD = 2**32


def signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def draws(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0, sequence_indices=0):
    """Draws of ``num_rows`` rows; each setting is one value for all or a list with one per row."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).clone()

    return Draws(
        temperature=column(temperature, torch.float64),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float64),
        seeds=column(seeds, torch.int64),
        positions=column(positions, torch.int64),
        sequence_indices=column(sequence_indices, torch.int64),
    )


# --- Philox ---------------------------------------------------------------------------------------------------------


def philox_by_integers(counter, key):
    """Philox4x32-10 as the paper states it, on Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def philox(counters, keys):
    counter = tuple(torch.tensor(column) for column in zip(*counters, strict=True))
    key = tuple(torch.tensor(column) for column in zip(*keys, strict=True))
    return [tuple(row) for row in torch.stack(philox4x32(counter, key), dim=-1).tolist()]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, words):
    assert philox([counter], [key]) == [words]
    assert philox_by_integers(counter, key) == words


def test_philox_equals_arithmetic_on_unbounded_integers():
    draw = random.Random(20)
    edges = [0, 1, 2**31 - 1, 2**31, WORD - 1]
    counters = [tuple(draw.choice([*edges, draw.randrange(WORD)]) for _ in range(4)) for _ in range(500)]
    keys = [tuple(draw.choice([*edges, draw.randrange(WORD)]) for _ in range(2)) for _ in range(500)]
    assert philox(counters, keys) == [philox_by_integers(*pair) for pair in zip(counters, keys, strict=True)]


def test_philox_equals_tritons(tmp_path):
    """A Triton kernel that draws with ``tl.philox`` will get the reference's random numbers."""
    source = """
import json, sys, torch, triton, triton.language as tl

@triton.jit
def kernel(counters, out, seed, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE) * 4
    w0, w1, w2, w3 = tl.philox(
        seed, tl.load(counters + at), tl.load(counters + at + 1), tl.load(counters + at + 2), tl.load(counters + at + 3)
    )
    tl.store(out + at, w0.to(tl.int64))
    tl.store(out + at + 1, w1.to(tl.int64))
    tl.store(out + at + 2, w2.to(tl.int64))
    tl.store(out + at + 3, w3.to(tl.int64))

seed, counters = json.loads(sys.argv[1])
counters = torch.tensor(counters, dtype=torch.int64).to(torch.int32)
out = torch.zeros(counters.shape, dtype=torch.int64)
kernel[(1,)](counters, out, seed, SIZE=len(counters))
print(json.dumps((out % 2**32).tolist()))
"""
    script = tmp_path / "triton_philox.py"
    script.write_text(source)
    draw = random.Random(21)
    seed = draw.getrandbits(63)
    counters = [[draw.randrange(2**31) for _ in range(4)] for _ in range(64)]
    result = subprocess.run(
        [sys.executable, str(script), json.dumps([seed, counters])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ours = philox(counters, [(seed % WORD, seed // WORD)] * len(counters))
    assert [tuple(row) for row in json.loads(result.stdout)] == ours


# --- Noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 130])
def test_uniforms_are_the_documented_function_of_seed_position_sequence_and_id(vocab_size):
    seeds = [0, 1, -1, signed(0x9E3779B97F4A7C15), -(2**63)]
    positions, indices = [0, 7, 2047, WORD - 1, 1], [0, 1, 2, 3, WORD - 1]
    found = uniforms(torch.tensor(seeds), torch.tensor(positions), torch.tensor(indices), vocab_size)
    assert found.dtype == torch.float32
    assert found.shape == (5, vocab_size)
    for row, (seed, position, index) in enumerate(zip(seeds, positions, indices, strict=True)):
        key = (seed % 2**64 % WORD, seed % 2**64 // WORD)
        words = [philox_by_integers((i // 4, position, index, 0), key)[i % 4] for i in range(vocab_size)]
        assert found[row].tolist() == [((word >> 9) + 0.5) / 2**23 for word in words]


def test_the_extreme_words_give_finite_noise(monkeypatch):
    monkeypatch.setattr(
        sampling, "philox4x32", lambda counter, key: tuple(torch.full((1, 1), word) for word in (0, WORD - 1, 511, 512))
    )
    zero = torch.zeros(1, dtype=torch.int64)
    found = uniforms(zero, zero, zero, 4)
    assert found.tolist() == [[2.0**-24, 1 - 2.0**-24, 2.0**-24, 1.5 * 2.0**-23]]
    expected = [-math.log(-math.log(u)) for u in found[0].tolist()]
    torch.testing.assert_close(gumbel_noise(zero, zero, zero, 4)[0], torch.tensor(expected), rtol=1e-6, atol=0)


def chi_square(observed, expected):
    """Chi-square over the cells that expect at least 5, the others taken together, and its 1 - 1e-6 quantile."""
    large = expected >= 5
    rest = torch.stack([item[~large].sum() for item in (observed, expected)])
    cells = [(observed[large], expected[large])] + ([(rest[:1], rest[1:])] if rest[1] > 0 else [])
    statistic = sum(((seen - due) ** 2 / due).sum().item() for seen, due in cells)
    freedom = sum(len(seen) for seen, _ in cells) - 1
    # Wilson and Hilferty's approximation of the quantile; 4.75 standard deviations are 1e-6 of a normal tail.
    return statistic, freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


NUM_DRAWS = 40_000


@pytest.mark.parametrize("axis", ["positions", "seeds", "sequence_indices"])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
def test_tokens_are_drawn_from_the_softmax(axis, temperature):
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 2
    settings = draws(NUM_DRAWS, temperature=temperature, **{"seeds": 11, axis: torch.arange(NUM_DRAWS)})
    token_ids, _ = sample(logits.expand(NUM_DRAWS, -1), settings)
    expected = (logits.double() / temperature).softmax(0) * NUM_DRAWS
    statistic, limit = chi_square(token_ids.bincount(minlength=24).double(), expected)
    assert statistic < limit


def test_filtered_tokens_are_drawn_from_the_softmax_of_those_kept():
    logits = torch.linspace(0, 3, 12)
    settings = draws(NUM_DRAWS, temperature=1.3, top_k=7, top_p=0.9, min_p=0.2, positions=torch.arange(NUM_DRAWS))
    token_ids, _ = sample(logits.expand(NUM_DRAWS, -1), settings)
    kept = log_weights(logits[None], settings.rows(torch.tensor([0])))[0]
    assert 1 < kept.isfinite().sum() < 7
    observed = token_ids.bincount(minlength=12).double()
    statistic, limit = chi_square(observed, kept.double().softmax(0) * NUM_DRAWS)
    assert statistic < limit
    assert observed[kept.isinf()].sum() == 0


@pytest.mark.parametrize("axis", ["positions", "seeds", "sequence_indices"])
def test_neighbouring_draws_are_independent(axis):
    logits = torch.tensor([0.0, 1.0, 0.5, -0.5, 0.2])
    settings = draws(NUM_DRAWS, **{axis: torch.arange(NUM_DRAWS)})
    token_ids, _ = sample(logits.expand(NUM_DRAWS, -1), settings)
    pairs = (token_ids[0::2] * 5 + token_ids[1::2]).bincount(minlength=25).double()
    single = logits.double().softmax(0)
    statistic, limit = chi_square(pairs, torch.outer(single, single).flatten() * (NUM_DRAWS / 2))
    assert statistic < limit


def test_equal_logits_are_drawn_evenly_at_the_smallest_temperatures():
    """Noise is not lost beside scores that a small temperature has made enormous."""
    logits = torch.tensor([5.0, 30.0, 30.0, 29.0])
    for temperature in (1e-3, 1e-30, 1e-300, 5e-324):
        settings = draws(4000, temperature=temperature, positions=torch.arange(4000))
        observed = sample(logits.expand(4000, -1), settings)[0].bincount(minlength=4)
        assert observed[[0, 3]].tolist() == [0, 0]
        assert 1840 < observed[1] < 2160


@pytest.mark.parametrize("scale", [1e-38, 1.0, 3e38])
@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1.0, 1e300])
def test_no_temperature_or_scale_of_logits_overflows(scale, temperature):
    for signs in ([-1.0, 0.5, 1.0], [-1.0, -0.5, -0.25], [0.0, -torch.inf, 1.0]):
        settings = draws(1, temperature=temperature, top_k=2, top_p=0.9, min_p=0.1)
        weights = log_weights(torch.tensor([signs]) * scale, settings)
        assert not weights.isnan().any()
        assert weights.amax() == 0
        assert sample(torch.tensor([signs]) * scale, settings)[1].tolist() == [RowStatus.OK]


# --- Filters and adjustments ----------------------------------------------------------------------------------------


def random_settings(draw):
    return {
        "temperature": draw.choice([0.05, 0.7, 1.0, 1.7, draw.uniform(0.1, 3)]),
        "top_k": draw.choice([0, 1, 2, 5, 40, 1000]),
        "top_p": draw.choice([1.0, 0.9, 0.5, 0.25, 1e-9, 1 - 1e-9, draw.uniform(0.01, 1)]),
        "min_p": draw.choice([0.0, 0.05, 0.5, 1.0, draw.random()]),
    }


def random_logits(draw, num_rows, vocab_size):
    """Rows with many ties, with none, flat, steep, and with −inf among them."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(draw.getrandbits(32)))
    for row in range(num_rows):
        kind = draw.choice(["plain", "ties", "flat", "steep", "holes"])
        if kind == "ties":
            logits[row] = logits[row].round()
        elif kind == "flat":
            logits[row] = 1.25
        elif kind == "steep":
            logits[row] *= 30
        elif kind == "holes":
            logits[row, 1::2] = -torch.inf
    return logits


def filtered_by_transformers(row, settings):
    scores = row[None]
    if settings["temperature"] != 1.0:
        scores = TemperatureLogitsWarper(settings["temperature"])(None, scores)
    if settings["top_k"]:
        scores = TopKLogitsWarper(settings["top_k"])(None, scores)
    if settings["top_p"] < 1.0:
        scores = TopPLogitsWarper(settings["top_p"])(None, scores)
    if settings["min_p"] > 0.0:
        scores = MinPLogitsWarper(settings["min_p"])(None, scores)
    return (scores - scores.amax())[0]


@pytest.mark.parametrize("seed", range(25))
def test_filters_keep_exactly_what_transformers_keeps(seed):
    """Bit for bit, with rows of different settings in one call. Only where top-p cuts between equal scores does
    transformers leave open which of them it keeps (its sort is not stable); there we keep the lowest ids."""
    draw = random.Random(seed)
    num_rows, vocab_size = 12, draw.choice([1, 2, 9, 64, 515])
    logits = random_logits(draw, num_rows, vocab_size)
    settings = [random_settings(draw) for _ in range(num_rows)]
    columns = {name: [setting[name] for setting in settings] for name in settings[0]}
    found = log_weights(logits, draws(num_rows, **columns))
    for row in range(num_rows):
        expected = filtered_by_transformers(logits[row], settings[row])
        tempered = log_weights(logits[row : row + 1], draws(1, temperature=settings[row]["temperature"]))[0]
        for score in tempered.unique():
            equals = (tempered == score).nonzero().squeeze(1)
            num_kept = int(expected[equals].isfinite().sum())
            kept_of_equals, cut = equals[:num_kept], equals[num_kept:]
            assert (found[row, kept_of_equals] == score).all(), (seed, row, settings[row])
            assert (found[row, cut] == -torch.inf).all(), (seed, row, settings[row])


def neutral(num_rows, vocab_size, **changes):
    neutral_values = {
        "seen": torch.zeros(num_rows, vocab_size, dtype=torch.bool),
        "counts": torch.zeros(num_rows, vocab_size),
        "repetition": torch.ones(num_rows),
        "presence": torch.zeros(num_rows),
        "frequency": torch.zeros(num_rows),
        "bias": torch.zeros(num_rows, vocab_size),
    }
    return Adjustments(**(neutral_values | changes))


def test_neutral_adjustments_change_nothing_and_none_changes_its_argument():
    logits = torch.tensor([[1.5, -2.25, 0.0, -torch.inf, 3e38]])
    assert torch.equal(adjust(logits, neutral(1, 5)), logits)
    before = logits.clone()
    adjust(logits, neutral(1, 5, seen=torch.ones(1, 5, dtype=torch.bool), repetition=torch.tensor([1.3])))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 3.0])
def test_repetition_penalty_equals_transformers(penalty):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 50, generator=generator) * 4
    token_ids = torch.randint(50, (4, 30), generator=generator)
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, token_ids, True)
    found = adjust(logits, neutral(4, 50, seen=seen, repetition=torch.full((4,), penalty)))
    assert torch.equal(found, RepetitionPenaltyLogitsProcessor(penalty)(token_ids, logits))


def test_adjustments_apply_in_their_order():
    """Worked by hand: 4 / 2 − 0.5 − 3 · 0.25 + 1, and −4 · 2 − 0.5 − 0.25; what is forbidden stays so."""
    found = adjust(
        torch.tensor([[4.0, -4.0, 4.0, 9.0]]),
        neutral(
            1,
            4,
            seen=torch.tensor([[True, True, False, True]]),
            counts=torch.tensor([[3.0, 1.0, 0.0, 2.0]]),
            repetition=torch.tensor([2.0]),
            presence=torch.tensor([0.5]),
            frequency=torch.tensor([0.25]),
            bias=torch.tensor([[1.0, 0.0, 0.0, -torch.inf]]),
        ),
    )
    assert found.tolist() == [[1.75, -8.75, 4.0, -math.inf]]


def test_a_penalty_that_overflows_leaves_a_largest_token():
    seen = torch.tensor([[True, False]])
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    found = adjust(torch.tensor([[9.0, 1.0]]), neutral(1, 2, seen=seen, repetition=tiny))
    assert sample(found, draws(1, temperature=0.5))[0].tolist() == [0]
    assert sample(found, draws(1, temperature=0.5))[1].tolist() == [RowStatus.OK]


def test_a_forbidden_token_stays_forbidden_where_a_tiny_penalty_overflows():
    seen, tiny = torch.tensor([[True, False]]), torch.tensor([1e-40])
    forbidden = torch.tensor([[float("-inf"), 0.0]])
    found = adjust(torch.tensor([[9.0, 1.0]]), neutral(1, 2, seen=seen, repetition=tiny, bias=forbidden))
    assert found.tolist() == [[float("-inf"), 1.0]]


# --- Rows -----------------------------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_largest_and_the_lowest_id_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-torch.inf, -torch.inf, -5.0, -5.0]])
    assert sample(logits, draws(3, temperature=0.0, top_k=1, top_p=0.1))[0].tolist() == [1, 0, 2]
    wide = torch.zeros(3, 70_001)
    wide[:, [69_999, 12_345, 40_000]] = 1.0
    assert sample(wide, draws(3, temperature=[0.0, 0.0, 0.0]))[0].tolist() == [12_345] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bad_row_is_flagged_and_disturbs_no_other(dtype):
    good = torch.randn(2, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    bad = torch.zeros(4, 40, dtype=dtype)
    bad[0, 17] = torch.nan
    bad[1, 3] = torch.inf
    bad[2] = -torch.inf
    bad[3] = torch.nan
    settings = {"top_k": 10, "top_p": 0.8, "min_p": 0.01, "seeds": 5, "positions": 3}
    for temperature in (0.0, 1.0):
        token_ids, status = sample(torch.cat([bad, good]), draws(6, temperature=temperature, **settings))
        assert status.tolist() == [
            RowStatus.NOT_FINITE, RowStatus.NOT_FINITE, RowStatus.NOTHING_LEFT, RowStatus.NOT_FINITE,
            RowStatus.OK, RowStatus.OK,
        ]  # fmt: skip
        assert ((token_ids >= 0) & (token_ids < 40)).all()
        assert token_ids[4:].tolist() == sample(good, draws(2, temperature=temperature, **settings))[0].tolist()


def test_a_token_of_weight_zero_is_never_drawn():
    logits = torch.full((2000, 33), -torch.inf)
    logits[:, [4, 32]] = torch.tensor([0.0, -3.0])
    token_ids, _ = sample(logits, draws(2000, temperature=2.0, positions=torch.arange(2000)))
    assert set(token_ids.tolist()) == {4, 32}


@pytest.mark.parametrize("seed", range(6))
def test_a_row_is_drawn_alike_alone_with_others_and_in_any_order(seed):
    draw = random.Random(seed)
    num_rows, vocab_size = 20, 301
    logits = random_logits(draw, num_rows, vocab_size)
    settings = [random_settings(draw) for _ in range(num_rows)]
    for setting in settings:
        setting["temperature"] *= draw.random() > 0.2
        setting.update(
            seeds=signed(draw.getrandbits(64)), positions=draw.randrange(4096), sequence_indices=draw.choice([0, 3])
        )
    together = sample(logits, draws(num_rows, **{name: [s[name] for s in settings] for name in settings[0]}))[0]
    alone = [sample(logits[row : row + 1], draws(1, **settings[row]))[0].item() for row in range(num_rows)]
    assert together.tolist() == alone
    order = torch.tensor(draw.sample(range(num_rows), num_rows))
    shuffled = draws(num_rows, **{name: [settings[row][name] for row in order] for name in settings[0]})
    assert torch.equal(sample(logits[order], shuffled)[0], together[order])


def test_seed_position_and_sequence_each_change_the_draws():
    logits = torch.zeros(50, 1000)
    base = {"seeds": 1, "positions": torch.arange(50), "sequence_indices": 0}
    first = sample(logits, draws(50, **base))[0]
    assert torch.equal(first, sample(logits, draws(50, **base))[0])
    for change in ({"seeds": 2}, {"seeds": 1 + 2**32}, {"positions": torch.arange(50, 100)}, {"sequence_indices": 1}):
        assert (sample(logits, draws(50, **(base | change)))[0] == first).sum() < 5, change


# --- Log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_equal_those_in_double_precision(dtype):
    logits = (torch.randn(5, 200, generator=torch.Generator().manual_seed(2)) * 6).to(dtype)
    token_ids = torch.tensor([0, 3, 199, 50, 7])
    actual, top, top_ids = log_probabilities(logits, token_ids, 10)
    reference = logits.double().log_softmax(-1)
    torch.testing.assert_close(actual.double(), reference[range(5), token_ids], rtol=0, atol=1e-5)
    torch.testing.assert_close(top.double(), reference.topk(10).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(top.double(), reference.gather(1, top_ids), rtol=0, atol=1e-5)


def test_among_equally_likely_tokens_the_lowest_ids_come_first_with_any_settings():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 1.0], [-torch.inf, 0.0, -torch.inf, 9.0, 0.0, 0.0]])
    order = [[1, 3, 0, 2, 4, 5], [3, 1, 4, 5, 0, 2]]
    for num_top in range(7):
        _, top, top_ids = log_probabilities(logits, torch.tensor([0, 0]), num_top)
        assert top_ids.tolist() == [row[:num_top] for row in order]
        assert top.shape == (2, num_top)
    assert log_probabilities(torch.tensor([[5.0]]), torch.tensor([0]), 1)[1].tolist() == [[0.0]]
