"""Attacks by formats of answers that are slow to compile, slow to follow, or large."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

from tests.serving.attacks.harness import Attack, Target, check_status
from tests.serving.http_client import Answered, RawClient

# Formats are kept, so each is sent once only.
_NUMBERS = count()
_AT_ONCE = 8


def bomb() -> dict[str, Any]:
    """Returns a small format that would take for ever to compile."""
    return {"type": "regex", "pattern": f"((((a{{100}}){{100}}){{100}}){{{100 + next(_NUMBERS)}}})"}


def large() -> dict[str, Any]:
    """Returns a format that is compiled within the limits, and whose lexer takes megabytes."""
    return {"type": "regex", "pattern": f"a{{{20_000 + next(_NUMBERS)}}}"}


def wide() -> dict[str, Any]:
    """Returns a schema with thousands of properties."""
    names = [f"p{next(_NUMBERS)}", *(f"p{number}" for number in range(2500))]
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "json_schema", "schema": {"type": "object", "properties": properties, "required": names}}


def deep() -> dict[str, Any]:
    """Returns a schema with a thousand objects, each the property of the one before, named by references."""
    number = 800 + next(_NUMBERS) % 400
    names = {f"{each}": {"properties": {"a": {"$ref": f"#/$defs/{each + 1}"}}} for each in range(number)}
    definitions = names | {f"{number}": {"const": next(_NUMBERS)}}
    return {"type": "json_schema", "schema": {"$ref": "#/$defs/0", "$defs": definitions}}


async def slow_trials(target: Target, size: int) -> None:
    """Sends ``size`` formats at once that take too long to compile. Each must be refused. An ordinary request that
    comes after them must be answered before more than a few of them were tried, or half of many.
    """
    num_tried = 0

    async def refused() -> None:
        nonlocal num_tried
        answered = await _constrained(target, bomb())
        check_status(answered.status, 400, 429, about=answered)
        num_tried += answered.status == 400

    clients = [asyncio.create_task(refused()) for _ in range(size)]
    await asyncio.sleep(0.5)
    num_before = num_tried
    answered = await _generate(target, {"prompt": "a", "max_new_tokens": 4})
    check_status(answered.status, 200, about=answered.error)
    assert num_tried <= num_before + max(4, size // 2), "an ordinary request waited for the formats of others"
    await asyncio.gather(*clients)


async def abandoned_trials(target: Target, size: int) -> None:
    """Sends ``size`` such formats in one body to check, and leaves. The next format must be tried."""
    bodies = [{"prompt": "a", "response_format": bomb()} for _ in range(min(size, 64))]
    client = await RawClient.connect(target.http)
    client.send(json.dumps({"requests": bodies}).encode(), path="/check")
    await asyncio.sleep(0.5)
    client.leave()
    answered = await _constrained(target, {"type": "regex", "pattern": f"[a-f]{{{1 + next(_NUMBERS)}}}"})
    check_status(answered.status, 200, about=answered.error)


async def large_formats(target: Target, size: int) -> None:
    """Sends ``size`` formats that pass the trial but take long to compile and to follow."""
    await _in_turn(target, [large() for _ in range(size)])


async def wide_formats(target: Target, size: int) -> None:
    """Sends ``size`` schemas with thousands of properties."""
    await _in_turn(target, [wide() for _ in range(size)])


async def deep_formats(target: Target, size: int) -> None:
    """Sends ``size`` schemas over which the library recurses deep."""
    await _in_turn(target, [deep() for _ in range(size)])


async def held_formats(target: Target, size: int) -> None:
    """Keeps ``size`` streams open, each with a format of its own that takes 37 MiB. The engine must not compile more
    of them than it has room for.
    """
    clients = []
    try:
        for _ in range(size):
            clients.append(client := await RawClient.connect(target.http))
            held = {"type": "regex", "pattern": f"a{{{95_000 + next(_NUMBERS) % 5000}}}"}
            body = {"prompt": "a", "max_new_tokens": 400, "stream": True, "response_format": held}
            client.send(json.dumps(body).encode(), path="/generate")
            await asyncio.sleep(0.3)  # so that few wait for their trial, and few are refused for it
        status, _ = await clients[0].head()
        check_status(status, 200, 429, about=status)
    finally:
        for client in clients:
            client.leave()


async def _in_turn(target: Target, formats: list[dict[str, Any]]) -> None:
    for start in range(0, len(formats), _AT_ONCE):
        answers = await asyncio.gather(*(_constrained(target, each) for each in formats[start : start + _AT_ONCE]))
        for answered in answers:
            check_status(answered.status, 200, 429, about=answered.error)


async def _constrained(target: Target, response_format: dict[str, Any]) -> Answered:
    return await _generate(target, {"prompt": "a", "max_new_tokens": 8, "response_format": response_format})


async def _generate(target: Target, body: dict[str, Any]) -> Answered:
    client = await RawClient.connect(target.http)
    try:
        client.send(json.dumps(body).encode(), path="/generate")
        status, headers = await client.head()
        return Answered(status, error=(await client._exactly(int(headers["content-length"]))).decode()[:500])
    finally:
        client.leave()


ATTACKS = {
    "slow_trials": Attack(slow_trials, 6, 200),
    "abandoned_trials": Attack(abandoned_trials, 16, 64),
    "large_formats": Attack(large_formats, 64, 200),
    "wide_formats": Attack(wide_formats, 4, 24),
    "deep_formats": Attack(deep_formats, 4, 24),
    "held_formats": Attack(held_formats, 6, 60),
}
