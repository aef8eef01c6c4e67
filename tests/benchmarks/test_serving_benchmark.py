"""The benchmark of HTTP: its measurements, and the rounds that make a figure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from benchmarks.cpu.evidence import Figure, Lack

LIMITS = {"read": 20e9, "fp32": 200e9, "int8": 800e9, "mkl": 180e9}


def a_round(http: float, library: float = 100.0, commit: str = "abc", **fields: Any) -> dict[str, Any]:
    rates = {"library": library, "http": http, "http stream": http / 2}
    sides = {side: {"tokens_per_s": rate, "before": LIMITS, "after": LIMITS} for side, rate in rates.items()}
    sides["http"] |= fields
    pairs = [[10.0, 11.0], [10.0, 12.0], [10.0, 19.0]]
    return {"date": "2026-11-24T00:00:00Z", "commit": commit, "sides": sides, "first_token_ms": pairs}


def test_the_loss_is_the_median_of_six_steady_rounds() -> None:
    entry = {"rounds": [a_round(each) for each in (99, 98, 97, 96, 95, 110)]}
    assert serving.loss(entry, "http") == Figure(2.5, -10.0, 5.0, 6, 6, "rounds", "abc")
    assert serving.shown(serving.loss(entry, "http")) == "2.5 % (-10.0 to 5.0, 6 rounds)"
    assert serving.first_token_added_ms(entry) == 2.0


def test_rounds_during_which_the_machine_changed_are_left_out() -> None:
    slower = LIMITS | {"read": 10e9}
    steady = [a_round(each) for each in (99, 98, 97, 96, 95)]
    moved = [a_round(50, after=slower), a_round(50, before=slower, after=slower)]
    found = serving.loss({"rounds": steady + moved}, "http")
    assert found == Lack("5 of 7 rounds steady, build abc")
    assert serving.shown(found) == "– (5 of 7 rounds steady, build abc)"
    sixth = a_round(94)
    assert serving.loss({"rounds": [*steady, *moved, sixth]}, "http") == Figure(3.5, 1.0, 6.0, 6, 8, "rounds", "abc")


def test_short_and_long_requests_are_measured_each_between_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library and the server are played: each answers at once, with as many tokens as are asked for."""
    asked: list[tuple[int, int, int]] = []

    def answered(num_requests: int, kind: serving.Kind) -> serving.Throughput:
        asked.append((num_requests, kind.num_prompt, kind.num_answer))
        return serving.Throughput(num_requests, kind.num_answer, ["text"] * num_requests, seconds=num_requests / 100)

    class Library:
        def throughput(self, num_requests: int, kind: serving.Kind) -> serving.Throughput:
            return answered(num_requests, kind)

        def first_token_s(self, prompt: list[int]) -> float:
            return 0.010

    @contextmanager
    def library(model: str) -> Iterator[Library]:
        yield Library()

    @contextmanager
    def served(model: str) -> Iterator[int]:
        yield 1

    class Calibration:
        def measure(self) -> dict[str, float]:
            return dict(LIMITS)

    monkeypatch.setattr(serving, "library", library)
    monkeypatch.setattr(serving, "served", served)
    monkeypatch.setattr(serving, "http_throughput", lambda port, model, number, kind, is_stream: answered(number, kind))
    monkeypatch.setattr(serving, "http_first_token_s", lambda *_: 0.012)
    for name, (num_prompt, num_answer) in {"short": (16, 16), "long": (64, 128), "burst": (64, 128)}.items():
        asked.clear()
        entry = serving.compare("m", "m", serving.KINDS[name], 6, Calibration())  # type: ignore[arg-type]
        num_requests = 128 if name == "burst" else 500
        assert asked[0] == (128, num_prompt, num_answer)
        assert set(asked[1:]) == {(num_requests, num_prompt, num_answer)}
        assert len(asked) == 1 + 6 * 3
        assert entry["requests"] == num_requests
        assert serving.loss(entry, "http stream") == Figure(0.0, 0.0, 0.0, 6, 6, "rounds", entry["rounds"][0]["commit"])
        assert serving.first_token_added_ms(entry) == pytest.approx(2.0)


def test_a_kind_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["serving", "--kinds", "medium", "--models", "tiny-llama"])
    with pytest.raises(SystemExit):
        serving.main()
