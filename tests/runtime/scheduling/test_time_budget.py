"""The policy that keeps to a time: a chunk has the most tokens that fit among the lengths that steps are padded to."""

from __future__ import annotations

import logging
import random

import pytest

from fastgen.runtime.scheduling.policies.time_budget import TimeBudgetSplitFuse
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.work import StepWork

COST = StepCost.linear(step_s=0.001, token_s=1e-4, context_s=0.0, pair_s=1e-8)
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def test_a_chunk_is_the_longest_that_fits_beside_any_number_of_decodes() -> None:
    rng = random.Random(0)
    for target_s in (0.004, 0.009, 0.02, 0.05):
        policy = TimeBudgetSplitFuse(target_s)
        for _ in range(200):
            work = StepWork(rng.choice(SIZES), 0, rng.randrange(200_000))
            policy.observe(work, COST.seconds(work))
        for num_before in (0, 1, 15, 16, 40, 62, 63, 64, 65, 100, 128, 300, 511):
            for num_tokens in (1, 40, 1000):
                work = StepWork(num_before, 0, 1000)  # another prompt has a chunk already
                most = min(num_tokens, 512 - num_before)
                lengths = {length for length in FEW if num_before + length < 64}
                lengths |= {size - num_before for size in SIZES if size >= 64}
                possible = {length for length in lengths if 0 < length < most} | {most}
                fitting = [n for n in possible if policy.model.upper_bound_s(work.with_chunk(0, n)) <= target_s]
                assert policy.limit(work, 0, num_tokens, SIZES) == max(fitting, default=0), (num_before, num_tokens)


def knowing(target_s: float, margin: float = 0.0, most_seen: int = 256) -> TimeBudgetSplitFuse:
    """Returns a policy whose model is sure that a step takes 4 s, and an eighth of a second for each token."""
    policy = TimeBudgetSplitFuse(target_s)
    certain = [1e40 * (row == column) for row in range(4) for column in range(4)]
    coefficients = (4.0, 0.125 * 256, 0.0, 0.0)
    policy.recall((*coefficients, *coefficients, *certain, 0.1, margin, 4.0, float(most_seen)))
    return policy


FINE = (1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 88, 96, 128, 256, 512)
DECODES, BESIDE_A_CHUNK = 0, 1000


@pytest.mark.parametrize(
    ("target_s", "num_before", "num_pairs", "num_tokens", "expected"),
    [
        (10.0, 0, DECODES, 1000, 48),  # exactly 10 s
        (9.99, 0, DECODES, 1000, 32),
        (10.0, 0, DECODES, 40, 40),
        (10.0, 16, DECODES, 1000, 32),
        (10.0, 17, DECODES, 1000, 24),
        (12.0, 16, DECODES, 1000, 48),  # 64 tokens, 12 s
        (13.0, 16, DECODES, 1000, 56),  # 72 tokens
        (14.5, 63, DECODES, 1000, 17),  # 80 tokens, 14 s
        (5.0, 0, BESIDE_A_CHUNK, 1000, 8),
        (5.0, 8, BESIDE_A_CHUNK, 1000, 0),
        (5.0, 8, DECODES, 1000, 4),  # one token takes 5.125 s, so 5.6375 s are allowed: 13 tokens
        (5.0, 70, DECODES, 1000, 10),  # 12.875 s with one token: 14.1625 s are allowed, 80 tokens take 14 s
        (13.0, 70, DECODES, 1000, 2),  # 12.875 s with one token is not too long
        (5.0, 70, BESIDE_A_CHUNK, 1000, 0),
        (100.0, 100, DECODES, 1000, 412),  # 512 tokens, the most
        (100.0, 512, DECODES, 1000, 1),
        (100.0, 512, BESIDE_A_CHUNK, 1000, 0),
        (100.0, 511, BESIDE_A_CHUNK, 1000, 1),
    ],
)
def test_a_chunk_has_what_fits_the_time(
    target_s: float, num_before: int, num_pairs: int, num_tokens: int, expected: int
) -> None:
    work = StepWork(num_before, 0, num_pairs)
    assert knowing(target_s).limit(work, 0, num_tokens, FINE) == expected


def test_a_short_chunk_has_one_of_a_few_lengths() -> None:
    work = StepWork(7, 0, BESIDE_A_CHUNK)
    found = [knowing(4.0 + (7 + fitting) / 8).limit(work, 0, 1000, FINE) for fitting in range(60)]
    assert sorted(set(found)) == [0, *FEW, 57]  # the last makes a step of 64 tokens
    assert found == [max([0, *(length for length in (*FEW, 57) if length <= fitting)]) for fitting in range(60)]


def test_steps_that_scatter_leave_room_for_it() -> None:
    """A step takes up to a quarter longer than expected, and so does the one that is too long already."""
    policy = knowing(10.0, margin=0.25)
    assert policy.limit(StepWork(0, 0, 0), 0, 1000, FINE) == 32  # 8 s, and up to 10 s
    assert policy.limit(StepWork(70, 0, 0), 0, 1000, FINE) == 10  # 12.875 s and 14 s, both a quarter longer


def test_a_step_is_at_most_twice_as_large_as_the_largest_seen() -> None:
    policy = knowing(1000.0, most_seen=40)
    assert policy.limit(StepWork(0, 0, 0), 0, 1000, FINE) == 80
    assert policy.limit(StepWork(30, 0, 0), 0, 1000, FINE) == 50
    assert policy.limit(StepWork(80, 0, 0), 0, 1000, FINE) == 1, "a prompt makes progress all the same"
    assert policy.limit(StepWork(80, 0, 500), 0, 1000, FINE) == 0


def test_a_target_that_cannot_be_held_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = knowing(10.0, margin=0.25)
    with caplog.at_level(logging.WARNING):
        policy.limit(StepWork(47, 0, 0), 300, 1000, FINE)  # 10 s with one token of the prompt
        policy.limit(StepWork(100, 0, 500), 300, 1000, FINE)  # another prompt makes progress
        assert not caplog.records
        policy.limit(StepWork(48, 0, 0), 300, 1000, FINE)
        policy.limit(StepWork(60, 0, 0), 300, 1000, FINE)
    (message,) = caplog.messages
    assert "itl_target_ms=10000 cannot be held: a step of 48 decodes and one token" in message
    assert "position 300 takes about 1.01e+04 ms" in message
