"""gRPC refuses a message that is too large before it has it. What a compressed message becomes is bounded as well."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path

import pytest

from tests.serving.attacks.http2 import PartialCall
from tests.serving.refusing import Refusing, served

WAIT_S = 20.0
LIMIT = 1 << 20
METHODS = ("/fastgen.v1.Generation/Generate", "/grpc.health.v1.Health/Check")
# The kinds of compression that gRPC knows, and what zlib calls their formats.
FORMATS = {"gzip": 31, "deflate": 15}
# How large a compressed message would become, and the most memory that it may take.
LARGE, MOST_MEMORY = 512 << 20, 128 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compressed(window_bits: int) -> bytes:
    """Returns zeros that become ``LARGE``, compressed once for each MiB."""
    compressor = zlib.compressobj(wbits=window_bits)
    begin = compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    again = compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    return begin + again * (LARGE // (1 << 20) - 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_is_refused_by_the_length_that_it_declares(method: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S), served(Refusing(), max_body_bytes=LIMIT) as address:
            too_large, large = [await PartialCall.open(address, method) for _ in range(2)]
            await large.send(LIMIT, 0)
            await too_large.send(LIMIT + 1, 0)
            await too_large.until_over()
            assert not large.is_over
            large.leave()

    asyncio.run(run())


@pytest.mark.parametrize("name", FORMATS)
def test_a_compressed_message_is_refused_once_it_becomes_too_large(name: str) -> None:
    bomb = compressed(FORMATS[name])
    assert len(bomb) < LIMIT

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), served(Refusing(), max_body_bytes=LIMIT) as address:
            call = await PartialCall.open(address, METHODS[0], encoding=name)
            before = most = resident_bytes()
            sending = asyncio.create_task(call.send_request(bomb, is_compressed=True))
            while not call.is_over:
                most = max(most, resident_bytes())
                await asyncio.sleep(0.001)
            await sending
            assert most - before < MOST_MEMORY

    asyncio.run(run())
