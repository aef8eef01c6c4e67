"""Requests of calls are received few at once, and none waits long for a slow one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from fastgen.serving.grpc.receiving import Receiving
from fastgen.serving.refusals import OverloadedError, RequestTimeoutError

WAIT_S = 20.0
LONG_S = 600.0


class Call:
    """A call whose request comes after ``after_s``, or once it is let go."""

    # Of all calls: how many are being received now, and the most there were.
    num_now = num_most = 0

    def __init__(self, receiving: Receiving, after_s: float | None = None):
        self._after_s = after_s
        self._comes = asyncio.Event()
        self.is_begun = False
        self.receipt = asyncio.create_task(receiving.first(self._requests()))

    def let_go(self) -> None:
        self._comes.set()

    async def _requests(self) -> AsyncIterator[bytes]:
        self.is_begun = True
        Call.num_now += 1
        Call.num_most = max(Call.num_most, Call.num_now)
        try:
            if self._after_s is None:
                await self._comes.wait()
            else:
                await asyncio.sleep(self._after_s)
        finally:
            Call.num_now -= 1
        yield b"request"


@pytest.fixture(autouse=True)
def none_yet() -> None:
    Call.num_now = Call.num_most = 0


async def stalled(receiving: Receiving) -> list[Call]:
    """Returns calls that hold all places."""
    calls = [Call(receiving) for _ in range(MAX_LARGEST_BODIES)]
    while not all(call.is_begun for call in calls):
        await asyncio.sleep(0)
    return calls


def test_no_more_than_the_places_are_received_at_once_in_order() -> None:
    async def run() -> None:
        receiving = Receiving(timeout_s=LONG_S, patience_s=LONG_S)
        first, later = await stalled(receiving), [Call(receiving) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(call.is_begun for call in later)
        first[5].let_go()
        assert await first[5].receipt == b"request"
        later[0].let_go()
        assert await later[0].receipt == b"request"
        while not later[1].is_begun:
            await asyncio.sleep(0)
        assert not later[2].is_begun
        for call in [*first, *later]:
            call.let_go()
        await asyncio.gather(*(call.receipt for call in [*first, *later]))
        assert Call.num_most == MAX_LARGEST_BODIES

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_the_oldest_of_the_slow_make_room_for_as_many_as_wait() -> None:
    async def run() -> None:
        receiving = Receiving(timeout_s=LONG_S, patience_s=0.05)
        slow = await stalled(receiving)
        await asyncio.sleep(0.1)  # no call waits for a place, so none is cut
        assert not any(call.receipt.done() for call in slow)
        assert await asyncio.gather(*(Call(receiving, 0.0).receipt for _ in range(2))) == [b"request"] * 2
        for call in slow[:2]:
            with pytest.raises(OverloadedError, match=r"within 0\.05 s, and others wait; send it again") as refused:
                await call.receipt
            assert refused.value.retry_after_s == 1.0
        await asyncio.sleep(0.1)
        assert not any(call.receipt.done() for call in slow[2:])
        for call in slow[2:]:
            call.let_go()
            assert await call.receipt == b"request"

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_call_that_gives_up_waiting_takes_no_place() -> None:
    async def run() -> None:
        receiving = Receiving(timeout_s=LONG_S, patience_s=0.1)
        slow = await stalled(receiving)
        waiting = Call(receiving)
        await asyncio.sleep(0)
        waiting.receipt.cancel()
        await asyncio.sleep(0.2)
        assert not any(call.receipt.done() for call in slow)
        for call in slow:
            call.let_go()
            await call.receipt
        assert await Call(receiving, 0.0).receipt == b"request"

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_waiting_counts_in_the_time_of_a_request() -> None:
    async def run() -> None:
        receiving = Receiving(timeout_s=0.2, patience_s=LONG_S)
        async with AsyncExitStack() as places:
            for _ in range(MAX_LARGEST_BODIES):
                await places.enter_async_context(receiving._place())
            call = Call(receiving)
            with pytest.raises(RequestTimeoutError, match=r"within 0\.2 s"):
                await call.receipt
            assert not call.is_begun

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_call_without_a_request() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async def run() -> None:
        with pytest.raises(InvalidArgumentError, match="no request"):
            await Receiving(timeout_s=LONG_S, patience_s=LONG_S).first(nothing())

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_places_come_back_after_random_histories() -> None:
    async def run() -> None:
        rng = random.Random(1)
        receiving = Receiving(timeout_s=0.05, patience_s=0.01)
        calls = []
        for _ in range(400):
            calls.append(Call(receiving, rng.choice([0.0, 0.002, 0.02, LONG_S])))
            if rng.random() < 0.2:
                rng.choice(calls).receipt.cancel()
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.005]))
        ends = await asyncio.gather(*(call.receipt for call in calls), return_exceptions=True)
        kinds = {type(end) for end in ends}
        assert kinds == {bytes, OverloadedError, RequestTimeoutError, asyncio.CancelledError}
        assert Call.num_most == MAX_LARGEST_BODIES
        assert Call.num_now == 0
        last = await stalled(receiving)  # all places are free
        for call in last:
            call.let_go()
            with suppress(RequestTimeoutError):
                await call.receipt

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_slow_requests_are_limited_only_while_others_wait() -> None:
    async def run() -> None:
        receiving = Receiving(timeout_s=LONG_S, patience_s=10.0)

        def num_limited() -> int:
            return sum(limit.when() is not None for limit in receiving._limits)

        calls = [Call(receiving) for _ in range(MAX_LARGEST_BODIES - 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(receiving._limits), num_limited()) == (MAX_LARGEST_BODIES - 1, 0), "a place is free"
        calls += [Call(receiving) for _ in range(3)]
        while not calls[-3].is_begun:
            await asyncio.sleep(0)
        assert (len(receiving._limits), num_limited()) == (MAX_LARGEST_BODIES, 2)
        began_s = list(receiving._limits.values())
        limits = [limit.when() for limit in receiving._limits]
        assert limits == [began_s[0] + 10.0, began_s[1] + 10.0, *[None] * (MAX_LARGEST_BODIES - 2)]
        calls[-1].receipt.cancel()
        await asyncio.wait({calls[-1].receipt})
        assert num_limited() == 1
        calls[5].let_go()
        await calls[5].receipt
        while not calls[-2].is_begun:
            await asyncio.sleep(0)
        assert (len(receiving._limits), num_limited()) == (MAX_LARGEST_BODIES, 0), "nobody waits"
        for call in calls[:-1]:
            call.let_go()
        await asyncio.gather(*(call.receipt for call in calls[:-1]))
        assert receiving._limits == {}

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
