"""Small instances of the attacks by HTTP, each beside honest streams."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.serving.attacks.harness import Target, observed
from tests.serving.attacks.storm import MODULES
from tests.serving.http_client import RawClient, ask
from tests.serving.server_process import ServerProcess

ATTACKS = {
    name: attack
    for module in ("bodies", "connections", "json_bodies", "formats", "logprobs")
    for name, attack in MODULES[module].ATTACKS.items()
    if name != "idle_connections"  # test_surroundings has it, on a server that ends them soon
}
# Of honest streams and of /health beside the attack, on a machine of two cores that may run other tests. What the
# server is protected from takes 1 s to minutes.
MOST_S = 1.0
# By how much the server's processes may grow at most.
MOST_GROWTH = 64 << 20
MORE_GROWTH = {
    # Half of what was sent.
    **dict.fromkeys(("fields_after_a_body", "long_field_after_a_body", "long_chunk_extension"), 16 << 20),
    # All bodies have 600 MiB, and 256 MiB of them are kept.
    "unfinished_bodies": 480 << 20,
    # Parsed, the lists take 180 MiB.
    **dict.fromkeys(MODULES["json_bodies"].ATTACKS, 128 << 20),
    # 128 MiB of formats, or six that are in use, two processes that try them, and what the heap does not give back.
    **dict.fromkeys([*MODULES["formats"].ATTACKS, "many_prompts"], 450 << 20),
    "many_logprobs": 400 << 20,
    # Of 1.6 GB of answers 256 MiB are kept, one is encoded, and the engine holds another's log-probabilities.
    "answers_not_taken": 1200 << 20,
}


SLOW = ("answers_not_taken",)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in ATTACKS])
def test_an_attack_delays_nobody_and_takes_bounded_memory(server: ServerProcess, name: str) -> None:
    attack = ATTACKS[name]
    with observed(server) as seen:
        asyncio.run(attack.run(Target(server.address), attack.small))
    assert max(seen.gaps_s) < MOST_S
    assert max(seen.health_s) < MOST_S
    assert seen.memory_growth < MORE_GROWTH.get(name, MOST_GROWTH)


@pytest.mark.slow
def test_answers_whose_masks_are_slow_leave_their_slots_to_others(server: ServerProcess) -> None:
    """Masks of one format are computed one after the other, so many answers in it would go on for an hour."""

    async def run() -> None:
        held = {"type": "regex", "pattern": "a{100123}"}
        body = {"prompt": "a", "n": 128, "max_new_tokens": 1900, "stream": True, "response_format": held}
        attacker = await RawClient.connect(server.address)
        attacker.send(json.dumps(body).encode(), path="/generate")
        status, _ = await attacker.head()
        assert status == 200
        asked = {"model": "tiny-llama", "prompt": "a", "max_tokens": 4}
        answered = await asyncio.wait_for(ask(server.address, asked), 60.0)
        assert answered.status == 200
        attacker.leave()

    asyncio.run(run())
