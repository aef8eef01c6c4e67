"""The OpenAPI document is true: any request built from it is answered as documented, and never with a failure."""

from __future__ import annotations

import random
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from tests.serving.server_process import ServerProcess

MODEL = "tiny-llama"
MOST_TOKENS = 3
OPERATIONS = [
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /version",
    "GET /recording",
    "POST /generate",
    "POST /invocations",
    "GET /info",
    "POST /terminate",  # no test here has the token that it needs
]
# Checks that the document does not cover, or that need servers with other options.
NOT_CHECKED = {
    "positive_data_acceptance",  # what the schema allows may be refused by the vocabulary, or by another field
    "unsupported_method",
    "missing_required_header",
    "ignored_auth",
}


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> Any:
    document = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    schemathesis.checks.load_all_checks()

    @document.hook
    def map_body(context: Any, body: Any) -> Any:
        """Most requests name the model, and none wants more tokens than a test has time for."""
        if not isinstance(body, dict):
            return body
        if context.operation.path == "/generate":
            return _shorten(body)
        if context.operation.path == "/invocations" and "inputs" in body:
            if isinstance(body.get("parameters", {}), dict):
                body["parameters"] = _shorten(body.get("parameters", {}))
            return body
        if type(body.get("model")) is str and random.Random(str(body)).random() < 0.7:
            body["model"] = MODEL
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(name)) is int:
                body[name] = min(body[name], MOST_TOKENS)
        if "messages" in body and not {"max_tokens", "max_completion_tokens"} & body.keys():
            body["max_completion_tokens"] = MOST_TOKENS
        if context.operation.path == "/v1/responses" and body.get("max_output_tokens") is None:
            body["max_output_tokens"] = MOST_TOKENS
        return body

    return document


def _shorten(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields``, with few tokens asked for."""
    given = fields.get("max_new_tokens")
    if given is None or type(given) is int:
        fields["max_new_tokens"] = MOST_TOKENS if given is None else min(given, MOST_TOKENS)
    return fields


def check(document: Any, label: str, mode: GenerationMode, max_examples: int) -> None:
    """Send requests of operation ``label`` that are, or are not, as the document has them."""
    operations = [result.ok() for result in document.get_all_operations()]
    (operation,) = [each for each in operations if each.label == label]
    excluded = [check for check in schemathesis.checks.CHECKS.get_all() if check.__name__ in NOT_CHECKED]
    assert len(excluded) == len(NOT_CHECKED)

    @settings(max_examples=max_examples, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        case.call_and_validate(excluded_checks=excluded)

    send()


def modes(label: str) -> list[GenerationMode]:
    """Returns the kinds of requests to draw: a path without parameters has no wrong ones."""
    has_parameters = label.startswith("POST") and label != "POST /terminate"
    return list(GenerationMode) if has_parameters else [GenerationMode.POSITIVE]


def test_every_good_answer_is_documented_as_200(document: Any) -> None:
    for result in document.get_all_operations():
        operation = result.ok()
        good = {status for status in operation.definition.raw["responses"] if str(status).startswith("2")}
        assert good == {"200"}, operation.label


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_document_says_holds(document: Any, label: str) -> None:
    for mode in modes(label):
        check(document, label, mode, 5)


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_document_says_holds_at_length(document: Any, label: str) -> None:
    for mode in modes(label):
        check(document, label, mode, 150)
