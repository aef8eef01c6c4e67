"""Small instances of the attacks by JSON."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.attacks.harness import Target, observed
from tests.serving.attacks.json_bodies import ATTACKS
from tests.serving.server_process import ServerProcess


@pytest.mark.parametrize(
    "name",
    [
        *("many_lists", "many_names", "many_biases", "many_fractions", "long_numbers"),
        *("short_bodies", "largest_bodies"),
    ],
)
def test_large_json_stops_no_stream(server: ServerProcess, name: str) -> None:
    with observed(server) as seen:
        asyncio.run(ATTACKS[name].run(Target(server.address), ATTACKS[name].small))
    # Parsed, one such body takes one second or more here. Measured, it takes some hundredths, beside the attacker and
    # other work on the machine.
    assert max(seen.gaps_s) < 0.8
    assert seen.memory_growth < 128 << 20, "parsed, the lists take 180 MiB"


@pytest.mark.parametrize("name", ["pages_of_other_sites", "half_characters"])
def test_bodies_that_are_refused_for_what_they_are(server: ServerProcess, name: str) -> None:
    asyncio.run(ATTACKS[name].run(Target(server.address), ATTACKS[name].small))
