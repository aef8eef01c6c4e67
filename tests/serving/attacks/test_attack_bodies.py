"""Small instances of the attacks by bodies."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.attacks.bodies import ATTACKS
from tests.serving.attacks.harness import Target, observed
from tests.serving.server_process import ServerProcess


@pytest.mark.parametrize("name", ["bodies_of_open_paths", "compressed_bodies"])
def test_bodies_that_are_not_read(server: ServerProcess, name: str) -> None:
    asyncio.run(ATTACKS[name].run(Target(server.address), ATTACKS[name].small))


def test_bodies_in_work_are_bounded_together(server: ServerProcess) -> None:
    attack = ATTACKS["unfinished_bodies"]
    with observed(server) as seen:
        asyncio.run(attack.run(Target(server.address), attack.small))
    assert seen.memory_growth < 480 << 20, "all bodies have 600 MiB, and 256 MiB of them are kept"
