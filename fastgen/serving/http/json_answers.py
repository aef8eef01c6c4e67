"""Answers as JSON. Large ones are encoded in pieces, between which other requests have their turn."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from fastgen.serving.admission.turns import Turns
from fastgen.serving.engine.packed_logprobs import PIECE_POSITIONS, PackedLogprobs
from fastgen.serving.threads import on_thread

Item = TypeVar("Item")
_Made = TypeVar("_Made")

_LARGE = ThreadPoolExecutor(1, "large-answer")
_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]
# Numbers or texts that are encoded at once, and other items of a list.
_PIECE_VALUES, _PIECE_ITEMS = 1024, 32
_SCALARS = frozenset((bool, float, int, str, type(None)))


class LazyList(Generic[Item]):
    """A list in JSON, whose items ``make`` makes whenever it is iterated over, such as when it is encoded."""

    def __init__(self, make: Callable[[], Iterable[Item]]):
        self._make = make

    def __iter__(self) -> Iterator[Item]:
        return iter(self._make())


def encode_json(body: Any) -> bytes:
    """Returns ``body`` as JSON, in which a :class:`LazyList` and :class:`PackedLogprobs` are lists."""
    return msgspec.json.encode(body, enc_hook=_as_list)


def json_line(body: Any) -> bytes:
    """Returns ``body`` as JSON without any character that a client might take for a line end. Some clients split at
    Unicode's line separators, which JSON does not escape.
    """
    line = encode_json(body)
    if not line.isascii():
        for end, escaped in _LINE_ENDS:
            line = line.replace(end, escaped)
    return line


def event_of(body: Any) -> bytes:
    """Returns a server-sent event with ``body`` as JSON."""
    return b"data: " + json_line(body) + b"\n\n"


async def large_event_of(body: Any, turns: Turns) -> bytes:
    """Returns the event of a large ``body``, which is encoded in ``turns``."""
    return await turns.run(encoding(body, b"data: ", b"\n\n"))


async def json_response(make: Callable[[], Any], turns: Turns, *, is_large: bool) -> Response:
    """Returns a response with the value of ``make()`` as JSON. A large one is made on another thread, and encoded in
    ``turns``. Raises ``UnavailableError`` if the system has no thread for it.
    """
    if is_large:
        content = await turns.run(encoding(await make_large(make)))
    else:
        content = encode_json(make())
    return Response(content, media_type="application/json")


async def make_large(make: Callable[[], _Made]) -> _Made:
    """Returns ``make()``, a large answer, from another thread. They are made one at a time: threads that compute all
    keep the event loop waiting. Raises ``UnavailableError`` if the system has no thread for it.
    """
    return await on_thread(make, _LARGE)


def encoding(body: Any, before: bytes = b"", behind: bytes = b"") -> Generator[None, None, bytes]:
    """Encodes ``body`` as :func:`json_line` does, with ``before`` and ``behind`` around it. Yields after each piece."""
    content = io.BytesIO()  # joining pieces would take some milliseconds at the end
    content.write(before)
    for piece in _pieces(body):
        content.write(piece)
        yield
    content.write(behind)
    return content.getvalue()


def _pieces(body: Any) -> Iterator[bytes]:
    if isinstance(body, msgspec.Struct):
        body = msgspec.structs.asdict(body)
    if not _is_large(body):
        yield json_line(body)
    elif isinstance(body, dict):
        begin = b"{"
        for name, value in body.items():
            yield begin + json_line(str(name)) + b":"
            yield from _pieces(value)
            begin = b","
        yield b"}"
    elif isinstance(body, list):
        yield from _list_pieces(body)
    else:
        yield from _lazy_pieces(body)


def _list_pieces(items: list[Any]) -> Iterator[bytes]:
    begin = b"["
    for start in range(0, len(items), _PIECE_VALUES):
        batch = items[start : start + _PIECE_VALUES]
        if _SCALARS.issuperset(map(type, batch)):
            yield begin + json_line(batch)[1:-1]
            begin = b","
            continue
        while batch:
            small = [*takewhile(lambda item: not _is_large(item), batch[:_PIECE_ITEMS])]
            if small:
                yield begin + json_line(small)[1:-1]
            else:
                yield begin
                yield from _pieces(batch[0])
            begin = b","
            del batch[: len(small) or 1]
    yield b"]"


def _lazy_pieces(items: Iterable[Any]) -> Iterator[bytes]:
    iterator, begin = iter(items), b"["
    while batch := [*islice(iterator, PIECE_POSITIONS)]:
        yield begin + json_line(batch)[1:-1]
        begin = b","
    yield b"[]" if begin == b"[" else b"]"


def _is_large(value: Any) -> bool:
    """Returns whether a value may hold too much to be encoded in one piece. Texts never do."""
    kind = type(value)
    if kind in _SCALARS:
        return False
    if kind is list:
        if len(value) > _PIECE_ITEMS:
            return len(value) > _PIECE_VALUES or not _SCALARS.issuperset(map(type, value))
        return any(map(_is_large, value))
    if kind is dict:
        return any(map(_is_large, value.values()))
    return isinstance(value, LazyList | PackedLogprobs | msgspec.Struct)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, LazyList | PackedLogprobs):
        return [*value]
    raise NotImplementedError(f"{type(value).__name__} has no JSON")
