"""The cost of a step: its parts add up, tables are interpolated, and a fit finds what made the steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import fmean, median

import numpy as np
import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.fit import (
    LEAST_STEPS,
    MeasuredStep,
    fit_step_cost,
    nonnegative_least_squares,
    residuals,
)
from fastgen.runtime.step_cost.work import StepWork, decode_work

# Few tokens cost the reading of weights, many their arithmetic.
COST = StepCost(
    tokens=((1, 0.010), (32, 0.011), (128, 0.020), (512, 0.060)),
    row_s=2e-5,
    chunk_s=3e-4,
    context_s=4e-7,
    pair_s=2e-9,
)


def test_the_parts_of_a_step_add_up() -> None:
    cost = StepCost(
        tokens=((1, 1.0), (3, 2.0)), host_s=10.0, row_s=0.1, chunk_s=0.01, context_s=1e-3, pair_s=1e-4, built_s=3.0
    )
    work = decode_work([5, 7]).with_chunk(2, 3, num_rows=1)
    assert work == StepWork(5, 6 + 8 + 5, 3 + 4 + 5, 3, 1, 1)
    device_s = (1.0 + 4 * 0.5) + 3 * 0.1 + 0.01 + 19e-3 + 12e-4 + 3.0
    assert cost.device_s(work) == pytest.approx(device_s)
    assert cost.seconds(work) == pytest.approx(10.0 + device_s)


def test_a_table_is_interpolated_and_never_falls_beyond_its_end() -> None:
    cost = StepCost(tokens=((4, 2.0), (8, 4.0), (16, 3.0)))
    assert [cost.matrices_s(tokens) for tokens in (1, 4, 6, 8, 12, 16, 99)] == [2.0, 2.0, 3.0, 4.0, 3.5, 3.0, 3.0]
    rising = StepCost(tokens=((4, 2.0), (8, 4.0)))
    assert rising.matrices_s(16) == 8.0
    assert StepCost(tokens=((4, 2.0),)).matrices_s(99) == 2.0


def test_steps_are_padded_to_captured_sizes() -> None:
    padded = StepCost(tokens=((0, 0.0), (1, 1.0)), sizes=captured_sizes(200))
    assert [padded.matrices_s(tokens) for tokens in (1, 3, 33, 65, 129, 200)] == [1, 4, 64, 128, 192, 200]


def test_a_size_without_a_tape_takes_longer() -> None:
    cost = StepCost(tokens=((1, 1.0),), called_s=0.5, recorded=(1, 2, 4))
    assert [cost.seconds(StepWork(tokens, 0, 0)) for tokens in (1, 2, 3, 4, 5)] == [1.0, 1.0, 1.5, 1.0, 1.5]


def test_a_table_out_of_order_is_refused() -> None:
    for points in ((), ((4, 1.0), (4, 2.0)), ((8, 1.0), (4, 2.0))):
        with pytest.raises(InvalidArgumentError, match="ascending order, at least one"):
            StepCost(tokens=points)


def works(rng: random.Random, num: int) -> list[tuple[StepWork, int]]:
    """Returns works and their numbers of decodes: decodes alone, prompts alone, and both."""
    found = []
    for _ in range(num):
        num_decodes = rng.choice([0, 1, 4, 16, 32, 64])
        work = decode_work([rng.randrange(2000) for _ in range(num_decodes)])
        for _ in range(rng.choice([0, 1, 3]) if num_decodes else 1):
            work = work.with_chunk(rng.randrange(1500), rng.randint(1, 140), num_rows=rng.randint(0, 1))
        found.append((work, num_decodes))
    return found


def measured(num: int, *, seed: int, noise: float = 0.0, pauses: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(seed)
    steps = []
    for work, num_decodes in works(rng, num):
        seconds = COST.seconds(work) * rng.lognormvariate(0.0, noise)
        steps.append(MeasuredStep(work, seconds + (1.0 if rng.random() < pauses else 0.0), num_decodes))
    return steps


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.1, 0.05)])
def test_a_fit_expects_what_held_out_steps_take(noise: float, tolerance: float) -> None:
    fitted = fit_step_cost(measured(1500, seed=1, noise=noise))
    for kind, found in residuals(fitted, measured(500, seed=2)).items():
        assert found.median < tolerance, kind
        assert abs(found.bias) < tolerance, kind


def test_residuals_are_the_errors_of_each_kind_of_step() -> None:
    cost, decodes = StepCost(tokens=((1, 1.0),)), StepWork(1, 1, 0)
    prompt = decodes.with_chunk(0, 5)
    # The cost expects 1 s, so the errors are 0, 10 %, … 90 % of the measured time.
    steps = [MeasuredStep(decodes, 1 / (1 + tenths / 10), 1) for tenths in range(10)]
    found = residuals(cost, [*steps, MeasuredStep(prompt, 2.0, 0), MeasuredStep(prompt, 0.5, 3)])
    assert {kind: each.num_steps for kind, each in found.items()} == {"decodes": 10, "mixed": 1, "prompts": 1}
    assert (found["decodes"].median, found["decodes"].p90) == pytest.approx((0.45, 0.8))
    assert found["decodes"].bias == pytest.approx(10 / sum(step.seconds for step in steps) - 1)
    assert (found["prompts"].bias, found["mixed"].bias) == pytest.approx((-0.5, 1.0))


def test_one_token_may_take_longer_than_a_few() -> None:
    rng = random.Random(6)
    times_s = {1: 0.023, 2: 0.019, 4: 0.019, 6: 0.019, 8: 0.020, 16: 0.034}
    steps = [
        MeasuredStep(decode_work([50] * num), times_s[num] * rng.lognormvariate(0.0, 0.03), num)
        for num in rng.choices(list(times_s), k=600)
    ]
    fitted = fit_step_cost(steps)
    for num, seconds in times_s.items():
        assert fitted.seconds(decode_work([50] * num)) == pytest.approx(seconds, rel=0.02), num


def test_pauses_scale_the_sum_and_bend_nothing() -> None:
    """Each fiftieth step is paused for a second: together the steps take as long as measured, and the expected times of
    two kinds keep their proportion."""
    steps = measured(1500, seed=3, noise=0.02, pauses=0.02)
    fitted = fit_step_cost(steps)
    assert sum(fitted.seconds(step.work) for step in steps) == pytest.approx(sum(step.seconds for step in steps))
    small, large = decode_work([100] * 4), StepWork(512, 2000, 250_000, 1, 3)
    ratio = fitted.seconds(large) / fitted.seconds(small)
    assert ratio == pytest.approx(COST.seconds(large) / COST.seconds(small), rel=0.05)
    assert np.mean(fitted.scatter) == pytest.approx(1.0)
    assert fitted.scatter[100] < 0.9 < 5 < fitted.scatter[-1]


def test_drawn_times_scatter_as_the_measured_ones_did() -> None:
    fitted = fit_step_cost(measured(3000, seed=4, noise=0.2))
    rng = random.Random(5)
    drawn = [fitted.draw_ratio(rng) for _ in range(5000)]
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(0.2, rel=0.1)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=f"{LEAST_STEPS - 1} steps are too few"):
        fit_step_cost(measured(LEAST_STEPS - 1, seed=1))


def test_steps_of_one_kind_are_enough() -> None:
    steps = [MeasuredStep(decode_work([100]), 0.01, 1)] * LEAST_STEPS
    assert fit_step_cost(steps).seconds(decode_work([100])) == pytest.approx(0.01)


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_above_zero_are_optimal(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker hold: no free coefficient can move, and none at 0 would rise."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(40, rng.integers(1, 9)))
    if seed % 3 == 0:  # columns that say the same
        matrix = np.concatenate([matrix, matrix[:, :1] * 2], axis=1)
    values = rng.normal(size=40)
    found = nonnegative_least_squares(matrix, values)
    slope = matrix.T @ (values - matrix @ found)
    assert found.min() >= 0
    assert slope.max() < 1e-8
    assert np.abs(slope[found > 0]).max(initial=0) < 1e-8


# The number of steps with so many tokens, and the points of the table that is fitted to them.
TABLES = [
    ({4: 20}, [4]),
    ({5: 19, 9: 1}, [5, 9]),
    ({1: 6, 2: 5, 8: 5, 40: 5}, [1, 2, 8, 40]),
    # Four steps at 2 are too few, with that of 3 they make a point at 4, and the last point moves to the largest step.
    ({1: 6, 2: 4, 3: 1, 8: 5, 40: 4}, [1, 4, 40]),
]
POINTS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192]


@pytest.mark.parametrize(("num_steps", "points"), [*TABLES, (dict.fromkeys([*POINTS, 9000], 5), [*POINTS, 9000])])
def test_the_table_has_a_point_where_enough_steps_are(num_steps: Mapping[int, int], points: list[int]) -> None:
    steps = [MeasuredStep(StepWork(num, 0, 0), 1.0 + num, 1) for num, count in num_steps.items() for _ in range(count)]
    fitted = fit_step_cost(steps)
    assert [count for count, _ in fitted.tokens] == points
    for num in num_steps:
        assert fitted.seconds(StepWork(num, 0, 0)) == pytest.approx(1.0 + num, rel=0.01)


def test_the_table_of_padded_steps_is_over_their_sizes() -> None:
    steps = [
        MeasuredStep(StepWork(num, 0, 0), 1.0 + size, 1) for num, size in ((3, 4), (6, 8), (9, 9)) for _ in "12345"
    ]
    fitted = fit_step_cost([*steps, *steps], sizes=(1, 2, 4, 8))
    assert [count for count, _ in fitted.tokens] == [4, 8, 9]
    assert fitted.sizes == (1, 2, 4, 8)
    assert [fitted.seconds(StepWork(num, 0, 0)) for num in (3, 4, 5, 8)] == pytest.approx([5.0, 5.0, 9.0, 9.0])


@pytest.mark.parametrize(("noise", "pause_s"), [(0.1, 0.5), (0.1, 9.0), (0.0005, 0.02)])
def test_large_errors_count_less_and_pauses_up_to_a_bound(noise: float, pause_s: float) -> None:
    """Steps with one token and with eight, whose times have nothing in common but the usual error of both."""
    rng, times_s = random.Random(11), {1: 1.0, 8: 3.0}
    measured_s = {num: [time_s * rng.lognormvariate(0.0, noise) for _ in range(25)] for num, time_s in times_s.items()}
    for place in range(5):
        measured_s[8][place] += pause_s
    usual_s = dict.fromkeys(times_s, 1.0)
    weights = {num: [1.0] * 25 for num in times_s}
    for _ in range(12):
        for num, seconds in measured_s.items():
            pairs = list(zip(weights[num], seconds, strict=True))
            usual_s[num] = sum(weight / each_s for weight, each_s in pairs) / sum(w / s**2 for w, s in pairs)
        errors = {num: [abs(usual_s[num] / each_s - 1) for each_s in seconds] for num, seconds in measured_s.items()}
        limit = 2 * max(median([*errors[1], *errors[8]]), 0.002)
        weights = {num: [min(1.0, limit / error) if error else 1.0 for error in own] for num, own in errors.items()}
    mean_s = {num: fmean(min(s, 4 * usual_s[num]) for s in seconds) for num, seconds in measured_s.items()}
    factor = sum(map(sum, measured_s.values())) / (25 * sum(mean_s.values()))
    fitted = fit_step_cost([MeasuredStep(StepWork(num, 0, 0), s, 1) for num, own in measured_s.items() for s in own])
    for num in times_s:
        assert fitted.seconds(StepWork(num, 0, 0)) == pytest.approx(factor * mean_s[num], rel=1e-6)


def test_a_cost_is_scaled_to_what_was_measured_and_its_scatter_counts_time() -> None:
    parts = {"host_s": 1.0, "row_s": 2.0, "chunk_s": 3.0, "context_s": 4.0, "pair_s": 5.0}
    cost = StepCost(tokens=((1, 1.0), (2, 4.0)), **parts, built_s=6.0, called_s=7.0, recorded=(1,), sizes=(2,))
    scaled = cost.scattered([(1.0, 3.0), (1.0, 1.0)])
    assert scaled.tokens == ((1, 2.0), (2, 8.0))
    found = (scaled.host_s, scaled.row_s, scaled.chunk_s, scaled.context_s, scaled.pair_s)
    assert found == (2.0, 4.0, 6.0, 8.0, 10.0)
    assert (scaled.built_s, scaled.called_s, scaled.recorded, scaled.sizes) == (12.0, 14.0, (1,), (2,))
    # Of 201 quantiles the one in the middle ends the first half.
    assert scaled.scatter == pytest.approx([201 / 401] * 101 + [603 / 401] * 100)
    scaled = cost.scattered([(1.0, 2.0), (3.0, 3.0)])
    assert scaled.host_s == 1.25
    assert scaled.scatter == pytest.approx([201 / 251] * 151 + [402 / 251] * 50)


def test_a_drawn_factor_lies_between_two_quantiles() -> None:
    cost = StepCost(tokens=((1, 1.0),), scatter=(0.5, 1.0, 3.0), noise=0.7)
    drawn, same = random.Random(1), random.Random(1)
    for _ in range(50):
        place = 2 * same.random()
        assert cost.draw_ratio(drawn) == pytest.approx(0.5 + 0.5 * place if place < 1 else 1.0 + 2 * (place - 1))
    assert StepCost(tokens=((1, 1.0),)).draw_ratio(drawn) == 1.0
