"""The request bodies of OpenAI's endpoints: types, ranges, and the fields that are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.request_limits import MAX_BEAMS, MAX_MESSAGES, MAX_N, MAX_TOKEN_IDS
from fastgen.serving.http.openai.formats import AnyFormat
from fastgen.serving.http.openai.messages import Message, Tool, ToolChoice, few_parts
from fastgen.serving.http.openai.validation import (
    MAX_INT32,
    MAX_METADATA,
    Label,
    Metadata,
    StopString,
    Strict,
    TokenId,
    at_most,
    check_num_token_ids,
    refused,
)
from fastgen.serving.http.openai.vllm import VllmChatFields, VllmFields

MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 4
MAX_LOGIT_BIAS = 1024
MAX_TOOLS = 128


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
    check_num_token_ids(items)
    for item in items:
        is_text = isinstance(item, str)
        if not is_text and not (isinstance(item, list) and item and set(map(type, item)) == {int}):
            raise _bad_prompt()
        if not is_text and not (min(item) >= 0 and max(item) <= MAX_INT32):
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
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32},
}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKEN_IDS_SCHEMA},
    ]
}


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


class SamplingRequest(VllmFields):
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
    # OpenAI has it for chats only.
    response_format: AnyFormat | None = None

    # Extensions: fields of fastgen's SamplingParams that neither OpenAI nor vLLM has.
    beam_width: Annotated[int | None, Field(ge=1, le=MAX_BEAMS)] = None
    timeout_s: Annotated[float | None, Field(gt=0)] = None


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[Any, PlainValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    # By default 16, or as many as fit. With ``echo``, 0 returns the prompt alone.
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_INT32)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    suffix: Annotated[Literal[""] | None, refused("the models here do not fill in before a suffix", unless="")] = None
    prompt_embeds: Annotated[None, refused("the models here read text and token ids")] = None


class ChatRequest(SamplingRequest, VllmChatFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), few_parts]
    # By default as many as fit.
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT32)] = None
    # The older name of ``max_completion_tokens``.
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_INT32)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Requests with the same key go to one replica.
    prompt_cache_key: Label | None = None

    # Without effect on the client's result.
    metadata: Annotated[Metadata | None, Field(max_length=MAX_METADATA), at_most(MAX_METADATA)] = None
    safety_identifier: Label | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Annotated[Literal[False] | None, refused("nothing is stored here", unless=False)] = None
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None

    audio: Annotated[None, refused("the models here write text")] = None
    function_call: Annotated[None, refused("use tool_choice")] = None
    functions: Annotated[None, refused("use tools")] = None
    moderation: Annotated[None, refused("nothing is moderated here")] = None
    prediction: Annotated[None, refused("predicted output is not used here")] = None
    prompt_cache_options: Annotated[None, refused("prefixes are cached for every request alike")] = None
    verbosity: Annotated[None, refused("the models here have no such setting")] = None
    web_search_options: Annotated[None, refused("nothing is searched here")] = None


class TokenizeRequest(VllmChatFields):
    """``POST /tokenize``: a text, or messages as the chat template renders them. vLLM's fields go with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=MAX_MESSAGES), few_parts] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    # By default true for a text, and false for messages, whose template writes them.
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
