"""Work that costs time for every token is limited, for every protocol."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

import fastgen
from fastgen import SamplingParams
from fastgen.errors import InvalidArgumentError
from fastgen.serving.clients.client import Protocols
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.request_limits import (
    MAX_BEAMS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    check_limits,
)


def fields(more: int) -> list[dict[str, Any]]:
    """Returns each field at its limit, and ``more``."""
    return [
        {"n": MAX_N + more},
        {"beam_width": MAX_BEAMS + more},
        {"stop": [f"{number}" for number in range(MAX_STOP_STRINGS + more)]},
        {"stop": ["a", "b" * (MAX_STOP_CHARACTERS + more)]},
        {"stop_token_ids": [5] * (MAX_STOP_TOKEN_IDS + more)},
        {"logprobs": MAX_LOGPROBS + more},
        {"prompt_logprobs": MAX_LOGPROBS + more},
    ]


@pytest.mark.parametrize(("most", "too_much"), list(zip(fields(0), fields(1), strict=True)))
def test_what_is_beyond_a_limit_is_refused_by_name(most: dict[str, Any], too_much: dict[str, Any]) -> None:
    check_limits(SamplingParams(**most))
    (name,) = too_much
    with pytest.raises(BadRequestError, match=f"^{name}: this server takes at most") as refused:
        check_limits(SamplingParams(**too_much))
    assert refused.value.param == name


def test_every_way_to_ask_has_the_limits(deployment: Deployment) -> None:
    stop = ["a"] * (MAX_STOP_STRINGS + 1)
    for path, body in (
        ("/generate", {"prompt": "a", "stop": stop}),
        ("/generate", {"prompt": "a", "stop": stop, "stream": True}),
        ("/invocations", {"inputs": "a", "parameters": {"stop": stop}}),
    ):
        answer = httpx2.post(deployment.address + path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
    checked = httpx2.post(deployment.address + "/check", json={"requests": [{"prompt": "a", "stop": stop}]}).json()
    assert checked["errors"] == [f"stop: this server takes at most {MAX_STOP_STRINGS} strings, not {len(stop)}"]
    protocols: tuple[Protocols, ...] = ("http", "grpc")
    for protocol in protocols:
        with (
            fastgen.client(deployment.address, protocol=protocol) as client,
            pytest.raises(InvalidArgumentError, match=r"^stop: this server"),
        ):
            client.generate("a", stop=stop)
