"""A small storm, and an engine that is killed once under load; the large ones are slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.serving.server_process import ServerProcess, served
from tests.serving.storm import FLAGS, MODEL, Known, draw_pool, run_kills, run_storm


@pytest.fixture(scope="module")
def pool() -> list[Known]:
    return draw_pool(random.Random(1), 20)


@pytest.fixture(scope="module")
def stormed() -> Iterator[ServerProcess]:
    """A server for all storms, one after the other."""
    with served(MODEL, *FLAGS) as server:
        yield server


def check_storm(server: ServerProcess, pool: list[Known], *, seconds: float, num_clients: int) -> None:
    storm = asyncio.run(run_storm(server, pool, seconds=seconds, num_clients=num_clients, seed=1))
    assert storm.wrong == []
    assert storm.happened["stream: right"] > num_clients / 4
    assert storm.happened["whole: right"] > 0
    assert sum(number for what, number in storm.happened.items() if what.endswith("refused")) > 0
    allowed = ("400 the client closed its side",)
    assert all(error.startswith(allowed) for error in storm.errors), storm.errors


def check_kills(server: ServerProcess, pool: list[Known], *, num_kills: int, num_clients: int) -> None:
    kills = asyncio.run(run_kills(server, pool, num_kills=num_kills, num_clients=num_clients, seed=1))
    assert kills.storm.wrong == []
    assert len(kills.ready_s) == num_kills
    assert kills.storm.num_right > 0
    assert all("the engine" in error for error in kills.storm.errors), kills.storm.errors


def test_a_small_storm(stormed: ServerProcess, pool: list[Known]) -> None:
    check_storm(stormed, pool, seconds=1, num_clients=12)


def test_a_kill_under_load(stormed: ServerProcess, pool: list[Known]) -> None:
    check_kills(stormed, pool, num_kills=1, num_clients=8)


@pytest.mark.slow
def test_a_storm(stormed: ServerProcess, pool: list[Known]) -> None:
    check_storm(stormed, pool, seconds=120, num_clients=200)


@pytest.mark.slow
def test_twenty_kills_under_load(stormed: ServerProcess, pool: list[Known]) -> None:
    check_kills(stormed, pool, num_kills=20, num_clients=32)
