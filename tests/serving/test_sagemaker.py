"""SageMaker's container contract, used as its clients do: with OpenAI's fields, and with those of LMI and TGI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

import fastgen
from fastgen import LLM
from fastgen.serving.clients.deployments import Deployment
from tests.serving.scripted import ScriptedService, ask, scripted_codec

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fastgen.load("tiny-llama") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def http(deployment: Deployment) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=deployment.address, trust_env=False, timeout=60) as opened:
        yield opened


def invoke(http: httpx2.Client, body: Any, **headers: str) -> httpx2.Response:
    return http.post("/invocations", json=body, headers=headers)


def test_ping_says_that_requests_are_taken(http: httpx2.Client) -> None:
    assert http.get("/ping").status_code == 200


def test_inputs_are_answered_greedily_by_default(http: httpx2.Client, llm: LLM) -> None:
    answer = invoke(http, {"inputs": PROMPT}).json()
    assert answer == {"generated_text": llm.generate(PROMPT, temperature=0, max_new_tokens=30).text}
    answers = invoke(http, {"inputs": [PROMPT, "There was"], "parameters": {"max_new_tokens": 5}}).json()
    wanted = llm.generate([PROMPT, "There was"], temperature=0, max_new_tokens=5)
    assert answers == [{"generated_text": each.text} for each in wanted]


# Their parameters, and what they mean in ours.
PARAMETERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": True, "seed": 4}, {"temperature": 1.0, "seed": 4}),
    ({"do_sample": True, "seed": 4, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "seed": 4}),
    ({"top_k": 3, "seed": 4}, {"temperature": 1.0, "top_k": 3, "seed": 4}),
    ({"do_sample": False, "temperature": 0.6}, {"temperature": 0}),
    ({"do_sample": True, "top_k": -1, "seed": 4}, {"temperature": 1.0, "seed": 4}),
    ({"stop_sequences": ["a"], "stop": ["e"]}, {"temperature": 0, "stop": ["a", "e"]}),
    (
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    ),
    ({"num_beams": 3, "length_penalty": 0.5}, {"temperature": 0, "beam_width": 3, "length_penalty": 0.5}),
    ({"ignore_eos_token": True}, {"temperature": 0, "ignore_eos": True}),
    (  # what TGI's own client sends in any case
        {
            **dict.fromkeys(["best_of", "truncate", "typical_p", "top_n_tokens", "grammar", "adapter_id", "seed"]),
            "watermark": False,
        },
        {"temperature": 0},
    ),
    ({"best_of": 1, "top_n_tokens": 0}, {"temperature": 0}),
]


@pytest.mark.parametrize(("theirs", "ours"), PARAMETERS, ids=[",".join(theirs) for theirs, _ in PARAMETERS])
def test_their_parameters_mean_what_they_mean_there(
    http: httpx2.Client, llm: LLM, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, **theirs}}
    assert invoke(http, body).json() == {"generated_text": llm.generate(PROMPT, max_new_tokens=12, **ours).text}


def test_the_end_of_a_prompt_counts(http: httpx2.Client, llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT)["input_ids"]
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "truncate": 2}}
    wanted = llm.generate(ids[-2:], temperature=0, max_new_tokens=5)
    assert invoke(http, body).json() == {"generated_text": wanted.text}


def test_details_tell_of_every_token(http: httpx2.Client, llm: LLM) -> None:
    parameters = {
        "max_new_tokens": 4,
        "details": True,
        "decoder_input_details": True,
        "do_sample": True,
        "seed": 1,
        "n": 2,
    }
    answer = invoke(http, {"inputs": PROMPT, "parameters": parameters | {"return_full_text": True}}).json()
    wanted = llm.generate(PROMPT, max_new_tokens=4, temperature=1.0, seed=1, n=2, logprobs=0, prompt_logprobs=0)
    assert answer["generated_text"] == PROMPT + wanted.text
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["inputs"]) == ("length", 4, PROMPT)
    assert [token["id"] for token in details["tokens"]] == wanted.token_ids
    assert "".join(token["text"] for token in details["tokens"]) == wanted.text
    assert wanted.logprobs is not None
    logprobs = [entry[token_id] for entry, token_id in zip(wanted.logprobs, wanted.token_ids, strict=True)]
    assert [token["log_prob"] for token in details["tokens"]] == logprobs
    assert [token["id"] for token in details["prefill"]] == wanted.prompt_token_ids
    assert details["prefill"][0]["log_prob"] is None
    (other,) = details["best_of_sequences"]
    assert other["generated_text"] == PROMPT + wanted.others[0].text


def test_why_it_ended_is_in_their_words(http: httpx2.Client, llm: LLM) -> None:
    first = llm.generate(PROMPT, temperature=0, max_new_tokens=1).token_ids[0]
    for parameters, reason in (
        ({"max_new_tokens": 2, "ignore_eos_token": True}, "length"),
        ({"stop_token_ids": [first]}, "stop_sequence"),
        ({"max_new_tokens": 1000}, "eos_token"),
    ):
        answer = invoke(http, {"inputs": PROMPT, "parameters": parameters | {"details": True}}).json()
        assert answer["details"]["finish_reason"] == reason


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
def test_a_stream_has_a_line_a_token(http: httpx2.Client, llm: LLM, accept: str) -> None:
    wanted = llm.generate(PROMPT, temperature=0, max_new_tokens=12)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}, "stream": True}
    response = invoke(http, body, accept=accept)
    is_sse = accept == "text/event-stream"
    assert response.headers["content-type"].startswith("text/event-stream" if is_sse else "application/jsonlines")
    lines = [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line]
    assert [line["token"]["id"] for line in lines] == wanted.token_ids
    assert ["generated_text" in line for line in lines] == [False] * 11 + [True]
    assert lines[-1]["generated_text"] == wanted.text
    assert lines[-1]["details"]["finish_reason"] == "length"


def test_the_last_line_of_a_stream_has_the_text_though_several_tokens_came_at_once() -> None:
    codec = scripted_codec()
    token_ids = codec.encode_text("One two three", add_special_tokens=False)
    service = ScriptedService(codec, lambda prompt, sampling: (token_ids, "length"), at_once=True)
    body = {"inputs": PROMPT, "parameters": {"return_full_text": True}, "stream": True}

    async def use(client: openai.AsyncOpenAI) -> httpx2.Response:
        return await client._client.post("http://scripted/invocations", json=body)

    *lines, last = map(json.loads, ask(service, use).text.splitlines())
    assert [line["token"]["id"] for line in (*lines, last)] == token_ids
    assert all(line.keys() == {"token"} for line in lines)
    assert last["generated_text"] == PROMPT + "One two three"
    assert last["details"] == {"finish_reason": "length", "generated_tokens": len(token_ids), "inputs": PROMPT}


def test_openais_bodies_are_those_of_openais_paths(http: httpx2.Client) -> None:
    sampling = {"temperature": 0, "max_tokens": 6}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, **sampling}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **sampling}),
    ):
        invoked, direct = invoke(http, body), http.post(path, json={"model": "tiny-llama", **body})
        assert invoked.status_code == direct.status_code == 200
        assert invoked.json()["choices"] == direct.json()["choices"]
        streamed = invoke(http, body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": PROMPT, "parameters": {"max_new_token": 3}}, "parameters.max_new_token"),
        ({"inputs": PROMPT, "parameters": {"temperature": "hot"}}, "parameters.temperature"),
        ({"inputs": PROMPT, "parameters": {"max_new_tokens": 10**30}}, "parameters.max_new_tokens"),
        ({"inputs": PROMPT, "parameters": {"top_k": 2**63}}, "parameters.top_k"),
        ({"inputs": PROMPT, "parameters": {"stop_token_ids": [2**64]}}, "parameters.stop_token_ids[0]"),
        ({"inputs": PROMPT, "parameters": {"temperature": -1.0}}, None),
        ({"inputs": PROMPT, "parameters": {"best_of": 2}}, "parameters.best_of"),
        ({"inputs": PROMPT, "parameters": {"watermark": True}}, "parameters.watermark"),
        ({"inputs": PROMPT, "parameters": {"truncate": 0}}, "parameters.truncate"),
        ({"inputs": 3}, "inputs"),
        ({"inputs": [PROMPT, PROMPT], "stream": True}, "stream"),
        ({"inputs": PROMPT, "parameters": {"n": 2, "do_sample": True}, "stream": True}, "stream"),
        ({"inputs": ["a"] * 2049}, "inputs"),
        ({"input": PROMPT}, "input"),  # did you mean `inputs`?
        ({"prompt": PROMPT, "temperature": -1.0}, "temperature"),
        ([], None),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(http: httpx2.Client, body: Any, param: str | None) -> None:
    response = invoke(http, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'{"inputs": "\xff"}'])
def test_what_is_no_json_is_a_400(http: httpx2.Client, body: bytes) -> None:
    response = http.post("/invocations", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("body", [{"inputs": PROMPT}, {"prompt": PROMPT, "max_tokens": 1}])
def test_only_what_is_said_to_be_json_is_read(http: httpx2.Client, body: Any) -> None:
    """A page of any site may send the other types to a server on its reader's own machine."""
    content = json.dumps(body)
    for kind in (
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=b",
        "a/json",
    ):
        headers = {} if kind is None else {"content-type": kind}
        response = http.post("/invocations", content=content, headers={**headers, "origin": "https://evil.example"})
        assert response.status_code == 400, kind
        assert "content-type: application/json" in response.json()["error"]["message"]
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert http.post("/invocations", content=content, headers={"content-type": kind}).status_code == 200, kind


@pytest.mark.parametrize("field", ["inputs", "prompt"])
def test_half_a_character_is_named(http: httpx2.Client, field: str) -> None:
    body = f'{{"{field}": "a \\ud800 b"}}'.encode()
    response = http.post("/invocations", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "truncated" not in error["message"]
    assert "surrogate" in error["message"]
    assert error["param"] == field
