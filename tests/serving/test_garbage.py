"""Garbage is collected rarely in a serving process, and nowhere else."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastgen.collector import collector_off
from fastgen.serving.admission.json_limits import parse_json
from fastgen.serving.engine.garbage import rarely_collected


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
