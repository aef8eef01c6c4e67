"""One caller goes on in a turn of the event loop, in their order, and none soon after a long piece of work."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from fastgen.serving.admission import turns as turns_module
from fastgen.serving.admission.turns import Turns, at_once
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
        of_turns = Counter(turn for turn, _ in gone)
        assert max(of_turns.values()) == of_turns[gone[0][0]] == num_at_once
        assert gone[-1][0] - gone[0][0] <= 2 * 10 // num_at_once + 2, "turns were left unused"

    run(test())


def test_long_pieces_take_their_share_of_the_time() -> None:
    """However many callers there are, and whether they wait already when a piece ends or come later."""

    async def test() -> None:
        turns, begun_s, ended_s = Turns(1, share=0.25), list[float](), list[float]()

        async def caller(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await turns.wait()
            begun_s.append(time.monotonic())
            compute(0.01)
            ended_s.append(time.monotonic())
            await asyncio.sleep(0.2)  # no longer the piece

        await asyncio.gather(*map(caller, (0.0, 0.0, 0.0, 0.08, 0.2)))
        for end_s, next_s in zip(ended_s[:4], begun_s[1:], strict=True):
            assert next_s - end_s >= 0.029, "timers count in milliseconds"

    run(test())


def test_short_pieces_need_no_rest() -> None:
    async def test() -> None:
        turns, sleeps = Turns(1, share=0.25), list[float]()
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(turns_module, "_SHORT_S", 10.0)
            patch.setattr(asyncio, "get_running_loop", lambda: Watched(loop, sleeps))
            await asyncio.gather(*(turns.wait() for _ in range(20)))
        assert sleeps == []

    run(test())


def test_pieces_that_wait_for_the_processor_or_sleep_are_no_longer_for_it() -> None:
    async def test() -> None:
        turns = Turns(1, share=0.01)
        await turns.wait()
        time.sleep(0.05)
        began_s = time.monotonic()
        await turns.wait()
        assert time.monotonic() - began_s < 1.0, "99 times as long"

    run(test())


def compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


class Watched:
    """A loop whose timers are noted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delays_s: list[float]):
        self._loop, self._delays_s = loop, delays_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._delays_s.append(delay_s)
        self._loop.call_later(delay_s, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


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


def test_work_is_run_in_turns_to_its_result() -> None:
    async def test() -> None:
        turns, loop_turns, seen = Turns(1, share=0.5), LoopTurns(), list[tuple[str, int]]()

        def work(name: str, num_pieces: int) -> Any:
            for _ in range(num_pieces):
                seen.append((name, loop_turns.number))
                compute(0.003)
                yield
            return name

        found = await asyncio.gather(turns.run(work("a", 4)), turns.run(work("b", 3)), turns.run(work("c", 0)))
        loop_turns.stop()
        assert found == ["a", "b", "c"]
        assert [name for name, _ in seen] == ["a", "b", "a", "b", "a", "b", "a"]
        assert len({turn for _, turn in seen}) == 7

    run(test())


def test_short_pieces_of_work_share_a_turn() -> None:
    async def test() -> None:
        turns, loop_turns, seen = Turns(1), LoopTurns(), list[int]()

        def work() -> Any:
            for _ in range(5):
                seen.append(loop_turns.number)
                yield
            return sum(seen)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(turns_module, "_SHORT_S", 10.0)
            assert await turns.run(work()) == sum(seen)
        loop_turns.stop()
        assert len(seen) == 5
        assert len(set(seen)) == 1

    run(test())


def test_an_error_of_the_work_is_the_callers() -> None:
    def work() -> Any:
        yield
        raise ValueError("bad luck")

    async def test() -> None:
        with pytest.raises(ValueError, match="bad luck"):
            await Turns(1).run(work())

    run(test())
    with pytest.raises(ValueError, match="bad luck"):
        at_once(work())
