"""Predictions of the first token, compared with the real scheduler on a simulated device."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.serving.admission.prediction import EngineSize, Load, Pending, Prediction
from tests.serving.test_admission import engine

COST = StepCost.linear(step_s=0.008, token_s=4e-5, context_s=2e-7, pair_s=1e-9, noise=0.05)
BLOCK_SIZE = 16


@dataclass
class Tried:
    predicted_s: float | None
    actual_s: float


class Watched:
    """A simulated engine. Its load is reported to :class:`Load` as by a server, and each arrival is predicted."""

    def __init__(self, *, token_budget: int, max_num_seqs: int, num_blocks: int, metrics_every_s: float = 1.0):
        self.device = SimulatedServer(
            COST, token_budget=token_budget, max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=BLOCK_SIZE
        )
        self.load = Load(EngineSize(token_budget, max_num_seqs, num_blocks * BLOCK_SIZE))
        self.open: list[tuple[Generation, Pending]] = []
        self.predicted: list[tuple[Generation, Prediction | None]] = []
        self.metrics_every_s, self.observed_s = metrics_every_s, 0.0

    def serve(self, arrivals: list[Arrival]) -> list[Tried]:
        clock = self.device.clock
        for arrival in arrivals:
            self._run(arrival.at_s)
            step_end_s, clock.now_s = max(clock.now_s, arrival.at_s), arrival.at_s
            sampling = arrival.sampling
            found = self.load.predict(len(arrival.prompt_ids), sampling.n, sampling.priority, clock.now_s)
            generation = self.device.engine.submit(arrival.prompt_ids, sampling)
            pending = self.load.submitted(
                len(arrival.prompt_ids), sampling.max_new_tokens, sampling.n, sampling.priority, clock.now_s
            )
            self.predicted.append((generation, found))
            self.open.append((generation, pending))
            clock.now_s = step_end_s
        self._run(float("inf"))
        tried = []
        for generation, found in self.predicted:
            actual_s = generation.output().metrics.ttft_s
            assert actual_s is not None
            tried.append(Tried(None if found is None else found.ttft_s, actual_s))
        return tried

    def _run(self, until_s: float) -> None:
        engine, clock = self.device.engine, self.device.clock
        while engine.has_work and clock.now_s < until_s:
            engine.step()
            for generation, pending in self.open:
                if generation.completions[0].token_ids:
                    self.load.started(pending, clock.now_s)
                if generation.finished:
                    num_generated = len(generation.completions[0].token_ids)
                    self.load.ended(pending, num_generated, is_whole=True, now_s=clock.now_s)
            self.open = [(generation, pending) for generation, pending in self.open if not generation.finished]
            if clock.now_s - self.observed_s >= self.metrics_every_s:
                self.observed_s = clock.now_s
                self.load.observe(engine.metrics.snapshot(), clock.now_s)


def poisson(
    draw: random.Random, num: int, rate: float, prompt: tuple[int, int], answer: tuple[int, int]
) -> list[Arrival]:
    at_s, arrivals = 0.0, []
    for index in range(num):
        at_s += draw.expovariate(rate)
        sampling = SamplingParams(max_new_tokens=draw.randint(*answer))
        arrivals.append(Arrival(at_s, [index % 900 + 1] * draw.randint(*prompt), sampling))
    return arrivals


def errors(tried: list[Tried]) -> tuple[np.ndarray, np.ndarray]:
    """Returns error and actual time of each prediction."""
    known = [each for each in tried if each.predicted_s is not None]
    assert len(known) > 0.8 * len(tried), "after the first seconds the speed is known"
    actual = np.array([each.actual_s for each in known])
    return np.array([each.predicted_s for each in known]) - actual, actual


LOADS = {
    "little to do": ({"token_budget": 512, "max_num_seqs": 64, "num_blocks": 8000}, (4, (200, 1500), (20, 100))),
    "long prompts": ({"token_budget": 512, "max_num_seqs": 64, "num_blocks": 8000}, (12, (200, 3000), (5, 20))),
    "few slots": ({"token_budget": 512, "max_num_seqs": 8, "num_blocks": 8000}, (7, (50, 400), (50, 200))),
    "a small cache": ({"token_budget": 512, "max_num_seqs": 64, "num_blocks": 150}, (8, (200, 600), (20, 100))),
}


@pytest.mark.parametrize("name", LOADS)
def test_nine_of_ten_predictions_are_off_by_a_quarter_at_most(name: str) -> None:
    """And by 50 ms more, which is two or three steps here: one that runs is not interrupted."""
    sizes, load = LOADS[name]
    tried = Watched(**sizes).serve(poisson(random.Random(5), 200, *load))
    error, actual = errors(tried)
    assert np.mean(np.abs(error) <= 0.05 + 0.25 * actual) >= 0.9


def test_the_gap_that_is_predicted_is_that_of_the_steps_with_one_more_answer() -> None:
    watched = Watched(token_budget=512, max_num_seqs=64, num_blocks=8000)
    running = [Arrival(0.01 * each, [each + 1] * 20, SamplingParams(max_new_tokens=600)) for each in range(15)]
    watched.serve([*running, Arrival(4.0, [9] * 20, SamplingParams(max_new_tokens=100))])
    newest, found = watched.predicted[-1]
    assert found is not None
    assert found.gap_s == pytest.approx(np.median(newest.output().metrics.gaps_s), rel=0.1)


def test_a_request_holds_its_prompt_and_what_it_has_generated() -> None:
    watched = Watched(token_budget=512, max_num_seqs=8, num_blocks=8000)
    watched.serve([Arrival(0.1 * each, [each + 1] * 20, SamplingParams(max_new_tokens=60)) for each in range(20)])
    engine, clock = watched.device.engine, watched.device.clock
    generation = engine.submit([7] * 20, SamplingParams(max_new_tokens=600))
    watched.open.append((generation, watched.load.submitted(20, 600, 1, 0, clock.now_s)))
    watched._run(clock.now_s + 1.0)
    ((num_left, num_seqs, num_held),) = watched.load._decoding(clock.now_s)
    num_generated = len(generation.completions[0].token_ids)
    assert 50 < num_generated < 300
    assert num_seqs == 1
    assert num_held == pytest.approx(20 + num_generated, rel=0.1)
    assert num_left == pytest.approx(600 - num_generated, rel=0.1)


def test_a_request_of_several_answers_begins_with_the_first_free_slot() -> None:
    watched = Watched(token_budget=512, max_num_seqs=8, num_blocks=8000)
    running = [Arrival(0.01 * each, [each + 1] * 20, SamplingParams(max_new_tokens=600)) for each in range(6)]
    several = Arrival(2.0, [9] * 20, SamplingParams(max_new_tokens=600, n=3))
    *_, of_several, of_next = watched.serve([*running, several, Arrival(2.5, [9] * 20, SamplingParams())])
    assert of_several.predicted_s is not None
    assert of_next.predicted_s is not None
    assert of_several.actual_s < 0.1
    assert of_several.predicted_s == pytest.approx(of_several.actual_s, abs=0.03)
    assert of_next.actual_s > 2.0, "all slots are taken"
    assert of_next.predicted_s == pytest.approx(of_next.actual_s, rel=0.1)


def steady(max_num_seqs: int) -> Load:
    """Returns the load of an engine whose steps take 10 ms each, with 64 tokens at most."""
    load = Load(EngineSize(64, max_num_seqs, 100_000))
    load.observe(engine({1: 0.01, 64: 0.01}), 0.0)
    return load


def ttft_s(load: Load, num_prompt_tokens: int, now_s: float) -> float:
    found = load.predict(num_prompt_tokens, 1, 0, now_s)
    assert found is not None
    return found.ttft_s


def test_answers_are_expected_to_be_as_long_as_those_that_ended_by_themselves() -> None:
    load = steady(max_num_seqs=1)
    for num_generated, is_whole in ((50, True), (1, False)) * 50:
        pending = load.submitted(1, 100, 1, 0, 0.0)
        load.started(pending, 0.0)
        load.ended(pending, num_generated, is_whole=is_whole, now_s=0.0)
    load.started(load.submitted(1, 1000, 1, 0, 0.0), 0.0)
    num_tokens = 1000 * (0.5 + 0.5 * 0.98**50)  # each of the 50 moves the expected share by 2 % to its own
    assert ttft_s(load, 1, 0.0) == pytest.approx(0.01 * num_tokens, rel=0.01)
    assert ttft_s(load, 1, 1.0) == pytest.approx(0.01 * num_tokens - 1.0, rel=0.01)


def test_the_first_prompt_is_computed_from_the_moment_when_it_became_the_first() -> None:
    load = steady(max_num_seqs=2)
    first = load.submitted(640, 10, 1, 0, 100.0)  # ten steps
    assert [ttft_s(load, 64, now_s) for now_s in (100.0, 100.05, 200.0)] == pytest.approx([0.12, 0.07, 0.02])
    second = load.submitted(640, 10, 1, 0, 100.05)
    load.started(first, 100.1)
    assert ttft_s(load, 64, 100.12) == pytest.approx(0.11, abs=0.02)
    load.ended(load.submitted(64, 10, 1, 0, 100.13), 0, is_whole=False, now_s=100.14)  # it never was the first
    assert ttft_s(load, 64, 100.15) == pytest.approx(0.08, abs=0.02)
    load.ended(second, 0, is_whole=False, now_s=100.15)
    assert ttft_s(load, 64, 100.15) == pytest.approx(0.02, abs=0.01)


def test_a_prompt_without_a_slot_is_not_computed_yet() -> None:
    load = steady(max_num_seqs=1)
    load.started(load.submitted(1, 1000, 1, 0, 0.0), 0.0)
    load.submitted(640, 10, 1, 0, 0.0)
    # What is left of the answer, ten steps of the prompt, its own answer, and the step of the new one.
    assert ttft_s(load, 1, 1.0) == pytest.approx(8.99 + 0.1 + 0.1 + 0.01, abs=0.03)


def proportional(*, max_num_seqs: int = 64, num_kv_tokens: int = 100_000, largest: int = 64) -> Load:
    """Returns the load of an engine whose steps take 1 ms for each token with its padding: of 1, 2, 4, … 64 tokens.
    Those of ``largest`` tokens were measured.
    """
    load = Load(EngineSize(64, max_num_seqs, num_kv_tokens))
    load.observe(engine({1: 0.001, largest: 0.001 * largest}), 0.0)
    return load


def running(load: Load, num_prompt_tokens: int, num_new_tokens: int, num_seqs: int = 1) -> None:
    """Adds a request whose first token has just come."""
    load.started(load.submitted(num_prompt_tokens, num_new_tokens, num_seqs, 0, 0.0), 0.0)


def ttft_ms(load: Load, num_prompt_tokens: int, *, now_s: float = 0.0, num_seqs: int = 1) -> float:
    found = load.predict(num_prompt_tokens, num_seqs, 0, now_s)
    assert found is not None
    return 1000 * found.ttft_s


@pytest.mark.parametrize(
    ("num_decodes", "num_tokens", "expected_ms"),
    [
        (0, 1, 1),
        (0, 32, 32),
        (0, 33, 64),
        (0, 100, 64 + 64),  # twice 50, each filled up to 64
        (0, 160, 64 + 64 + 32),
        (3, 5, 8),
        (3, 6, 16),
        (3, 61, 64),
        (3, 62, 64 + 4),
        (64, 2, 64 + 64),  # beside so many there is room for one token a step
    ],
)
def test_a_prompt_shares_its_steps_with_the_decodes(num_decodes: int, num_tokens: int, expected_ms: float) -> None:
    load = proportional(max_num_seqs=65)
    for _ in range(num_decodes):
        running(load, 1, 1000)
    assert ttft_ms(load, num_tokens) == pytest.approx(expected_ms)


@pytest.mark.parametrize(
    ("waiting", "num_tokens", "expected_ms"),
    [
        (20, 20, 64),
        (20, 12, 32),
        (100, 28, 64 + 64),
        (100, 40, 64 + 64 + 16),  # 100 and 28 of 40, and the other 12 beside the first one's decode
    ],
)
def test_a_prompt_shares_its_steps_with_the_one_before_it(waiting: int, num_tokens: int, expected_ms: float) -> None:
    load = proportional()
    load.submitted(waiting, 10, 1, 0, 0.0)
    assert ttft_ms(load, num_tokens) == pytest.approx(expected_ms)


def test_a_request_waits_for_the_first_answer_that_ends() -> None:
    load = proportional(max_num_seqs=2)
    running(load, 1, 5)  # of which one token has come
    running(load, 1, 10)
    assert ttft_ms(load, 1) == pytest.approx(4 * 2 + 2)
    load.submitted(2, 3, 1, 0, 0.0)
    # Four steps, the prompt of the one before, its answer of three steps, and the step of this one.
    assert ttft_ms(load, 1) == pytest.approx(4 * 2 + 4 + 3 * 2 + 2)


def test_a_request_of_several_answers_leaves_as_many_slots() -> None:
    load = proportional(max_num_seqs=4)
    running(load, 1, 9, num_seqs=3)
    assert ttft_ms(load, 1) == pytest.approx(4)
    load.submitted(2, 5, 2, 0, 0.0)
    # The one before has its prompt computed beside three decodes, and leaves two slots after five steps of five.
    assert ttft_ms(load, 1) == pytest.approx(8 + 5 * 8 + 4)


def test_a_request_waits_until_the_cache_has_room_for_its_prompt() -> None:
    load = proportional(num_kv_tokens=100)
    running(load, 40, 10, num_seqs=2)  # it holds 42 tokens, and ends after nine more steps
    assert ttft_ms(load, 58) == pytest.approx(64)
    assert ttft_ms(load, 59) == pytest.approx(9 * 2 + 64)


def test_a_prompt_that_was_admitted_holds_its_place_in_the_cache() -> None:
    load = proportional(num_kv_tokens=100)
    load.submitted(60, 5, 1, 0, 0.0)
    assert ttft_ms(load, 40) == pytest.approx(64 + 64)
    # It has its first token after 64 ms and ends five steps later.
    assert ttft_ms(load, 41) == pytest.approx(64 + 5 + 64)


def test_an_answer_has_come_as_far_as_steps_of_its_size_go() -> None:
    load = proportional(num_kv_tokens=60)
    running(load, 50, 100)
    assert ttft_ms(load, 20, now_s=0.05) == pytest.approx(49 + 32)


def test_the_gap_is_the_step_of_all_who_are_there_then_as_far_as_there_are_slots() -> None:
    for max_num_seqs, expected_s in ((64, 0.016), (8, 0.008), (5, 0.008), (4, 0.004)):
        load = proportional(max_num_seqs=max_num_seqs)
        running(load, 1, 10, num_seqs=2)
        load.submitted(1, 10, 3, 0, 0.0)
        found = load.predict(1, 4, 0, 0.0)
        assert found is not None
        assert found.gap_s == pytest.approx(expected_s)


def test_nothing_is_predicted_of_steps_that_are_more_than_four_times_the_largest_measured() -> None:
    load = proportional(largest=4)
    assert ttft_ms(load, 16) == pytest.approx(16)
    assert load.predict(17, 1, 0, 0.0) is None
    assert ttft_ms(load, 1, num_seqs=16) == pytest.approx(1)
    assert load.predict(1, 17, 0, 0.0) is None
    for _ in range(4):
        running(load, 1, 10)
    assert ttft_ms(load, 12) == pytest.approx(16)
    assert load.predict(13, 1, 0, 0.0) is None


def test_equal_steps_are_simulated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    load, num_looks = proportional(max_num_seqs=1), 0
    step_s = load.speed.step_s

    def look(num_tokens: float) -> float:
        nonlocal num_looks
        num_looks += 1
        return step_s(num_tokens)

    running(load, 1, 1_000_001)
    load.submitted(6_400_000, 10, 1, 0, 0.0)
    monkeypatch.setattr(load.speed, "step_s", look)
    assert ttft_ms(load, 1) == pytest.approx(1_000_000 + 6_400_000 + 10 + 1)
    assert num_looks < 20


def test_the_room_that_an_answer_takes_grows_with_its_tokens() -> None:
    load = proportional(max_num_seqs=2, num_kv_tokens=100)
    running(load, 20, 1000)
    load.submitted(2, 29, 1, 0, 0.0)
    # A slot becomes free after 30 steps. By then the running answer holds 51 tokens.
    assert ttft_ms(load, 49) < 200
    assert ttft_ms(load, 50) > 900


@pytest.mark.parametrize(("num_decodes", "num_tokens"), [(4, 600), (4, 632), (100, 440), (100, 413)])
def test_a_prompt_comes_in_even_shares_and_no_step_is_larger_than_it_needs(num_decodes: int, num_tokens: int) -> None:
    """Each takes two steps of 320 tokens. Larger ones are slower than in proportion."""
    load = Load(EngineSize(512, 200, 100_000))
    load.observe(engine({1: 0.001, 320: 0.32, 512: 1.0}), 0.0)
    for _ in range(num_decodes):
        running(load, 1, 1000)
    assert ttft_ms(load, num_tokens) == pytest.approx(2 * 320)


def test_an_answer_that_ends_leaves_all_the_room_that_it_took() -> None:
    load = proportional(num_kv_tokens=100)
    running(load, 40, 11)
    running(load, 40, 1000)
    assert ttft_ms(load, 18) == pytest.approx(32), "each holds 41 tokens"
    # Ten steps later the first one ends, and leaves 49 places beside the 51 of the other.
    assert ttft_ms(load, 49) == pytest.approx(10 * 2 + 64)
    assert ttft_ms(load, 50) > 900


def test_the_progress_of_the_first_prompt_is_none_of_a_more_urgent_request() -> None:
    load = proportional()
    load.submitted(640, 10, 1, 0, 0.0)
    for now_s in (0.0, 0.5):
        found = load.predict(64, 1, -1, now_s)
        assert found is not None
        assert found.ttft_s == pytest.approx(0.064)
