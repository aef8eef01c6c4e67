"""What endpoints are asked, and how their streams are read: OpenAI's completions, and fastgen's ``/generate``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.target import Answer, RequestFailedError
from fastgen.lab.workloads.request import PlannedRequest

# Turns token ids into a text that has the same ids.
Decode = Callable[[Sequence[int]], str]


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

    # ``None``: prompts are sent as token ids.
    decode: Decode | None = None
    # What is tried where a server does not take token ids.
    fallback: Decode | None = None
    reports_usage_always: bool = True

    def facts(self) -> dict[str, Any]:
        return {
            "prompts": "token ids" if self.decode is None else "text",
            "tokens_counted_by": "usage of each chunk" if self.reports_usage_always else "one for each chunk",
        }

    def body(self, model: str, request: PlannedRequest) -> dict[str, Any]:
        options = {"include_usage": True}
        if self.reports_usage_always:
            options["continuous_usage_stats"] = True
        prompt = list(request.prompt_ids) if self.decode is None else self.decode(request.prompt_ids)
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.num_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": options,
        }

    def read(self, event: dict[str, Any], answer: Answer, at: float) -> bool:
        usage = event.get("usage") or {}
        choices = event.get("choices") or []
        num_known = len(answer.token_times)
        for choice in choices:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if usage.get("completion_tokens") is None:
                ids = choice.get("token_ids")
                answer.add(len(ids) if ids is not None else int(bool(choice.get("text"))), at)
        if (num_tokens := usage.get("completion_tokens")) is not None:
            is_last = not choices
            answer.add(num_tokens - num_known, answer.token_times[-1] if is_last and answer.token_times else at)
            del answer.token_times[num_tokens:]
            answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            answer.num_cached_tokens = details.get("cached_tokens", answer.num_cached_tokens)
        return False

    def simpler(self) -> Completions | None:
        if self.reports_usage_always:
            return Completions(self.decode, self.fallback, reports_usage_always=False)
        if self.decode is None and self.fallback is not None:
            return Completions(self.fallback, None)
        return None


@dataclass(frozen=True)
class Generate:
    """fastgen's own ``/generate``, whose events have the ids of their tokens, also of those that have no text yet."""

    def facts(self) -> dict[str, Any]:
        return {"prompts": "token ids", "tokens_counted_by": "token ids of each chunk"}

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


def format_of(endpoint: str, fallback: Decode | None) -> Format:
    """Returns the format of an endpoint by its path. ``fallback`` makes texts for servers that take no token ids.

    :raises InvalidArgumentError: for a path of another kind.
    """
    if endpoint.endswith("/completions") and not endpoint.endswith("/chat/completions"):
        return Completions(None, fallback)
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
