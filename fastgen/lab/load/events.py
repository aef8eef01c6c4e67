"""Server-sent events, parsed from the pieces in which they arrive."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fastgen.lab.load.target import RequestFailedError


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


def parse_event(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of an event. Raises ``RequestFailedError`` if the data is not
    a JSON object, or the event is an error.
    """
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
    """Returns the text of OpenAI's ``error`` object, or of any other value in its place."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)
