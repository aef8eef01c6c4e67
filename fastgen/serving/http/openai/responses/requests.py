"""The request body of ``POST /v1/responses``, and the chat that it means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints
from pydantic import Tag as Reading
from pydantic_core import PydanticCustomError

from fastgen.serving.http.openai.formats import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from fastgen.serving.http.openai.messages import Function, FunctionName, NamedFunction, NamedTool, Tool
from fastgen.serving.http.openai.requests import MAX_STOP_STRINGS, MAX_TOOLS, ChatRequest
from fastgen.serving.http.openai.responses.items import Input, messages_of
from fastgen.serving.http.openai.validation import (
    MAX_INT32,
    MAX_METADATA,
    Label,
    Metadata,
    StopString,
    Strict,
    at_most,
    refused,
)
from fastgen.serving.http.openai.vllm import VllmChatFields, VllmFields
from fastgen.serving.refusals import BadRequestError

_RESEND = "nothing is stored here; send the whole conversation as input"


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    # A JSON schema; without it, the function takes no arguments.
    parameters: dict[str, Any] | None = None
    # Arguments match the schema; without it only those of a call that ``tool_choice`` demands do.
    strict: bool | None = None


class NamedFunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(Strict):
    """Some of the tools, one of which may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


def _only_functions(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError(
            "cannot_be_honoured",
            "{kind} cannot be honoured: this server runs no tools; give functions, which the client runs",
            {"kind": repr(kind)[:80]},
        )
    return value


def _only_choices_of_functions(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise PydanticCustomError(
            "cannot_be_honoured", "{kind} cannot be honoured: this server runs no tools", {"kind": repr(kind)[:80]}
        )
    return value


def _choice(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else "mode" if isinstance(value, str) else None
    return kind if isinstance(kind, str) else None


Choice = Annotated[
    Annotated[
        Annotated[Literal["none", "auto", "required"], Reading("mode")]
        | Annotated[NamedFunctionTool, Reading("function")]
        | Annotated[AllowedTools, Reading("allowed_tools")],
        Discriminator(_choice),
    ],
    BeforeValidator(_only_choices_of_functions),
]


class TextJsonSchema(JsonSchema):
    type: Literal["json_schema"]


class TextSettings(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | TextJsonSchema, Field(discriminator="type")] | None = None
    verbosity: Annotated[Literal["medium"] | None, refused("the models here have no such setting", unless="medium")] = (
        None
    )


class Reasoning(Strict):
    # As ``reasoning_effort``.
    effort: Annotated[str, StringConstraints(pattern="^[a-z_]{1,32}$")] | None = None
    # Without effect: the models here write no reasoning items, of which there could be a summary.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Strict):
    # Accepted without effect, as in chats.
    include_obfuscation: bool | None = None


# More that an answer may hold. Only log-probabilities occur here; the other kinds belong to items that never do.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(VllmFields, VllmChatFields):
    """``POST /v1/responses``."""

    # The name under which the model is served.
    model: str
    input: Input
    # A system message before the input.
    instructions: str | None = None
    # By default as many as fit.
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT32)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Annotated[list[Includable] | None, Field(fail_fast=True, max_length=16)] = None
    text: TextSettings | None = None
    tools: Annotated[
        list[Annotated[FunctionTool, BeforeValidator(_only_functions)]] | None,
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ] = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    # Extensions: fields of chats.
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None

    # Without effect on the answer.
    # OpenAI's default is true. Nothing is stored here, which the answer says.
    store: bool | None = None
    # It limits calls of tools that the server runs, and there are none.
    max_tool_calls: Annotated[int | None, Field(ge=1, le=MAX_INT32)] = None
    metadata: Annotated[Metadata | None, Field(max_length=MAX_METADATA), at_most(MAX_METADATA)] = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None

    background: Annotated[
        Literal[False] | None, refused("an answer is not kept for later; use stream, or wait for it", unless=False)
    ] = None
    conversation: Annotated[None, refused(_RESEND)] = None
    previous_response_id: Annotated[None, refused(_RESEND)] = None
    prompt: Annotated[None, refused("no prompts are stored here; send instructions and input")] = None
    truncation: Annotated[
        Literal["disabled"] | None,
        refused("no items are dropped; send fewer, or use truncate_prompt_tokens", unless="disabled"),
    ] = None
    access_programs: Annotated[None, refused("it is OpenAI's own")] = None
    background_options: Annotated[None, refused("an answer is not kept for later")] = None
    context_management: Annotated[None, refused("nothing is compacted here; send fewer items")] = None
    image: Annotated[None, refused("the models here read text")] = None
    moderation: Annotated[None, refused("nothing is moderated here")] = None
    prompt_cache_options: Annotated[None, refused("prefixes are cached for every request alike")] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def chat(self) -> ChatRequest:
        """Returns the chat that means the same. Raises ``BadRequestError``."""
        tools, choice = self._tools()
        same = {name: getattr(self, name) for name in (*VllmFields.model_fields, *VllmChatFields.model_fields)}
        if self.reasoning is not None and self.reasoning.effort is not None:
            same["reasoning_effort"] = self.reasoning.effort
        return ChatRequest.model_construct(  # every part was checked
            **same,
            model=self.model,
            messages=messages_of(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            response_format=self._format(),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            stream=self.stream,
            seed=self.seed,
            stop=self.stop,
            prompt_cache_key=self.prompt_cache_key,
        )

    def _format(self) -> Any:
        given = self.text.format if self.text is not None else None
        if not isinstance(given, TextJsonSchema):
            return given
        return JsonSchemaFormat(
            type="json_schema", json_schema=JsonSchema.model_construct(name=given.name, schema_=given.schema_)
        )

    def _tools(self) -> tuple[list[Tool] | None, Any]:
        """Returns the tools that may be called, and which of them must be."""
        choice: Any = self.tool_choice
        given = self.tools or []
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools}
            if unknown := allowed - {tool.name for tool in given}:
                raise BadRequestError(f"tool_choice: there is no tool named {min(unknown)!r}", param="tool_choice")
            given, choice = [tool for tool in given if tool.name in allowed], choice.mode
        elif isinstance(choice, NamedFunctionTool):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        functions = [
            Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
            for tool in given
        ]
        return [Tool(type="function", function=function) for function in functions] or None, choice


_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


@contextmanager
def in_its_names() -> Iterator[None]:
    """Makes refusals of the chat name the fields of the response."""
    try:
        yield
    except BadRequestError as error:
        param = None if error.param is None else _renamed(error.param)
        raise BadRequestError(_renamed(str(error)), param=param, code=error.code) from error


def _renamed(text: str) -> str:
    text = re.sub(r"^\w+", lambda name: _FIELDS.get(name[0], name[0]), text)
    return re.sub(r"^(tools\[\d+\])\.function\.", r"\1.", text)
