"""Garbage is collected rarely in a serving process, and nowhere else."""

from __future__ import annotations

import gc

import pytest

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
