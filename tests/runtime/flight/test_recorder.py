"""The flight recorder: a step's record equals what was decided, and the recorder never exceeds its bounds."""

from __future__ import annotations

import contextlib
import gc
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import fastgen.runtime.requests.request
from fastgen.errors import RequestTooLargeError
from fastgen.runtime.flight.recorder import Recorder
from fastgen.runtime.flight.recording import Arrival, Blocks, Finish, Recording
from fastgen.runtime.flight.replay import first_difference
from fastgen.runtime.flight.ring_events import ArrivalRecord, FinishRecord, StepRecord
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.step.step import Step as EngineStep
from tests.runtime.histories import History, random_history

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recording_says_what_was_scheduled(seed: int) -> None:
    history = random_history(random.Random(seed), failures=0.05)
    expected = []

    def note(step: EngineStep, *, launch: Any = history.device.launch) -> None:
        schedule, scheduler = step.schedule, history.engine.scheduler
        entries = [(f"{e.seq.key[0]}.{e.seq.index}", e.start, e.num_tokens) for e in schedule.entries]
        slots = {f"{e.seq.key[0]}.{e.seq.index}": e.seq.slot for e in schedule.entries}
        preempted = [f"{seq.key[0]}.{seq.index}" for seq in schedule.preempted]
        expected.append((entries, slots, preempted, schedule.size, scheduler.kv.pool.num_free))
        launch(step)

    history.device.launch = note  # type: ignore[method-assign]
    history.live(150)
    steps = history.engine.recorder.recording("m").steps
    assert [step.step for step in steps] == list(range(len(expected)))
    slot_of: dict[str, int] = {}
    for step, (entries, slots, preempted, size, num_free) in zip(steps, expected, strict=True):
        assert [entry[:3] for entry in step.entries] == entries
        assert (list(step.preempted), step.size, step.blocks_free) == (preempted, size, num_free)
        slot_of |= {admission.sequence: admission.slot for admission in step.admitted}
        assert {sequence: slot_of[sequence] for sequence in slots} == slots
        assert step.began_s <= step.scheduled_s <= step.end_s


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_and_times_are_those_of_the_answers(seed: int) -> None:
    history = random_history(random.Random(seed), failures=0.05)
    history.live(150)
    recording = history.engine.recorder.recording("m")
    for generation in history.generations:
        arrival = recording.arrivals[generation.request.request_id]
        assert arrival.clock_s == generation.request.arrival_s
        assert arrival.prompt_tokens == len(generation.request.prompt_ids)
        for completion in generation.completions:
            name = f"{arrival.request}.{completion.sequence.index}"
            finish, ran = recording.finishes[name], [step for step in recording.steps if step.ran_s is not None]
            assert (finish.reason, finish.num_tokens) == (completion.finish_reason, len(completion.token_ids))
            entries = [(step.ran_s, entry) for step in ran for entry in step.entries if entry.sequence == name]
            times_s = [ran_s for ran_s, entry in entries for _ in range(entry.num_sampled)]
            assert times_s == completion.token_times_s


def test_a_failed_step_is_there_without_an_end() -> None:
    history = random_history(random.Random(0))
    history.submit(8, max_new_tokens=2)
    history.device.failures = 1.0
    history.step()
    history.device.failures = 0.0
    history.submit(8, max_new_tokens=2)
    history.finish()
    recording = history.engine.recorder.recording("m")
    first, second, *_ = recording.steps
    assert (first.ran_s, first.ended_s, first.end_s) == (None, None, first.scheduled_s)
    assert [entry[:4] for entry in first.entries] == [("0.0", 0, first.num_tokens, 0)]
    assert (recording.finishes["0.0"].reason, recording.finishes["0.0"].step) == ("error", None)
    assert second.ran_s is not None
    assert {entry.sequence for entry in second.entries} == {"1.0"}
    assert [admission[:2] for step in (first, second) for admission in step.admitted] == [("0.0", 0), ("1.0", 0)]


def bounded(history: History, **bounds: int) -> Recorder:
    history.record_with(**bounds)
    return history.engine.recorder


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bounds", [{"max_steps": 7}, {"max_bytes": 9000}])
def test_the_ring_keeps_the_last_of_what_a_larger_one_keeps(seed: int, bounds: dict[str, int]) -> None:
    small, large = (random_history(random.Random(seed)) for _ in range(2))
    recorder = bounded(small, **bounds)
    small.live(120)
    large.live(120)
    some, all_ = recorder.recording("m"), large.engine.recorder.recording("m")
    first = some.header.first_step
    assert first > 0
    assert some.steps == all_.steps[first:]
    assert len(some.steps) <= bounds.get("max_steps", len(all_.steps))
    assert [event for event in some.events if isinstance(event, Finish)] == list(all_.finishes.values())[
        -len(some.finishes) :
    ]
    named = {entry.sequence for step in some.steps for entry in step.entries} | some.finishes.keys()
    assert {int(name.split(".")[0]) for name in named} <= some.arrivals.keys()
    assert all(all_.arrivals[request] == arrival for request, arrival in some.arrivals.items())


