"""Bodies of requests to endpoints, and parsers of their streams: OpenAI's completions, and fastgen's ``/generate``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.target import Answer, RequestFailedError
from fastgen.lab.workloads.request import PlannedRequest


class Codec(Protocol):
    """A tokenizer: :class:`~fastgen.runtime.text.codec.TextCodec` is one."""

    def encode(self, prompt: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass
class EventParser:
    """Parses server-sent events from the pieces in which they arrive."""

    _rest: bytes = b""
    _name: bytes = b"message"
    _data: list[bytes] = field(default_factory=list)

    def feed(self, piece: bytes) -> list[tuple[str, bytes]]:
        """Returns the events that ``piece`` completes, each with its name and its data."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append((self._name.decode("latin-1"), b"\n".join(self._data)))
                self._name, self._data = b"message", []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
        return events


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
class Completions:
    """OpenAI's ``/v1/completions``, with the fields that make answers exact: ``ignore_eos``, temperature 0, and counts
    of tokens. What OpenAI's own service lacks, vLLM's server and others have.

    Tokens are counted by the usage that each chunk reports (``continuous_usage_stats``), or by its ``token_ids``.
    Where a server has neither, a chunk with text counts as a token, as in ``vllm bench``. In any case the usage of the
    last chunk says how many tokens the answer has: those beyond the chunks get the time of the last one.
    """

    # Makes texts for a server that takes no token ids; ``None`` where prompts cannot be texts.
    codec: Codec | None = None
    sends_text: bool = False
    # What is asked for to count tokens by: what vLLM has, what fastgen has, what OpenAI has.
    asks_for: Literal["token ids", "usage", "nothing"] = "token ids"

    def facts(self) -> dict[str, Any]:
        return {"prompts": "text" if self.sends_text else "token ids"}

    def body(self, model: str, request: PlannedRequest) -> dict[str, Any]:
        prompt: Any = list(request.prompt_ids)
        if self.sends_text:
            assert self.codec is not None
            prompt = self.codec.decode(prompt)
        usage = {"include_usage": True} | ({} if self.asks_for == "nothing" else {"continuous_usage_stats": True})
        return {
            "model": model,
            "prompt": prompt,
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
            answer.text += choice.get("text") or ""
            ids = choice.get("token_ids")
            answer.token_ids += ids or ()
            if num_tokens is None and (ids is not None or choice.get("text")):
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

    def simpler(self) -> Completions | None:
        if self.asks_for != "nothing":
            return replace(self, asks_for="usage" if self.asks_for == "token ids" else "nothing")
        if self.codec is not None and not self.sends_text:
            return Completions(self.codec, sends_text=True)
        return None


@dataclass(frozen=True)
class Generate:
    """fastgen's own ``/generate``, whose events have the ids of their tokens, also of those that have no text yet."""

    def facts(self) -> dict[str, Any]:
        return {"prompts": "token ids"}

    def body(self, model: str, request: PlannedRequest) -> dict[str, Any]:
        return {
            "prompt": list(request.prompt_ids),
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


def format_of(endpoint: str, codec: Codec | None) -> Format:
    """Returns the format of an endpoint by its path. ``codec`` makes texts for servers that take no token ids.

    :raises InvalidArgumentError: for a path of another kind.
    """
    if endpoint.endswith("/completions") and not endpoint.endswith("/chat/completions"):
        return Completions(codec)
    if endpoint == "/generate":
        return Generate()
    raise InvalidArgumentError(
        f"the endpoint {endpoint} is not known: /v1/completions is OpenAI's, /generate is fastgen's own"
    )


def parse_event(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of an event. Raises ``RequestFailedError`` if it is none, or an error."""
    try:
        event = json.loads(data)
    except ValueError:
        raise RequestFailedError(f"an event of the stream is not JSON: {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise RequestFailedError(f"an event of the stream is not an object: {data[:80]!r}")
    if event.get("error") is not None:
        raise RequestFailedError(message_of(event["error"]))
    return event


def message_of(error: Any) -> str:
    """Returns the text of OpenAI's ``error`` object, or of what stands in its place."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)
