"""Replays of recordings: the scheduler decides the same bit for bit, and a differing decision is found."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.recording import Arrival, Beams, Recording, Snapshot, Step, Withdrawal
from fastgen.runtime.flight.recording_file import read_recording, write_recording
from fastgen.runtime.flight.replay import first_difference, replay
from fastgen.runtime.scheduling.policies import POLICIES, choose_policy, make_policy, policy_name
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.policies.time_budget import TimeBudgetSplitFuse
from fastgen.runtime.scheduling.scheduler import Scheduler
from tests.fast import cases
from tests.runtime.histories import History, random_history, random_policy


def options(seed: int) -> dict[str, Any]:
    """Varies all features of a scheduler from seed to seed."""
    rng = random.Random(f"options {seed}")
    return {
        "failures": 0.03,
        "damages": 0.02,
        "prefix_caching": seed % 2 == 0,
        "beams": seed % 4 < 2,
        "drafts": seed % 3 == 0,
        "policy": random_policy(rng),
        "aging_s": rng.choice([0.01, 0.05, 30.0]),
    }


def recorded(seed: int, **options: Any) -> tuple[History, Recording]:
    history = random_history(random.Random(seed), **options)
    history.live(150)
    return history, history.engine.recorder.recording("m")


@pytest.mark.parametrize("seed", cases(range(40), fast=range(15)))
def test_every_decision_of_a_random_history_is_repeated(seed: int, tmp_path: Path) -> None:
    _, recording = recorded(seed, **options(seed))
    write_recording(recording, tmp_path / "flight.jsonl")
    found = read_recording(tmp_path / "flight.jsonl")
    assert len(found.steps) > 20
    assert first_difference(found) is None
    assert sum(1 for _ in replay(found)) == len(found.steps)


def test_these_histories_contain_the_hard_cases() -> None:
    counts = {"preempted": 0, "failed": 0, "hits": 0, "copies": 0, "windows": 0, "forks": 0}
    counts |= {"cancelled": 0, "timeout": 0, "drafts": 0, "right drafts": 0, "waits": 0, "bounded": 0, "withdrawn": 0}
    for seed in range(40):
        history, recording = recorded(seed, **options(seed))
        policy = history.engine.scheduler.policy
        counts["waits"] += history.num_waits
        counts["bounded"] += isinstance(policy, TimeBudgetSplitFuse)
        counts["windows"] += any(history.windows)
        for step in recording.steps:
            counts["preempted"] += len(step.preempted)
            counts["failed"] += step.ran_s is None
            counts["hits"] += sum(admission.cached_tokens > 0 for admission in step.admitted)
            counts["copies"] += len(step.block_copies)
            counts["drafts"] += sum(entry.num_drafts > 0 for entry in step.entries)
            counts["right drafts"] += sum(entry.num_drafts > 0 and entry.num_sampled > 1 for entry in step.entries)
        moves = [move for event in recording.events if isinstance(event, Beams) for move in event.moves]
        counts["forks"] += sum(move.parent is not None for move in moves)
        reasons = [finish.reason for finish in recording.finishes.values()]
        counts["cancelled"] += reasons.count("cancelled")
        counts["timeout"] += reasons.count("timeout")
        counts["withdrawn"] += sum(isinstance(event, Withdrawal) for event in recording.events)
    assert counts.pop("bounded") >= 4
    assert min(counts.values()) >= 10, counts


def held(scheduler: Scheduler) -> dict[str, list[list[int]]]:
    """Returns the block tables. Beams, which move after the step, are left out."""
    running = [seq for seq in scheduler.running if not seq.request.has_beams]
    return {str(seq.key): [*map(list, seq.block_tables)] for seq in running}


def test_block_tables_equal_the_recorded_ones() -> None:
    tables: list[dict[str, list[list[int]]]] = []

    def note(history: History) -> None:
        if len(history.device.seen) > len(tables):
            tables.append(held(history.engine.scheduler))

    history = random_history(random.Random(3), prefix_caching=True, after_step=note)
    history.live(100)
    recording = history.engine.recorder.recording("m")
    replayed = [held(scheduler) for _, _, scheduler in replay(recording)]
    for now, then in zip(replayed, tables, strict=True):  # at a time when the sequences that the step ended were gone
        assert {key: now[key] for key in then} == then


CHANGES: dict[str, Any] = {
    "size": lambda step: {"size": step.size + 1},
    "entries": lambda step: {
        "entries": (step.entries[0]._replace(num_tokens=step.entries[0].num_tokens + 1), *step.entries[1:])
    },
    "waiting": lambda step: {"waiting": step.waiting + 1},
    "blocks_free": lambda step: {"blocks_free": step.blocks_free - 1},
    "block_entries": lambda step: {
        "block_entries": tuple(entry._replace(block=entry.block + 1) for entry in step.block_entries)
    },
    "admitted": lambda step: {"admitted": tuple(each._replace(slot=each.slot + 1) for each in step.admitted)},
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_first_step_that_differs_is_returned_with_both_decisions(field: str) -> None:
    _, recording = recorded(7)
    events = list(recording.events)
    steps = [place for place, event in enumerate(events) if isinstance(event, Step) and event.admitted]
    place = steps[2]
    step = events[place]
    assert isinstance(step, Step)
    assert step.block_entries
    events[place] = replace(step, **CHANGES[field](step))
    difference = first_difference(Recording(recording.header, tuple(events)))
    assert difference is not None
    assert (difference.recorded, difference.replayed) == (events[place], step)
    assert difference.fields == (field,)


def test_another_prompt_length_or_another_cache_decides_differently() -> None:
    _, recording = recorded(7)
    longer = [replace(e, prompt_tokens=e.prompt_tokens + 3) if isinstance(e, Arrival) else e for e in recording.events]
    assert first_difference(Recording(recording.header, tuple(longer))) is not None
    engine = replace(recording.header.engine, num_blocks=recording.header.engine.num_blocks + 1)
    assert first_difference(Recording(replace(recording.header, engine=engine), recording.events)) is not None


def test_another_policy_or_other_step_times_decide_differently() -> None:
    def differs(recording: Recording, **engine: Any) -> bool:
        header = replace(recording.header, engine=replace(recording.header.engine, **engine))
        return first_difference(Recording(header, recording.events)) is not None

    history = random_history(random.Random(1), policy=choose_policy("splitfuse", itl_target_ms=6.5))
    history.live(150)
    bounded = history.engine.recorder.recording("m")
    assert (bounded.header.engine.policy, bounded.header.engine.policy_parameters) == (
        "time_budget",
        {"itl_target_s": 0.0065},
    )
    assert not differs(bounded)
    assert differs(bounded, policy_parameters={"itl_target_s": 1000.0})
    assert differs(bounded, policy="prefill_first", policy_parameters={})
    slower = [replace(e, began_s=e.began_s - 0.1) if isinstance(e, Step) else e for e in bounded.events]
    assert first_difference(Recording(bounded.header, tuple(slower))) is not None


def test_a_custom_policy_cannot_be_replayed() -> None:
    class Mine(SplitFuse):
        pass

    history = random_history(random.Random(1), policy=Mine())
    history.live(20)
    with pytest.raises(InvalidArgumentError, match=r"Mine' is none of fastgen's own, which are splitfuse, prefill"):
        first_difference(history.engine.recorder.recording("m"))


@pytest.mark.parametrize("name", [*POLICIES, "bounded"])
def test_policies_are_rebuilt_from_their_names_and_parameters(name: str) -> None:
    policy = choose_policy("splitfuse", 7.0) if name == "bounded" else choose_policy(name)
    parameters = {parameter: getattr(policy, parameter) for parameter in policy.parameters}
    made = make_policy(policy_name(policy), parameters)
    assert type(made) is type(policy)
    assert {parameter: getattr(made, parameter) for parameter in parameters} == parameters
    assert tuple(inspect.signature(type(policy)).parameters) == policy.parameters
    with pytest.raises(InvalidArgumentError, match=r"has the parameters \("):
        make_policy(policy_name(policy), parameters | {"other": 1})


def test_the_prefix_caches_hits_need_the_block_numbers() -> None:
    history = History(random.Random(0), num_blocks=40, token_budget=64, max_num_seqs=4, prefix_caching=True)
    for _ in range(2):
        history.engine.submit([7] * 20, history.sampling(max_new_tokens=2))
        history.finish()
    recording = history.engine.recorder.recording("m")
    assert [admission.cached_tokens for step in recording.steps for admission in step.admitted] == [0, 16]
    assert first_difference(recording) is None
    without = tuple(replace(e, blocks=()) if isinstance(e, Arrival) else e for e in recording.events)
    difference = first_difference(Recording(recording.header, without))
    assert difference is not None
    assert "admitted" in difference.fields


def test_a_continued_chat_finds_its_own_answer() -> None:
    """The second prompt contains the first one, its answer, and more: blocks that straddle prompt and answer are found
    too.
    """
    history = History(random.Random(0), num_blocks=40, token_budget=64, max_num_seqs=4, prefix_caching=True)
    first = history.engine.submit([7] * 10, history.sampling(max_new_tokens=9, ignore_eos=True))
    history.finish()
    history.engine.submit([7] * 10 + first.output().token_ids + [3], history.sampling(max_new_tokens=2))
    history.finish()
    recording = history.engine.recorder.recording("m")
    assert recording.steps[-1].entries[0].sequence == "1.0"
    assert [admission.cached_tokens for step in recording.steps for admission in step.admitted] == [0, 16]
    assert first_difference(recording) is None


@pytest.mark.parametrize("seed", cases(range(40), fast=range(15)))
def test_a_ring_that_wrapped_is_replayed_from_a_snapshot(seed: int, tmp_path: Path) -> None:
    history = random_history(random.Random(seed), **options(seed))
    history.record_with(max_steps=40)
    history.live(150)
    write_recording(history.engine.recorder.recording("m"), tmp_path / "flight.jsonl")
    found = read_recording(tmp_path / "flight.jsonl")
    assert found.header.first_step
    assert len([event for event in found.events if isinstance(event, Snapshot)]) >= 3
    assert first_difference(found) is None
    replayed = [event.step for event, _, _ in replay(found)]
    assert len(replayed) >= 30
    assert replayed == list(range(replayed[0], replayed[-1] + 1))


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_that_is_bounded_in_bytes_holds_snapshots_too(seed: int) -> None:
    history = random_history(random.Random(seed))
    history.record_with(max_bytes=40_000)
    history.live(150)
    recording = history.engine.recorder.recording("m")
    assert recording.header.first_step
    num_snapshots = sum(isinstance(event, Snapshot) for event in recording.events)
    assert 1 <= num_snapshots <= 4
    assert first_difference(recording) is None


def test_a_snapshot_that_is_wrong_decides_differently() -> None:
    num_tried = 0
    for seed in range(8):
        history = random_history(random.Random(seed))
        history.record_with(max_steps=40)
        history.live(150)
        recording = history.engine.recorder.recording("m")
        place = next(place for place, event in enumerate(recording.events) if isinstance(event, Snapshot))
        snapshot = recording.events[place]
        assert isinstance(snapshot, Snapshot)
        if snapshot.free:
            num_tried += 1
            events = list(recording.events)
            events[place] = replace(snapshot, free=snapshot.free[1:])
            assert first_difference(Recording(recording.header, tuple(events))) is not None
    assert num_tried > 2


def test_a_ring_too_small_for_a_snapshot_cannot_be_replayed() -> None:
    history = random_history(random.Random(0))
    history.record_with(max_bytes=6000)
    history.live(60)
    recording = history.engine.recorder.recording("m")
    with pytest.raises(InvalidArgumentError, match=rf"begins at step {recording.steps[0].step}, since the recorder"):
        first_difference(recording)


def test_a_request_after_a_snapshot_without_waiting_ones_stands_behind_those_that_run() -> None:
    """Turns go on behind those of running sequences, else a preemption would take another sequence than it took."""
    history = History(random.Random(0), num_blocks=13, token_budget=32, max_num_seqs=4)
    for _ in range(3):
        history.engine.submit([5] * 8, history.sampling(max_new_tokens=16, ignore_eos=True))
    history.step()
    history.engine.recorder.snapshot(history.engine.scheduler)
    snapshot_at = history.engine.recorder.next_step
    history.engine.submit([6] * 8, history.sampling(max_new_tokens=16, ignore_eos=True))
    history.finish()
    recording = history.engine.recorder.recording("m")
    assert any(step.preempted for step in recording.steps)
    place = next(place for place, event in enumerate(recording.events) if isinstance(event, Snapshot))
    snapshot = recording.events[place]
    assert isinstance(snapshot, Snapshot)
    assert snapshot.waiting == ()
    arrivals = [event for event in recording.events[:place] if isinstance(event, Arrival)]
    header = replace(recording.header, first_step=snapshot_at)
    later = Recording(header, (*arrivals, *recording.events[place:]))
    assert first_difference(later) is None
