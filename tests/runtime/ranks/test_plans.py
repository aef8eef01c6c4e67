"""Plans reach every rank once, in order, whether it looks or sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from fastgen.compile.host.rank_memory import RankMemory
from fastgen.errors import RankError
from fastgen.runtime.step import plans
from fastgen.runtime.step.plans import Kind, PlanBoard

PAYLOAD = 256


def board(memory: RankMemory) -> PlanBoard:
    return PlanBoard(memory, PAYLOAD)


def memory_of(count: int) -> RankMemory:
    return RankMemory(count, 4096, PlanBoard.size_bytes(count, PAYLOAD))


def test_plans_reach_every_rank_once_and_in_order() -> None:
    memory = memory_of(3)
    leader, found = board(memory), {1: list[tuple[int, ...]](), 2: list[tuple[int, ...]]()}
    wakes = {rank: threading.Event() for rank in found}

    def sleep(rank: int) -> Callable[[float], None]:
        def wait(seconds: float) -> None:
            wakes[rank].wait(seconds)
            wakes[rank].clear()

        return wait

    def follow(rank: int) -> None:
        own = board(memory)
        for _ in range(50):
            plan = own.next(rank, sleep(rank))
            found[rank].append((plan.kind, *plan.numbers, int(plan.payload.view(np.int64).sum())))
            own.taken(rank)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in found]
    for thread in threads:
        thread.start()
    expected = []
    for number in range(50):
        arrays = [np.arange(number % 7, dtype=np.int64), np.full((3, 2), number, np.int64)[:, 0]]  # a column of others
        leader.write(Kind(number % 5), (number, 7)[: number % 3], arrays, lambda rank: wakes[rank].set())
        expected.append((number % 5, *(number, 7)[: number % 3], sum(int(each.sum()) for each in arrays)))
    for thread in threads:
        thread.join(60)
    leader.finish()
    assert found == {1: expected, 2: expected}
    assert leader.costs.num_plans == 50


def test_a_rank_that_takes_no_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "TIMEOUT_S", 0.1)
    memory = memory_of(2)
    leader = board(memory)
    for _ in range(2):  # both places are free
        leader.write(Kind.HIDDEN, (), (), lambda rank: None)
    with pytest.raises(RankError, match="rank 1 of 2 takes no plans"):
        leader.write(Kind.HIDDEN, (), (), lambda rank: None)
    with pytest.raises(RankError, match="rank 1 of 2 takes no plans"):
        leader.finish()


def test_a_rank_sleeps_where_no_plan_comes_and_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LOOK_S", 0.0)
    memory = memory_of(3)
    leader, follower = board(memory), board(memory)
    slept, woken = list[float](), list[int]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            leader.write(Kind.COPY_BLOCKS, (4, 5, 6), [np.arange(3, dtype=np.int32)], woken.append)

    plan = follower.next(2, sleep)
    assert slept == [0.05] * 2
    assert woken == [2]
    assert (plan.kind, plan.numbers) == (Kind.COPY_BLOCKS, (4, 5, 6))
    assert plan.payload.view(np.int32).tolist() == [0, 1, 2]
    assert leader.slowest() == (1, 0)
    follower.taken(2)
    leader.write(Kind.LOGITS, range(7), [], woken.append)
    assert follower.next(2, sleep).numbers == (0, 1, 2, 3, 4, 5, 6)
    assert (slept, woken) == ([0.05] * 2, [2]), "there was a plan to take"
    for rank in (1, 1, 2):
        follower.taken(rank)
    assert leader.slowest() is None
    leader.finish()
    leader.write(Kind.LOGITS, (), [], woken.append)
    assert leader.slowest() == (1, 2)


def test_the_bytes_of_plans_are_counted() -> None:
    """Ten words beside the arrays."""
    memory = memory_of(2)
    leader = board(memory)
    leader.write(Kind.HIDDEN, (1,), [np.zeros(5, np.int64), np.zeros(3, np.int32)], lambda rank: None)
    assert (leader.costs.num_plans, leader.costs.num_bytes) == (1, 80 + 52)
    leader.write(Kind.HIDDEN, (), [], lambda rank: None)
    assert (leader.costs.num_plans, leader.costs.num_bytes) == (2, 2 * 80 + 52)
    assert 0 < leader.costs.took_s < 60


def test_plans_have_room_for_their_arrays_at_lines_of_their_own() -> None:
    """A line has 64 bytes. Each of two ranks has two, for a number and for whether it sleeps; a header takes 80 bytes,
    and each of two places is filled up to whole lines."""
    assert [PlanBoard.size_bytes(2, payload) for payload in (48, 49, 112, 113)] == [512, 640, 640, 768]
    memory = memory_of(2)
    leader, follower = board(memory), board(memory)
    for number in (1, 2):
        leader.write(Kind.HIDDEN, (), [np.full(PAYLOAD, number, np.uint8)], lambda rank: None)
    for number in (1, 2):
        assert set(follower.next(1, lambda seconds: None).payload.tolist()) == {number}
        follower.taken(1)
