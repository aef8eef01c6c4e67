"""The clients' process measures how late its own event loop is, since that makes gaps longer."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.serving.attacks.storm import LATE_S, Lateness


def test_a_process_that_is_busy_is_late_for_as_long() -> None:
    lateness, busy_s = Lateness(), 10 * LATE_S

    async def run() -> tuple[float, float]:
        watching = asyncio.create_task(lateness.watch(lambda: False))
        await asyncio.sleep(0.01)
        began_s = time.perf_counter()
        time.sleep(busy_s)
        ended_s = time.perf_counter()
        await asyncio.sleep(0.01)
        watching.cancel()
        return began_s, ended_s

    began_s, ended_s = asyncio.run(run())
    middle_s = (began_s + ended_s) / 2
    assert max(lateness.all_s) > 0.9 * busy_s
    assert lateness.between(began_s, ended_s) > 0.9 * busy_s
    assert lateness.between(began_s, middle_s) == pytest.approx(middle_s - began_s, abs=0.01)
    assert lateness.between(began_s - 100.0, began_s - 99.0) == 0.0
