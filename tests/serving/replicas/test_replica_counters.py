"""Counters of replicas that are lost, heard again, restarted and ended: each request and loss is counted once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from fastgen.runtime.metrics import Histogram, Metrics
from fastgen.serving.engine.messages import Reply, Status, encoder
from fastgen.serving.replicas import membership
from fastgen.serving.replicas.messages import Beat
from tests.serving.replicas.played import Noted, PlayedReplica, played_set, run, submit, until, where

pytestmark = pytest.mark.usefixtures("quick")
KV_BLOCKS = 40
NO_METRICS = msgspec.Raw(encoder.encode(None))


def counters(requests_total: int) -> Metrics:
    """Returns the counters of an engine that took so many requests."""
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(Metrics)), 0)
    values |= {"requests_total": requests_total, "kv_blocks": KV_BLOCKS}
    values |= {name: Histogram(bounds=(), counts=(0,), sum=0.0) for name in values if name.endswith("_seconds")}
    values |= {"sequences_finished_total": {}, "step_seconds": {}}
    return Metrics(**values)


def sums(noted: Noted) -> tuple[int, int]:
    """Returns the sums over all replicas: of requests, which are counted, and of blocks, of which there are some."""
    metrics = noted.metrics.engine()
    return (0, 0) if metrics is None else (metrics.requests_total, metrics.kv_blocks)


async def until_counted(replica: PlayedReplica, noted: Noted, beat: Callable[[], None]) -> None:
    """Has ``replica`` report until its counters have been taken once more."""
    before = noted.notes.count(("counted", replica.name))

    def is_counted() -> bool:
        beat()
        return noted.notes.count(("counted", replica.name)) > before

    await until(is_counted)


@pytest.mark.parametrize(("num_restarts", "expected"), [(0, 7), (1, 12)])
def test_the_counters_of_a_replica_that_is_attached_again_continue_if_its_engine_is_the_same(
    num_restarts: int, expected: int
) -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, noted):
            await until_counted(a, noted, lambda: a.beat(metrics=counters(5)))
            assert sums(noted) == (5, KV_BLOCKS)
            a.num_restarts = num_restarts
            a.close()
            await until(lambda: ("away", "a") in noted.notes)
            assert sums(noted) == (5, 0)
            await until(lambda: replicas.replicas)
            await until_counted(a, noted, lambda: a.beat(metrics=counters(7), num_restarts=num_restarts))
            assert sums(noted) == (expected, KV_BLOCKS)
            assert replicas.num_restarts == 1 + num_restarts

    run(test)


def test_a_replica_that_finishes_its_requests_is_counted_to_its_end_and_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "KEEP_S", 0.0)

    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, handle, noted):
            request = submit(replicas)
            await where(request, a)
            await until_counted(a, noted, lambda: a.beat(metrics=counters(5)))
            handle.remove("a")
            await until(lambda: not replicas.replicas)
            await until_counted(a, noted, lambda: a.beat(metrics=counters(9)))
            a.finish(request.number, 5)
            await until(lambda: ("ended", "a") in noted.notes)
            assert sums(noted) == (9, 0)
            assert replicas.num_restarts == 0

    run(test)


def test_counters_that_come_after_their_engine_has_ended_are_not_taken_for_the_next_ones() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, noted):
            await until_counted(a, noted, lambda: a.beat(metrics=counters(5)))
            counting = asyncio.create_task(replicas.count())
            await until(lambda: replicas._questions._open)
            (number,), members = replicas._questions._open, replicas._members
            assert members is not None
            reply = Reply(number, msgspec.Raw(encoder.encode(counters(5))), None)
            replicas._take(reply)  # both come together
            members._take_beat(replicas.replicas["a"], Beat(None, Status(0, 0, 0), NO_METRICS, 0))
            await counting
            assert sums(noted) == (5, 0)
            await until_counted(a, noted, lambda: a.beat(metrics=counters(2), num_restarts=1))
            assert sums(noted) == (7, KV_BLOCKS)

    run(test)


def test_the_counters_of_each_replica_that_answers_are_taken_when_they_are_asked_for() -> None:
    async def test() -> None:
        replicas = [PlayedReplica(name) for name in "abc"]
        async with played_set(*replicas) as (found, _, noted):
            counting = asyncio.create_task(found.count())
            await until(lambda: len(found._questions._open) == 3)
            for number, (replica, _) in list(found._questions._open.items()):
                error = "out of memory" if replica.id == "b" else None
                found._take(Reply(number, msgspec.Raw(encoder.encode(counters(5))), error))
            await counting
            assert sums(noted) == (10, 2 * KV_BLOCKS)

    run(test)


def test_losses_and_restarts_of_engines_add_up_and_never_fall() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _):
            a.beat(num_restarts=2)
            await until(lambda: replicas.num_restarts == 2)
            a.close()
            await until(lambda: replicas.num_restarts == 3)
            handle.remove("a")
            await until(lambda: list(replicas.replicas) == ["b"])
            assert replicas.num_restarts == 3

    run(test)
