"""vLLM's fields that say which tokens of a prompt count, and how an answer's tokens become text."""

from __future__ import annotations

from collections.abc import Mapping

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.answers import TextRules
from fastgen.serving.http.openai.vllm import VllmFields
from fastgen.serving.refusals import BadRequestError


def num_kept(fields: VllmFields, num_answer: int, max_model_len: int) -> int | None:
    """Returns how many of the prompt's last tokens are kept, beside an answer of ``num_answer`` tokens; ``None`` for
    all. Raises ``BadRequestError``.
    """
    given = fields.truncate_prompt_tokens
    if given == 0:
        raise BadRequestError(
            "truncate_prompt_tokens: a prompt needs at least one token", param="truncate_prompt_tokens"
        )
    return max(1, max_model_len - num_answer) if given == -1 else given


def text_rules(fields: VllmFields, codec: TextCodec, spelled: Mapping[int, str] | None = None) -> TextRules:
    """Returns how an answer's tokens become text. ``spelled`` are special tokens that have a text in any case. Raises
    ``BadRequestError``.
    """
    spelled = dict(spelled or {})
    if fields.skip_special_tokens is False:
        if fields.spaces_between_special_tokens:
            raise BadRequestError(
                "spaces_between_special_tokens cannot be honoured: no spaces are written around special tokens",
                param="spaces_between_special_tokens",
            )
        spelled |= {token_id: spelling for spelling, token_id in codec.special_ids().items()}
    return TextRules(spelled, includes_stop=bool(fields.include_stop_str_in_output))


def with_special_stops(fields: VllmFields, sampling: SamplingParams, codec: TextCodec) -> SamplingParams:
    """Returns ``sampling`` with special tokens among the stop strings as stop tokens, if special tokens have a text.

    Raises ``BadRequestError`` for a stop string that a special token is only a part of: the engine looks for stop
    strings in text without special tokens.
    """
    if fields.skip_special_tokens is not False or not sampling.stop:
        return sampling
    special_ids = codec.special_ids()
    strings = [stop for stop in sampling.stop if stop not in special_ids]
    for stop in strings:
        if any(spelling in stop for spelling in special_ids):
            raise BadRequestError(f"stop: {stop!r:.80} holds a special token; give that alone", param="stop")
    token_ids = [*sampling.stop_token_ids, *(special_ids[stop] for stop in sampling.stop if stop in special_ids)]
    return SamplingParams.from_fields(sampling, stop=strings, stop_token_ids=token_ids)
