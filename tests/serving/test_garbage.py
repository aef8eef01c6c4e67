"""Garbage is collected rarely in a serving process, and nowhere else."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from fastgen.collector import collector_off
from fastgen.serving import garbage
from fastgen.serving.admission.json_limits import QUICK_BYTES, parse_json
from fastgen.serving.garbage import Collector, rarely_collected
from fastgen.serving.http.guard import Guard
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions


def test_garbage_is_collected_rarely_and_not_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))
    monkeypatch.setattr(gc, "get_threshold", lambda: (700, 11, 12))
    monkeypatch.setattr(gc, "set_threshold", lambda *thresholds: called.append(thresholds))

    def fail() -> None:
        with rarely_collected():
            assert called == ["freeze", (5000, 10, 40)]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert called[2:] == [(700, 11, 12), "unfreeze"]


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
    [((4999, 99, 99), []), ((5000, 9, 39), [0]), ((9999, 10, 39), [1]), ((5000, 0, 40), [2]), ((5000, 10, 40), [2])],
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
    count(monkeypatch, 5000, 0, 0)
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
        count(monkeypatch, 5000 if number >= 50 else 10, 0, 0)
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
