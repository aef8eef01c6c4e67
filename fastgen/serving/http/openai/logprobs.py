"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastgen.runtime.requests.outputs import Logprobs
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.http.json_answers import LazyList
from fastgen.serving.http.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob

# OpenAI's value for an impossible token: JSON has no minus infinity.
IMPOSSIBLE = -9999.0


class TokenOffsets:
    """Finds where each token of one text begins in it. The first one begins at ``start``. ``context_ids`` are the
    tokens before it, and ``spelled`` the special tokens that have a text. Without a tokenizer all begin at ``start``.
    """

    def __init__(
        self, codec: TextCodec, spelled: Mapping[int, str], *, context_ids: Sequence[int] = (), start: int = 0
    ):
        self._offset = start
        self._detokenizer = codec.new_detokenizer(context_ids, spelled=spelled) if codec.has_tokenizer else None

    def next(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the offsets of the next tokens. A token that ends a character begins where the character does."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.append(token_id))
        return offsets


class CompletionLogprobsWriter:
    """Converts the log-probabilities of one choice: its tokens as text, each with its offset in the choice's text.

    Each position has the ``num_top`` most likely tokens and the chosen one. ``start`` is the offset of the first token:
    after the prompt, if that is echoed. ``context_ids`` and ``spelled`` are those of :class:`TokenOffsets`.
    """

    def __init__(
        self,
        codec: TextCodec,
        num_top: int,
        spelled: Mapping[int, str],
        *,
        context_ids: Sequence[int] = (),
        start: int = 0,
    ):
        self._codec, self._num_top = codec, num_top
        self._offsets = TokenOffsets(codec, spelled, context_ids=context_ids, start=start)

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], end: int | None = None
    ) -> CompletionLogprobs:
        """Returns the log-probabilities of the next tokens. No offset exceeds ``end``, where the text ends before a
        stop string.
        """
        offsets = self._offsets.next(token_ids)
        return {
            "tokens": [self._spelled(token_id) for token_id in token_ids],
            "token_logprobs": LazyList(
                lambda: (
                    None if each is None else _finite(each[token_id])
                    for token_id, each in zip(token_ids, logprobs, strict=True)
                )
            ),
            "top_logprobs": LazyList(
                lambda: (
                    None if each is None else self._by_spelling(each, token_id)
                    for token_id, each in zip(token_ids, logprobs, strict=True)
                )
            ),
            "text_offset": offsets if end is None else [min(offset, end) for offset in offsets],
        }

    def _by_spelling(self, logprobs: Logprobs, actual_id: int) -> dict[str, float]:
        """Returns tokens by spelling, the most likely first; of tokens with the same spelling only the most likely."""
        found: dict[str, float] = {}
        for rank, (token_id, logprob) in enumerate(_likeliest_first(logprobs)):
            if rank < self._num_top or token_id == actual_id:
                found.setdefault(self._spelled(token_id), _finite(logprob))
        return found

    def _spelled(self, token_id: int) -> str:
        spelling = self._codec.token_bytes(token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def chat_logprobs(
    codec: TextCodec, token_ids: Sequence[int], logprobs: Sequence[Logprobs], num_top: int
) -> ChatLogprobs:
    """Returns the log-probabilities of a chat answer's tokens, with the ``num_top`` most likely at each position."""
    return {
        "content": LazyList(
            lambda: (
                {
                    **_token_logprob(codec, token_id, each[token_id]),
                    "top_logprobs": [_token_logprob(codec, *one) for one in _likeliest_first(each)[:num_top]],
                }
                for token_id, each in zip(token_ids, logprobs, strict=True)
            )
        ),
        "refusal": None,
    }


def _token_logprob(codec: TextCodec, token_id: int, logprob: float) -> TokenLogprob:
    spelling = codec.token_bytes(token_id)
    return {"token": spelling.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(spelling)}


def _likeliest_first(logprobs: Logprobs) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda item: -item[1])


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
