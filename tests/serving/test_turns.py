"""Few callers go on in one turn of the event loop, in their order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from fastgen.serving.admission.turns import Turns
from tests.serving.loop_turns import LoopTurns


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 20.0))


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_so_many_go_on_in_a_turn_in_their_order(num_at_once: int) -> None:
    async def test() -> None:
        turns, loop_turns, gone = Turns(num_at_once), LoopTurns(), list[tuple[int, int]]()

        async def caller(number: int) -> None:
            await turns.wait()
            gone.append((loop_turns.number, number))

        await asyncio.gather(*(caller(number) for number in range(10)))
        loop_turns.stop()
        assert [number for _, number in gone] == list(range(10))
        assert max(Counter(turn for turn, _ in gone).values()) == num_at_once
        assert gone[-1][0] - gone[0][0] <= 10 // num_at_once + 2, "turns were left unused"

    run(test())


@pytest.mark.parametrize("seed", range(5))
def test_random_callers_of_whom_some_leave(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        turns, loop_turns, gone = Turns(2), LoopTurns(), list[tuple[int, int]]()

        async def caller(number: int) -> None:
            for _ in range(3):
                await turns.wait()
                gone.append((loop_turns.number, number))

        tasks = []
        for number in range(60):
            tasks.append(asyncio.create_task(caller(number)))
            for _ in range(rng.choice([0, 0, 0, 1, 5])):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        loop_turns.stop()
        assert max(Counter(turn for turn, _ in gone).values()) <= 2
        times = Counter(number for _, number in gone)
        for number, end in enumerate(ended):
            assert times[number] == 3 or isinstance(end, asyncio.CancelledError)

    run(test())


def test_a_caller_alone_goes_on_soon_and_then_the_loop_rests() -> None:
    async def test() -> None:
        turns, loop_turns = Turns(1), LoopTurns()
        for _ in range(3):
            before = loop_turns.number
            await turns.wait()
            assert loop_turns.number - before <= 2
            for _ in range(3):
                await asyncio.sleep(0)
        loop_turns.stop()
        assert not turns._waiting

    run(test())
