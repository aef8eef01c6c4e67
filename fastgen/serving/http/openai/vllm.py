"""The fields that vLLM's server takes beyond OpenAI's: served with vLLM's meaning, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.request_limits import MAX_STOP_TOKEN_IDS
from fastgen.serving.http.openai.formats import Choices, Schema, StructuredOutputs
from fastgen.serving.http.openai.validation import MAX_INT32, Label, Strict, TokenId, at_most, refused

MAX_TEMPLATE_VARIABLES = 64
MAX_DOCUMENTS = 1024
_TOKEN_IDS = "POST /generate gives token ids"
_ENGINES = "it configures vLLM's engine"
_EmptyList = Annotated[list[Any], Field(max_length=0)]
_EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]
# Variables of a chat template that have a field of their own, or that only the server sets.
_RESERVED_VARIABLES = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "documents", "messages", "tools"),
        *("chat_template", "conversations", "return_assistant_tokens_mask"),
    }
)


class VllmFields(Strict):
    """vLLM's fields of every endpoint."""

    # 0 and −1 keep all tokens.
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_INT32)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_INT32)] = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    # The stop string or stop token that ends an answer is part of its text.
    include_stop_str_in_output: bool | None = None
    # With false, special tokens have a text.
    skip_special_tokens: bool | None = None
    # Without effect unless special tokens have a text; no spaces are written between them.
    spaces_between_special_tokens: bool | None = None
    # Keeps the last tokens of the prompt; −1 is as many as fit.
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_INT32)] = None
    # By default true for prompts, and false for conversations, whose template writes them.
    add_special_tokens: bool | None = None
    # A beam search with as many beams as answers.
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, Field(ge=-10, le=10)] = None
    priority: Annotated[int | None, Field(ge=-MAX_INT32, le=MAX_INT32)] = None

    structured_outputs: StructuredOutputs | None = None
    # The older spelling of ``structured_outputs``.
    guided_json: Schema | None = None
    guided_regex: Annotated[str, StringConstraints(min_length=1)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[str, StringConstraints(min_length=1)] | None = None
    # Accepted without effect: there is one implementation.
    guided_decoding_backend: Label | None = None

    guided_whitespace_pattern: Annotated[None, refused("use structured_outputs.disable_any_whitespace")] = None
    allowed_token_ids: Annotated[None, refused("use structured_outputs.choice, or logit_bias")] = None
    bad_words: Annotated[_EmptyList | None, refused("use logit_bias for the tokens of the words", unless=[])] = None
    prompt_logprobs: Annotated[None, refused("use completions with echo and logprobs, or POST /generate")] = None
    logits_processors: Annotated[_EmptyList | None, refused("no code of requests is run here", unless=[])] = None
    return_tokens_as_token_ids: Annotated[Literal[False] | None, refused(_TOKEN_IDS, unless=False)] = None
    return_token_ids: Annotated[Literal[False] | None, refused(_TOKEN_IDS, unless=False)] = None
    request_id: Annotated[None, refused("send the id as the header x-request-id")] = None
    cache_salt: Annotated[None, refused("prefixes are cached for every request alike")] = None
    kv_transfer_params: Annotated[None, refused(_ENGINES)] = None
    vllm_xargs: Annotated[_EmptyObject | None, refused(_ENGINES, unless={})] = None


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _RESERVED_VARIABLES:
            raise PydanticCustomError(
                "reserved_variable",
                "{name} is not set here: it has a field of its own, or is the server's",
                {"name": name},
            )
    return variables


TemplateVariables = Annotated[
    dict[str, Any],
    Field(max_length=MAX_TEMPLATE_VARIABLES),
    at_most(MAX_TEMPLATE_VARIABLES),
    AfterValidator(_check_variables),
]


class VllmChatFields(Strict):
    """vLLM's fields of conversations."""

    # With false, the prompt ends after the last message.
    add_generation_prompt: bool | None = None
    # The answer continues the last message.
    continue_final_message: bool | None = None
    # More variables of the chat template, such as ``enable_thinking``.
    chat_template_kwargs: TemplateVariables | None = None
    # The variable ``documents`` of the chat template.
    documents: Annotated[list[dict[str, Any]] | None, Field(fail_fast=True, max_length=MAX_DOCUMENTS)] = None
    # The variable ``reasoning_effort`` of the chat template; ``none`` also sets ``enable_thinking`` to false.
    reasoning_effort: Annotated[str, StringConstraints(pattern="^[a-z_]{1,32}$")] | None = None

    chat_template: Annotated[None, refused("only the checkpoint's own template is run")] = None
    echo: Annotated[Literal[False] | None, refused("the answer does not repeat the conversation", unless=False)] = None
    include_reasoning: Annotated[
        Literal[True] | None, refused("reasoning is not separated from the rest of the text", unless=True)
    ] = None
    mm_processor_kwargs: Annotated[None, refused("the models here read text")] = None
    media_io_kwargs: Annotated[None, refused("the models here read text")] = None
