"""Attacks on the processes that render conversations and encode texts: some end them or make them stand still, as a
system does that has no memory left, and some give them texts that take too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.serving.attacks.harness import HONEST, MODEL, Attack, Target, check_status, started_by
from tests.serving.http_client import RawClient, ask

# Longer than two processes in a row may take for an answer, which stand still.
WAIT_S = 100.0
_MODULE = b"fastgen.serving.isolated.templates.process"
# The pattern of a tokenizer that looks at the rest of such a text twice at each place. Other texts do not match it.
CUBIC = "[☃☄]*[☃☄]*[☢☣]"
_SLOW_TEXT = "☃" * 3000


async def killed_helpers(target: Target, size: int) -> None:
    """Has ``size`` conversations rendered while the processes that do it are killed. Each must be answered, or be
    refused as one to send again.
    """
    for _ in range(size):
        chat = asyncio.create_task(_chat(target))
        while not chat.done():
            _signal(target, signal.SIGKILL)
            await asyncio.sleep(0.01)
        check_status(await chat, 200, 503)


async def stopped_helpers(target: Target, size: int) -> None:
    """Stops the processes that render conversations, and has ``size`` rendered. Each must be answered, or be refused as
    one to send again. Ordinary requests must be answered meanwhile.
    """
    check_status(await _chat(target), 200, 503)  # so that there is one
    _signal(target, signal.SIGSTOP)
    chats = [asyncio.create_task(_chat(target)) for _ in range(size)]
    answered = await ask(target.http, HONEST | {"max_tokens": 4})
    check_status(answered.status, 200, about=answered.error)
    for chat in chats:
        check_status(await chat, 200, 429, 503)


async def slow_texts(target: Target, size: int) -> None:
    """Sends ``size`` texts to each path that the tokenizer takes too long for. Each must be refused."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": MODEL, "prompt": _SLOW_TEXT, "max_tokens": 1},
        "/generate": {"prompt": _SLOW_TEXT, "max_new_tokens": 1},
        "/tokenize": {"prompt": _SLOW_TEXT},
        "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": _SLOW_TEXT}]},
    }
    for _ in range(size):
        for path, body in bodies.items():
            status, answer = await _post(target, path, body)
            check_status(status, 400, about=answer[:500])
            assert b"processor time" in answer, answer[:500]


async def _chat(target: Target) -> int:
    messages = [{"role": "user", "content": "once upon a time"}]
    async with asyncio.timeout(WAIT_S):
        status, _ = await _post(target, "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 2})
        return status


async def _post(target: Target, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    client = await RawClient.connect(target.http)
    try:
        client.send(json.dumps(body).encode(), path=path)
        status, headers = await client.head()
        return status, await client._exactly(int(headers["content-length"]))
    finally:
        client.leave()


def _signal(target: Target, number: signal.Signals) -> None:
    """Sends the signal to the processes that render conversations."""
    for pid in started_by(target.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if _MODULE in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)


ATTACKS = {
    "killed_helpers": Attack(killed_helpers, 2, 10),
    "stopped_helpers": Attack(stopped_helpers, 1, 8),
    "slow_texts": Attack(slow_texts, 1, 5),
}
