"""The request bodies of OpenAI's endpoints: types, ranges, and the fields that are refused by name.

Every model forbids unknown fields. ``null`` means that a field was not given. An OpenAI field without effect here is
accepted only if ignoring it cannot change the client's result; other such fields are refused as "cannot be honoured".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fastgen.serving.http.openai.messages import Message, Tool, ToolChoice, few_parts
from fastgen.serving.request_limits import MAX_BEAMS, MAX_N, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS

MAX_PROMPTS = 2048
# All prompts of a request together: validating more would block the server for too long.
MAX_TOKEN_IDS = 1 << 20
MAX_STOP_STRINGS = 4
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 128
_MAX_INT32 = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# An identifier for the caller's own records.
Label = Annotated[str, StringConstraints(max_length=512)]


def _refuse(why: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value is not None:
            raise PydanticCustomError("cannot_be_honoured", "cannot be honoured: {why}", {"why": why})

    return check


def _only_null(why: str) -> BeforeValidator:
    """Returns a validator for an OpenAI field that would change the answer: it accepts only ``null``."""
    return BeforeValidator(_refuse(why))


def at_most(number: int) -> BeforeValidator:
    """Returns a validator that limits the members of an object before each of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > number:
            raise PydanticCustomError(
                "too_many_members", "at most {max} members, not {found}", {"max": number, "found": len(value)}
            )
        return value

    return BeforeValidator(check)


def _prompt(value: Any) -> Any:
    """Validates text, token ids, or a list of either. It is one check, because a union of types would try each type on
    a long list.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _bad_prompt()
    items = value if isinstance(value[0], (str, list)) else [value]
    if len(items) > MAX_PROMPTS:
        raise PydanticCustomError("too_many_prompts", "at most {max} prompts at once", {"max": MAX_PROMPTS})
    if sum(len(item) for item in items if isinstance(item, list)) > MAX_TOKEN_IDS:
        raise PydanticCustomError("too_many_token_ids", "at most {max} token ids in all", {"max": MAX_TOKEN_IDS})
    for item in items:
        is_text = isinstance(item, str)
        if not is_text and not (isinstance(item, list) and item and set(map(type, item)) == {int}):
            raise _bad_prompt()
        if not is_text and not (min(item) >= 0 and max(item) <= _MAX_INT32):
            raise PydanticCustomError("not_a_token", "a token id is 0 or more, and less than the vocabulary's size")
    if len({type(item) for item in items}) > 1:
        raise _bad_prompt()
    return value


def _bad_prompt() -> PydanticCustomError:
    return PydanticCustomError(
        "bad_prompt",
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids, none of them empty",
    )


_TOKEN_IDS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_TOKEN_IDS,
    "items": {"type": "integer", "minimum": 0, "maximum": _MAX_INT32},
}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKEN_IDS_SCHEMA},
    ]
}


class FewErrors(BaseModel):
    """A body that takes no longer to refuse than to accept."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Keeps only the first unknown field if there are more fields than the model has. Each unknown field would be
        an error of its own, and thousands of errors help no reader.
        """
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in value if name not in known)
        return {name: each for name, each in value.items() if name in known or name == unknown}


class Strict(FewErrors):
    """A model without unknown fields, numbers as text, or numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    # A last chunk without choices reports the usage.
    include_usage: bool | None = None
    # With it, every chunk reports the usage so far. Not an OpenAI field, but load generators use it.
    continuous_usage_stats: bool | None = None
    # Accepted without effect: padding against eavesdroppers is for networks that others can observe.
    include_obfuscation: bool | None = None

    @property
    def reports_usage_always(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class SamplingRequest(Strict):
    """The fields that completions and chats share."""

    # The name under which the model is served.
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # The defaults of this, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` are the checkpoint's.
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    # From a token id, as text, to the value added to its logit.
    logit_bias: (
        Annotated[
            dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
            at_most(MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    user: Label | None = None

    # Extensions: fields of fastgen's SamplingParams that OpenAI does not have.
    top_k: Annotated[int | None, Field(ge=0, le=_MAX_INT32)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=_MAX_INT32)] = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    beam_width: Annotated[int | None, Field(ge=1, le=MAX_BEAMS)] = None
    priority: Annotated[int | None, Field(ge=-_MAX_INT32, le=_MAX_INT32)] = None
    timeout_s: Annotated[float | None, Field(gt=0)] = None


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[Any, PlainValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    # By default 16, or as many as fit. With ``echo``, 0 returns the prompt alone.
    max_tokens: Annotated[int | None, Field(ge=0, le=_MAX_INT32)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    suffix: Annotated[None, _only_null("the models here do not fill in before a suffix")] = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    # Accepted without effect: the schema is always enforced.
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), few_parts]
    # By default as many as fit.
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=_MAX_INT32)] = None
    # The older name of ``max_completion_tokens``.
    max_tokens: Annotated[int | None, Field(ge=1, le=_MAX_INT32)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Without effect on the client's result.
    metadata: Annotated[
        dict[Annotated[str, StringConstraints(max_length=64)], Label] | None, Field(max_length=16), at_most(16)
    ] = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None

    audio: Annotated[None, _only_null("the models here write text")] = None
    function_call: Annotated[None, _only_null("use tool_choice")] = None
    functions: Annotated[None, _only_null("use tools")] = None
    moderation: Annotated[None, _only_null("nothing is moderated here")] = None
    prediction: Annotated[None, _only_null("predicted output is not used here")] = None
    prompt_cache_options: Annotated[None, _only_null("prefixes are cached for every request alike")] = None
    reasoning_effort: Annotated[None, _only_null("the models here have no such setting")] = None
    verbosity: Annotated[None, _only_null("the models here have no such setting")] = None
    web_search_options: Annotated[None, _only_null("nothing is searched here")] = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=MAX_MESSAGES), few_parts] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    # For a text only; by default true.
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
