"""All attacks at once, beside honest streams."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.serving.attacks.storm import FLAGS, MAX_MEMORY_GROWTH, Found, attacks, run, server_on_half_the_cores
from tests.serving.attacks.surroundings import badly_placed
from tests.serving.storm import Known, draw_pool


@pytest.fixture(scope="module")
def pool() -> list[Known]:
    return draw_pool(random.Random(1), 20)


def check(found: Found) -> None:
    assert found.alone.wrong == found.control.wrong == found.beside.wrong == found.wrong == []
    assert found.wrong_to_attacks == []
    assert found.alone.num_right > 0
    assert found.beside.num_right > 0
    assert found.memory_growth < MAX_MEMORY_GROWTH
    assert {name.partition(":")[0] for name in found.attacks} == attacks().keys()


@pytest.mark.slow
def test_a_small_storm_of_all_attacks(pool: list[Known], tmp_path: Path) -> None:
    with badly_placed(tmp_path, *FLAGS) as server:
        check(run(server, pool, seconds=4, num_streams=10, is_large=False, num_turns=1))


@pytest.mark.slow
def test_honest_streams_in_a_storm_of_all_attacks(pool: list[Known], tmp_path: Path) -> None:
    with server_on_half_the_cores(tmp_path) as (server, is_first):
        found = run(server, pool, seconds=120, num_streams=50, is_large=True)
    check(found)
    print(found.summary())
    assert found.p99_ratio(found.control) <= 2.0
    # Where honest clients do not come first, the attackers' own work more than doubles the gaps, whatever they send.
    assert not is_first or found.p99_ratio(found.alone) <= 2.0
