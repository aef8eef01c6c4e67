"""Lines of a JSON Lines file, read strictly."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from fastgen.errors import RecordingError


def checked_line(adapter: TypeAdapter[Any], line: bytes, path: str, number: int) -> Any:
    """Returns what ``adapter`` reads from ``line``. Raises ``RecordingError`` with the file, the line's number and the
    first field that is wrong.
    """
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordingError(f"{where + ': ' if where else ''}{first['msg']}", file=path, line=number) from None
