"""Small instances of the attacks by log-probabilities."""

from __future__ import annotations

import asyncio

from tests.serving.attacks.harness import Target, observed
from tests.serving.attacks.logprobs import ATTACKS
from tests.serving.server_process import ServerProcess


def test_more_than_a_request_may_have_are_refused(server: ServerProcess) -> None:
    asyncio.run(ATTACKS["endless_logprobs"].run(Target(server.address), ATTACKS["endless_logprobs"].small))


def test_many_hold_up_no_other_request(server: ServerProcess) -> None:
    attack = ATTACKS["many_logprobs"]
    with observed(server) as seen:
        asyncio.run(attack.run(Target(server.address), attack.small))
    # In one piece they stop the loop for a quarter of a second, and on a busy machine for longer.
    assert max(seen.health_s) < 1.0
    assert seen.memory_growth < 400 << 20
