"""Converts OpenAI's fields to ``SamplingParams``, and the field names in refusals back to OpenAI's."""

from __future__ import annotations

import re
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.http.openai.formats import required_format
from fastgen.serving.http.openai.requests import ChatRequest, CompletionRequest, SamplingRequest
from fastgen.serving.refusals import BadRequestError

DEFAULT_COMPLETION_TOKENS = 16
# OpenAI's range begins at 0, which keeps only the most likely token. Any tiny ``top_p`` does the same.
_TOP_P_OF_ONE_TOKEN = 1e-6

# From names of ``SamplingParams`` to OpenAI's, where they differ.
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "prompt_logprobs": "logprobs"}
_PASSED_ON = (
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "stop",
    "seed",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "length_penalty",
    "priority",
    "timeout_s",
)


def completion_tokens(request: CompletionRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Returns how many tokens the answer to a prompt of so many tokens may have. Raises ``BadRequestError``."""
    wanted = request.max_tokens
    if wanted is None:
        wanted = min(DEFAULT_COMPLETION_TOKENS, max_model_len - num_prompt_tokens)
    _check_room(num_prompt_tokens, wanted, max_model_len, "max_tokens")
    return wanted


def completion_sampling(
    request: CompletionRequest, wanted: int, *, defaults: SamplingParams, vocab_size: int
) -> SamplingParams:
    """Returns the sampling parameters of completions of ``wanted`` tokens. Raises ``BadRequestError``.

    The engine generates at least one token; if ``wanted`` is 0, that token is left out of the answer.
    """
    fields: dict[str, Any] = {"max_new_tokens": max(1, wanted), "response_format": required_format(request)}
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
        if request.echo:
            fields["prompt_logprobs"] = request.logprobs
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequestError("best_of cannot be honoured unless it equals n: use beam_width", param="best_of")
    return _sampling(request, fields, defaults, vocab_size)


def chat_sampling(
    request: ChatRequest,
    num_prompt_tokens: int,
    response_format: ResponseFormat | None,
    *,
    defaults: SamplingParams,
    max_model_len: int,
    vocab_size: int,
) -> SamplingParams:
    """Returns the sampling parameters of a chat whose prompt has so many tokens. Raises ``BadRequestError``."""
    older, newer = request.max_tokens, request.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise BadRequestError(
            f"max_tokens ({older}) is the older name of max_completion_tokens ({newer}); give one", param="max_tokens"
        )
    wanted = older if newer is None else newer
    if wanted is None:
        wanted = max_model_len - num_prompt_tokens
    _check_room(num_prompt_tokens, wanted, max_model_len, "max_tokens" if newer is None else "max_completion_tokens")
    fields: dict[str, Any] = {"max_new_tokens": wanted, "response_format": response_format}
    if request.top_logprobs and not request.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    return _sampling(request, fields, defaults, vocab_size)


def _sampling(
    request: SamplingRequest, fields: dict[str, Any], defaults: SamplingParams, vocab_size: int
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("stream_options goes with stream only", param="stream_options")
    for name in _PASSED_ON:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.top_p is not None:
        fields["top_p"] = max(request.top_p, _TOP_P_OF_ONE_TOKEN)
    if request.min_tokens is not None:
        fields["min_new_tokens"] = request.min_tokens
    if request.logit_bias:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
    if request.top_k is not None:
        fields["top_k"] = max(request.top_k, 0)
    fields |= _beams(request)
    try:
        sampling = SamplingParams.from_fields(defaults, **fields)
        sampling.check_against(vocab_size)
    except InvalidArgumentError as error:
        raise named_refusal(str(error)) from error
    return sampling


def _beams(request: SamplingRequest) -> dict[str, Any]:
    """Returns the fields of a beam search, if one is wanted. It draws nothing, so greedy is its default."""
    beam_width = request.beam_width
    if request.use_beam_search:
        if beam_width not in (None, request.n or 1):
            raise BadRequestError("use_beam_search has n beams; give beam_width alone", param="use_beam_search")
        beam_width = request.n or 1
    if beam_width is None:
        return {}
    fields: dict[str, Any] = {"beam_width": beam_width}
    if request.temperature is None and (beam_width > 1 or request.use_beam_search):
        fields["temperature"] = 0.0
    return fields


def _check_room(num_prompt_tokens: int, max_tokens: int, max_model_len: int, param: str) -> None:
    if num_prompt_tokens + max_tokens > max_model_len:
        raise BadRequestError(
            f"{param} is {max_tokens} and the prompt has {num_prompt_tokens} tokens, more than the {max_model_len} "
            f"that the model takes together; at most {max_model_len - num_prompt_tokens} fit",
            param=param,
            code="context_length_exceeded",
        )


def named_refusal(message: str, *, code: str | None = None) -> BadRequestError:
    """Returns the refusal for ``message``, with the field names of ``SamplingParams`` replaced by OpenAI's."""
    for ours, theirs in _RENAMED.items():
        message = message.replace(ours, theirs)
    first_word = re.match(r"\w*", message)
    assert first_word is not None
    return BadRequestError(message, param=first_word[0] if first_word[0] in _NAMES else None, code=code)


_NAMES = {
    *_PASSED_ON,
    "beam_width",
    "top_k",
    "top_p",
    "max_tokens",
    "min_tokens",
    "logit_bias",
    "logprobs",
    "response_format",
}
