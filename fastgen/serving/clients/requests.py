"""A client's requests, and the interface of the transports that send them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.prompts import Conversation, Prompt, as_token_ids

# Token ids in the requests that are sent in one message, and as how many of them a part of a message's content counts.
_MAX_WEIGHT, _PART_WEIGHT = 1 << 20, 1 << 8


@dataclass(frozen=True)
class ClientRequest:
    """A prompt (text or token ids) or a conversation, and the sampling fields that override the model's defaults."""

    fields: Mapping[str, Any]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class Transport(Protocol):
    """Sends requests to a server. Errors are raised as ``FastgenError``; closing the iterator of ``stream`` cancels the
    request.
    """

    async def generate(self, request: ClientRequest) -> GenerationOutput: ...

    def stream(self, request: ClientRequest) -> AsyncIterator[GenerationChunk | GenerationOutput]:
        """Yields the chunks, and after the last one the whole output."""
        ...

    async def check(self, requests: Sequence[ClientRequest]) -> list[str | None]:
        """Returns for each request why it would be refused, or ``None``."""
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
    """Returns a request for each of ``items``, built by ``make``. The fields are checked as far as possible without the
    model.
    """
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


def batches(requests: Sequence[ClientRequest], max_requests: int) -> Iterator[list[ClientRequest]]:
    """Yields ``requests`` in batches of at most ``max_requests``, each of which a server takes as one body of JSON."""
    batch, weight = list[ClientRequest](), 0
    for request in requests:
        more = _weight(request)
        if len(batch) == max_requests or (batch and weight + more > _MAX_WEIGHT):
            yield batch
            batch, weight = [], 0
        batch.append(request)
        weight += more
    yield batch


def _weight(request: ClientRequest) -> int:
    """Returns the number of token ids in the prompt. A bias counts as sixteen, since it takes longer to read, and a
    part of a message's content as many times as there may be fewer of them.
    """
    num_ids = len(request.prompt) if isinstance(request.prompt, list) else 0
    contents = [message.get("content") for message in request.messages or ()]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    return num_ids + _PART_WEIGHT * num_parts + 16 * len(request.fields.get("logit_bias") or ())


def of_prompt(prompt: Prompt, fields: Mapping[str, Any]) -> ClientRequest:
    """Returns a request for ``prompt`` with the given sampling fields."""
    return ClientRequest(fields, prompt=prompt if isinstance(prompt, str) else as_token_ids(prompt))


def of_messages(messages: Conversation, fields: Mapping[str, Any]) -> ClientRequest:
    """Returns a request for a conversation with the given sampling fields."""
    return ClientRequest(fields, messages=[dict(message) for message in messages])
