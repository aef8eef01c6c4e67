"""Builds bodies of requests to endpoints and reads their streams: OpenAI's completions and chat completions, and
fastgen's ``/generate``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, Self

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.target import Answer, RequestFailedError
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.runtime.text.detokenizer import REPLACEMENT

# The messages of a conversation alternate.
_ROLES = ("user", "assistant")
# How often a text is made longer or shorter to be encoded to the number of tokens that is wanted. In a thousandth of
# drawn prompts it takes more.
_MAX_ROUNDS = 10


class Codec(Protocol):
    """A tokenizer: :class:`~fastgen.runtime.text.codec.TextCodec` is one."""

    def encode(self, prompt: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


class Format(Protocol):
    """One kind of endpoint."""

    def facts(self) -> dict[str, Any]: ...

    def body(self, model: str, request: PlannedRequest) -> dict[str, Any]:
        """Returns the body of a request."""
        ...

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> bool:
        """Adds an event of the stream to ``answer``. Returns whether the answer is complete."""
        ...

    def simpler(self) -> Format | None:
        """Returns a format that asks for less, for a server that refuses this one; ``None`` if there is none."""
        ...


@dataclass(frozen=True)
class Streamed(ABC):
    """The base of OpenAI's two endpoints: the common fields of their bodies, and the counting of tokens.

    The fields ``ignore_eos``, ``return_token_ids`` and ``continuous_usage_stats`` are extensions that vLLM's server and
    others have, and OpenAI's own service does not. Answers have the planned length only where ``ignore_eos`` works.

    Tokens are counted by the usage that each chunk reports (``continuous_usage_stats``), or by its ``token_ids``. If a
    server sends neither, a chunk with text counts as a token, as in ``vllm bench``. In each case the usage in the last
    chunk gives the length of the answer. Tokens that were not counted until then get the time of the last one.
    """

    # Makes texts for a server that takes no token ids; ``None`` where prompts cannot be texts.
    codec: Codec | None = None
    # What a body asks for, to count tokens: ids and usage of each chunk (vLLM has both), usage (fastgen), or nothing
    # (OpenAI).
    asks_for: Literal["token ids", "usage", "nothing"] = "token ids"

    def body(self, model: str, request: PlannedRequest) -> dict[str, Any]:
        usage = {"include_usage": True} | ({} if self.asks_for == "nothing" else {"continuous_usage_stats": True})
        return {
            "model": model,
            **self._prompt(request),
            "max_tokens": request.num_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": usage,
            **({"return_token_ids": True} if self.asks_for == "token ids" else {}),
        }

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> bool:
        usage, choices = event.get("usage") or {}, event.get("choices") or []
        num_tokens = usage.get("completion_tokens")
        for choice in choices:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text, other = self._texts(choice)
            answer.text += text
            ids = choice.get("token_ids")
            answer.token_ids += ids or ()
            if num_tokens is None and (ids is not None or text or other):
                answer.add(1 if ids is None else len(ids), at)
                answer.counted_by = "one for each chunk" if ids is None else "token ids of each chunk"
        if num_tokens is not None:
            if choices:
                answer.counted_by = "usage of each chunk"
            is_beyond_chunks = not choices and answer.token_times
            answer.add(num_tokens - len(answer.token_times), answer.token_times[-1] if is_beyond_chunks else at)
            del answer.token_times[num_tokens:]
            answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            answer.num_cached_tokens = details.get("cached_tokens", answer.num_cached_tokens)
        return False

    def simpler(self) -> Self | None:
        if self.asks_for == "nothing":
            return None
        return replace(self, asks_for="usage" if self.asks_for == "token ids" else "nothing")

    @abstractmethod
    def _prompt(self, request: PlannedRequest) -> dict[str, Any]:
        """Returns the fields of a body that hold the prompt."""

    @abstractmethod
    def _texts(self, choice: dict[str, Any]) -> tuple[str, str]:
        """Returns the text that a chunk adds to the answer, and other text of the model, such as its reasoning."""


@dataclass(frozen=True)
class Completions(Streamed):
    """OpenAI's ``/v1/completions``. Prompts are token ids, or texts if ``sends_text``."""

    sends_text: bool = False

    def facts(self) -> dict[str, Any]:
        return {"prompts": "text" if self.sends_text else "token ids"}

    def simpler(self) -> Completions | None:
        if self.asks_for == "nothing" and self.codec is not None and not self.sends_text:
            return Completions(self.codec, sends_text=True)
        return super().simpler()

    def _prompt(self, request: PlannedRequest) -> dict[str, Any]:
        if not self.sends_text:
            return {"prompt": list(request.prompt_ids)}
        assert self.codec is not None
        return {"prompt": text_of(request, self.codec)}

    def _texts(self, choice: dict[str, Any]) -> tuple[str, str]:
        return choice.get("text") or "", ""


