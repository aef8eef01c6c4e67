"""The model of step times: it finds a device's coefficients, keeps them, and is not led astray."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from fastgen.runtime.scheduling.policies.step_time import StepTimeModel
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.work import StepWork, chunk_pairs

COST = StepCost.linear(step_s=0.004, token_s=2e-5, context_s=1e-7, pair_s=4e-10)


def decodes(rng: random.Random) -> StepWork:
    return StepWork(16, rng.randint(2_000, 20_000), 0)


def mixed(rng: random.Random, start: int | None = None) -> StepWork:
    num_tokens = rng.choice([32, 64, 128, 256, 512])
    position = rng.randrange(60_000) if start is None else start
    return StepWork(num_tokens, rng.randint(2_000, 20_000), chunk_pairs(position, num_tokens - 16))


def learn(model: StepTimeModel, works: list[StepWork], rng: random.Random, noise: float = 0.0) -> None:
    for work in works:
        model.observe(work, COST.seconds(work) * rng.lognormvariate(0.0, noise))


def test_pairs_are_what_each_token_of_a_chunk_reads() -> None:
    for start, num_tokens in [(0, 1), (0, 5), (7, 1), (100, 33)]:
        assert chunk_pairs(start, num_tokens) == sum(position + 1 for position in range(start, start + num_tokens))


def test_before_it_has_seen_anything_it_lets_nothing_but_the_smallest_step() -> None:
    model, rng = StepTimeModel(), random.Random(0)
    assert model.most_tokens(512) == 0
    learn(model, [decodes(rng) for _ in range(3)], rng)
    assert model.most_tokens(512) == 0
    learn(model, [decodes(rng)], rng)
    assert model.most_tokens(512) == 32, "twice what it has seen"
    learn(model, [StepWork(400, 0, 0)], rng)
    assert model.most_tokens(512) == 512


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.001), (0.05, 0.06)])
def test_it_finds_what_steps_take(noise: float, tolerance: float) -> None:
    model, rng = StepTimeModel(), random.Random(1)
    learn(model, [rng.choice([decodes, mixed])(rng) for _ in range(300)], rng, noise)
    for work in (decodes(rng), *(mixed(rng) for _ in range(50))):
        assert model.predict_s(work) == pytest.approx(COST.seconds(work), rel=tolerance)
        assert model.upper_bound_s(work) >= model.predict_s(work)


def test_a_few_steps_of_a_quiet_machine_are_enough() -> None:
    model, rng = StepTimeModel(), random.Random(8)
    works = [rng.choice([decodes, mixed])(rng) for _ in range(60)]
    learn(model, works[:8], rng)
    for work in works:
        assert model.predict_s(work) == pytest.approx(COST.seconds(work), rel=1e-4)


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_one_step_in_two_hundred_takes_longer_than_the_upper_bound(noise: float) -> None:
    model, rng = StepTimeModel(), random.Random(6)
    learn(model, [mixed(rng) for _ in range(300)], rng, noise)
    num_longer = 0
    for _ in range(3_000):
        work = StepWork(256, 10_000, chunk_pairs(1_000, 240))
        step_s = COST.seconds(work) * rng.lognormvariate(0.0, noise)
        num_longer += step_s > model.upper_bound_s(work)
        model.observe(work, step_s)
    assert 7 <= num_longer <= 25


def test_what_it_has_learned_survives_a_long_time_of_other_steps() -> None:
    model, rng = StepTimeModel(), random.Random(2)
    learn(model, [mixed(rng) for _ in range(200)], rng, noise=0.02)
    learn(model, [decodes(rng) for _ in range(5_000)], rng, noise=0.02)
    for _ in range(50):
        work = mixed(rng)
        assert model.predict_s(work) == pytest.approx(COST.seconds(work), rel=0.2)
        model.observe(work, COST.seconds(work))


def test_what_another_model_has_learned_replaces_what_this_one_has() -> None:
    taught, other, rng = StepTimeModel(), StepTimeModel(), random.Random(7)
    learn(taught, [mixed(rng) for _ in range(100)], rng, noise=0.05)
    for _ in range(100):
        other.observe(work := mixed(rng), 3 * COST.seconds(work))
    work = mixed(rng)
    assert other.predict_s(work) > 2 * taught.predict_s(work)
    other.recall(taught.learned)
    assert other.learned == taught.learned
    for each in (work, decodes(rng)):
        assert other.predict_s(each) == taught.predict_s(each)
        assert other.upper_bound_s(each) == taught.upper_bound_s(each)


def test_pauses_of_the_machine_do_not_count_for_much() -> None:
    model, rng = StepTimeModel(), random.Random(3)
    learn(model, [mixed(rng) for _ in range(100)], rng, noise=0.02)
    for _ in range(60):
        learn(model, [mixed(rng) for _ in range(20)], rng, noise=0.02)
        model.observe(mixed(rng), 1.0)
        for _ in range(5):
            work = mixed(rng)
            assert model.predict_s(work) == pytest.approx(COST.seconds(work), rel=0.3)


def test_a_machine_that_pauses_often_leaves_room_for_prompts() -> None:
    model, rng = StepTimeModel(), random.Random(9)
    for number in range(300):
        work = mixed(rng)
        model.observe(work, COST.seconds(work) * (20 if number % 3 == 0 else 1))
    assert model.scatter == 2


def test_a_lasting_change_is_learned() -> None:
    model, rng = StepTimeModel(), random.Random(4)
    learn(model, [mixed(rng) for _ in range(300)], rng, noise=0.02)
    for _ in range(300):
        work = mixed(rng)
        model.observe(work, 3 * COST.seconds(work) * rng.lognormvariate(0.0, 0.02))
    for _ in range(50):
        work = mixed(rng)
        assert model.predict_s(work) == pytest.approx(3 * COST.seconds(work), rel=0.1)


def test_chunks_of_one_length_are_known_however_their_context_grows() -> None:
    """The context and the pairs of such chunks grow together, so the model cannot tell their costs apart."""
    model, rng = StepTimeModel(), random.Random(8)
    for start in range(0, 48_000, 48):
        work = StepWork(16, 16 * 300, 0).with_chunk(start, 48)
        if start > 4_800:
            assert model.predict_s(work) == pytest.approx(COST.seconds(work), rel=0.1)
        model.observe(work, COST.seconds(work) * rng.lognormvariate(0.0, 0.05))


def test_of_steps_that_were_never_seen_it_expects_the_worse() -> None:
    model, rng = StepTimeModel(), random.Random(7)
    learn(model, [decodes(rng) for _ in range(100)], rng, noise=0.02)
    learn(model, [mixed(rng, start=0) for _ in range(100)], rng, noise=0.02)
    seen, new = StepWork(256, 10_000, 0).with_chunk(0, 240), StepWork(256, 10_000, 0).with_chunk(50_000, 240)
    assert model.upper_bound_s(seen) < 1.2 * COST.seconds(seen)
    learn(model, [new, new], rng)
    assert model.upper_bound_s(new) < 1.2 * COST.seconds(new), "two such steps say enough"


def test_more_work_never_takes_less() -> None:
    model, rng = StepTimeModel(), random.Random(5)
    for _ in range(200):
        model.observe(mixed(rng), rng.uniform(0.001, 0.1))
        work = mixed(rng)
        for more in (work._replace(num_tokens=600), work._replace(num_context=10**6), work._replace(num_pairs=10**9)):
            assert model.predict_s(more) >= model.predict_s(work) >= 0.0


class ByHand:
    """The formulas of the model written out, a number at a time."""

    def __init__(self) -> None:
        self.fit, self.found = [0.0] * 4, [0.0] * 4
        self.information = [[0.0001 * (row == column) for column in range(4)] for row in range(4)]
        self.error, self.margin, self.num_seen = 0.1, 0.2, 0

    @staticmethod
    def parts(work: StepWork) -> list[float]:
        return [1.0, work.num_tokens / 256, work.num_context / 16384, work.num_pairs / 4194304]

    def expected_s(self, work: StepWork) -> float:
        return sum(part * factor for part, factor in zip(self.parts(work), self.found, strict=True))

    def upper_bound_s(self, work: StepWork) -> float:
        spread = np.linalg.inv(self.information) @ self.parts(work) @ self.parts(work)
        return self.expected_s(work) * (1 + min(1, max(0, self.margin))) + self.error * math.sqrt(spread)

    def observe(self, work: StepWork, step_s: float) -> None:
        expected_s, weight = self.expected_s(work), 1.0
        if self.num_seen < 4 or not expected_s:
            expected_s = step_s if step_s > 0.000001 else 0.000001
        else:
            off, limit = step_s / expected_s - 1, 3 * (self.error if self.error > 0.01 else 0.01)
            weight = 1.0 if abs(off) < limit else limit / abs(off)
            if work.num_pairs:
                self.error = 0.95 * self.error + 0.05 * (abs(off) if abs(off) < 2 * limit else 2 * limit)
                self.margin += 0.995 * self.error if off > self.margin else -0.005 * self.error
                self.margin = self.margin if self.margin < 8 * self.error else 8 * self.error
                for row in range(4):
                    for column in range(4):
                        self.information[row][column] *= 0.99
                    self.information[row][row] += 0.000001
        self.num_seen += 1
        parts = [part / expected_s for part in self.parts(work)]
        known = [sum(self.information[row][place] * parts[place] for place in range(4)) for row in range(4)]
        share = sum(part * each for part, each in zip(parts, known, strict=True))
        for row in range(4):
            for column in range(4):
                if share > 1:
                    self.information[row][column] -= 0.02 * known[row] * known[column] / share
                self.information[row][column] += weight * parts[row] * parts[column]
        off = step_s / expected_s - sum(part * factor for part, factor in zip(parts, self.fit, strict=True))
        gain = np.linalg.inv(self.information) @ parts
        self.fit = [self.fit[place] + weight * off * gain[place] for place in range(4)]
        if min(self.fit) >= 0:
            self.found = list(self.fit)
            return
        for _ in range(4):
            for place in range(4):
                row = self.information[place]
                others = sum(row[each] * (self.found[each] - self.fit[each]) for each in range(4) if each != place)
                self.found[place] = max(0.0, self.fit[place] - others / row[place])


def test_what_is_learned_is_what_the_formulas_say() -> None:
    """Over decodes and chunks, single pauses, a device that becomes slower, and one where context costs nothing."""
    rng, num_at_zero = random.Random(10), 0
    for cost in (COST, StepCost.linear(0.004, 2e-5, 0.0, 0.0)):
        model, by_hand = StepTimeModel(), ByHand()
        works = [rng.choice([decodes, mixed])(rng) for _ in range(70)]
        for number, work in enumerate(works):
            step_s = cost.seconds(work) * rng.lognormvariate(0.0, 0.03) * (1.5 if number > 50 else 1)
            step_s = {30: 1.0, 40: 0.02}.get(number, step_s)
            model.observe(work, step_s)
            by_hand.observe(work, step_s)
            information = [number for row in by_hand.information for number in row]
            expected = [*by_hand.fit, *by_hand.found, *information, by_hand.error, by_hand.margin]
            assert model.learned[:26] == pytest.approx(expected, rel=1e-6, abs=1e-10)
            for each in (work, StepWork(512, 20_000, 30_000_000)):
                assert model.predict_s(each) == pytest.approx(by_hand.expected_s(each), rel=1e-6)
                assert model.upper_bound_s(each) == pytest.approx(by_hand.upper_bound_s(each), rel=1e-6)
            num_at_zero += 0.0 in by_hand.found
        assert model.learned[26:] == (70, max(work.num_tokens for work in works))
    assert 10 < num_at_zero < 130


@pytest.mark.parametrize(("margin", "scatter"), [(-0.5, 1.0), (0.0, 1.0), (0.25, 1.25), (1.0, 2.0), (7.0, 2.0)])
def test_the_scatter_is_between_once_and_twice_the_expected_time(margin: float, scatter: float) -> None:
    model = StepTimeModel()
    model.recall((*model.learned[:25], margin, 4.0, 16.0))
    assert model.scatter == scatter


def test_a_step_that_the_clock_is_too_coarse_for_teaches_nothing() -> None:
    model, rng = StepTimeModel(), random.Random(4)
    for _ in range(20):
        model.observe(decodes(rng), 0.0)
    assert model.learned == StepTimeModel().learned
    learn(model, [decodes(rng) for _ in range(20)], rng)
    assert model.predict_s(work := decodes(rng)) == pytest.approx(COST.seconds(work), rel=0.01)
