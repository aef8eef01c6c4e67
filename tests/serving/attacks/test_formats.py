"""Small instances of the attacks by formats."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.attacks.formats import ATTACKS
from tests.serving.attacks.harness import Target, observed
from tests.serving.server_process import ServerProcess

# Of an honest stream beside the attack. The promise is 0.1 s; without the threads it is 3 to 7 s. The machine may have
# two cores, on which the attack, its trials and other tests run, too.
MAX_GAP_S = 1.0


@pytest.mark.parametrize("name", ["slow_trials", "abandoned_trials"])
def test_formats_that_are_slow_to_try_hold_up_nothing_else(server: ServerProcess, name: str) -> None:
    asyncio.run(ATTACKS[name].run(Target(server.address), ATTACKS[name].small))


@pytest.mark.parametrize("name", ["large_formats", "wide_formats"])
def test_formats_that_pass_their_trial_delay_no_stream_and_are_let_go(server: ServerProcess, name: str) -> None:
    attack = ATTACKS[name]
    with observed(server) as seen:
        asyncio.run(attack.run(Target(server.address), attack.small))
    assert max(seen.gaps_s) < MAX_GAP_S
    assert seen.memory_growth < 450 << 20, (
        "128 MiB of formats, two trial processes, and what the heap does not give back"
    )
