"""The answers of OpenAI's endpoints as typed dictionaries, from which the OpenAPI document is also built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from fastgen.errors import GenerationError
from fastgen.runtime.requests.outputs import FinishReason, GenerationOutput
from fastgen.serving.refusals import UnavailableError

CompletionFinish = Literal["stop", "length", "timeout"]
ChatFinish = Literal["stop", "length", "timeout", "tool_calls"]


class PromptTokensDetails(TypedDict):
    # Prompt tokens whose keys and values were in the prefix cache.
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: Iterable[float | None]
    top_logprobs: Iterable[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    # In a stream only with ``include_usage``, and then ``null`` in all chunks but the last.
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: Iterable[ContentLogprob]
    refusal: None


class FunctionOfCall(TypedDict):
    name: str
    arguments: str


class ToolCallOfMessage(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AssistantAnswer(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallOfMessage]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    # Most tokens of prompt and answer together.
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Version(TypedDict):
    version: str


class Tokenized(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(TypedDict):
    prompt: str


def usage_of(outputs: Iterable[GenerationOutput], *, counts_answer: bool = True) -> Usage:
    """Returns the total usage of requests, given their outputs. ``counts_answer=False`` leaves out the
    answers' tokens.
    """
    prompt, answer, cached = 0, 0, 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.metrics.cached_tokens
        if counts_answer:
            answer += sum(len(completion.token_ids) for completion in output.completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_of(reason: FinishReason, error: str | None) -> CompletionFinish:
    """Returns OpenAI's finish reason and fastgen's own. Raises if there is no answer."""
    if reason == "error":
        raise GenerationError(error or "the request failed while it ran")
    if reason == "cancelled":
        raise UnavailableError(error or "the request was cancelled before its answer was complete")
    return reason
