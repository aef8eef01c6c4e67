"""Requests by gRPC of millions of fields are refused before they are decoded, and others are read beside the loop."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from fastgen.errors import InvalidArgumentError
from fastgen.serving.admission.json_limits import FREE_BYTES
from fastgen.serving.admission.request_limits import MAX_BIASES, MAX_MESSAGES, MAX_TOKEN_IDS
from fastgen.serving.clients.grpc import GrpcTransport
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.grpc import messages, size
from fastgen.serving.grpc.size import MAX_FIELDS, check_num_fields
from fastgen.serving.refusals import BadRequestError, TooLargeError
from tests.serving.refusing import Refusing, served


def length_prefixed(number: int, content: bytes) -> bytes:
    size, encoded = len(content), b""
    while size > 127:
        encoded += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + encoded + bytes([size]) + content


def as_large_as_may_be() -> list[Any]:
    """Returns requests with as much as a server takes of one thing."""
    prompt = messages.GenerateRequest()
    prompt.token_ids.ids.extend([100_000] * MAX_TOKEN_IDS)
    biased = messages.GenerateRequest(text="a" * FREE_BYTES)
    biased.sampling.logit_bias.update(dict.fromkeys(range(MAX_BIASES), -1.5))
    chat = messages.ChatRequest()
    for _ in range(MAX_FIELDS // 4):
        chat.messages.add(role="user", content="a")
    return [prompt, biased, chat, messages.GenerateRequest(text="é" * (8 << 20))]


def test_large_requests_are_not_refused_for_their_bytes() -> None:
    for message in as_large_as_may_be():
        encoded = message.SerializeToString()
        assert len(encoded) > FREE_BYTES
        check_num_fields(encoded, message.DESCRIPTOR)


@pytest.mark.parametrize(
    ("kind", "encoded"),
    [
        (messages.ChatRequest, b"\x0a\x00" * (MAX_FIELDS + 1)),
        (messages.CheckRequest, length_prefixed(2, b"\x0a\x00" * (MAX_FIELDS + 1))),
        (messages.GenerateRequest, length_prefixed(3, b"\x6a\x01a" * (MAX_FIELDS + 1))),
        (messages.GenerateRequest, b"\xf8\x06\x01" * (MAX_FIELDS + 1)),
        (messages.GenerateRequest, b"\xfb\x06\xfc\x06" * (MAX_FIELDS // 2 + 1)),
        (messages.GenerateRequest, b"\xf8\x06" + b"\xff" * 9 + b"\x01" + b"\xf8\x06\x01" * MAX_FIELDS),
        (messages.GenerateRequest, (b"\xf9\x06" + b"\xff" * 8 + b"\xfd\x06" + b"\xff" * 4) * (MAX_FIELDS // 2 + 1)),
    ],
    ids=[
        *("messages", "messages of a request to check", "stop strings", "unknown numbers", "unknown groups"),
        *("behind a negative number", "unknown numbers of eight and four bytes"),
    ],
)
def test_too_many_fields_are_refused_unread(kind: Any, encoded: bytes) -> None:
    kind.FromString(encoded)
    with pytest.raises(TooLargeError, match=f"more than {MAX_FIELDS} fields"):
        check_num_fields(encoded, kind.DESCRIPTOR)


def test_as_many_fields_as_there_may_be_are_read() -> None:
    check_num_fields(b"\x0a\x00" * MAX_FIELDS, messages.ChatRequest.DESCRIPTOR)


@pytest.mark.parametrize("seed", range(20))
def test_what_cannot_be_decoded_is_left_to_the_decoder(seed: int) -> None:
    rng = random.Random(seed)
    noise = [rng.randbytes(FREE_BYTES + 1), b"\xff" * (4 << 20), b"\x0a" + b"\xff" * FREE_BYTES, bytes(FREE_BYTES + 1)]
    for encoded in noise:
        try:
            check_num_fields(encoded, messages.ChatRequest.DESCRIPTOR)
        except TooLargeError:
            assert len(encoded) > MAX_FIELDS


def test_a_server_refuses_them_and_counts_that() -> None:
    service: Any = Refusing()
    service.error = BadRequestError("it was read")
    ids, biases = [1] * (MAX_TOKEN_IDS + 1), dict.fromkeys(range(MAX_BIASES + 1), 1.0)
    message = {"role": "", "content": ""}
    as_many = {"logit_bias": dict(list(biases.items())[:-1])}

    async def run() -> None:
        async with served(service) as address:
            transport = GrpcTransport(address, None)
            try:
                for request, why in (
                    (ClientRequest({}, messages=[message] * (MAX_FIELDS + 1)), f"more than {MAX_FIELDS} fields"),
                    (ClientRequest({}, messages=[message] * (MAX_MESSAGES + 1)), f"at most {MAX_MESSAGES} messages"),
                    (ClientRequest({}, messages=[]), "messages: give at least one"),
                    (ClientRequest({}, prompt=ids), f"token_ids: .* at most {MAX_TOKEN_IDS} ids"),
                    (ClientRequest({"logit_bias": biases}, prompt="a"), f"logit_bias: .* at most {MAX_BIASES} biases"),
                    (ClientRequest({}, prompt=ids[1:]), "it was read"),
                    (ClientRequest(as_many, prompt="a"), "it was read"),
                ):
                    with pytest.raises(InvalidArgumentError, match=why):
                        await transport.generate(request)
            finally:
                await transport.close()

    asyncio.run(run())
    assert b'fastgen_refused_total{reason="body_size"} 1.0' in service.metrics.text()


def test_requests_are_read_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = Refusing()
    service.error = BadRequestError("no")
    threads: list[str] = []
    monkeypatch.setattr(messages, "refuse_unknown_fields", lambda _: threads.append(threading.current_thread().name))

    async def run() -> None:
        async with served(service) as address:
            transport = GrpcTransport(address, None)
            try:
                with pytest.raises(InvalidArgumentError, match="no"):
                    await transport.generate(ClientRequest({}, prompt="a"))
            finally:
                await transport.close()

    asyncio.run(run())
    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name


def num_fields_of(message: Any) -> int:
    """Returns the fields of a message as it is sent, where each repeated number is in one piece."""
    number = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            number += len(value) if field.is_repeated and not field.is_packed else 1
        else:
            each = value if field.is_repeated else [value]
            number += len(each) + sum(map(num_fields_of, each))
    return number


def random_check(rng: random.Random) -> Any:
    """Returns a request with fields of many lengths and at several depths."""
    check = messages.CheckRequest()
    lengths = [0, 1, 2, 126, 127, 128, 129, 255, 256, 16_383, 16_384, 16_385]
    for _ in range(rng.randrange(20, 40)):
        prompt = check.prompts.add()
        if rng.random() < 0.5:
            prompt.text = "a" * rng.choice(lengths)
        else:
            prompt.token_ids.ids.extend(rng.choices([1, 127, 128, 2**31 - 1], k=rng.randrange(5)))
        prompt.sampling.stop.extend("b" * rng.choice(lengths) for _ in range(rng.randrange(4)))
        prompt.sampling.temperature = rng.random()
        prompt.sampling.max_new_tokens = rng.choice([1, 127, 128, 129, 1 << 20])
        prompt.sampling.seed = rng.choice([127, 128, 2**63, 2**64 - 1])
        if rng.random() < 0.5:
            prompt.MergeFromString(b"\xfd\x06abcd\xf9\x06abcdefgh")  # numbers that are not known
        chat = check.chats.add()
        for _ in range(rng.randrange(4)):
            chat.messages.add(role="user", content="c" * rng.choice(lengths))
    check.prompts.add(text="d" * FREE_BYTES)
    return check


@pytest.mark.parametrize("seed", range(10))
def test_fields_are_counted_as_protobuf_reads_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message = random_check(random.Random(seed))
    number, encoded = num_fields_of(message), message.SerializeToString()
    monkeypatch.setattr(size, "MAX_FIELDS", number)
    check_num_fields(encoded, message.DESCRIPTOR)
    monkeypatch.setattr(size, "MAX_FIELDS", number - 1)
    with pytest.raises(TooLargeError, match=f"more than {number - 1} fields"):
        check_num_fields(encoded, message.DESCRIPTOR)
