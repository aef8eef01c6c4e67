"""Garbage is collected in small portions in a serving process, and by Python itself elsewhere."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count as count_from
from typing import Any

import httpx2
import pytest
import zmq

from fastgen.collector import collector_off
from fastgen.runtime.simulated import SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.serving import garbage
from fastgen.serving.admission.json_limits import QUICK_BYTES, parse_json
from fastgen.serving.engine.messages import Submit, encoder
from fastgen.serving.engine.process import EngineLoop
from fastgen.serving.garbage import Collector, collected_by_hand
from fastgen.serving.http.guard import Guard
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions


def test_python_collects_nothing_while_a_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))

    def fail() -> None:
        with collected_by_hand():
            assert called == ["freeze"]
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert called == ["freeze", "unfreeze"]
    assert gc.isenabled()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_a_body_is_parsed(was_enabled: bool) -> None:
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    def fail() -> None:
        with collector_off():
            gc.callbacks.append(note)
            lists: list[list[int]] = [[] for _ in range(100_000)]
            gc.callbacks.remove(note)
            assert len(lists) == 100_000
            assert not collected
            raise ZeroDivisionError

    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_threads_that_parse_leave_garbage_collection_as_it_is() -> None:
    """Conversations by gRPC are parsed on threads."""
    text = json.dumps({"a": [[]] * 300}).encode()
    with ThreadPoolExecutor(4) as pool:
        for parsed in pool.map(parse_json, [text] * 2000):
            assert len(parsed["a"]) == 300
    assert gc.isenabled()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations that were collected, while Python itself collects nothing."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", found.append)
    with collector_off():
        yield found


def count(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    monkeypatch.setattr(gc, "get_count", lambda: numbers)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((999, 9, 999), []), ((1000, 3, 499), [0]), ((9999, 4, 499), [1]), ((1000, 0, 500), [2]), ((1000, 4, 500), [2])],
)
def test_a_server_collects_what_is_new_and_rarely_what_is_old(
    monkeypatch: pytest.MonkeyPatch, collected: list[int], numbers: tuple[int, ...], expected: list[int]
) -> None:
    count(monkeypatch, *numbers)
    Collector().collect()
    assert collected == expected


def test_large_json_puts_a_collection_off_for_a_moment(monkeypatch: pytest.MonkeyPatch, collected: list[int]) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    collector = Collector()
    count(monkeypatch, 1000, 0, 0)
    with collector.large():
        collector.collect()
        now_s += 0.75
        with collector.large():
            now_s += 0.5
            collector.collect()
            assert collected == []
        collector.collect()
        assert collected == [0], "the first is there for long, and the second is gone"


def test_large_json_after_large_json_does_not_put_it_off_for_long(
    monkeypatch: pytest.MonkeyPatch, collected: list[int]
) -> None:
    now_s, times_s = 100.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    collector = Collector()
    for number in range(100):
        count(monkeypatch, 1000 if number >= 50 else 10, 0, 0)
        with collector.large():
            collector.collect()
        if len(collected) > len(times_s):
            times_s.append(now_s)
        now_s += 0.125
    assert times_s == [106.25 + 2.0, 106.25 + 4.125], "once it is due"


def test_a_running_collector_stands_in_for_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        itself: Node

    def leave_garbage() -> weakref.ref[Node]:
        nodes = [Node() for _ in range(10_000)]
        for node in nodes:
            node.itself = node
        return weakref.ref(nodes[0])

    async def run() -> None:
        async with Collector().running():
            assert not gc.isenabled()
            left = leave_garbage()
            assert left() is not None, "Python collects nothing"
            async with asyncio.timeout(20.0):
                while left() is not None:
                    await asyncio.sleep(0.01)
        assert gc.isenabled()

    monkeypatch.setattr(garbage, "_PERIOD_S", 0.01)
    asyncio.run(run())


def test_no_collection_comes_before_a_large_body_is_answered() -> None:
    """An answer that has begun holds no body, but an error does until it is sent."""
    found: list[tuple[str, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        def note(where: str) -> None:
            found.append((where, len(garbage.COLLECTOR._large)))

        note("before")
        status = int(scope["path"][1:])
        await send({"type": "http.response.start", "status": status, "headers": []})
        note("begun")
        await send({"type": "http.response.body", "body": b"{}"})
        note("sent")

    async def run() -> None:
        guarded = httpx2.ASGITransport(app=Guard(app, ServeOptions(), ServerMetrics(lambda: True), "127.0.0.1"))
        async with httpx2.AsyncClient(transport=guarded, base_url="http://localhost") as client:
            for path, size in (("/200", QUICK_BYTES), ("/200", QUICK_BYTES + 1), ("/400", QUICK_BYTES + 1)):
                await client.post(path, content=b" " * size)
                found.append(("after", len(garbage.COLLECTOR._large)))

    asyncio.run(run())
    assert [number for _, number in found] == [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0], found


def test_an_engine_collects_between_steps_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself would do it in the middle of a step, or on a thread of a low priority."""
    engine = SimulatedServer(
        StepCost.linear(step_s=0.0001, token_s=0.0), token_budget=64, max_num_seqs=4, num_blocks=64
    ).engine
    is_stepping, found, step = False, list[tuple[bool, str]](), engine.step

    def step_with_garbage() -> None:
        nonlocal is_stepping
        is_stepping = True
        step()
        for _ in range(2 * garbage._NEW_OBJECTS):
            itself: list[object] = []
            itself.append(itself)
        is_stepping = False

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append((is_stepping, threading.current_thread().name))

    monkeypatch.setattr(engine, "step", step_with_garbage)
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://engine")
        theirs.connect("inproc://engine")
        ours.send(encoder.encode(Submit(1, [5, 6], {"max_new_tokens": 20, "ignore_eos": True}, True)))
        steps = count_from(0)
        gc.callbacks.append(note)
        try:
            with collected_by_hand():
                EngineLoop(engine, theirs, is_orphan=lambda: next(steps) == 20).run()
        finally:
            gc.callbacks.remove(note)
    assert len(found) >= 15
    assert set(found) == {(False, threading.current_thread().name)}