@dataclass(frozen=True)
class ChatCompletions(Streamed):
    """OpenAI's ``/v1/chat/completions``. A prompt is one message of the user. In a conversation each turn is such a
    message, and the answers between them are messages of the assistant.

    The server's chat template adds tokens to a prompt. Records contain the length that the server reports.
    """

    def facts(self) -> dict[str, Any]:
        return {"prompts": "messages"}

    def _prompt(self, request: PlannedRequest) -> dict[str, Any]:
        assert self.codec is not None
        ends = (*request.message_ends, len(request.prompt_ids))
        ids = list(request.prompt_ids)
        texts = [self.codec.decode(ids[begin:end]) for begin, end in pairwise((0, *ends))]
        return {"messages": [{"role": _ROLES[place % 2], "content": text} for place, text in enumerate(texts)]}

    def _texts(self, choice: dict[str, Any]) -> tuple[str, str]:
        delta = choice.get("delta") or {}
        return delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""


@dataclass(frozen=True)
class Generate:
    """fastgen's own ``/generate``, whose events have the ids of their tokens, also of those that have no text yet.
    Prompts are token ids, or texts made by ``text_codec``.
    """

    text_codec: Codec | None = None

    def facts(self) -> dict[str, Any]:
        return {"prompts": "token ids" if self.text_codec is None else "text"}

    def body(self, model: str, request: PlannedRequest) -> dict[str, Any]:
        codec = self.text_codec
        return {
            "prompt": list(request.prompt_ids) if codec is None else text_of(request, codec),
            "max_new_tokens": request.num_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> bool:
        answer.add(len(event["token_ids"]), at)
        answer.token_ids += event["token_ids"]
        answer.counted_by = "token ids of each chunk"
        answer.finish_reason = event["finish_reason"] or answer.finish_reason
        output = event.get("output")
        if output is None:
            return False
        (completion,) = output["completions"]
        answer.num_cached_tokens = completion["metrics"]["cached_tokens"]
        if completion["error"] is not None:
            raise RequestFailedError(completion["error"])
        return True

    def simpler(self) -> None:
        return None


def text_of(request: PlannedRequest, codec: Codec) -> str:
    """Returns the prompt of ``request`` as a text that is encoded to as many tokens, or nearly as many where no such
    text is found.

    Drawn tokens that are put together are often encoded otherwise: two as one, or one as two. So a text that is encoded
    to too many tokens is cut, and one of too few goes on with tokens of the prompt. Texts of requests with the same
    beginning begin alike. The prompt of a conversation is not changed, since what follows continues it.
    """
    ids, text = list(request.prompt_ids), codec.decode(list(request.prompt_ids))
    if request.session is not None:
        return text
    texts: dict[int, str] = {}  # by how many tokens are missing
    for place in range(_MAX_ROUNDS):
        encoded = codec.encode(text)
        missing = len(ids) - len(encoded)
        texts[missing] = text
        if missing == 0:
            break
        begin = place % max(1, len(ids))
        more = [*ids[begin:], *ids][: max(0, missing)]
        text = codec.decode([*encoded[: len(ids)], *more])
        if missing < 0:
            text = text.rstrip(REPLACEMENT)  # half a character would be encoded to several tokens
    return texts[min(texts, key=abs)]


def format_of(endpoint: str, codec: Codec | None, *, sends_text: bool = False) -> Format:
    """Returns the format of an endpoint by its path. ``codec`` makes texts for servers that take no token ids, and for
    every server if ``sends_text``.

    :raises InvalidArgumentError: for a path of another kind, or if texts are needed and ``codec`` is ``None``.
    """
    if sends_text and codec is None:
        raise InvalidArgumentError("prompts are sent as text only with the model's tokenizer: name it (--tokenizer)")
    if endpoint.endswith("/chat/completions"):
        if codec is None:
            raise InvalidArgumentError(
                f"{endpoint} takes messages of text, not token ids: name the model's tokenizer (--tokenizer)"
            )
        return ChatCompletions(codec)
    if endpoint.endswith("/completions"):
        return Completions(codec, sends_text=sends_text)
    if endpoint == "/generate":
        return Generate(codec if sends_text else None)
    raise InvalidArgumentError(
        f"the endpoint {endpoint} is not known: /v1/completions and /v1/chat/completions are OpenAI's, /generate is "
        "fastgen's own"
    )
