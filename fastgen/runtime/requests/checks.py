"""Checks of a request against the model, before the request is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams


class FormatCompiler(Protocol):
    """Compiles response formats."""

    def compile(self, response_format: ResponseFormat) -> None:
        """Raises ``InvalidArgumentError`` for a format that the model cannot follow."""
        ...


class RequestChecks:
    """The limits of one model. ``formats`` is ``None`` if the model has no tokenizer and so can follow no format."""

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        has_tokenizer: bool,
        formats: FormatCompiler | None,
    ):
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids
        self.has_tokenizer, self.formats = has_tokenizer, formats
        # The parameters that were checked last: many requests share one object.
        self._last: SamplingParams | None = None

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raises ``InvalidArgumentError`` with the reason if the model cannot answer."""
        if not prompt_ids:
            raise InvalidArgumentError("the prompt has no tokens; give it at least one")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            found = ((at, token_id) for at, token_id in enumerate(prompt_ids) if not 0 <= token_id < self.vocab_size)
            position, token_id = next(found)
            raise InvalidArgumentError(
                f"prompt token {position} is id {token_id}; the model's ids are 0 to {self.vocab_size - 1}"
            )
        if sampling is not self._last:
            self._check_sampling(sampling)
            self._last = sampling
        num_tokens = len(prompt_ids) + sampling.max_new_tokens
        if num_tokens > self.max_model_len:
            room = self.max_model_len - len(prompt_ids)
            advice = f"ask for at most {room} new tokens or shorten the prompt" if room > 0 else "shorten the prompt"
            raise RequestTooLargeError(
                f"a prompt of {len(prompt_ids)} tokens with max_new_tokens={sampling.max_new_tokens} makes "
                f"{num_tokens} tokens, max_model_len is {self.max_model_len}; {advice}",
                room=room,
            )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Checks what does not depend on the prompt."""
        sampling.check_against(self.vocab_size)
        if sampling.stop and not self.has_tokenizer:
            raise InvalidArgumentError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if sampling.response_format is not None:
            if self.formats is None:
                raise InvalidArgumentError("response_format needs a tokenizer, and this model has none")
            self.formats.compile(sampling.response_format)
        num_endings = len(sampling.stop_ids(self.eos_token_ids))
        if 1 < sampling.beam_width > self.vocab_size - num_endings:
            raise InvalidArgumentError(
                f"beam_width={sampling.beam_width} beams cannot all continue with different tokens: of "
                f"{self.vocab_size} in the vocabulary {num_endings} end a beam"
            )
