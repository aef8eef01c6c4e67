"""Fields of another tool's JSON, read with care: errors name the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from fastgen.errors import RecordingError

# No time, count or rate of a run is larger; their squares can still be added.
_MOST = 1e18


def is_figure(value: object) -> bool:
    """Returns whether a JSON value may be a time, a count or a rate: a number that is not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


class Fields:
    """One object of a JSON file."""

    def __init__(self, data: Any, file: str, where: str = ""):
        self.file, self.where = file, where
        if not isinstance(data, dict):
            self.fail("", f"expected an object, not {data!r:.80}")
        self.data: dict[str, Any] = data

    def fail(self, name: str, message: str) -> NoReturn:
        """Raises ``RecordingError`` about the field ``name``."""
        place = ".".join(part for part in (self.where, name) if part)
        raise RecordingError(f"{place}: {message}" if place else message, file=self.file)

    def number(self, name: str) -> float | None:
        """Returns a number that may be a time, a count or a rate; ``None`` if it is missing or null."""
        value = self.data.get(name)
        if value is None:
            return None
        if not is_figure(value):
            self.fail(name, f"expected a number, not {value!r:.80}")
        number: float = value
        return number

    def inside(self, *names: str) -> Fields | None:
        """Returns the object at the end of the path ``names``; ``None`` if a part of it is missing or null."""
        fields: Fields = self
        for name in names:
            value = fields.data.get(name)
            if value is None:
                return None
            fields = Fields(value, self.file, ".".join(part for part in (fields.where, name) if part))
        return fields

    def items(self, name: str) -> list[Any]:
        """Returns a list; an empty one if it is missing or null."""
        value = self.data.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(name, f"expected a list, not {value!r:.80}")
        return value


def read_json(path: str | Path) -> list[Any]:
    """Returns the JSON values of a file: one, or one in each line.

    :raises RecordingError: if the file cannot be read or has something else.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise RecordingError(f"the results cannot be read: {reason}", file=str(path)) from None
    try:
        return [json.loads(text)]
    except json.JSONDecodeError as error:
        whole = error
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            place = number if found else whole.lineno
            raise RecordingError(f"no JSON: {whole.msg}", file=str(path), line=place) from None
    return found
