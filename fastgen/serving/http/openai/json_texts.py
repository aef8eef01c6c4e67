"""Texts in a body that are JSON themselves: the arguments of calls in a conversation. They are parsed once, within the
limits of a body's JSON.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.json_limits import FREE_BYTES, measured, parse_json, parsing_json
from fastgen.serving.http.json_route import JsonRequest, JsonRoute


class _ParsedText(str):
    """A text that is parsed already. One that is not JSON has the value ``None``."""

    value: Any = None


def _object(text: Any) -> dict[str, Any]:
    value = None
    if isinstance(text, _ParsedText):
        value = text.value
    elif isinstance(text, str):
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
        calls = [*_calls(body)]
        if sum(len(call["arguments"]) for call in calls) > FREE_BYTES // 4:  # a character has at most 4 bytes
            for _ in measured((call["arguments"].encode() for call in calls), "the JSON in arguments of calls"):
                await self.turn()
            await self._turns.run(_parsing(calls))
            await self.turn()  # to be validated
        return body


class ConversationRoute(JsonRoute):
    """A route whose body may have a conversation."""

    request_class = _ConversationRequest


def _parsing(calls: list[dict[str, Any]]) -> Generator[None, None, None]:
    """Parses the arguments of all ``calls``, and yields after each piece."""
    for call in calls:
        if text := call["arguments"]:
            parsed = call["arguments"] = _ParsedText(text)
            with suppress(ValueError):  # the validation says so
                parsed.value = yield from parsing_json(text.encode())
        yield


def _calls(body: Any) -> Iterator[dict[str, Any]]:
    """Yields the calls in ``body`` whose arguments are text, in messages of a chat and in items of a response. The body
    was not validated yet.
    """
    for message in _objects(body, "messages"):
        for call in _objects(message, "tool_calls"):
            if isinstance(function := call.get("function"), dict) and isinstance(function.get("arguments"), str):
                yield function
    for item in _objects(body, "input"):
        if isinstance(item.get("arguments"), str):
            yield item


def _objects(holder: Any, name: str) -> Iterator[dict[str, Any]]:
    members = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(members, list):
        yield from (member for member in members if isinstance(member, dict))