def test_nothing_is_kept_of_requests_that_left_the_ring() -> None:
    history = random_history(random.Random(5))
    recorder = bounded(history, max_steps=3)
    for _ in range(20):
        history.submit(3, max_new_tokens=2)
        history.finish()
    assert len(recorder.recording("m").arrivals) <= 3


def test_the_garbage_collector_visits_one_object_of_each_step_and_of_each_ended_request() -> None:
    history = random_history(random.Random(2))
    history.live(60)
    for _ in range(3):  # it stops to visit tuples of what it does not visit
        gc.collect()
    ring = history.engine.recorder._ring
    records = [event for event in ring if isinstance(event, StepRecord | ArrivalRecord)]
    assert {type(record) for record in records} == {StepRecord, ArrivalRecord}
    for record in records:
        if isinstance(record, StepRecord) or record.request is None:
            held = {name: getattr(record, name) for name in type(record).__slots__}
            assert [name for name, value in held.items() if gc.is_tracked(value)] == []
    ended = [event.request for event in ring if isinstance(event, FinishRecord) and event.request is not None]
    assert ended
    assert [record.request for record in ended] == [None] * len(ended)
    history.engine.cancel_all()


def test_a_recording_can_be_taken_at_any_moment() -> None:
    history = random_history(random.Random(1))
    history.submit(8, max_new_tokens=8, ignore_eos=True)
    for _ in range(4):
        history.step()
    recording = history.engine.recorder.recording("m")
    assert (len(recording.steps), recording.finishes) == (4, {})
    history.finish()
    assert recording.steps == history.engine.recorder.recording("m").steps[:4]


def test_the_last_steps_are_those_the_oldest_first() -> None:
    history = random_history(random.Random(1))
    history.submit(8, max_new_tokens=8, ignore_eos=True)
    for _ in range(5):
        history.step()
    recorder = history.engine.recorder
    assert [record.number for record in recorder.last_steps(3)] == [2, 3, 4]
    assert [record.number for record in recorder.last_steps(99)] == [0, 1, 2, 3, 4]
    history.engine.cancel_all()


def brute_force_numbers(token_ids: dict[str, list[int]], block_size: int) -> dict[str, list[int]]:
    """Numbers each full block by comparing whole prefixes."""
    prefixes: list[list[int]] = []
    numbers: dict[str, list[int]] = {}
    for name, ids in token_ids.items():
        numbers[name] = []
        for end in range(block_size, len(ids) + 1, block_size):
            if ids[:end] not in prefixes:
                prefixes.append(ids[:end])
            numbers[name].append(prefixes.index(ids[:end]))
    return numbers


def same_structure(left: dict[str, list[int]], right: dict[str, list[int]]) -> bool:
    """Returns whether a renaming of the numbers turns one into the other."""
    pairs = {pair for name in left for pair in zip(left[name], right[name], strict=True)}
    return len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})


def blocks_of(recording: Recording) -> dict[str, list[int]]:
    later = {event.sequence: list(event.blocks) for event in recording.events if event.kind == "blocks"}
    return {
        f"{arrival.request}.{index}": [*arrival.blocks, *later.get(f"{arrival.request}.{index}", [])]
        for arrival in recording.arrivals.values()
        for index in range(arrival.n)
    }


def test_a_step_that_ends_while_its_record_is_written_has_ended_with_its_tokens_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server writes recordings on another thread. Here the step ends when the record's decodes are read."""

    class Decodes(list[Any]):
        def __iter__(self) -> Any:
            if not has_ended:
                has_ended.append(True)
                ended(step)
            return super().__iter__()

    history = random_history(random.Random(2))
    for _ in range(2):
        history.submit(3, max_new_tokens=9)
    recorder, ended = history.engine.recorder, history.engine.recorder.ended
    steps: list[EngineStep] = []
    monkeypatch.setattr(recorder, "ended", steps.append)
    for _ in range(4):
        history.step()
        has_ended: list[bool] = []
        (record,), (step,) = recorder.last_steps(1), steps
        record.decodes = Decodes(record.decodes)
        for _ in range(2):
            written = record.step()
            num_sampled = sum(entry.num_sampled for entry in written.entries)
            assert num_sampled == (0 if written.ended_s is None else len(step.given))
        assert written.ended_s is not None
        assert step.given
        steps.clear()
    history.engine.cancel_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_block_numbers_say_which_blocks_are_equal_and_nothing_else(seed: int) -> None:
    history = random_history(random.Random(seed))
    recorder = bounded(history)
    recorder.engine = replace(recorder.engine, prefix_caching=True)
    history.live(80)
    recording = recorder.recording("m")
    token_ids = {
        f"{generation.request.request_id}.{completion.sequence.index}": completion.sequence.token_ids
        for generation in history.generations
        for completion in generation.completions
    }
    expected = brute_force_numbers(token_ids, history.block_size)
    found = blocks_of(recording)
    assert same_structure(found, expected)
    numbers = {number for blocks in found.values() for number in blocks}
    assert numbers == set(range(len(numbers)))
    arrivals = [event for event in recording.events if isinstance(event, Arrival)]
    first_seen = list(dict.fromkeys(number for arrival in arrivals for number in arrival.blocks))
    assert first_seen == sorted(first_seen)


