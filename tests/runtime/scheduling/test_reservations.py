"""Reservation of KV blocks: what is admitted can finish, so nothing is preempted, and answers stay the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

import fastgen
from fastgen.errors import InvalidArgumentError, OutOfMemoryError, RequestTooLargeError
from fastgen.runtime.flight.replay import first_difference
from fastgen.runtime.flight.time_account import TimeAccount
from fastgen.runtime.kv_cache.block_pool import BlockPool
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.reservations import Reservations
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from tests.fast import cases
from tests.runtime.histories import History, random_history, random_policy

COST = StepCost.linear(0.01, 1e-4)


class Counts:
    """Counts over the steps of a history; checks every owner after each."""

    def __init__(self) -> None:
        self.num_preempted = self.most_running = self.most_reserved = 0

    def __call__(self, history: History) -> None:
        history.engine.check_integrity()
        scheduler = history.engine.scheduler
        self.most_running = max(self.most_running, len(scheduler.running))
        self.most_reserved = max(self.most_reserved, scheduler.reservations.num_blocks)
        self.num_preempted = history.engine.metrics.snapshot().preemptions_total


@pytest.mark.parametrize("seed", cases(range(40), fast=range(10)))
@pytest.mark.parametrize("kind", ["request", "context"])
def test_over_random_histories_nothing_is_preempted_and_all_is_released(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    counts = Counts()
    history = random_history(
        rng,
        policy=random_policy(rng),
        prefix_caching=rng.random() < 0.5,
        beams=rng.random() < 0.5,
        drafts=rng.random() < 0.5,
        failures=rng.choice([0.0, 0.02]),
        damages=rng.choice([0.0, 0.01]),
        kv_reservation=kind,
        after_step=counts,
    )
    room = (history.num_blocks - 1) // len(history.windows) * history.block_size
    history.max_model_len = room
    history.__post_init__()
    history.live(150)
    assert counts.num_preempted == 0
    assert counts.most_reserved > 0
    assert history.engine.scheduler.reservations.num_blocks == 0
    assert first_difference(history.engine.recorder.recording("history")) is None


def test_the_same_histories_without_reservation_preempt() -> None:
    """So the test above has something to find."""
    counts = [Counts() for _ in range(20)]
    for seed, each in enumerate(counts):
        random_history(random.Random(seed), after_step=each).live(150)
    assert sum(each.num_preempted for each in counts) > 20


def chats(num: int) -> list[Arrival]:
    return [Arrival(0.0, [chat + 1] * 100, SamplingParams(max_new_tokens=61)) for chat in range(num)]


@pytest.mark.parametrize(
    ("kind", "most_at_once"),
    [
        ("request", 40 // 10),  # 160 tokens are computed of each: 10 blocks of 16
        ("context", 40 // 16),  # 256 tokens, of which 255 are computed: 16 blocks
    ],
)
def test_as_many_run_at_once_as_the_arithmetic_says(kind: str, most_at_once: int) -> None:
    server = SimulatedServer(
        COST, token_budget=512, max_num_seqs=16, num_blocks=41, kv_reservation=kind, max_model_len=256
    )
    server.serve(chats(12))
    recording = server.engine.recorder.recording("chats")
    assert max(step.running for step in recording.steps) == most_at_once
    assert min(step.blocks_free for step in recording.steps) == 40 % (10 if kind == "request" else 16)


def test_a_request_that_waits_for_a_reservation_is_said_to_wait_for_blocks() -> None:
    server = SimulatedServer(
        COST, token_budget=512, max_num_seqs=16, num_blocks=41, kv_reservation="context", max_model_len=256
    )
    server.serve(chats(3))
    recording = server.engine.recorder.recording("chats")
    span = TimeAccount(recording, ("2.0",), recording.arrivals[2]).span(0.0, 0.6)
    assert span.percentages["queued_blocks"] > 90


def test_a_recording_replays_from_the_middle() -> None:
    rng = random.Random(3)
    history = random_history(rng, prefix_caching=True, beams=True, kv_reservation="request")
    history.record_with(max_steps=40)
    history.live(200)
    recording = history.engine.recorder.recording("history")
    assert recording.header.first_step > 0
    assert first_difference(recording) is None


PROMPTS = ["Once upon a time", "The", "A little girl named Lily went to the park", "One day"] * 4
KINDS: list[dict[str, Any]] = [{}, {"n": 2, "temperature": 0.9, "seed": 1}, {"beam_width": 3, "n": 2}, {"seed": 2}]


def test_answers_are_those_without_reservation() -> None:
    samplings = [SamplingParams(max_new_tokens=20 + 3 * place, **KINDS[place % 4]) for place in range(len(PROMPTS))]
    results = []
    for kind in (None, "request", "context"):
        with fastgen.load(
            "tiny-llama", kv_reservation=kind, block_size=4, kv_cache_memory="1MiB", max_model_len=96, max_num_seqs=8
        ) as llm:
            outputs = llm.generate(PROMPTS, samplings)
            results.append([[each.token_ids for each in output.completions] for output in outputs])
            assert kind is None or llm.metrics().preemptions_total == 0
    assert results[0] == results[1] == results[2]


def test_a_cache_too_small_for_one_context_is_refused_at_the_start() -> None:
    with pytest.raises(OutOfMemoryError, match=r"kv_reservation='context' reserves \d+ blocks for each sequence"):
        fastgen.load("tiny-llama", kv_reservation="context", kv_cache_memory="64KiB", max_model_len=256)
    with pytest.raises(InvalidArgumentError, match="kv_reservation='all'"):
        fastgen.load("tiny-llama", kv_reservation="all")


def test_beams_that_the_cache_cannot_hold_at_full_length_are_refused() -> None:
    server = SimulatedServer(
        COST, token_budget=64, max_num_seqs=8, num_blocks=41, kv_reservation="context", max_model_len=512
    )
    server.engine.check([1] * 8, SamplingParams(max_new_tokens=4))
    with pytest.raises(RequestTooLargeError, match="reserves 66 blocks for a request with max_model_len=512"):
        server.engine.check([1] * 8, SamplingParams(max_new_tokens=4, beam_width=2))


def test_the_pool_is_never_asked_for_more_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved blocks are there when they are used, also while others have pending copies."""
    refused = []
    allocate = BlockPool.allocate

    def watched(pool: BlockPool, num_blocks: int) -> list[int] | None:
        found = allocate(pool, num_blocks)
        if found is None:
            refused.append(num_blocks)
        return found

    monkeypatch.setattr(BlockPool, "allocate", watched)
    for seed in range(10):
        rng = random.Random(seed)
        history = random_history(rng, prefix_caching=True, kv_reservation="request")
        history.live(100)
    assert not refused


