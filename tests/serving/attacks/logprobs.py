"""Attacks by many log-probabilities."""

from __future__ import annotations

import json
from typing import Any

from tests.serving.attacks.harness import Attack, Target, check_status
from tests.serving.http_client import RawClient


async def endless_logprobs(target: Target, size: int) -> None:
    """Asks ``size`` times for more log-probabilities than a request may have. Each must be refused at once."""
    for _ in range(size):
        status, answer = await _generate(target, n=128, logprobs=128, max_new_tokens=512)
        check_status(status, 400, about=answer[:500])
        assert b"128 answers" in answer


async def many_logprobs(target: Target, size: int) -> None:
    """Asks for 8 answers of ``size`` tokens, each with 128 log-probabilities."""
    status, answer = await _generate(target, n=8, logprobs=127, max_new_tokens=size, ignore_eos=True)
    check_status(status, 200, about=answer[:500])
    assert answer.count(b'"finish_reason":"length"') == 8  # parsing so much would delay the clients of this process


async def answers_not_taken(target: Target, size: int) -> None:
    """Asks ``size`` times for an answer of 54 MB, and reads its head only. The server must not keep all of them."""
    body = json.dumps({"prompt": "a", "n": 128, "logprobs": 127, "max_new_tokens": 127, "ignore_eos": True})
    clients = []
    try:
        for _ in range(size):
            clients.append(client := await RawClient.connect(target.http))
            client.send(body.encode(), path="/generate")
            check_status((await client.head())[0], 200)
    finally:
        for client in clients:
            client.leave()


async def _generate(target: Target, **fields: Any) -> tuple[int, bytes]:
    client = await RawClient.connect(target.http)
    try:
        client.send(json.dumps({"prompt": "a", **fields}).encode(), path="/generate")
        status, headers = await client.head()
        return status, await client._exactly(int(headers["content-length"]))
    finally:
        client.leave()


ATTACKS = {
    "endless_logprobs": Attack(endless_logprobs, 5, 50),
    "many_logprobs": Attack(many_logprobs, 300, 1500),
    "answers_not_taken": Attack(answers_not_taken, 30, 3),
}
