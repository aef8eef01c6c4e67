"""Work that costs time for every token is limited, for every protocol."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError
from starlette.requests import Request

import fastgen
from fastgen import SamplingParams
from fastgen.errors import InvalidArgumentError
from fastgen.serving.admission.request_limits import (
    MANY_LOGPROBS,
    MAX_CALL_ANSWERS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REQUEST_LOGPROBS,
    MAX_STOP_STRINGS,
    check_limits,
    check_num_logprobs,
    max_logprob_bytes,
    num_logprobs,
)
from fastgen.serving.clients.connect import Protocols
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.http.generate import CheckBody
from fastgen.serving.http.openai.run import Batch, session_of
from fastgen.serving.http.streaming import Gone
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Service

# Bytes for more log-probabilities than a request may have.
ROOM = 1 << 40


def fields(more: int) -> list[dict[str, Any]]:
    """Returns each field at its limit, as docs/serving.md states it, and ``more``."""
    return [
        {"n": 128 + more},
        {"beam_width": 256 + more},
        {"stop": [f"{number}" for number in range(64 + more)]},
        {"stop": ["a", "b" * (1000 + more)]},
        {"stop_token_ids": [5] * (1024 + more)},
        {"logprobs": 128 + more},
        {"prompt_logprobs": 128 + more},
    ]


@pytest.mark.parametrize(("most", "too_much"), list(zip(fields(0), fields(1), strict=True)))
def test_what_is_beyond_a_limit_is_refused_by_name(most: dict[str, Any], too_much: dict[str, Any]) -> None:
    check_limits(SamplingParams(**most))
    (name,) = too_much
    with pytest.raises(BadRequestError, match=f"^{name}: this server takes at most") as refused:
        check_limits(SamplingParams(**too_much))
    assert refused.value.param == name


def test_the_log_probabilities_of_a_request_are_bounded_as_a_product() -> None:
    answers = SamplingParams(n=2, max_new_tokens=8191, logprobs=127)
    assert num_logprobs(8, answers) == MAX_REQUEST_LOGPROBS - 256
    check_num_logprobs(8, answers, ROOM)
    check_num_logprobs(2, replace(answers, prompt_logprobs=127), ROOM)
    sums = r"2 answers × 8191 tokens × \(1 \+ 127\) \+ 3 tokens of the prompt × \(1 \+ 127\) = 2097280"
    with pytest.raises(BadRequestError, match=sums) as refused:
        check_num_logprobs(3, replace(answers, prompt_logprobs=127), ROOM)
    assert refused.value.param == "logprobs"
    beams = SamplingParams(beam_width=4, max_new_tokens=10, logprobs=0)
    assert num_logprobs(8, beams) == 40
    assert num_logprobs(8, SamplingParams(max_new_tokens=10)) == 0
    with pytest.raises(BadRequestError, match=f"at most {MAX_REQUEST_LOGPROBS} in one request") as refused:
        check_num_logprobs(MAX_REQUEST_LOGPROBS // 128 + 1, SamplingParams(prompt_logprobs=127), ROOM)
    assert refused.value.param == "prompt_logprobs"


def test_the_log_probabilities_of_a_request_are_bounded_by_their_memory() -> None:
    """Each takes 280 bytes, and each token that has any 1000 more."""
    asked = SamplingParams(n=2, max_new_tokens=100, logprobs=9, prompt_logprobs=0)
    check_num_logprobs(50, asked, 200 * 3800 + 50 * 1280)
    with pytest.raises(BadRequestError, match="= 2050 log-probabilities; they take up to 824000 bytes, and") as refused:
        check_num_logprobs(50, asked, 200 * 3800 + 50 * 1280 - 1)
    assert "this server has 823999 bytes for those of all requests" in str(refused.value)
    assert refused.value.param == "logprobs"
    check_num_logprobs(50, SamplingParams(), 0)


def test_log_probabilities_have_a_16th_part_of_the_memory_up_to_their_number() -> None:
    assert max_logprob_bytes(1 << 30) == 64 << 20
    assert max_logprob_bytes(1 << 34) == 1 << 30
    assert max_logprob_bytes(1 << 50) == 8_388_608 * 1280


def test_a_server_with_little_memory_takes_requests_with_fewer_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastgen.serving.watch.memory_bytes", lambda: 1 << 20)
    service, asked = Service({"model": "m"}), SamplingParams(max_new_tokens=51, logprobs=0)
    service._check_request([1], asked)  # 65,280 of 65,536 bytes
    with pytest.raises(BadRequestError, match="this server has 65536 bytes"):
        service._check_request([1], replace(asked, max_new_tokens=52))


def test_too_many_log_probabilities_are_refused_by_every_protocol(deployment: Deployment) -> None:
    much = {"n": MAX_N, "logprobs": MAX_LOGPROBS, "max_tokens": 512}
    answer = httpx2.post(deployment.address + "/v1/completions", json={"model": deployment.name, "prompt": "a"} | much)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    protocols: tuple[Protocols, ...] = ("http", "grpc")
    for protocol in protocols:
        with (
            fastgen.client(deployment.address, protocol=protocol) as client,
            pytest.raises(InvalidArgumentError, match=r"128 answers × 512 tokens × \(1 \+ 128\) = 8454144"),
        ):
            client.generate("a", n=MAX_N, logprobs=MAX_LOGPROBS, max_new_tokens=512)


def test_the_answers_to_all_prompts_of_a_call_are_bounded_together(deployment: Deployment) -> None:
    prompts = ["a"] * (MAX_CALL_ANSWERS // MAX_N + 1)
    for path, body in (
        ("/v1/completions", {"model": deployment.name, "prompt": prompts, "n": MAX_N}),
        ("/invocations", {"inputs": prompts, "parameters": {"n": MAX_N, "do_sample": True}}),
    ):
        answer = httpx2.post(deployment.address + path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert f"33 prompts ask for {33 * MAX_N} answers together" in answer.json()["error"]["message"]


def test_a_call_with_many_prompts_lets_other_requests_have_their_turn() -> None:
    num_since_turn, most = 0, 0

    class Taking:
        def check_num_requests(self, number: int, param: str) -> None:
            assert number == 1000

        async def submit(self, *arguments: Any, **more: Any) -> Any:
            nonlocal num_since_turn, most
            num_since_turn += 1
            most = max(most, num_since_turn)

    async def run() -> None:
        nonlocal num_since_turn

        async def take_turns() -> None:
            nonlocal num_since_turn
            while True:
                num_since_turn = 0
                await asyncio.sleep(0)

        async def receive() -> Any:
            await asyncio.Event().wait()

        others = asyncio.create_task(take_turns())
        request = Request({"type": "http", "headers": []}, receive)
        service: Any = Taking()
        await Batch.submit(service, request, [[1]] * 1000, [SamplingParams()] * 1000, is_stream=False)
        others.cancel()

    asyncio.run(run())
    assert 1 < most < 100


def test_a_call_may_ask_for_4096_answers_together() -> None:
    class Taking:
        def check_num_requests(self, number: int, param: str) -> None:
            pass

        async def submit(self, *arguments: Any, **more: Any) -> Any:
            return SimpleNamespace(cancel=lambda: None)

    async def submit(*samplings: SamplingParams) -> None:
        request = Request({"type": "http", "headers": [], "state": {"gone": Gone()}})
        service: Any = Taking()
        await Batch.submit(service, request, [[1]] * len(samplings), samplings, is_stream=False)

    most = [SamplingParams(n=128)] * 31 + [SamplingParams(beam_width=128, n=2)]
    asyncio.run(submit(*most))
    with pytest.raises(BadRequestError, match=r"^n: 33 prompts ask for 4097 answers together; .* at most 4096 in one"):
        asyncio.run(submit(*most, SamplingParams()))


def test_a_call_has_no_more_prompts_than_may_wait(deployment: Deployment) -> None:
    body = {"model": deployment.name, "prompt": ["a"] * 1025, "max_tokens": 1}
    answer = httpx2.post(deployment.address + "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "this server lets at most 1024 wait (--max-queued-requests)" in answer.json()["error"]["message"]
    answer = httpx2.post(deployment.address + "/invocations", json={"inputs": ["a"] * 1025})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "inputs")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": ["once upon a time " * 300] * 32, "n": 128},
            r"^echo: the answers would repeat 20889600 characters",
        ),
        (
            {"prompt": ["once " * 900] * 32, "n": 20, "logprobs": 4},
            r"^echo: 20 completions would repeat \d{7} log-probabilities of the prompts; this server repeats at most "
            "2097152 in one call",
        ),
    ],
)
def test_answers_repeat_so_much_of_their_prompts(deployment: Deployment, fields: dict[str, Any], message: str) -> None:
    body = {"model": deployment.name, "max_tokens": 0, "echo": True, **fields}
    answer = httpx2.post(deployment.address + "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo"), answer.text[:300]
    assert re.search(message, answer.json()["error"]["message"])


def test_an_answer_with_many_log_probabilities_is_the_same_in_pieces(deployment: Deployment, llm: fastgen.LLM) -> None:
    asked: dict[str, Any] = {"n": 2, "logprobs": 120, "max_new_tokens": 80, "temperature": 0.5, "seed": 1}
    assert num_logprobs(1, SamplingParams(**asked)) > MANY_LOGPROBS
    expected = llm.generate("Once", **asked)
    protocols: tuple[Protocols, ...] = ("http", "grpc")
    for protocol in protocols:
        with fastgen.client(deployment.address, protocol=protocol) as client:
            with client.stream("Once", **asked) as stream:
                assert len(list(stream)) > 2
            for found in (client.generate("Once", **asked), stream.output):
                for one, other in zip(found.completions, expected.completions, strict=True):
                    assert one.token_ids == other.token_ids
                    assert one.logprobs == other.logprobs


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


@pytest.mark.parametrize(("sent", "session"), [("", None), ("a" * 512, "a" * 512), ("a" * 513, "a" * 512)])
def test_the_name_of_a_session_has_512_characters(sent: str, session: str | None) -> None:
    assert session_of(Request({"type": "http", "headers": [(b"x-session-id", sent.encode())]})) == session


def test_64_requests_may_be_checked_by_one_call() -> None:
    bodies = [{"prompt": "a"}] * 65
    assert len(CheckBody.model_validate({"requests": bodies[1:]}).requests) == 64
    with pytest.raises(ValidationError, match="at most 64 items"):
        CheckBody.model_validate({"requests": bodies})
