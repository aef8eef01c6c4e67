"""A client's requests are checked in messages that a server takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastgen.serving.admission.json_limits import check_json_sizes
from fastgen.serving.clients.requests import ClientRequest, batches

BIASES = dict.fromkeys(range(1 << 16), -1.25)


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([ClientRequest({}, prompt="a")] * 35, [16, 16, 3]),
        ([ClientRequest({}, prompt=[7] * 400_000)] * 5, [2, 2, 1]),
        ([ClientRequest({}, prompt=[7] * 2_000_000), ClientRequest({}, prompt="a")], [1, 1]),
        ([ClientRequest({"logit_bias": BIASES}, prompt="a")] * 3, [1, 1, 1]),
        ([ClientRequest({"logit_bias": None}, messages=[])] * 2, [2]),
    ],
)
def test_batches_hold_few_requests_and_few_numbers(requests: list[ClientRequest], sizes: list[int]) -> None:
    found = list(batches(requests, 16))
    assert [len(batch) for batch in found] == sizes
    assert [request for batch in found for request in batch] == requests


@pytest.mark.parametrize(
    "request_",
    [ClientRequest({}, prompt=[50_000] * 65_000), ClientRequest({"logit_bias": BIASES}, prompt=[1, 2])],
)
def test_a_server_takes_each_batch(request_: ClientRequest) -> None:
    for batch in batches([request_] * 20, 16):
        bodies: list[dict[str, Any]] = [{"prompt": each.prompt, **each.fields} for each in batch]
        check_json_sizes([json.dumps({"requests": bodies}).encode()])


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        # A body may have 1,048,576 token ids.
        ([ClientRequest({}, prompt=[7] * 524_288)] * 3, [2, 1]),
        ([ClientRequest({}, prompt=[7] * 524_289)] * 3, [1, 1, 1]),
        ([ClientRequest({}, prompt=[7] * (1 << 20)), ClientRequest({}, prompt=[7])], [1, 1]),
        # Each of 1024 biases is as much as sixteen of them, and a text is none.
        ([ClientRequest({"logit_bias": dict.fromkeys(range(1024), 0.5)}, prompt=[7] * 507_904)] * 3, [2, 1]),
        ([ClientRequest({"logit_bias": dict.fromkeys(range(1024), 0.5)}, prompt=[7] * 507_905)] * 3, [1, 1, 1]),
        ([ClientRequest({}, prompt="a" * (1 << 19))] * 16, [16]),
        # A body may have 4096 parts of content.
        ([ClientRequest({}, messages=[{"content": [{"type": "text", "text": "a"}] * 1024}] * 2)] * 3, [2, 1]),
        ([ClientRequest({}, messages=[{"content": [{"type": "text", "text": "a"}] * 2049}])] * 3, [1, 1, 1]),
        ([ClientRequest({}, prompt=[7] * 524_288), ClientRequest({}, messages=[{"content": "a"}])] * 2, [4]),
    ],
)
def test_a_batch_is_as_large_as_it_may_be(requests: list[ClientRequest], sizes: list[int]) -> None:
    assert [len(batch) for batch in batches(requests, 16)] == sizes