def test_without_a_prefix_cache_nothing_is_said_of_tokens() -> None:
    history = random_history(random.Random(2))
    history.live(40)
    recording = history.engine.recorder.recording("m")
    assert all(arrival.blocks == () for arrival in recording.arrivals.values())
    assert {event.kind for event in recording.events} == {"arrival", "step", "finish"}


def test_writing_a_recording_makes_no_sequences_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written on another thread, and the engine's would then have other sequences than their request."""
    history = History(random.Random(0), num_blocks=30, token_budget=8, max_num_seqs=1, prefix_caching=True)
    for _ in range(3):
        history.engine.submit([7] * 9, history.sampling(max_new_tokens=5, ignore_eos=True))
    history.step()
    header, events = history.engine.recorder.contents("m")

    def refuse(request: Request, index: int) -> Any:
        raise AssertionError(f"sequence {index} of {request} is made")

    with monkeypatch.context() as patched:
        patched.setattr(fastgen.runtime.requests.request, "Sequence", refuse)
        recording = Recording(header, tuple(events))
    assert len(recording.arrivals) == 3
    history.finish()
    assert first_difference(history.engine.recorder.recording("m")) is None


def test_a_recording_that_is_written_while_beams_move_on_has_their_tokens_of_its_end() -> None:
    """A replay gives a moving beam the tokens of its next life, so those after the last recorded move count."""
    for seed in range(40):
        history = random_history(random.Random(seed), prefix_caching=True)
        for _ in range(60):
            if history.rng.random() < 0.3:
                with contextlib.suppress(RequestTooLargeError):  # on a small cache two beams may be too many
                    history.submit(beam_width=2, max_new_tokens=history.rng.randint(5, 12))
            else:
                history.step()
        now = history.engine.recorder.recording("m")
        header, events = history.engine.recorder.contents("m")
        history.finish()
        later = Recording(header, tuple(events))
        blocks_now, blocks_later = ([e for e in each.events if isinstance(e, Blocks)] for each in (now, later))
        assert blocks_later == blocks_now
        assert first_difference(later) is None


def new_request(num_prompt_tokens: int, **fields: Any) -> Request:
    return Request(0, [7] * num_prompt_tokens, SamplingParams(**fields), arrival_s=0.0)


def test_a_snapshot_is_due_each_quarter_of_the_ring() -> None:
    engine = random_history(random.Random(0)).engine.recorder.engine
    for num_steps, num_bytes, is_due in ((9, 99, False), (10, 0, True), (0, 100, True)):
        recorder = Recorder(engine, lambda: 0.0, max_steps=40, max_bytes=400, first_step=5)
        recorder.next_step += num_steps
        recorder._bytes_seen += num_bytes
        assert recorder.wants_snapshot is is_due
        recorder._last_snapshot = (recorder.next_step, recorder._bytes_seen)
        assert not recorder.wants_snapshot


@pytest.mark.parametrize(("max_bytes", "is_kept"), [(400, False), (401, True)])
def test_a_snapshot_that_takes_a_quarter_of_the_ring_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int, is_kept: bool
) -> None:
    state = SimpleNamespace(num_bytes=100)
    monkeypatch.setattr("fastgen.runtime.flight.recorder.SchedulerState", lambda scheduler, step: state)
    history = random_history(random.Random(0))
    history.record_with(max_bytes=max_bytes)
    recorder = history.engine.recorder
    recorder.snapshot(history.engine.scheduler)
    assert list(recorder._ring) == ([state] if is_kept else [])
    assert recorder._last_snapshot == (0, 100 if is_kept else 0)


def test_the_last_steps_are_searched_among_eight_times_as_many_events() -> None:
    history = random_history(random.Random(1))
    history.submit(8, max_new_tokens=8, ignore_eos=True)
    history.step()
    recorder = history.engine.recorder
    for num_others, numbers in ((7, [0]), (8, [])):
        recorder._ring.extend([new_request(1)] * (num_others - len(recorder._ring) + 2))
        assert [record.number for record in recorder.last_steps(1)] == numbers
    history.engine.cancel_all()


def test_the_ring_holds_as_many_steps_and_bytes_as_it_may() -> None:
    """An arrival of 100 tokens is estimated at 1000 bytes."""
    history = random_history(random.Random(1))
    recorder = bounded(history, max_steps=7)
    history.submit(3, max_new_tokens=20, ignore_eos=True)
    for _ in range(12):
        history.step()
    assert [step.step for step in recorder.recording("m").steps] == [5, 6, 7, 8, 9, 10, 11]
    for max_bytes, num_kept in ((2000, 2), (1999, 1), (1000, 1), (10, 1)):
        recorder = Recorder(replace(recorder.engine, prefix_caching=True), lambda: 0.0, max_bytes=max_bytes)
        for _ in range(4):
            recorder.arrived(new_request(100))
        assert len(recorder._ring) == num_kept
    history.engine.cancel_all()
