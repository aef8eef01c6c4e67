"""Attacks by JSON that takes long to parse or to act on, and JSON sent by pages of other sites."""

from __future__ import annotations

import asyncio
import json

from tests.serving.attacks.harness import MODEL, Attack, Target, check_status
from tests.serving.http_client import RawClient

_LARGE = ("/v1/completions", "/generate", "/invocations")
_PATHS = (*_LARGE, "/v1/chat/completions", "/tokenize", "/check")
_SMALL_BYTES = 256 << 10


async def many_lists(target: Target, size: int) -> None:
    """Sends ``size`` bytes of empty lists to each path. They must be refused as too many."""
    await _too_many(target, b'{"x":[', b"[],", b"1]}", size)


async def many_names(target: Target, size: int) -> None:
    """Sends ``size`` bytes of fields that no request has. They must be refused as too many."""
    fields = b",".join(b'"%d":1' % number for number in range(size // 12))
    for path in _LARGE:
        await _refused(target, path, b"{" + fields + b"}", 413 if len(fields) > 4 << 20 else 400)


async def many_biases(target: Target, size: int) -> None:
    """Sends ``size`` bytes of ``logit_bias``. They must be refused as too many."""
    biases = b",".join(b'"%d":-1.5' % number for number in range(size // 14))
    body = b'{"model":"%b","prompt":"a","logit_bias":{%b}}' % (MODEL.encode(), biases)
    for path in _LARGE:
        await _refused(target, path, body, 413 if len(biases) > 4 << 20 else 400)


async def many_fractions(target: Target, size: int) -> None:
    """Sends a prompt of ``size`` bytes of fractions. They must be refused."""
    await _too_many(target, b'{"prompt":[', b"1e5,", b"1]}", size)


async def short_bodies(target: Target, size: int) -> None:
    """Sends ``size`` bodies that are just too short to be measured. They must be refused, for what is in them."""
    body = b'{"x":[' + b"[]," * (_SMALL_BYTES // 3 - 10) + b"1]}"
    for number in range(size):
        await _refused(target, _PATHS[number % len(_PATHS)], body, 400)


async def largest_bodies(target: Target, size: int) -> None:
    """Sends ``size`` bodies that have as many values as a body may have. They must be refused, for what is in them."""
    kinds = [
        b'{"prompt":[' + b"50000," * ((1 << 20) + (1 << 17) - 2) + b"1]}",
        b"{" + b",".join(b'"%030d":1' % number for number in range(163_000)) + b"}",
        b'{"x":[' + b'"",' * 163_000 + b"1]}",
        b'{"x":[' + b"1234567890," * 1_000_000 + b"1]}",
    ]
    for number in range(size):
        await _refused(target, _PATHS[number % len(_PATHS)], kinds[number % len(kinds)], 400)


async def long_numbers(target: Target, size: int) -> None:
    """Sends ``size`` bytes of numbers with thousands of digits. They must be refused."""
    await _too_many(target, b'{"x":[', b"9" * 4300 + b",", b"1]}", size)


async def pages_of_other_sites(target: Target, size: int) -> None:
    """Sends ``size`` requests of each kind that a page of another site may send without being asked. None may run."""
    body = b'{"prompt":"a","max_tokens":1}'
    for _ in range(size):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
            for path in _PATHS:
                for site, expected in (("sec-fetch-site: cross-site", 403), ("x-older: browser", 400)):
                    client = await RawClient.connect(target.http)
                    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
                    lines += ["origin: https://evil.example", site]
                    lines += [f"content-type: {kind}"] if kind else []
                    client.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                    status, _ = await client.head()
                    client.leave()
                    check_status(status, expected, about=(kind, path))


async def half_characters(target: Target, size: int) -> None:
    """Sends ``size`` texts with a lone surrogate to each path. They must be refused."""
    for _ in range(size):
        for path, field in (("/v1/completions", "prompt"), ("/generate", "prompt"), ("/invocations", "inputs")):
            body = b'{"model":"%b","%b":"a\\ud800"}' % (MODEL.encode(), field.encode())
            if path != "/v1/completions":
                body = b'{"%b":"a\\ud800"}' % field.encode()
            await _refused(target, path, body, 400)


async def many_prompts(target: Target, size: int) -> None:
    """Sends ``size`` prompts with fields that take milliseconds to read, once with each. All must be answered, but for
    those of a format that takes too long to compile.
    """
    bounds = {f"a{number}": {"minimum": number} for number in range(5000)}
    choices = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [*map(str, range(15_000))]}}}
    for field, value, status in (
        ("stop_token_ids", [*range(3, 1027)], 200),
        ("logit_bias", {str(token_id): 1.0 for token_id in range(1024)}, 200),
        ("response_format", choices, 200),
        ("guided_json", {"properties": bounds}, 400),
    ):
        body = {"model": MODEL, "prompt": ["a"] * size, "max_tokens": 1, field: value}
        await _answered(target, "/v1/completions", json.dumps(body).encode(), status, about=field)


async def texts_of_ids(target: Target, size: int) -> None:
    """Asks ``size`` times at once for the text of ids that are single bytes and no characters, which takes longest."""
    body = json.dumps({"tokens": [*range(131, 240)] * 300}).encode()
    await asyncio.gather(*(_answered(target, "/detokenize", body, 200, about="detokenize") for _ in range(size)))


async def _too_many(target: Target, head: bytes, unit: bytes, end: bytes, size: int) -> None:
    body = head + unit * (size // len(unit)) + end
    for path in _LARGE:
        await _refused(target, path, body, 413)


async def _refused(target: Target, path: str, body: bytes, status: int) -> None:
    await _answered(target, path, body, status, about=path)


async def _answered(target: Target, path: str, body: bytes, status: int, *, about: str) -> None:
    client = await RawClient.connect(target.http)
    try:
        client.send(body, path=path)
        check_status((await client.head())[0], status, about=about)
    finally:
        client.leave()


ATTACKS = {
    "many_lists": Attack(many_lists, 8 << 20, 15 << 20),
    "many_names": Attack(many_names, 8 << 20, 15 << 20),
    "many_biases": Attack(many_biases, 8 << 20, 15 << 20),
    "many_fractions": Attack(many_fractions, 8 << 20, 15 << 20),
    "short_bodies": Attack(short_bodies, 6, 60),
    "largest_bodies": Attack(largest_bodies, 8, 24),
    "long_numbers": Attack(long_numbers, 8 << 20, 15 << 20),
    "pages_of_other_sites": Attack(pages_of_other_sites, 1, 10),
    "half_characters": Attack(half_characters, 1, 10),
    "many_prompts": Attack(many_prompts, 500, 800),
    "texts_of_ids": Attack(texts_of_ids, 4, 16),
}
