"""The model of step times: it finds a device's coefficients, keeps them, and is not led astray."""

from __future__ import annotations

import random

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
