"""Texts in a body that are JSON themselves: the arguments of calls in a conversation. They are parsed once, within the
limits of a body's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.json_limits import FREE_BYTES, measured, parse_json
from fastgen.serving.http.json_route import JsonRequest, JsonRoute


def _object(text: Any) -> dict[str, Any]:
    value = None
    if isinstance(text, str):
        try:
            value = parse_json(text.encode()) if text else {}
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("not_an_object", "must be a JSON object as text: templates render its members")
    return value


# The arguments of a call: an object, which a body has as text. An empty text means one without members.
ObjectText = Annotated[dict[str, Any], PlainValidator(_object), WithJsonSchema({"type": "string"})]


class _ConversationRequest(JsonRequest):
    async def json(self) -> Any:
        """Returns the parsed body. Raises ``TooLargeError`` too, if the arguments in it hold too much."""
        body = await super().json()
        texts = [*_arguments(body)]
        if sum(map(len, texts)) > FREE_BYTES // 4:  # a character has at most 4 bytes
            for _ in measured((text.encode() for text in texts), "the JSON in arguments of calls"):
                await self.turn()
        return body


class ConversationRoute(JsonRoute):
    """A route whose body may have a conversation."""

    request_class = _ConversationRequest


def _arguments(body: Any) -> Iterator[str]:
    """Yields the arguments of the calls in ``body``, which was not validated yet: in messages of a chat, and in items
    of a response.
    """
    for message in _objects(body, "messages"):
        for call in _objects(message, "tool_calls"):
            if isinstance(function := call.get("function"), dict):
                yield from _texts(function)
    for item in _objects(body, "input"):
        yield from _texts(item)


def _objects(holder: Any, name: str) -> Iterator[dict[str, Any]]:
    members = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(members, list):
        yield from (member for member in members if isinstance(member, dict))


def _texts(holder: dict[str, Any]) -> Iterator[str]:
    if isinstance(text := holder.get("arguments"), str):
        yield text
