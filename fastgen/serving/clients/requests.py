"""What a client asks of a server, and what carries it there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.prompts import Conversation, Prompt, as_token_ids


@dataclass(frozen=True)
class ClientRequest:
    """A prompt (text or token ids) or a conversation, and the sampling fields that are to differ from the model's."""

    fields: Mapping[str, Any]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class Transport(Protocol):
    """How requests reach a server. Errors come as ``FastgenError``; closing what ``stream`` gave cancels it."""

    async def generate(self, request: ClientRequest) -> GenerationOutput: ...

    def stream(self, request: ClientRequest) -> AsyncIterator[GenerationChunk | GenerationOutput]:
        """The chunks, and after the last the whole output."""
        ...

    async def check(self, requests: Sequence[ClientRequest]) -> list[str | None]:
        """Of each why it would be refused, or ``None``."""
        ...

    async def info(self) -> dict[str, Any]: ...

    async def terminate(self, token: str | None) -> None: ...

    async def close(self) -> None: ...


def as_requests(
    items: Sequence[Any],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    fields: Mapping[str, Any],
    make: Callable[[Any, Mapping[str, Any]], ClientRequest],
) -> list[ClientRequest]:
    """A request for each of ``items``, by ``make``. The fields are checked as far as they can be without the model."""
    if sampling is not None and fields:
        raise InvalidArgumentError(f"give sampling=, or the fields {', '.join(fields)}, not both")
    if sampling is None:
        checked = vars(SamplingParams(**fields))
        each = [{name: checked[name] for name in fields}] * len(items)
    else:
        samplings = [sampling] * len(items) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(samplings) != len(items):
            raise InvalidArgumentError(
                f"{len(items)} prompts, but {len(samplings)} SamplingParams; give one for each prompt"
            )
        each = [dict(vars(one)) for one in samplings]
    return [make(item, fields) for item, fields in zip(items, each, strict=True)]


def of_prompt(prompt: Prompt, fields: Mapping[str, Any]) -> ClientRequest:
    """``prompt`` and the fields that are to differ."""
    return ClientRequest(fields, prompt=prompt if isinstance(prompt, str) else as_token_ids(prompt))


def of_messages(messages: Conversation, fields: Mapping[str, Any]) -> ClientRequest:
    """A conversation and the fields that are to differ."""
    return ClientRequest(fields, messages=[dict(message) for message in messages])
