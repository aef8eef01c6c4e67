"""docs/openai-api.md is true: its examples run, and its tables list every field and format."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from pydantic import BaseModel

from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.openai.formats import StructuredOutputs
from fastgen.serving.http.openai.requests import ChatRequest, CompletionRequest, SamplingRequest, StreamOptions
from fastgen.serving.http.openai.responses.requests import Reasoning, ResponsesRequest, ResponsesStreamOptions
from fastgen.serving.http.openai.vllm import VllmChatFields, VllmFields
from fastgen.serving.tools.formats import TOOL_FORMATS
from tests.pages import DOCS, blocks
from tests.serving.server_process import ServerProcess

PAGE = DOCS / "openai-api.md"
TEXT = PAGE.read_text("utf-8")
SHOWN = "http://127.0.0.1:8000"


def table(heading: str) -> list[str]:
    """Returns the first column of the table after ``heading``, one entry per row."""
    rows = TEXT.split(heading, 1)[1].split("|", 1)[1].split("\n\n", 1)[0].split("\n")
    return [re.split(r"(?<!\\)\|", row)[1] for row in rows[2:]]


@pytest.mark.parametrize("command", blocks(PAGE, "bash"))
def test_its_commands_run(server: ServerProcess, command: str) -> None:
    assert SHOWN in command
    typed = command.replace(SHOWN, server.address).replace("curl ", "curl --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    if "data: " in done.stdout:
        *events, last = [line.removeprefix("data: ") for line in done.stdout.split("\n\n") if line]
        assert last == "[DONE]"
        assert json.loads(events[-1])["usage"]["completion_tokens"] == 20
    else:
        assert json.loads(done.stdout)


def test_its_python_runs(server: ServerProcess) -> None:
    (code,) = blocks(PAGE, "python")
    code = code.replace(SHOWN, server.address)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10


VLLM, CHATS = VllmFields.model_fields.keys(), VllmChatFields.model_fields.keys()
SHARED = SamplingRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("Of completions and chats:", SHARED - VLLM),
        ("Of completions:", CompletionRequest.model_fields.keys() - SHARED),
        ("Of chats:", ChatRequest.model_fields.keys() - SHARED - CHATS),
        ("Of these three:", set(VLLM)),
        ("Of conversations (", set(CHATS)),
        ("`structured_outputs` has", {field.alias or name for name, field in StructuredOutputs.model_fields.items()}),
        ("## Responses", ResponsesRequest.model_fields.keys() - VLLM - CHATS),
        ("## Tools", set(TOOL_FORMATS)),
    ],
)
def test_its_tables_are_whole(heading: str, fields: set[str]) -> None:
    named = [name for row in table(heading) for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) == len(set(named))
    assert set(named) == fields


@pytest.mark.parametrize(
    ("heading", "field", "options"),
    [
        ("Of completions and chats:", "stream_options", StreamOptions),
        ("## Responses", "stream_options", ResponsesStreamOptions),
        ("## Responses", "reasoning", Reasoning),
    ],
)
def test_its_tables_have_the_fields_within_a_field(heading: str, field: str, options: type[BaseModel]) -> None:
    row = TEXT.split(heading, 1)[1].split(f"| `{field}` |", 1)[1].split("\n", 1)[0]
    assert [name for name in options.model_fields if f"`{name}`" not in row] == []


def test_its_errors_are_those_of_the_openapi_document() -> None:
    listed = [int(status) for row in table("## Errors") for status in re.findall(r"\d+", row)]
    assert listed == sorted([*map(int, ERRORS), 405]), "405 is the router's, for another method"