def test_beams_have_one_reservation_until_the_last_of_them_stops() -> None:
    """A prompt of 10 tokens and 8 of an answer: 17 are computed, in 2 blocks that both share and 3 of each, with one
    for copies."""
    server = SimulatedServer(
        COST, token_budget=64, max_num_seqs=8, num_blocks=41, block_size=4, kv_reservation="request", max_model_len=64
    )
    reservations = server.engine.scheduler.reservations
    first, second = Request(0, range(10), SamplingParams(max_new_tokens=8, beam_width=2), 0.0).sequences
    for slot, beam in enumerate((first, second)):
        assert reservations.has_room(beam)
        reservations.reserve(beam)
        beam.slot = slot
        assert (reservations.num_blocks, reservations.num_free) == (2 + 2 * (3 + 1), 30)
    first.slot = None
    reservations.release(first)
    assert reservations.num_blocks == 10
    second.slot = None
    reservations.release(second)
    reservations.release(second)
    assert (reservations.num_blocks, reservations.num_free) == (0, 40)


def test_what_is_free_to_the_last_block_is_room() -> None:
    """16 tokens of a sequence are computed, in 4 blocks; where whole contexts are reserved, 63 tokens in 16 blocks."""
    for kind, num_needed in (("request", 4), ("context", 16)):
        server = SimulatedServer(
            COST, token_budget=64, max_num_seqs=8, num_blocks=41, block_size=4, kv_reservation=kind, max_model_len=64
        )
        reservations = server.engine.scheduler.reservations
        sequences = [
            Request(index, [1] * 10, SamplingParams(max_new_tokens=7), 0.0).sequences[0] for index in range(11)
        ]
        num_fitting = 0
        while reservations.has_room(sequences[num_fitting]):
            reservations.reserve(sequences[num_fitting])
            num_fitting += 1
        assert num_fitting == 40 // num_needed
        assert reservations.num_free == 40 % num_needed
        assert reservations.has_room(sequences[0]), "it has its blocks already"
        for sequence in sequences:
            reservations.release(sequence)
        assert reservations.num_free == 40


def test_a_reservation_is_of_a_known_kind_and_knows_what_it_reserves() -> None:
    parts: Any = (None, None)
    with pytest.raises(InvalidArgumentError, match="kv_reservation='half': expected 'request' or 'context'"):
        Reservations(*parts, "half", 100)
    with pytest.raises(InvalidArgumentError, match="kv_reservation='context' needs max_model_len"):
        Reservations(*parts, "context", None)
    assert Reservations(*parts, "context", 100).num_blocks == 0
