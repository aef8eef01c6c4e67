"""Attacks by lines of the log."""

from __future__ import annotations

import asyncio

from tests.serving.attacks.harness import Attack, Target, check_status
from tests.serving.http_client import get

WAIT_S = 60.0
# Long, so that fewer lines fill the pipe to the log's reader.
_PATH = "/" + "x" * 500


async def many_log_lines(target: Target, size: int) -> None:
    """Sends ``size`` requests, each of which a server that logs requests writes a long line of. All must be answered,
    though nobody reads the log.
    """
    for _ in range(size):
        async with asyncio.timeout(WAIT_S):
            status, _ = await get(target.http, _PATH)
        check_status(status, 404)


ATTACKS = {"many_log_lines": Attack(many_log_lines, 300, 2000)}
