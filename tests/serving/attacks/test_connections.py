"""Small instances of the attacks on the reading of requests."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.attacks.connections import ATTACKS
from tests.serving.attacks.harness import Target, observed
from tests.serving.server_process import ServerProcess


@pytest.mark.parametrize("name", ["fields_after_a_body", "long_field_after_a_body", "long_chunk_extension"])
def test_what_follows_a_body_takes_no_memory(server: ServerProcess, name: str) -> None:
    with observed(server) as seen:
        asyncio.run(ATTACKS[name].run(Target(server.address), ATTACKS[name].small))
    assert seen.memory_growth < 16 << 20, "half of what was sent"


@pytest.mark.parametrize("name", ["name_after_a_body", "pipelined_upgrades", "other_hosts"])
def test_requests_that_are_not_taken_as_they_came(server: ServerProcess, name: str) -> None:
    asyncio.run(ATTACKS[name].run(Target(server.address), ATTACKS[name].small))
