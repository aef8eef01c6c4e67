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
